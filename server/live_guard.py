"""Live guard: the first look of a replay, taken while the server runs.

Each step's observation and shadow report are compared with what the state says that its caches
should have seen (statemachine/observing.py, which replay goes by too). Owns what is found, who
cannot be trusted after it, and what is said in the log. Changes nothing by itself: what is to be
done becomes inputs (cancels, a flush), which stand on tape as all others do.

After a divergence nobody knows what wrong rows were read by. So these are given up: the request
that is named; every request whose table has one of its blocks from the first wrong row on, or a
copy of one; and whatever such a request computed behind that. The flush that follows them takes all
that they published out of the prefix index: by then no step is in flight, so nothing holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import structlog
from msgspec import Struct

from kernel.batch import StepResult
from statemachine.events import NO_BLOCK, BlockCopied
from statemachine.geometry import Geometry
from statemachine.observing import OFF, Deriver, Seen
from statemachine.records import (
    FlushRequested,
    Observation,
    RequestCancelled,
    ShadowReport,
)
from statemachine.sequence import Sequence
from statemachine.state import State

from .view import StepPlan, View

WARN = "warn"
ABORT = "abort-request"
STOP = "stop"
MODES = (WARN, ABORT, STOP)

OBSERVATION = "observation"
CONTENT = "content"
DIVERGED = "diverged"
"""Why a request was cancelled that cannot be trusted."""
NOBODY = -1
TOLD_MAX = 4096

Block = tuple[int, int]
"""A group and a block of it."""

log = structlog.get_logger()


class Wrong(Struct, frozen=True):
    """One thing that is not as it should be.

    kind: OBSERVATION or CONTENT, as replay calls it. seq: whose, NOBODY where all of the step's
    may be concerned. position: its first wrong row.
    """

    kind: str
    seq: int
    position: int
    what: str


class LiveGuard:
    """See the module. One thread makes every call.

    stopped: why the engine must end; empty while it need not.
    """

    def __init__(self, geometry: Geometry, sanitize: str = OFF, mode: str = WARN) -> None:
        """`sanitize`: the kernel's mode, which says how many rows it must compare."""
        if mode not in MODES:
            raise ValueError(f"on_divergence must be one of {', '.join(MODES)}, not {mode!r}")
        self._geometry = geometry
        self._sanitize = sanitize
        self._mode = mode
        self._deriver = Deriver(geometry)
        self._told: set[tuple[str, int]] = set()
        self._suspects: set[int] = set()
        self._flush = False
        self.stopped = ""

    @property
    def pending(self) -> bool:
        """Whether something was found that `take` has not handed out yet."""
        return self._flush

    def look(self, plan: StepPlan, result: StepResult) -> tuple[Wrong, ...]:
        """What is wrong with a step's result; `plan.state` is what its caches should have seen."""
        pieces, seen, shadow = plan.pieces, result.observation, result.shadow
        if not pieces:
            return ()
        sequences = [plan.state.sequences[piece.seq] for piece in pieces]
        due = self._deriver.seen(sequences, [piece.rows + piece.pads for piece in pieces])
        wrong = [*_columns(plan, due, seen), *_found(shadow)]
        use = self._deriver.wrong_use(seen, sum(due.rows))
        if use is not None:
            name, right, saw = use
            said = f"layers saw between {saw[0]} and {saw[1]} {name}, where {right} is right"
            wrong.append(Wrong(OBSERVATION, NOBODY, 0, said))
        wanted, exact = self._deriver.due_checks(self._sanitize, sequences, due)
        if shadow.checked < wanted or (exact and shadow.checked > wanted):
            said = f"{shadow.checked} rows in the pages were compared, where {wanted} are due"
            wrong.append(Wrong(CONTENT, NOBODY, 0, said))
        return tuple(wrong)

    def act(
        self, view: View, plan: StepPlan, wrong: tuple[Wrong, ...], tape_bytes: int | None
    ) -> tuple[int, ...]:
        """Log what was found, and note what is to be done; the requests that are given up.

        `view` is the one before the step is closed. Only `stop` sets `stopped`.
        """
        for it in wrong:
            self._say(view, plan.step, it, tape_bytes)
        if self._mode == WARN:
            return ()
        if self._mode == STOP:
            first = wrong[0]
            whose = f" for request {first.seq}" if first.seq != NOBODY else ""
            self.stopped = f"its cache was found wrong at step {plan.step}{whose}: {first.what}"
        suspects = _suspects(self._geometry, view, plan, wrong)
        self._suspects |= suspects
        self._flush = True
        return tuple(sorted(suspects & set(view.requests.keys())))

    def take(self) -> list[RequestCancelled | FlushRequested]:
        """The inputs that are due, once."""
        if not self._flush:
            return []
        cancels = [RequestCancelled(request, DIVERGED) for request in sorted(self._suspects)]
        self._suspects, self._flush = set(), False
        return [*cancels, FlushRequested(DIVERGED)]

    def _say(self, view: View, step: int, wrong: Wrong, tape_bytes: int | None) -> None:
        """One line for the first divergence of a class that a request has, not for each step."""
        key = (wrong.kind, wrong.seq)
        if key in self._told:
            return
        if len(self._told) >= TOLD_MAX:
            self._told.clear()
        self._told.add(key)
        request = view.requests.get(wrong.seq)
        log.error(
            "divergence",
            kind=wrong.kind,
            step=step,
            request=None if wrong.seq == NOBODY else wrong.seq,
            id=None if request is None else request.arrived.external_id,
            what=wrong.what,
            tape_bytes=tape_bytes,
            action=self._mode,
        )


