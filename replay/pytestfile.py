"""Pytestfile: `replay test small.log -o test_incident.py`, a test that keeps an incident away.

Owns the text of that file, and what it calls: the inputs of the tape are run again, and what then
goes on tape is replayed. Fails where the code has the fault, passes where it has not.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from attrs import evolve
from msgspec import Struct

from statemachine.codec import TapeEncoder
from statemachine.records import Record, StepDone, StepFailed, StepPlanned

from .again import inputs_of, records_of, run_again
from .arguments import TAPE_HELP, margin, tell
from .divergence import FOLD as FOLD_CLASS
from .divergence import PLAN as PLAN_CLASS
from .divergence import Divergence
from .errors import Unusable
from .fold import EACH_EVENT
from .judge import first_divergence
from .reader import Tape
from .rewrite import check_place
from .run import DEPTHS, FOLD, PLAN, REFERENCE, Options, checker_for

if TYPE_CHECKING:
    from kernel.batch import Kernel

EMBEDDED_MAX = 64 << 10
"""Bytes of a compressed tape that are put into the file itself."""
LEAST_MARGIN = 1e-3
"""Scores of float32 arithmetic in another order stay well below this."""
_WIDTH = 92
_NAME = re.compile(r"test_\w+\.py|\w+_test\.py")


class Decision(Struct, frozen=True):
    """A decision of a tape that is wrong: the record and the number of its event."""

    step: int
    record: str
    index: int


class TestReport(Struct, frozen=True):
    """What `replay test` wrote. format: of this report. path, output: the tape, and the test.

    depth, diverges, step, summary: the tape's divergence. beside: the file that holds the tape, ""
    where the test itself does. fails_now: what the test finds with the code of this version, "" if
    it passes.
    """

    __test__ = False

    format: int
    path: str
    output: str
    depth: str
    diverges: str
    step: int
    summary: str
    fails_now: str
    beside: str = ""


def main(arguments: list[str]) -> int:
    """`replay test`; 0 where the file was written."""
    parser = argparse.ArgumentParser(
        prog="replay test",
        description="Write a pytest file that runs the tape's inputs again, and fails while the "
        "fault is in the code.",
    )
    parser.add_argument("tape", help=TAPE_HELP)
    parser.add_argument("-o", "--output", required=True, metavar="test_X.py", help="the file")
    parser.add_argument(
        "--depth", choices=DEPTHS, help="default: fold, and plan where the tape folds"
    )
    parser.add_argument(
        "--model", metavar="PATH", help="run the real model, for a fault in its layers"
    )
    parser.add_argument("--margin", type=margin, metavar="X", help="as for `replay`")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    given = parser.parse_args(arguments)
    options = Options(depth=given.depth or "", model=given.model, margin=given.margin, tell=tell)
    report = write_test(given.tape, given.output, options)
    print(msgspec.json.encode(report).decode() if given.json else as_text(report))
    return 0


def as_text(report: TestReport) -> str:
    """The report for a person."""
    lines = [f"{report.output}: a test of {report.path}"]
    if report.fails_now:
        lines.append(f"it FAILS now: {report.fails_now}")
    elif report.diverges == PLAN_CLASS:
        lines.append(
            "it PASSES now: the scheduler of this version decides otherwise than the tape, which "
            "another one wrote; it fails where the code decides as on tape"
        )
    else:
        lines.append(
            "it PASSES now: run again with this version, the inputs lead to no divergence. The "
            "fault was fixed, or is where the test cannot see (the file says what that is)"
        )
    if report.beside:
        lines.append(f"the tape is in {report.beside}: keep it beside the test")
    lines.append(f"on tape   {report.diverges}, step {report.step}: {report.summary}")
    return "\n".join(lines)


def write_test(path: str, output: str, options: Options) -> TestReport:
    """Write the test. Depth "": fold, then plan; with a model also the forward.

    Raises Unusable where the tape cannot be read, is redacted, begins in the middle of a run, does
    not diverge, and where the output cannot be written.
    """
    place = Path(output)
    check_place(path, output)
    if not _NAME.fullmatch(place.name):
        raise Unusable(f"{output} is no name that pytest finds: call it test_SOMETHING.py")
    records = list(Tape(path))
    inputs_of(records)  # raises where they cannot be run again
    depth, found = _found(path, records, options)
    wrong = decision(found)
    if options.model and options.margin is None:
        options = evolve(options, margin=_margin(found))
    data = TapeEncoder().encode(records)
    packed = zlib.compress(data, 9)
    beside = "" if len(packed) <= EMBEDDED_MAX else place.with_suffix(".tape").name
    text = _text(found, depth, wrong, packed, beside, options)
    held = place.with_suffix(".tape")
    if beside and held.exists() and held.read_bytes() != data:
        raise Unusable(
            f"{held}, where the tape would go, holds another one: give the test another name"
        )
    try:
        if beside:
            held.write_bytes(data)
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unusable(f"{output} cannot be written: {error.strerror}") from error
    now = wrong_again(records, wrong, options.model, options.margin)
    return TestReport(
        1, path, output, depth, found.kind, found.step, found.summary, now, beside
    )  # fmt: skip


def _found(path: str, records: list[Record], options: Options) -> tuple[str, Divergence]:
    depths = [options.depth] if options.depth else [FOLD, PLAN]
    if options.model and not options.depth:
        depths.append("forward")
    for depth in depths:
        found = first_divergence(records, evolve(options, depth=depth), checker_for)
        if found is not None:
            return depth, found
    raise Unusable(
        f"{path} does not diverge at depth {' or '.join(depths)}: there is nothing to test for"
    )


def decision(found: Divergence) -> Decision | None:
    """The event at fault, where a divergence has one that the scheduler decided."""
    if found.kind in (PLAN_CLASS, FOLD_CLASS) and found.event_index >= 0:
        return Decision(found.step, found.record, found.event_index)
    return None


def _margin(found: Divergence) -> float | None:
    """Half of what a score is off on tape, as far as arithmetic allows; None where none is."""
    for value in found.values:
        pair = value.recorded, value.observed
        if value.name.startswith("logit") and all(isinstance(it, float) for it in pair):
            off = abs(float(str(pair[0])) - float(str(pair[1])))
            return max(LEAST_MARGIN, round(off / 2, 6)) if off else None
    return None


def _tuple(wrong: Decision | None) -> tuple[int, str, int] | None:
    return None if wrong is None else (wrong.step, wrong.record, wrong.index)


def found_again(
    tape: bytes,
    *,
    wrong: tuple[int, str, int] | None = None,
    model: str | None = None,
    margin: float | None = None,
) -> str:
    """What is wrong when a tape's inputs are run again by this version; "" where nothing is.

    wrong: step, record and number of an event that the scheduler must not decide again. model: a
    path; the real model runs, and each answer is compared with the model alone. Without it tokens
    are the recorded ones.
    """
    return wrong_again(records_of(tape), wrong and Decision(*wrong), model, margin)


def wrong_again(
    recorded: list[Record],
    wrong: Decision | None,
    model: str | None = None,
    margin: float | None = None,
) -> str:
    """What `found_again` says, of records."""
    inputs = inputs_of(recorded)
    options = Options(PLAN)
    kernel: Kernel | None = None
    if model is not None:
        from .models import kernel_for, load

        options = Options(REFERENCE, model=model, margin=margin)
        loaded = load(inputs.header, options)
        try:
            kernel = kernel_for(inputs.header, loaded)
        except Unusable as error:
            return str(error)  # it is tried out when it is made, and failed then
    try:
        again = run_again(inputs, kernel)
    except Unusable:
        raise
    except Exception as error:
        return f"the engine raised {type(error).__name__}: {error}"
    found = first_divergence(again, Options(PLAN), checker_for, EACH_EVENT)
    if found is None and model is not None:
        found = first_divergence(again, options, checker_for)
    if found is not None:
        return f"step {found.step} ({found.kind}): {found.summary}"
    if wrong is not None and _decided(recorded, wrong) == _decided(again, wrong) != ():
        return (
            f"step {wrong.step}: event {wrong.index} of {wrong.record} is decided again as it was "
            "on tape"
        )
    return ""


def _decided(records: list[Record], wrong: Decision) -> tuple[object, ...]:
    """The events of a record up to the wrong one, and how many steps were answered before it: with
    a step in flight the same events may be right a moment later. () where there is none.
    """
    answered = 0
    for record in records:
        if not isinstance(record, StepPlanned | StepDone | StepFailed):
            continue
        if record.step == wrong.step and type(record).__name__ == wrong.record:
            events = record.events[: wrong.index + 1]
            more = ("no more",) if len(events) <= wrong.index else ()
            return (answered, *events, *more)
        answered += not isinstance(record, StepPlanned)
    return ()


def _text(
    found: Divergence,
    depth: str,
    wrong: Decision | None,
    packed: bytes,
    beside: str,
    options: Options,
) -> str:
    """The test file."""
    where = f"step {found.step}" + (f", sequence {found.sequence}" if found.sequence >= 0 else "")
    said = [f"On tape, {where} ({found.kind}):", *_wrapped(found.summary)]
    for value in found.values:
        shown = [
            f"{name} {value_of}"
            for name, value_of in (
                ("recorded", value.recorded),
                ("derived", value.derived),
                ("observed", value.observed),
            )
            if value_of is not None
        ]
        said += _wrapped(f"{value.name}: {', '.join(shown)}")
    arguments = ["TAPE"]
    if wrong is not None:
        arguments.append(f"wrong={_tuple(wrong)!r}")
    if options.model is not None:
        arguments.append(f"model={options.model!r}")
    if options.margin is not None:
        arguments.append(f"margin={options.margin!r}")
    call = ", ".join(arguments)
    sees = _SEES_MODEL if options.model is not None else _SEES
    lines = [
        f'"""An incident, run again. Made by `replay test` at depth {depth}.',
        "",
        *(line.replace("\\", "\\\\").replace('"""', "'''") for line in said),
        "",
        *textwrap.wrap(sees + (_SEES_PLAN if wrong is not None else ""), _WIDTH),
        '"""',
        "",
        "from __future__ import annotations",
        "",
        *(["from pathlib import Path"] if beside else ["import base64", "import zlib"]),
        "",
        "from replay.pytestfile import found_again",
        "",
        *_tape_lines(packed, beside),
        "",
        "",
        "def test_what_came_in_then_is_served_rightly() -> None:",
        f'    assert found_again({call}) == ""',
        "",
    ]
    return "\n".join(lines)


