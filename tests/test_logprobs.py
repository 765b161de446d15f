"""Log-probabilities, scores of prompt tokens, embeddings: the dense model's, told to who asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from msgspec import structs

from kernel.batch import Logprob, Piece
from kernel.split import hidden_size
from kernel.telling import SCORE_ROWS, plan_telling, read, tell
from replay.divergence import OBSERVATION, TOKEN
from replay.run import FORWARD, Options, replay
from server.policy import Policy
from server.submission import RequestRefused
from statemachine.events import DRAFT, LOOKAHEAD
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters, StepDone

from .paged import Book, random_tokens
from .sim import POLICY as FAKE
from .sim import Inbox, Sim
from .tampering import write
from .wishes import (
    BOTH,
    OWNED,
    POLICIES,
    POLICY,
    VOCAB,
    Run,
    assert_clean,
    assert_told,
    dense,
    log_softmax,
    run,
    tiny,
)

PROMPTS = [tuple(random_tokens(seed, 5 + 9 * seed, VOCAB)) for seed in range(5)]
PADDED = structs.replace(POLICY, prefill_tile=8, prefill_cohort=True)
COHORTS = {**POLICIES, "padded": PADDED}
POLICY_KINDS = pytest.mark.parametrize("policy", COHORTS.values(), ids=COHORTS)


def wanted(max_tokens: int = 8, **values: Any) -> Parameters:
    return Parameters(max_tokens, **values)


def told_of(inbox: Inbox) -> list[Logprob]:
    return [it for update in inbox.updates for it in update.logprobs]


def scores_of(inbox: Inbox) -> dict[int, Logprob]:
    """By position; what is told twice must be told alike, to rounding."""
    found: dict[int, Logprob] = {}
    for update in inbox.updates:
        assert bool(update.scores) == (update.scores_at >= 0)
        for at, told in enumerate(update.scores, start=update.scores_at):
            assert at not in found or abs(found[at].logprob - told.logprob) < 1e-4
            found[at] = told
    return found


@POLICY_KINDS
def test_each_answer_token_comes_with_its_log_probability_and_the_likeliest(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = wanted(14, logprobs=0, end_tokens=tuple(range(0, VOCAB, 9)))
    asking = [
        (PROMPTS[0], wanted(14, logprobs=20)),
        (PROMPTS[1], wanted(14, logprobs=3, temperature=1.0, seed=4)),
        (PROMPTS[2], ends),
        (PROMPTS[3], wanted(14)),
        (PROMPTS[4], wanted(14, logprobs=1, presence_penalty=2.0, logit_bias=((7, 9.0),))),
    ]
    made = run(asking, policy)
    assert bool(made.appended(DRAFT)) == bool(policy.draft_tokens)
    assert bool(made.appended(LOOKAHEAD)) == policy.lookahead
    for (prompt, parameters), inbox in zip(asking, made.inboxes, strict=True):
        told = told_of(inbox)
        if parameters.logprobs < 0:
            assert told == []
            continue
        assert len(told) == len(inbox.tokens)
        for update in inbox.updates:
            assert [it.token for it in update.logprobs] == list(update.tokens)
        rows = dense((*prompt, *inbox.tokens))[len(prompt) - 1 :]
        for token, row, it in zip(inbox.tokens, rows, told, strict=False):
            assert_told(it, token, row, parameters.logprobs)
    assert made.inboxes[2].reason == "stop"
    assert_clean(made, tmp_path, monkeypatch)


def test_log_probabilities_of_a_row_are_the_same_bits_alone_and_among_others() -> None:
    logits = mx.random.normal((6, 3001), key=mx.random.key(3)) * 4
    tokens = mx.array([5, 3, 3000, 0, 77, 78], dtype=mx.uint32)
    book = Book(Geometry(8, (Group(num_blocks=64),)))

    def told(rows: list[int], tops: list[int]) -> tuple[Any, ...]:
        pieces = []
        for seq, top in enumerate(tops):
            given = wanted(1, logprobs=top)
            sequence = book.open(seq + 100)
            pieces.append(Piece(sequence, (1,), samples=1, parameters=given))
        plan = plan_telling(pieces)
        if plan is None:
            return (None,) * len(rows)
        picked = mx.array(rows)
        nobody: Any = None
        arrays = tell(plan, logits[picked], tokens[picked], *[nobody] * 4)
        mx.eval(arrays)
        samples = np.array(tokens[picked]).tolist()
        return read(plan, samples, map(np.array, arrays)).logprobs

    together = told([0, 1, 2, 3, 4, 5], [20, -1, 0, 7, 2, 20])
    assert together[1] is None
    for row, top in ((0, 20), (2, 0), (3, 7), (4, 2), (5, 20)):
        assert told([row], [top]) == (together[row],)
    assert told([0, 1], [-1, -1]) == (None, None)


def test_of_equally_likely_tokens_the_lower_id_comes_first() -> None:
    book = Book(Geometry(8, (Group(num_blocks=64),)))
    piece = Piece(book.open(0), (1,), samples=1, parameters=wanted(1, logprobs=3))
    plan = plan_telling([piece])
    assert plan is not None
    nobody: Any = None
    logits, chosen = mx.array([[0.0, 2.0, 1.0, 1.0, 1.0]]), mx.array([0], dtype=mx.uint32)
    arrays = tell(plan, logits, chosen, *[nobody] * 4)
    (told,) = read(plan, [0], map(np.array, arrays)).logprobs
    assert told is not None
    assert [token for token, _ in told.top] == [1, 2, 3]
    wide = log_softmax(np.array([0.0, 2.0, 1.0, 1.0, 1.0]))
    assert told.logprob == pytest.approx(wide[0], abs=1e-6)
    assert [value for _, value in told.top] == pytest.approx([wide[1], wide[2], wide[2]], abs=1e-6)


SCORED: list[dict[str, Any]] = [
    {"score_from": 0, "logprobs": 5},
    {"score_from": 1},
    {"score_from": 20, "logprobs": 0},
    {"score_from": 31, "logprobs": 20},
    {"score_from": 500, "logprobs": 2},
]


def assert_scored(prompt: tuple[int, ...], given: Parameters, inbox: Inbox, **how: Any) -> None:
    found = scores_of(inbox)
    first = max(given.score_from, 1)
    assert sorted(found) == list(range(first, len(prompt)))
    rows = dense(prompt, **how)
    for at, told in found.items():
        assert_told(told, prompt[at], rows[at - 1], max(given.logprobs, 0))


@pytest.mark.parametrize("windows", [False, True], ids=["full", "windows"])
@POLICY_KINDS
def test_prompt_tokens_are_scored_as_by_a_dense_forward_in_any_chunks(
    policy: Policy, windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = [(prompt, wanted(5, **wished)) for prompt, wished in zip(PROMPTS, SCORED, strict=True)]
    asking += [(PROMPTS[3], wanted(3)), (PROMPTS[4], wanted(1, score_from=17, logprobs=1))]
    made = run(asking, policy, windows=windows)
    for (prompt, parameters), inbox in zip(asking, made.inboxes, strict=True):
        if parameters.score_from < 0:
            assert scores_of(inbox) == {}
        else:
            assert_scored(prompt, parameters, inbox, windows=windows)
    assert len(made.inboxes[3].updates[0].scores) > 0
    assert_clean(made, tmp_path, monkeypatch)


def test_a_scored_prompt_adopts_no_row_that_it_must_compute_and_others_do() -> None:
    prompt = PROMPTS[4]
    asking = [
        (prompt, wanted(2)),
        (prompt, wanted(2, score_from=0)),
        (prompt, wanted(2, score_from=18)),
        (prompt, wanted(2, score_from=24)),
        (prompt, wanted(2, score_from=25)),
        (prompt, wanted(2, score_from=len(prompt) + 1)),
        (prompt, wanted(2)),
    ]
    made = run(asking, apart=True)
    for (_, parameters), inbox in zip(asking[1:6], made.inboxes[1:6], strict=True):
        assert_scored(prompt, parameters, inbox)
    cached = [inbox.cached_tokens for inbox in made.inboxes]
    assert cached == [0, 0, 16, 16, 24, 40, 40]
    assert len({inbox.tokens for inbox in made.inboxes}) == 1


def test_a_scored_prompt_waits_for_no_prefix_that_it_must_not_adopt() -> None:
    policy = structs.replace(FAKE, prefix_aware=True, prefill_chunk=8)
    steps = []
    for scored in (-1, 0, 17):
        sim = Sim(policy=policy)
        prompt = tuple(range(1, 41))
        first = sim.submit(prompt, 2)
        sim.step()
        second = sim.submit(prompt, 2, score_from=scored)
        sim.run()
        begun = (at for at, b in enumerate(sim.kernel.batches) if len(b.pieces) > 1)
        steps.append(next(begun, None))
        assert first.tokens == second.tokens
    # One that may adopt all waits; one that may adopt nothing starts; one for 16 rows in between.
    assert steps[1] == 1
    assert steps[0] is None or steps[0] > 3
    assert steps[2] == 2


def test_copies_of_a_prompt_share_what_they_need_not_score() -> None:
    prompt = PROMPTS[4]
    for scored in (0, 18, 500):
        parameters = wanted(4, score_from=scored, temperature=1.0)
        made = run([(prompt, parameters)] * 3, parents=(-1, 0, 0))
        for inbox in made.inboxes:
            assert_scored(prompt, parameters, inbox)
        assert bool(made.forks) == (scored > 0)


@pytest.mark.parametrize("policy", [POLICY, BOTH], ids=["plain", "both"])
def test_scores_and_log_probabilities_survive_preemption_and_are_at_most_told_twice(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = [(prompt, wanted(16, score_from=0, logprobs=2)) for prompt in PROMPTS]
    made = run(asking, policy, blocks=10)
    assert made.status["preemptions"] > 0
    for (prompt, parameters), inbox in zip(asking, made.inboxes, strict=True):
        assert_scored(prompt, parameters, inbox)
        assert [it.token for it in told_of(inbox)] == list(inbox.tokens)
    assert_clean(made, tmp_path, monkeypatch)


def test_a_model_over_its_own_caches_tells_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = [(prompt, wanted(4, **wished)) for prompt, wished in zip(PROMPTS, SCORED, strict=True)]
    made = run(asking, OWNED, owned=True)
    for (prompt, parameters), inbox in zip(asking, made.inboxes, strict=True):
        assert_scored(prompt, parameters, inbox)
    rows = dense((*PROMPTS[0], *made.inboxes[0].tokens))[len(PROMPTS[0]) - 1 :]
    for row, told in zip(rows, told_of(made.inboxes[0]), strict=False):
        assert_told(told, told.token, row, 5)
    assert_clean(made, tmp_path, monkeypatch)


def test_more_rows_than_a_tile_are_scored_tile_by_tile() -> None:
    prompt = tuple(random_tokens(9, 2 * SCORE_ROWS + 12, VOCAB))
    policy = Policy(max_batch_tokens=256, prefill_chunk=256, context_tokens=256)
    made = run([(prompt, wanted(1, score_from=0, logprobs=2))], policy)
    (update,) = made.inboxes[0].updates
    assert (update.scores_at, len(update.scores)) == (1, len(prompt) - 1)
    assert_scored(prompt, wanted(1, score_from=0, logprobs=2), made.inboxes[0])


def test_another_score_on_tape_diverges_at_its_step_and_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run([(PROMPTS[1], wanted(2)), (PROMPTS[2], wanted(2, score_from=0))])
    assert_clean(made, tmp_path, monkeypatch)
    at, done = next(
        (at, it) for at, it in enumerate(made.records) if isinstance(it, StepDone) and it.scored
    )
    assert done.scored == (1,) * len(done.scores)
    for wrong in (
        {"scores": (done.scores[0] + 0.25, *done.scores[1:])},
        {"scored": done.scored[:-1], "scores": done.scores[:-1]},
        {"scored": (), "scores": ()},
    ):
        tampered = list(made.records)
        tampered[at] = structs.replace(done, **wrong)
        found = replay(write(tmp_path, tampered), Options(depth=FORWARD)).divergence
        assert found is not None
        assert (found.kind, found.step) == (TOKEN, done.step)
        assert "prompt token" in found.summary


def test_scores_of_no_piece_of_the_step_are_an_observation(tmp_path: Path) -> None:
    made = run([(PROMPTS[2], wanted(2, score_from=0))])
    at, done = next(
        (at, it) for at, it in enumerate(made.records) if isinstance(it, StepDone) and it.scored
    )
    for wrong in (
        {"scored": (7, *done.scored[1:])},
        {"scored": (*done.scored, *done.scored), "scores": (*done.scores, *done.scores)},
        {"scores": done.scores[1:]},
    ):
        tampered = list(made.records)
        tampered[at] = structs.replace(done, **wrong)
        found = replay(write(tmp_path, tampered), Options()).divergence
        assert found is not None
        assert (found.kind, found.step) == (OBSERVATION, done.step)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_an_embedding_is_what_the_head_is_fed_for_the_last_token(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = [(PROMPTS[3], wanted(5))]
    asking += [(prompt, wanted(1, embed=True)) for prompt in PROMPTS]
    asking += [(PROMPTS[2], wanted(4, embed=True, logprobs=1, temperature=1.0))]
    made = run(asking, policy)
    for (prompt, _), inbox in zip(asking[1:], made.inboxes[1:], strict=True):
        assert (inbox.tokens, inbox.reason) == ((), "stop")
        (update,) = inbox.updates
        assert update.logprobs == ()
        wanted_row = tiny().model(mx.array([list(prompt)]), cache=make_prompt_cache(tiny()))[0, -1]
        np.testing.assert_allclose(update.embedding, np.array(wanted_row), atol=1e-4)
    assert made.inboxes[0].reason == "length"
    assert made.status["held"] == 0
    assert_clean(made, tmp_path, monkeypatch)


def test_embeddings_come_from_a_models_own_caches_too_and_adopted_rows_change_nothing() -> None:
    owned = run([(PROMPTS[3], wanted(1, embed=True))], OWNED, owned=True)
    again = run([(PROMPTS[3], wanted(1, embed=True))] * 2, apart=True)
    assert again.inboxes[1].cached_tokens == 31
    rows = [inbox.updates[-1].embedding for inbox in (*owned.inboxes, *again.inboxes)]
    assert [len(row) for row in rows] == [hidden_size(tiny())] * 3 == [32] * 3
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-4)
    np.testing.assert_allclose(rows[2], rows[0], atol=1e-4)


def test_a_model_that_cannot_be_cut_refuses_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.forward.body_and_head", lambda model: (model, lambda rows: rows))
    monkeypatch.setattr("kernel.split.BODIES", ())
    assert hidden_size(tiny()) == 0
    with pytest.raises(RequestRefused, match="last hidden state"):
        run([(PROMPTS[0], wanted(1, embed=True))])
    scored = run([(PROMPTS[1], wanted(2, score_from=0, logprobs=1))])
    assert_scored(PROMPTS[1], wanted(2, score_from=0, logprobs=1), scored.inboxes[0])


def test_nobody_who_does_not_ask_is_told_anything() -> None:
    made: Run = run([(PROMPTS[1], wanted(3)), (PROMPTS[2], wanted(3, logprobs=1, score_from=0))])
    for update in made.inboxes[0].updates:
        assert (update.logprobs, update.scores, update.embedding) == ((), (), ())


def test_logits_of_scored_rows_are_in_memory_a_few_tiles_at_a_time() -> None:
    rows, vocab = 2048, 20_000
    hidden = mx.random.normal((rows, 16), key=mx.random.key(1))
    head = mx.random.normal((16, vocab), key=mx.random.key(2))
    mx.eval(hidden, head)
    parameters = wanted(1, score_from=0, logprobs=2)
    book = Book(Geometry(8, (Group(num_blocks=64),)))
    piece = Piece(book.open(0), (1,) * rows, parameters=parameters, targets=(5,) * rows)
    plan = plan_telling([piece])
    assert plan is not None
    nobody: Any = None

    def logits_of(picked: Any, held: mx.array) -> mx.array:
        return held[mx.array(picked.astype(np.uint32))] @ head

    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(tell(plan, None, None, np.arange(rows), hidden, logits_of, nobody))
    tile, peak = 4 * vocab * SCORE_ROWS, mx.get_peak_memory() - before
    assert peak < 24 * tile < 4 * vocab * rows