def sentence(step: int) -> str:
    """What a client hears whose answer cannot be trusted."""
    return (
        f"the cache of this request was found wrong at step {step}, so its answer was given up: "
        "send it again"
    )


def _columns(plan: StepPlan, due: Seen, seen: Observation) -> Iterator[Wrong]:
    """Pieces that the caches saw otherwise, each by the first thing that differs."""
    columns = (
        ("start", due.starts, seen.starts),
        ("rows", due.rows, seen.rows),
        ("visible rows", due.visible, seen.visible),
        ("table", due.tables, seen.tables),
    )
    if all(wanted == found for _, wanted, found in columns):
        return
    for _, wanted, found in columns:
        if len(wanted) != len(found):
            said = f"the caches saw {len(found)} pieces, where the step has {len(wanted)}"
            yield Wrong(OBSERVATION, NOBODY, 0, said)
            return
    for number, piece in enumerate(plan.pieces):
        for name, wanted, found in columns:
            if wanted[number] != found[number]:
                said = f"the caches saw {name} {found[number]}, where the state has "
                said += str(wanted[number])
                if name == "table":
                    said = "the caches read another block table than the sequence has"
                yield Wrong(OBSERVATION, piece.seq, due.starts[number], said)
                break


def _found(shadow: ShadowReport) -> Iterator[Wrong]:
    """Whose rows are not theirs, each by its first one; NOBODY's where not all were named."""
    if not shadow.found:
        return
    first: dict[int, Wrong] = {}
    for it in shadow.findings:
        if it.seq not in first or it.position < first[it.seq].position:
            said = f"position {it.position}, in block {it.block} of group {it.group}, "
            said += "holds another row than it should"
            first[it.seq] = Wrong(CONTENT, it.seq, it.position, said)
    yield from first.values()
    if shadow.found > len(shadow.findings):
        said = f"{shadow.found} rows in the pages are not their sequences'"
        yield Wrong(CONTENT, NOBODY, 0, said)


def _suspects(geometry: Geometry, view: View, plan: StepPlan, wrong: tuple[Wrong, ...]) -> set[int]:
    """The sequences that hold a row which cannot be trusted, of those that the view has."""
    first: dict[int, int] = {}
    for it in wrong:
        for seq in [piece.seq for piece in plan.pieces] if it.seq == NOBODY else [it.seq]:
            first[seq] = min(it.position, first.get(seq, it.position))
    blocks: set[Block] = set()
    for seq, position in first.items():
        sequence = plan.state.sequences.get(seq)
        if sequence is not None:
            blocks |= _from(sequence, position // geometry.block_size)
    events = [event for flight in view.flights for event in flight.events]
    copies = [it for it in events if isinstance(it, BlockCopied)]
    suspects = set(first)
    while True:
        known = len(blocks)
        blocks |= {(it.group, it.target) for it in copies if (it.group, it.source) in blocks}
        for seq, index in _holders(view.state, blocks):
            suspects.add(seq)
            blocks |= _from(view.state.sequences[seq], index)
        if len(blocks) == known:
            return suspects


def _holders(state: State, blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """Sequences with one of the blocks in a table, and the first index at which they have one."""
    wanted, found = set(blocks), []
    for seq in sorted(state.sequences):
        places = [
            index
            for group, table in enumerate(state.sequences[seq].tables)
            for index, block in enumerate(table)
            if (group, block) in wanted
        ]
        if places:
            found.append((seq, min(places)))
    return found


def _from(sequence: Sequence, index: int) -> set[Block]:
    """A sequence's blocks from an index on, in every group."""
    return {
        (group, block)
        for group, table in enumerate(sequence.tables)
        for block in table[index:]
        if block != NO_BLOCK
    }
