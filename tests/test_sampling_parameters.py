"""Penalties, bias: what they do to logits, and that a request's tokens stay its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernel.adjusting import Asked, adjusted, asked_of, plan_adjustments
from kernel.batch import Batch, BuildFailed, Piece
from kernel.grammar import Grammars
from kernel.model_kernel import ModelKernel
from kernel.sampling import plan_samples, sample
from server.policy import Policy
from server.submission import RequestRefused
from statemachine.events import DRAFT, LOOKAHEAD
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters, StepDone

from .follow import AHEAD as FAKE_AHEAD
from .paged import Book, random_tokens
from .sim import Sim
from .wishes import POLICIES, VOCAB, assert_clean, dense, run, tiny, tokenizer

POOL = Geometry(8, (Group(num_blocks=64),))

WISHES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.3},
    {"repetition_penalty": 1.4},
    {"logit_bias": ((3, 5.0), (7, -100.0), (250, 0.25))},
    {
        "frequency_penalty": -0.4,
        "presence_penalty": 0.9,
        "repetition_penalty": 0.8,
        "logit_bias": ((1, 2.0), (2, -3.0)),
    },
]
KINDS = pytest.mark.parametrize("wished", WISHES, ids=lambda it: "+".join(it))


def wanted(max_tokens: int = 8, **values: Any) -> Parameters:
    return Parameters(max_tokens, **values)


def by_hand(
    logits: np.ndarray, parameters: Parameters, answer: tuple[int, ...], prompt: tuple[int, ...]
) -> np.ndarray:
    """The rules of records.Parameters, one token after the other."""
    row = logits.astype(np.float32).copy()
    if parameters.repetition_penalty != 1.0:
        penalty = np.float32(parameters.repetition_penalty)
        for token in {*answer, *prompt}:
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    bias = dict(parameters.logit_bias)
    for token in sorted({*answer, *bias}):
        count = answer.count(token)
        taken = parameters.frequency_penalty * count + parameters.presence_penalty * (count > 0)
        row[token] += np.float32(bias.get(token, 0.0) - taken)
    return row


def asked(row: int, parameters: Parameters, answer: tuple[int, ...] = (), **more: Any) -> Asked:
    return Asked(row, row, parameters, answer, len(answer), **more)


@KINDS
def test_logits_change_as_the_rules_say_to_the_last_bit(wished: dict[str, Any]) -> None:
    logits = np.random.default_rng(4).normal(0, 3, (3, VOCAB)).astype(np.float32)
    answers = ((), (5, 7, 5, 250), tuple(random_tokens(1, 40, VOCAB)))
    prompt = tuple(random_tokens(2, 30, VOCAB))
    parameters = wanted(**wished)
    plan = plan_adjustments(
        [asked(row, parameters, answer, prompt=prompt) for row, answer in enumerate(answers)],
        3,
        VOCAB,
        None,
    )
    got = np.array(adjusted(mx.array(logits), plan))
    for row, answer in enumerate(answers):
        np.testing.assert_array_equal(got[row], by_hand(logits[row], parameters, answer, prompt))


def test_rows_that_ask_nothing_are_left_as_they_are_and_where_none_asks_nothing_is_made() -> None:
    logits = mx.random.normal((4, VOCAB), key=mx.random.key(1))
    assert plan_adjustments([], 4, VOCAB, None) is None
    assert adjusted(logits, None) is logits
    plan = plan_adjustments([asked(2, wanted(presence_penalty=1.0), (9,))], 4, VOCAB, None)
    got = np.array(adjusted(logits, plan))
    changed = np.argwhere(got != np.array(logits)).tolist()
    assert changed == [[2, 9]]


def test_a_penalty_over_an_empty_answer_and_a_first_token_make_no_graph() -> None:
    assert plan_adjustments([asked(0, wanted(frequency_penalty=1.0))], 1, VOCAB, None) is None


@KINDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_gives_the_same_token_alone_and_among_any_neighbours(
    wished: dict[str, Any], temperature: float
) -> None:
    logits = mx.random.normal((5, 3001), key=mx.random.key(2)) * 3
    mine = wanted(temperature=temperature, seed=3, **wished)
    answer, prompt = tuple(random_tokens(3, 25, 300)), tuple(random_tokens(4, 25, 300))
    others = [
        asked(row, wanted(temperature=1.0, seed=row, **WISHES[row]), (row, row), prompt=(8,))
        for row in range(5)
    ]

    def drawn(rows: mx.array, listed: list[Asked]) -> Any:
        plan = plan_samples((it.parameters, 40) for it in listed)
        return sample(adjusted(rows, plan_adjustments(listed, len(listed), 3001, None)), plan)

    for place in range(5):
        mixed = list(others)
        mixed[place] = asked(place, mine, answer, prompt=prompt)
        alone = drawn(logits[place : place + 1], [asked(0, mine, answer, prompt=prompt)])
        among = drawn(logits, mixed)
        for name in ("tokens", "logits", "margins"):
            assert getattr(among, name)[place].item() == getattr(alone, name)[0].item(), name


def greedy_by_hand(prompt: tuple[int, ...], parameters: Parameters) -> tuple[int, ...]:
    """What a request answers over mlx-lm's own caches."""
    answer: tuple[int, ...] = ()
    while len(answer) < parameters.max_tokens:
        row = by_hand(dense((*prompt, *answer))[-1], parameters, answer, prompt)
        answer = (*answer, int(row.argmax()))
    return answer


