"""Check: what must hold of every run, whatever was in it.

    every record       encoded and decoded; fold and plan find nothing
    every event        applied by itself, then the cheap invariants, in all runs; all invariants in
                       the runs of which `thorough` says so
    every answered     all invariants, in all runs (a predicate whose part of the state is the very
    step               object that it was is not asked again)
    every request      ended, within `bound` steps; told so once and nothing after it; its answer is
                       a beginning of the answer alone, and all of it where it ended by itself; its
                       log-probabilities, scores and embedding are those that it asked for
    every step         succeeds, but for those whose failure was ordered
    at the end         nothing is held, waits or runs; every block is free or cached; no client is
                       remembered; no row was found that is not its sequence's

Of tapes in segments (about one run in fifty, on a real disk) replay's own command asks the cheap
invariants after every record, and all of them at the end. Steps in a gap are seen by nobody.

The states that the invariants see are the fold's. The engine's own are the same ones: their digests
are on tape, and compared.

**Liveness.** A request ends at most `bound(load, live)` steps after it arrived, where `live` are
the requests that were live at some time while it was, itself included, and F the steps that failed
meanwhile:

    sum over live of (pieces + a * answer + 2)  +  F * sum over live of (pieces + 2)

pieces: of prompt and answer, at the fewest rows that a step without decode rows gives the first
prompt; answer: max_tokens; a: 2 with lookahead (a sequence that waits for its token sits out every
second step), else 1. In words: never later than if all were served one after the other, each
failure making all of them start over, and tried alone.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from replay.divergence import Diverged
from replay.fold import AT_END, Fold
from replay.plan import Planner
from replay.run import CLEAN, PLAN, Options
from replay.run import replay as run_replay
from server.loop import FAILURES_MAX
from server.sharing import sharers
from server.submission import CANCELLED, ERROR, LENGTH, STOP
from statemachine.codec import TapeDecoder
from statemachine.errors import InvariantBroken
from statemachine.events import Committed, Event
from statemachine.invariants import ALL, Check, check_step
from statemachine.records import StepFailed, StepPlanned, TapeEnded
from statemachine.state import State
from statemachine.transitions import apply

from .simulation_alone import alone, scores_alone
from .simulation_disk import STUCK
from .simulation_load import POISON, Load, Request
from .simulation_play import REFUSED, Played, play

PLANNED = StepPlanned.__name__
ACCEPTED = "accepted draft"
DRAFT_MODEL = "draft model: "
"""Before what is counted of the draft model's pool."""

THOROUGH = 16
"""One run in so many asks all invariants after every event."""

_INDEX = ("groups", "entries", "by_key")
READS: dict[str, tuple[str, ...]] = {
    "shapes_fit_the_geometry": (*_INDEX, "sequences", "last_seq", "next_entry"),
    "blocks_add_up": ("groups",),
    "queues_are_sound": ("groups",),
    "references_are_counted": ("groups", "sequences", "pins"),
    "pins_wait_for_a_step": ("pins", "written_step", "issued_step"),
    "tables_cover_the_offset": ("sequences",),
    "starts_leave_the_window": ("sequences",),
    "rows_are_ordered": ("sequences", "written_step"),
    "content_matches_keys": ("sequences",),
    "index_is_findable": _INDEX,
    "published_rows_are_committed": ("groups", "sequences", "entries", "written_step"),
    "shared_rows_are_committed": ("groups", "sequences"),
}
"""Parts of the state that each predicate looks at (a test asks them); one not named here: all."""


class Wrong(AssertionError):
    """Something that must hold does not; `kind` is in few words what."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


class Invariants:
    """All of them, each asked again only where its part of the state was replaced."""

    def __init__(self) -> None:
        self._seen: dict[Check, tuple[object, ...]] = {}

    def __call__(self, state: State) -> None:
        """Raises InvariantBroken."""
        for check in ALL:
            names = READS.get(check.__name__)
            parts = (state,) if names is None else tuple(getattr(state, name) for name in names)
            before = self._seen.get(check)
            if before is not None and all(a is b for a, b in zip(parts, before, strict=True)):
                continue
            for message in check(state):
                raise InvariantBroken(f"{check.__name__}: {message}")
            self._seen[check] = parts


class Watched(Fold):
    """A fold that applies events one by one and asks the invariants."""

    def __init__(self, thorough: bool) -> None:
        super().__init__(AT_END)
        self._thorough = thorough
        self._ask = Invariants()
        self._each = self._ask if thorough else check_step
        self.had = Counter[str]()

    def for_draft(self) -> Fold:
        """One that asks the same of the draft model's pool."""
        return Watched(self._thorough)

    def _apply(self, step: int, kind: str, events: tuple[Event, ...]) -> None:
        self.history.add(step, kind, events)
        self.counts.events += len(events)
        self.had.update(map(_had, events))
        self._apply_slowly(step, kind, events, self._each)
        if kind == PLANNED:
            return
        try:
            self._ask(self.state)
        except InvariantBroken as error:
            self._fold(step, kind, -1, None, str(error))


