"""The depths that run a model again, on tapes with lookahead, drafts and forks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from kernel.batch import Kernel
from kernel.blas import load_blas
from kernel.fake import Failure, FakeClock, FakeKernel, run_pinned
from replay import forward, models, reference
from replay.answers import Answers
from replay.batches import Batches
from replay.divergence import TOKEN
from replay.errors import Unusable
from replay.models import Loaded
from replay.observed import Pieces
from replay.run import CLEAN, FORWARD, REFERENCE, TORN, Options, Outcome, replay
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission
from statemachine.events import (
    DRAFT,
    LOOKAHEAD,
    Appended,
    AppendedEach,
    Committed,
    Forked,
    Namespace,
    Rewound,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Finished,
    Observation,
    Parameters,
    Record,
    RequestArrived,
    ShadowReport,
    StepDone,
    StepFailed,
    StepPlanned,
)
from statemachine.sequence import Sequence, Speculative

from .sim import Inbox, MemoryCapture, header
from .tampering import changed, first_step, with_item, write

POOL = Geometry(4, (Group(num_blocks=40),))
POLICY = Policy(
    max_batch_tokens=64,
    max_running=32,
    prefill_chunk=16,
    context_tokens=64,
    lookahead=True,
    draft_tokens=3,
    lookup_ngram=1,
)
Recorded = tuple[tuple[Record, ...], tuple[Inbox, ...]]


def served(kernel: Kernel, policy: Policy, told: dict[str, Any], sampled: int) -> Recorded:
    """A dozen requests: some sampled, some the forks of the one before, one cancelled in flight."""
    capture = MemoryCapture()
    head = structs.replace(header(POOL, policy), **told)
    engine = Engine(lambda: Parts(kernel, policy, capture, head), clock=FakeClock())
    engine.open()
    inboxes = tuple(Inbox() for _ in range(12))

    def submit(number: int) -> None:
        parent = number - 1 if number % 4 == 3 else -1
        start = number - (number % 4 == 3)
        parameters = Parameters(
            20, temperature=0.7 * (number % sampled == 1), seed=number, end_tokens=(9,)
        )
        prompt = tuple(range(start % 3, start % 3 + 10))
        engine.submit(Submission(prompt, parameters, parent=parent), inboxes[number])

    actions: dict[int, list[Any]] = {1: [functools.partial(submit, n) for n in range(10)]}
    actions[12] = [functools.partial(submit, n) for n in (10, 11)]
    actions[14] = [lambda: engine.cancel(11)]
    run_pinned(engine, actions)
    engine.stop()
    return tuple(capture.records), inboxes


FAILURES = {9: Failure("eval"), 20: Failure("build"), 31: Failure("eval")}


def fake_kernel(**more: Any) -> FakeKernel:
    """Three tokens, so that guesses come true."""
    return FakeKernel(POOL, vocab_size=3, end_token=9, end_every=40, **more)


@functools.cache
def on_fake() -> Recorded:
    return served(fake_kernel(fail=FAILURES), POLICY, {}, 2)


@functools.cache
def tiny() -> Any:
    load_blas()
    from kernel.tiny import tiny_llama

    return tiny_llama(seed=3, vocab=12)


@functools.cache
def on_tiny() -> Recorded:
    from kernel.model_kernel import ModelKernel

    tiny()
    kernel = ModelKernel(tiny(), POOL, sanitize="full", check=False)
    told = {"device": models.device_name(), "blas": load_blas(), "layers": 3}
    return served(kernel, POLICY, told, 3)


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes both depths run on a given kernel, or on the tiny llama."""

    def use(kernel: object = None) -> None:
        model: Any = None if kernel else SimpleNamespace(model=tiny(), tokenizer=None)
        loaded = Loaded(model, True, 0.05, "")
        monkeypatch.setattr(forward, "load", lambda *_: loaded)
        monkeypatch.setattr(reference, "load", lambda *_: loaded)
        if kernel is not None:
            monkeypatch.setattr(forward, "kernel_for", lambda *_: kernel)

    return use


def run(folder: Path, records: Iterable[Record], depth: str = FORWARD) -> Outcome:
    return replay(write(folder, list(records)), Options(depth=depth))


def events(records: Iterable[Record], kind: type, purpose: str = "") -> int:
    return sum(
        isinstance(event, kind) and (not purpose or getattr(event, "purpose", "") == purpose)
        for record in records
        for event in getattr(record, "events", ())
    )


def test_the_tapes_hold_what_they_are_to_test() -> None:
    for records, inboxes in (on_fake(), on_tiny()):
        ahead = [events(records, kind, LOOKAHEAD) for kind in (Appended, AppendedEach)]
        assert min(*ahead, events(records, Appended, DRAFT), events(records, Rewound)) >= 3
        assert max(_committed(records)) > 1
        assert events(records, Forked) >= 1
        assert [box.reason for box in inboxes].count("cancelled") == 1
    stages = [record.stage for record in on_fake()[0] if isinstance(record, StepFailed)]
    assert set(stages) == {"build", "eval", "void"}


def _committed(records: Iterable[Record]) -> list[int]:
    return [
        len(event.tokens)
        for record in records
        for event in getattr(record, "events", ())
        if isinstance(event, Committed)
    ]