PROMPTS = [tuple(random_tokens(seed, 3 + 5 * seed, VOCAB)) for seed in range(5)]


ASKING = [
    *((prompt, wanted(14, **wished)) for prompt, wished in zip(PROMPTS, WISHES, strict=True)),
    (PROMPTS[1], wanted(14)),
    (PROMPTS[2], wanted(14, temperature=1.0, seed=4)),
]


@pytest.fixture(scope="module")
def ruled() -> list[tuple[int, ...]]:
    """What ASKING but for the last one, which is sampled, is answered by the rules."""
    return [greedy_by_hand(*asked) for asked in ASKING[:-1]]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """What each of ASKING is answered with nobody beside it."""
    return [run([asked]).inboxes[0].tokens for asked in ASKING]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_answers_are_those_of_the_rules_alone_and_together_and_replay_clean(
    policy: Policy,
    ruled: list[tuple[int, ...]],
    alone: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = run(ASKING, policy)
    assert bool(made.appended(DRAFT)) == bool(policy.draft_tokens)
    assert bool(made.appended(LOOKAHEAD)) == policy.lookahead
    answers = [inbox.tokens for inbox in made.inboxes]
    assert answers[:-1] == ruled
    assert answers == alone
    assert made.inboxes[1].tokens != made.inboxes[5].tokens
    assert_clean(made, tmp_path, monkeypatch)


def test_sampled_penalised_answers_are_the_same_under_every_policy_and_after_preemptions() -> None:
    asking = [
        (prompt, wanted(16, temperature=1.0, seed=9 + at, **wished))
        for at, (prompt, wished) in enumerate(zip(PROMPTS, WISHES, strict=True))
    ]
    plain = [inbox.tokens for inbox in run(asking, apart=True).inboxes]
    assert all(len(tokens) == 16 for tokens in plain)
    for policy in POLICIES.values():
        tight = run(asking, policy, blocks=10)
        assert tight.status["preemptions"] > 0
        assert [inbox.tokens for inbox in tight.inboxes] == plain


def test_the_logit_on_tape_is_of_the_processed_logits() -> None:
    bias = wanted(1, logit_bias=((5, 40.0),))
    made = run([(PROMPTS[2], bias)])
    (done,) = [it for it in made.records if isinstance(it, StepDone) and it.tokens]
    raw = dense(PROMPTS[2])[-1]
    assert done.tokens == (5,)
    assert done.logits[0] == pytest.approx(raw[5] + 40.0, abs=1e-3)
    assert done.margins[0] == pytest.approx(raw[5] + 40.0 - np.delete(raw, 5).max(), abs=1e-3)


def test_a_request_that_reads_its_answer_has_no_row_ahead_and_nothing_stalls() -> None:
    sim = Sim(policy=FAKE_AHEAD)
    alone = sim.submit([1, 2, 3], 6, frequency_penalty=0.5)
    sim.run()
    assert (alone.reason, len(alone.tokens)) == ("length", 6)
    pending = [piece.pending for batch in sim.kernel.batches for piece in batch.pieces]
    assert pending == [0] * 6
    assert all(piece.answer == alone.tokens[:at] for at, piece in enumerate(_pieces(sim)))
    # Beside one that is sampled ahead it takes part in every second step.
    both = [sim.submit([4, 5], 6, presence_penalty=0.5), sim.submit([7, 8], 20)]
    sim.kernel.batches.clear()
    sim.run()
    ahead = [event for event in _appended(sim) if event.purpose == LOOKAHEAD]
    assert [len(inbox.tokens) for inbox in both] == [6, 20]
    assert ahead
    steps = [
        at for at, b in enumerate(sim.kernel.batches) if 1 in {p.sequence.id for p in b.pieces}
    ]
    assert np.diff(steps).tolist() == [2] * 5


def _pieces(sim: Sim) -> list[Piece]:
    return [piece for batch in sim.kernel.batches for piece in batch.pieces]


def _appended(sim: Sim) -> list[Any]:
    found = []
    for record in sim.capture.records:
        found += [e for e in getattr(record, "events", ()) if type(e).__name__.startswith("Append")]
    return found


def test_a_drafts_later_samples_see_the_guesses_before_them() -> None:
    book = Book(POOL)
    piece = book.append(0, [1, 2, 3, 4, 5])
    drafted = Piece(
        piece.sequence,
        (3, 4, 5),
        samples=3,
        parameters=wanted(presence_penalty=1.0),
        answer=(2, 3),
    )
    assert [(it.row, it.answer, it.certain) for it in asked_of([piece, drafted])] == [
        (1, (2, 3), 2),
        (2, (2, 3, 4), 2),
        (3, (2, 3, 4, 5), 2),
    ]


def test_a_row_whose_answer_is_not_known_is_not_sampled_under_a_penalty() -> None:
    kernel = ModelKernel(tiny(), POOL, masks=Grammars(tokenizer()), check=False)
    book = Book(POOL)
    kernel.collect(kernel.issue(Batch(1, (book.append(3, [1, 2], frequency_penalty=1.0),))))
    with pytest.raises(BuildFailed, match="before all of its answer is known") as raised:
        kernel.issue(Batch(2, (book.ahead(3, 2, frequency_penalty=1.0),)))
    assert raised.value.seq == 3


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
        ({"logit_bias": ((1, -100.5),)}, "logit_bias"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"priority": 2**70}, "priority"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(values: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as raised:
        run([(PROMPTS[1], wanted(1, **values))])
    assert raised.value.param == param
    assert "\n" not in str(raised.value)