def _had(event: Event) -> str:
    """What an event counts as: rows by their purpose, everything else by its name."""
    if isinstance(event, Committed) and len(event.tokens) > 1:
        return ACCEPTED
    return getattr(event, "purpose", type(event).__name__)


def thorough(seed: int) -> bool:
    """Whether this seed's run asks all invariants after every event."""
    return seed % THOROUGH == 0


def check_load(load: Load, every_event: bool = True) -> Played:
    """Play a load and judge it. Raises Wrong."""
    if load.segment_bytes:
        with tempfile.TemporaryDirectory() as folder:
            tape = Path(folder) / "tape"
            played = play(load, tape)
            outcome = run_replay(str(tape), Options(PLAN))
        if outcome.exit_code != CLEAN:
            raise Wrong("replay", f"exit code {outcome.exit_code}, {outcome.divergence}")
        judge(load, played)
        return played
    played = play(load, None)
    if played.error:
        raise Wrong("engine", played.error)
    failed = replay_in_memory(load, played, every_event)
    judge(load, played, failed)
    return played


def replay_in_memory(load: Load, played: Played, every_event: bool) -> list[StepFailed]:
    """Fold and plan of a tape, and the invariants. Returns the steps that failed."""
    fold, planner, failed = Watched(every_event), Planner(), list[StepFailed]()
    decoder, record = TapeDecoder(), None
    try:
        for record in decoder.feed(played.tape):
            fold.feed(record)
            planner.feed(record)
            if isinstance(record, StepFailed):
                failed.append(record)
        fold.finish()
    except Diverged as diverged:
        found = diverged.divergence
        raise Wrong(f"replay: {found.kind}", f"step {found.step}: {found.summary}") from diverged
    # A tape that ends in a gap has no end, and half a frame where that could not be cut off.
    whole, gap = isinstance(record, TapeEnded), played.lost_records > 0
    torn = decoder.torn and (whole or STUCK not in load.full_disk.values())
    if torn or not (whole or gap):
        raise Wrong("tape", f"it ends with {type(record).__name__}, {decoder.pending_bytes} bytes")
    played.had.update(fold.had)
    if isinstance(fold.drafted, Watched):
        played.had.update({f"{DRAFT_MODEL}{name}": n for name, n in fold.drafted.had.items()})
    return failed


def judge(load: Load, played: Played, failed: list[StepFailed] | None = None) -> None:
    """What must hold of requests and at the end. failed: where the tape says so and has no gap."""
    if played.error:
        raise Wrong("engine", played.error)
    _judge_failures(load, played)
    _judge_end(load, played)
    blamed = set[int]()
    for number, request in enumerate(load.requests):
        reason = played.reasons[number]
        if reason is None:
            raise Wrong("liveness", f"request {number} never ended")
        _judge_answer(load, played, number, request)
        _judge_reason(load, played, number, request)
        if reason == ERROR and not _breaks(load, request):
            blamed.add(number)
    builds = sum(failure.stage == "build" for failure in load.fail.values())
    if len(blamed) > builds:
        raise Wrong("blame", f"requests {sorted(blamed)} failed for {builds} failing builds")
    _judge_bounds(load, played)


def failures_most(load: Load, ordered: int, requests: Iterable[Request]) -> int:
    """How many steps may fail. A prompt with POISON fails among others, then alone; once more
    among others for each failure on order that came between.
    """
    poisoned = sum(load.poison and POISON in request.tokens for request in requests)
    return ordered + poisoned * (2 + ordered)


def _judge_failures(load: Load, played: Played) -> None:
    most = failures_most(load, len(load.fail), load.requests)
    if played.failed_steps > most:
        raise Wrong("failures", f"{played.failed_steps} steps failed: {played.failure}")
    if played.broken and most < FAILURES_MAX:
        raise Wrong("failures", f"the engine gave up: {played.failure}")