def test_lookahead_drafts_forks_and_void_steps_run_again_bit_for_bit(
    tmp_path: Path, replaying: Any
) -> None:
    records, _ = on_fake()
    kernel = fake_kernel()
    replaying(kernel)
    outcome = run(tmp_path, records)
    assert (outcome.exit_code, outcome.divergence) == (CLEAN, None)
    assert kernel.resets == 2
    sampled = sum(len(r.tokens) for r in records if isinstance(r, StepDone))
    assert outcome.figures["tokens sampled again"] == sampled


@pytest.mark.parametrize(("kind", "step", "unanswered"), [(StepPlanned, 16, 2), (StepDone, 15, 1)])
def test_a_tape_whose_last_steps_were_never_answered_ends_cleanly(
    tmp_path: Path, replaying: Any, kind: type, step: int, unanswered: int
) -> None:
    records, _ = on_fake()
    place = first_step(
        list(records), lambda r: isinstance(r, kind) and getattr(r, "step", 0) == step
    )
    cut = records[: place + 1]
    count = {kind: sum(isinstance(r, kind) for r in cut) for kind in (StepPlanned, StepDone)}
    failed = sum(isinstance(r, StepFailed) for r in cut)
    assert count[StepPlanned] - count[StepDone] - failed == unanswered
    replaying(fake_kernel())
    outcome = run(tmp_path, cut)
    assert (outcome.exit_code, outcome.divergence) == (TORN, None)


def test_a_real_model_is_clean_at_both_depths(tmp_path: Path, replaying: Any) -> None:
    records, inboxes = on_tiny()
    replaying()
    again = run(tmp_path, records)
    assert (again.exit_code, again.divergence) == (CLEAN, None)
    alone = run(tmp_path, records, REFERENCE)
    assert (alone.exit_code, alone.divergence) == (CLEAN, None)
    ends = sum(box.reason == "stop" for box in inboxes)
    assert alone.figures["tokens judged"] == sum(len(box.tokens) for box in inboxes) + ends
    assert int(again.figures["tokens sampled again"]) > int(alone.figures["tokens judged"])
    assert alone.figures["excused flips"] == 0


def test_a_draft_that_is_said_to_have_been_sampled_and_was_not_diverges(
    tmp_path: Path, replaying: Any
) -> None:
    """At both depths, at its step, where it changes a sample that stood."""
    records, _ = on_tiny()
    place = first_step(
        list(records),
        lambda r: isinstance(r, StepDone) and len(r.sampled) > len(set(r.sampled)),
    )
    record: Any = records[place]
    at = next(n for n in range(len(record.sampled)) if record.sampled.count(record.sampled[n]) > 1)
    wrong = with_item(record.tokens, at, (record.tokens[at] + 5) % 12)
    replaying()
    for depth in (FORWARD, REFERENCE):
        found = run(tmp_path, changed(list(records), place, tokens=wrong), depth).divergence
        assert found is not None
        assert (found.kind, found.step) == (TOKEN, record.step)


def test_a_row_that_waits_for_what_nobody_sampled_cannot_be_run_again() -> None:
    row = AppendedEach(2, (7,), None, LOOKAHEAD)
    batches = Batches()
    batches.plan(2, Pieces([7], [1], [Sequence(7, Namespace(), 0)], {1: 0}, (row,)), Answers())
    with pytest.raises(Unusable, match="step 2 feeds sequence 7 a token of the step before it"):
        batches.batch(batches.take(2), ())


def done(tokens: tuple[int, ...]) -> StepDone:
    seen = Observation((0, 0), (0, 0), (0, 0), (0, 0), 0, (), (), (), ())
    scores = (0.0,) * len(tokens)
    return StepDone(3, seen, ShadowReport(), (0,) * len(tokens), tokens, scores, scores, (), (), 0)


@pytest.mark.parametrize(
    ("drawn", "joined", "changes", "finished"),
    [
        ((5, 6, 7, 8), (5, 6, 7, 8), {}, None),
        ((5, 6, 9, 8), (5, 6, 9), {}, None),
        ((9, 6, 7, 8), (9,), {}, None),
        ((5, 6, 7, 8), (5, 6), {"end_tokens": (6,)}, None),
        ((5, 6, 7, 8), (5, 6, 7), {"max_tokens": 3}, None),
        ((5, 6, 7, 8), (5, 6), {}, 2),
    ],
)
def test_only_drawn_tokens_that_stood_before_the_end_join_the_answer(
    drawn: tuple[int, ...],
    joined: tuple[int, ...],
    changes: dict[str, Any],
    finished: int | None,
) -> None:
    """Fed was 4 and the guesses 5, 6, 7."""
    parameters = structs.replace(Parameters(50), **changes)
    answers = Answers()
    answers.begin(RequestArrived(0, "", (1, 2, 3), parameters))
    if finished is not None:
        answers.begin(Finished(0, finished, "stop"))
    rows = tuple(Speculative(token, 3) for token in (4, 5, 6, 7))
    sequence = Sequence(0, Namespace(), 0, committed=3, speculative=rows)
    answers.done(done(drawn), Pieces([0], [4], [sequence], {}, ()))
    assert answers.live[0].stream == (1, 2, 3, *joined)
