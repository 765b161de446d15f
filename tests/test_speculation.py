"""Speculation by prompt lookup: what is guessed, what of it is accepted, and what that leaves.

A text of period four is guessed right by its own beginning: 1 2 3 4 1 2 3 4 1 2 | 3 4 1 2.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from server.speculation import accepted, extend, index, propose
from server.tokenlog import log_of
from statemachine.events import (
    DECODE,
    DRAFT,
    LOOKAHEAD,
    Appended,
    AppendedEach,
    BlockPublished,
    Closed,
    Committed,
    FrontTrimmed,
    Preempted,
    Rewound,
    StepWritten,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import Finished, StepDone, StepFailed, StepPlanned
from statemachine.sequence import unpack

from .follow import (
    GUESSING,
    Letters,
    clean,
    done,
    outline,
    planned,
    pool,
    random_load,
    same_answers,
)
from .sim import SMALL, Sim, answer_alone

ROUND = (1, 2, 3, 4)
PROMPT = (*ROUND, *ROUND, 1, 2)
"""Ten tokens; the next would be 3 4 1 2."""
PLAIN = structs.replace(GUESSING, draft_tokens=0)


def going_round(seq: int, position: int) -> int:
    """The text goes on as it began."""
    return ROUND[position % 4]


def wrong_at(*places: int) -> object:
    """The text goes on as it began, but for 50 and more at these positions."""
    return lambda seq, position: 50 + position if position in places else ROUND[position % 4]


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_a_guess_is_what_followed_the_last_time_that_the_text_read_the_same(
    prompt: list[int], answer: list[int], ngram: int, most: int
) -> None:
    text = (*prompt, *answer)
    stream = log_of(tuple(prompt), tuple(answer))
    naive: tuple[int, ...] = ()
    for at in range(len(text) - 1, ngram - 1, -1):
        if text[at - ngram : at] == text[len(text) - ngram :]:
            naive = text[at : at + most]
            break
    assert propose(stream, index(stream, ngram), ngram, most) == naive


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=6),
    st.integers(1, 4),
)
def test_an_index_that_is_kept_up_equals_one_that_is_made_anew(
    prompt: list[int], more: list[list[int]], ngram: int
) -> None:
    stream = log_of(tuple(prompt))
    kept = index(stream, ngram)
    for tokens in more:
        for token in tokens:
            stream = stream.append(token)
        kept = extend(kept, stream, len(tokens), ngram)
        assert kept == index(stream, ngram)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), max_size=5))
def test_a_guess_is_accepted_up_to_the_first_that_was_not_drawn(
    drawn: list[int], guessed: list[int]
) -> None:
    naive = 0
    while naive < min(len(drawn), len(guessed)) and drawn[naive] == guessed[naive]:
        naive += 1
    assert accepted(drawn, guessed) == naive


@pytest.mark.parametrize("right", [0, 1, 2, 3, 4])
def test_of_four_drafts_some_are_accepted_one_token_more_is_drawn_and_the_rest_is_rewound(
    right: int,
) -> None:
    # D1 draws position 10, which is 3; the draft of P2 is 4 1 2 3 at 11 to 14.
    sim = Sim(policy=GUESSING, script=wrong_at(11 + right))
    inbox = sim.submit(PROMPT, 20)
    sim.step()
    sim.step()
    assert planned(sim, 2) == (Appended(0, 2, 5, (3, 4, 1, 2, 3), ((3,),), DRAFT),)
    before = len(inbox.tokens)
    sim.step()
    kept = (3, 4, 1, 2, 3)[: right + 1]
    expected = [StepWritten(2), Committed(0, kept)]
    if right < 4:
        expected.append(Rewound(0, 4 - right))
    assert [e for e in done(sim, 2) if not isinstance(e, BlockPublished)] == expected
    # Of the sampled tokens of D2 those that were guessed and the one behind them are the answer's.
    assert before == 1 + right + 1
    assert inbox.tokens[: right + 2] == (*kept, 50 + 11 + right)
    (result,) = [record for record in sim.records(StepDone) if record.step == 2]
    assert result.sampled == (0,) * 5
    assert len(result.tokens) == len(result.logits) == len(result.margins) == 5
    assert result.offsets == (10 + 1 + right,)
    sim.run()
    clean(sim)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_no_block_is_published_before_all_of_its_rows_are_accepted(right: int) -> None:
    # Rows 10 to 14 are issued in step 2; block 2 is rows 8 to 11, so its last row is one draft.
    sim = Sim(policy=GUESSING, script=wrong_at(11 + right))
    sim.submit(PROMPT, 20)
    sim.step()
    assert sim.events(BlockPublished) == []
    sim.step()
    sim.step()
    first = [event.index for event in done(sim, 1) if isinstance(event, BlockPublished)]
    second = [event.index for event in done(sim, 2) if isinstance(event, BlockPublished)]
    assert (first, second) == ([0, 1], [2] if right >= 1 else [])
    sim.run()
    clean(sim)


def published_tokens_are_the_texts(sim: Sim, texts: dict[int, tuple[int, ...]]) -> int:
    """Every published block's tokens are those of its request's whole text; how many there are."""
    state = sim.engine.view.state
    for _, entry in sorted(state.entries.items()):
        assert any(_holds(text, unpack(entry.tokens)) for text in texts.values())
    return len(state.entries)


def _holds(text: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(0, len(text), 4))


@pytest.mark.parametrize("end", [10, 11, 12, 13, 14, 15])
def test_p33_an_end_token_among_the_accepted_ends_the_answer_there(end: int) -> None:
    # The end token is one of the round, so the drafts behind it agree with what is drawn.
    sim = Sim(policy=GUESSING, script=going_round)
    inbox = sim.submit(PROMPT, 20, end_tokens=(ROUND[end % 4],))
    neighbour = sim.submit((9, *PROMPT), 8)
    sim.run()
    first = next(at for at in range(10, 16) if ROUND[at % 4] == ROUND[end % 4])
    assert inbox.tokens == tuple(ROUND[at % 4] for at in range(10, first))
    assert inbox.reason == "stop"
    assert neighbour.tokens == tuple(ROUND[at % 4] for at in range(11, 19))
    clean(sim)


def test_p33_two_tokens_before_the_end_are_told_and_what_is_behind_it_is_nowhere() -> None:
    script = {11: 4, 12: 1, 13: 99, 14: 3, 15: 4}
    sim = Sim(
        policy=GUESSING,
        vocab_size=100,
        script=lambda seq, position: script.get(position, ROUND[position % 4]) if seq == 0 else 8,
    )
    # The prompt has the end token in its round, so the draft 4 1 99 3 goes over the end.
    prompt = (3, 4, 1, 99, 3, 4, 1, 99, 5, 6)
    inbox = sim.submit(prompt, 20, end_tokens=(99,))
    neighbour = sim.submit((8, 8, 9, 9, 9), 6)
    sim.step()
    assert inbox.tokens == (3,)
    sim.run()
    assert (inbox.tokens, inbox.reason) == ((3, 4, 1), "stop")
    assert neighbour.tokens == (8,) * 6
    clean(sim)


def test_p33_an_end_token_in_a_draft_closes_its_sequence_behind_the_last_accepted_row() -> None:
    end = 3
    sim = Sim(policy=GUESSING, script=lambda seq, position: ROUND[position % 4])
    prompt = (*ROUND, *ROUND, 1)  # D1 draws 2; its draft 3 4 1 2 begins with the end token
    inbox = sim.submit(prompt, 20, end_tokens=(end,))
    sim.run()
    assert planned(sim, 2) == (Appended(0, 2, 5, (2, 3, 4, 1, 2), ((3,),), DRAFT),)
    assert done(sim, 2) == (
        StepWritten(2), Committed(0, (2,)), Rewound(0, 4), Closed(0, "stop"),
    )  # fmt: skip
    assert (inbox.tokens, inbox.reason) == ((2,), "stop")
    assert outline(sim) == "P1 D1 P2 D2"
    texts = {0: (*prompt, 2)}
    assert published_tokens_are_the_texts(sim, texts) == 2
    clean(sim)


def test_p33_a_stop_string_among_the_accepted_ends_the_answer_there() -> None:
    sim = Sim(policy=GUESSING, decoder=Letters, script=going_round)
    inbox = sim.submit(PROMPT, 20, stop=("EB",))  # 4 1: positions 11 and 12
    other = sim.submit((9, *PROMPT), 7)
    sim.run()
    assert (inbox.tokens, inbox.reason) == ((3, 4, 1), "stop")
    assert sim.records(Finished) == [Finished(0, 3, "stop")]
    assert Committed(0, (3, 4, 1)) in done(sim, 2)
    assert Rewound(0, 2) in done(sim, 2)
    assert len(other.tokens) == 7
    clean(sim)


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_p33_drafts_never_go_beyond_the_last_token_of_an_answer(max_tokens: int) -> None:
    sim = Sim(policy=GUESSING, script=going_round)
    inbox = sim.submit(PROMPT, max_tokens)
    sim.run()
    assert inbox.tokens == tuple(ROUND[at % 4] for at in range(10, 10 + max_tokens))
    assert inbox.reason == "length"
    assert sum(len(update.tokens) for update in inbox.updates) == max_tokens
    issued = [e.rows for e in sim.events(Appended) if e.purpose == DRAFT]
    assert issued == {1: [], 2: [], 3: [2], 4: [3], 5: [4], 6: [5], 7: [5]}[max_tokens]
    clean(sim)


def test_p33_drafts_never_go_beyond_the_context_or_the_pool() -> None:
    for geometry, policy in (
        (SMALL, structs.replace(GUESSING, context_tokens=16)),
        (pool(4), GUESSING),
    ):
        sim = Sim(geometry, policy, script=going_round)
        inbox = sim.submit(PROMPT, 50)
        sim.run()
        assert inbox.tokens == tuple(ROUND[at % 4] for at in range(10, 16))
        assert inbox.reason == "length"
        clean(sim)


@pytest.mark.parametrize("num_blocks", [6, 7])
def test_drafts_are_dropped_where_blocks_are_short_and_nobody_is_preempted_for_them(
    num_blocks: int,
) -> None:
    policy = structs.replace(GUESSING, watermark_blocks=0)
    sim = Sim(pool(num_blocks), policy, script=going_round)
    for _ in range(2):
        sim.submit(PROMPT, 12)
    sim.step()
    sim.step()
    # Each has 10 rows in 3 blocks, and a draft of four needs one more: two are not there.
    assert planned(sim, 2) == (AppendedEach(2, (0, 1), (3, 3), DECODE),)
    assert sim.events(Preempted) == []
    sim.run()
    clean(sim)


def test_drafts_stay_within_the_rows_of_a_step_and_leave_every_answer_its_row() -> None:
    policy = structs.replace(GUESSING, max_batch_tokens=7, max_running=3, prefill_chunk=7)
    sim = Sim(policy=policy, script=going_round)
    inboxes = [sim.submit((40 + n, *PROMPT), 20) for n in range(3)]
    sim.run()
    rows = [sum(len(piece.tokens) for piece in batch.pieces) for batch in sim.kernel.batches]
    assert max(rows) == 7
    assert any(len(batch.pieces) == 3 and sum_rows(batch) == 7 for batch in sim.kernel.batches)
    assert [inbox.tokens for inbox in inboxes] == [tuple(ROUND[at % 4] for at in range(11, 31))] * 3
    clean(sim)


def sum_rows(batch: object) -> int:
    return sum(len(p.tokens) + p.pads + p.pending for p in batch.pieces)  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
def test_drafts_lookahead_and_prompts_together_stay_within_the_rows_of_a_step(seed: int) -> None:
    policy = structs.replace(
        GUESSING, lookahead=True, max_batch_tokens=8, max_running=8, prefill_chunk=8
    )
    sim = Sim(policy=policy, vocab_size=3)
    for n in range(9):
        sim.submit([(n * place + seed) % 3 for place in range(4 + n)], 12)
    sim.run()
    assert max(sum_rows(batch) for batch in sim.kernel.batches) <= 8
    clean(sim)


def test_a_draft_of_a_window_gives_its_rows_back_and_moves_on_by_the_accepted_only() -> None:
    geometry = Geometry(4, (Group(num_blocks=64), Group("window", num_blocks=64, window=6, sink=1)))
    sim = Sim(geometry, GUESSING, script=wrong_at(13, 17, 22))
    inbox = sim.submit(PROMPT, 20)
    sim.run()
    assert sim.events(Rewound)
    assert sim.events(FrontTrimmed)
    expected = tuple(50 + at if at in (13, 17, 22) else ROUND[at % 4] for at in range(10, 30))
    assert inbox.tokens == expected
    clean(sim)


def test_a_cancel_with_drafts_in_flight_gives_everything_back() -> None:
    policy = structs.replace(GUESSING, lookahead=True)
    for at in range(1, 7):
        sim = Sim(policy=policy, script=going_round)
        inbox = sim.submit(PROMPT, 30)
        sim.run({at: [lambda sim=sim: sim.engine.cancel(0)]})  # type: ignore[misc]
        assert inbox.reason == "cancelled"
        assert inbox.tokens == tuple(ROUND[(10 + n) % 4] for n in range(len(inbox.tokens)))
        clean(sim)


SEEDS = range(8)
GUESS = {"draft_tokens": 4, "lookup_ngram": 2}
BOTH = {"lookahead": True, **GUESS}


def test_speculation_changes_no_token_greedy_or_sampled() -> None:
    issued = right = 0
    for seed in SEEDS:
        plain = random_load(seed)[1]
        for settings in (GUESS, BOTH) if seed < 4 else (BOTH,):
            sim, answers = random_load(seed, **settings)
            same_answers(plain, answers)
            issued += sum(e.rows - 1 for e in sim.events(Appended) if e.purpose == DRAFT)
            right += sum(len(event.tokens) - 1 for event in sim.events(Committed))
    assert right > 20
    assert issued - right > 20


def test_lookahead_and_draft_rows_are_never_in_one_sequence_at_once() -> None:
    """From the tapes: a sequence has drafts that nobody read, or a row ahead, and never both."""
    ahead = drafts = 0
    for seed in SEEDS:
        sim, _ = random_load(seed, **BOTH)
        flights: list[tuple[set[int], set[int], set[int]]] = []
        for record in sim.capture.records:
            if isinstance(record, StepPlanned):
                flights.append(_kinds(record))
                guessed = {seq for flight in flights for seq in flight[0]}
                rows_ahead = {seq for flight in flights for seq in flight[1]}
                assert not guessed & rows_ahead
                if len(flights) == 2:
                    # Nor does a sequence whose drafts are in flight get any other row.
                    assert not flights[0][0] & flights[1][2]
                ahead += len(flights[-1][1])
                drafts += len(flights[-1][0])
            elif isinstance(record, StepDone | StepFailed):
                flights.pop(0)
    assert ahead > 50
    assert drafts > 20


def _kinds(record: StepPlanned) -> tuple[set[int], set[int], set[int]]:
    """Sequences that a step issues drafts, rows ahead and any rows for."""
    by_purpose: dict[str, set[int]] = {}
    for event in record.events:
        if isinstance(event, Appended):
            by_purpose.setdefault(event.purpose, set()).add(event.seq)
        elif isinstance(event, AppendedEach):
            by_purpose.setdefault(event.purpose, set()).update(event.seqs)
    every = set().union(*by_purpose.values()) if by_purpose else set()
    return by_purpose.get(DRAFT, set()), by_purpose.get(LOOKAHEAD, set()), every


def test_no_block_of_a_draft_is_found_by_a_later_request() -> None:
    """What was guessed and not drawn is in no answer and in no prefix."""
    sim = Sim(policy=GUESSING, script=wrong_at(12, 13, 14))
    first = sim.submit(PROMPT, 9)
    sim.run()
    text = (*PROMPT, *first.tokens)
    guessed = (*PROMPT, 3, 4, 1, 2, 3, 4)
    published_tokens_are_the_texts(sim, {0: text})
    again = sim.submit((*guessed, 9), 1)
    sim.run()
    shared = next(
        at for at, pair in enumerate(zip(text, guessed, strict=False)) if len({*pair}) > 1
    )
    assert again.cached_tokens == shared // 4 * 4
    clean(sim)


def test_a_sampled_answer_draws_by_position_however_many_are_drawn_at_once() -> None:
    given = {"temperature": 1.0, "seed": 11}
    for draft_tokens in (1, 2, 4, 8):
        policy = structs.replace(GUESSING, draft_tokens=draft_tokens, lookup_ngram=1)
        sim = Sim(policy=policy, vocab_size=3)
        inbox = sim.submit([0, 1, 2] * 4, 24, **given)
        sim.run()
        plain = Sim(policy=PLAIN, vocab_size=3)
        alone = plain.submit([0, 1, 2] * 4, 24, **given)
        plain.run()
        assert inbox.tokens == alone.tokens
        assert any(len(event.tokens) > 1 for event in sim.events(Committed))
        clean(sim)


def test_a_short_text_is_not_guessed() -> None:
    sim = Sim(policy=structs.replace(GUESSING, lookup_ngram=8))
    inbox = sim.submit([5, 5], 4)
    sim.run()
    assert inbox.tokens == answer_alone([5, 5], 4)
    assert [e for e in sim.events(Appended) if e.purpose == DRAFT] == []


def test_drafts_leave_a_prompt_half_of_what_rows_of_one_token_leave() -> None:
    policy = structs.replace(
        GUESSING, max_batch_tokens=16, max_running=8, prefill_chunk=16, lookahead=False
    )
    sim = Sim(policy=policy, script=going_round)
    for _ in range(4):
        sim.submit(PROMPT, 40)
    while not sim.events(Committed):
        sim.step()
    came = sim.next_step
    late = sim.submit([9, 8, 7, 6, 5], 1)
    sim.run()
    assert late.reason == "length"
    first = next(event.step for event in sim.events(Appended) if event.seq == 4)
    assert first == came
    drafted = [it.rows - 1 for it in planned(sim, came) if getattr(it, "purpose", "") == DRAFT]
    assert sum(drafted) == (16 - 4) // 2
    clean(sim)