def _judge_end(load: Load, played: Played) -> None:
    status = played.status
    over = load.stop_at is None and not played.broken
    left = {name: status[name] for name in ("running", "waiting", "held") if status[name]}
    if over and (left or status["free"] + status["cached"] != status["num_blocks"]):
        raise Wrong("left over", f"when nothing was left to do: {status}")
    if over and played.clients:
        raise Wrong("left over", f"{played.clients} clients are remembered")
    if played.held_blocks:
        raise Wrong("left over", f"{played.held_blocks} blocks are still held at the end")
    if status["shadow_found"] or status["divergences"] or status["capture_failures"]:
        raise Wrong("status", str(status))
    if played.updates_after_end:
        raise Wrong("updates", f"{played.updates_after_end} came after a request's end")


def _judge_answer(load: Load, played: Played, number: int, request: Request) -> None:
    answer, reason = played.answers[number], played.reasons[number]
    if reason == REFUSED:
        if answer:
            raise Wrong("updates", f"request {number} was refused and answered {answer}")
        return
    expected, end = alone(load, request)
    if reason in (STOP, LENGTH) and (answer, reason) != (expected, end):
        raise Wrong("answer", f"request {number}: {reason} {answer}, alone {end} {expected}")
    if answer != expected[: len(answer)]:
        raise Wrong("answer", f"request {number} began {answer}, alone {expected}")
    _judge_wishes(load, played, number, request)


def _judge_wishes(load: Load, played: Played, number: int, request: Request) -> None:
    """Each token with its log-probability, each prompt token's score, and an embedding."""
    wishes, whole = request.wishes, played.reasons[number] in (STOP, LENGTH)
    told, scores = played.told[number], played.scores[number]
    if told != (played.answers[number] if wishes.logprobs >= 0 else ()):
        raise Wrong("wishes", f"request {number}: log-probabilities of {told}")
    expected = scores_alone(load, request)
    if (whole and scores.keys() != expected.keys()) or scores.items() - expected.items():
        raise Wrong("wishes", f"request {number}: scores {scores}, alone {expected}")
    if played.embedded[number] != (whole and wishes.embed):
        raise Wrong("wishes", f"request {number} has {played.embedded[number]} embeddings")


def _breaks(load: Load, request: Request) -> bool:
    """Whether a request can fail for what is its own."""
    poisoned = load.poison and POISON in request.tokens
    return poisoned or request.sink_raises is not None or request.text_raises is not None


def _judge_reason(load: Load, played: Played, number: int, request: Request) -> None:
    reason = played.reasons[number]
    left = request.cancel_at is not None or request.sink_cancels is not None
    stopped = load.stop_at is not None or played.broken
    if reason == CANCELLED and not (left or stopped):
        raise Wrong("reason", f"request {number} was cancelled by nobody")
    if reason in (STOP, LENGTH) and load.poison and POISON in request.tokens:
        raise Wrong("reason", f"request {number} cannot be built and ended with {reason}")


def bound(load: Load, live: list[Request], failures: int) -> int:
    """Steps within which a request ends; the formula is the module's."""
    policy = load.policy
    shared = policy.max_batch_tokens // max(1, sharers(policy, policy.max_batch_tokens))
    rows = max(1, min(policy.prefill_chunk, max(policy.prefill_tile, shared)))
    pieces = [-(-(len(it.tokens) + it.max_tokens) // rows) for it in live]
    each = 2 if policy.lookahead else 1
    serial = sum(count + each * it.max_tokens + 2 for count, it in zip(pieces, live, strict=True))
    return serial + failures * sum(count + 2 for count in pieces)


def _judge_bounds(load: Load, played: Played) -> None:
    for number, reason in enumerate(played.reasons):
        if reason != REFUSED:
            taken, most = spent(load, played, number)
            if taken > most:
                raise Wrong("liveness", f"request {number} took {taken} steps, more than {most}")


def spent(load: Load, played: Played, number: int) -> tuple[int, int]:
    """Steps that a request took, and its bound."""
    first, last = played.arrived[number], played.ended[number]
    assert first is not None
    assert last is not None
    live = [
        request
        for request, came, went in zip(load.requests, played.arrived, played.ended, strict=True)
        if came is not None and went is not None and came <= last and went >= first
    ]
    ordered = sum(first <= step <= last for step in load.fail)
    return last - first, bound(load, live, failures_most(load, ordered, live))


__all__ = ["Invariants", "Wrong", "apply", "bound", "check_load", "judge", "spent", "thorough"]