_SEES = (
    "What the test does: it gives the recorded requests (cancels, stop strings, failed steps, "
    "flushes) to this version's scheduler and engine loop, with a kernel that samples the recorded "
    "tokens, and replays the tape that comes of it, fold and plan, with all invariants after each "
    "event. It sees faults in the state machine, the scheduler, the loop, and in how the kernel "
    "lays out positions, tables and visible rows. It cannot see faults in MLX arithmetic or in a "
    "model's layers (`--model` runs these), in a draft model's cache, in HTTP or text, in timing, "
    "or faults that need more than the recorded inputs (another pool, a full disk, a race)."
)
_SEES_MODEL = (
    "What the test does: it gives the recorded requests to this version's engine over the real "
    "model, replays the tape that comes of it, fold and plan, and compares each answer with the "
    "model run alone, by the margin rule. It sees faults that make a length, a table or a score "
    "wrong; not those whose scores differ by less than the margin, nor HTTP, text or timing."
)
_SEES_PLAN = (
    " The tape's wrong event is a decision of the scheduler: the test also fails where the same "
    "step decides it in the same way again. A scheduler that never comes to that step passes."
)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _tape_lines(packed: bytes, beside: str) -> Iterator[str]:
    if beside:
        yield f"TAPE = Path(__file__).with_name({json.dumps(beside)}).read_bytes()"
        return
    text = base64.b85encode(packed).decode("ascii")
    yield "TAPE = zlib.decompress("
    yield "    base64.b85decode("
    for at in range(0, len(text), 80):
        yield f'        "{text[at : at + 80]}"'
    yield "    )"
    yield ")"
