"""What-if: `replay what-if TAPE --set NAME=VALUE`, a recorded load under another policy.

Owns the settings that can be tried, what is wrong with one, and the report: the tally of the
recorded run beside that of the one tried (resched.py). No model, no times: steps stand for both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import msgspec
from msgspec import Struct, structs

from server.admission import check_pool
from server.policy import Policy, check
from statemachine.errors import StateMachineError
from statemachine.geometry import Geometry
from statemachine.geometry import check as check_geometry
from statemachine.records import Header

from .arguments import TAPE_HELP
from .errors import Unusable
from .plan import policy_of
from .progress import progress
from .reader import Tape
from .recorded import Recorded
from .resched import Resched
from .run import CLEAN
from .stat import StatReport, report_of
from .tally import Tally
from .words import plural

ON = ("on", "true", "yes", "1")
OFF = ("off", "false", "no", "0")
NUM_BLOCKS = "num_blocks"
NUM_SLOTS = "num_slots"
SIZES = (NUM_BLOCKS, NUM_SLOTS)

_NEEDS = {
    "prefix_cache": "share",
    "prefill_tile": "pad",
    "prefill_cohort": "pad",
    "lookahead": "rewind",
    "draft_tokens": "rewind",
    "max_running": "batch",
}
"""Settings that a model must be capable of, where they are more than these values."""
_NEUTRAL: dict[str, object] = {"prefill_tile": 1, "max_running": 1}


class Change(Struct, frozen=True):
    """A setting as it was, and as it was tried."""

    name: str
    recorded: str
    tried: str


class WhatIfReport(Struct, frozen=True, kw_only=True):
    """What `replay what-if --json` prints: both runs as `replay stat` counts them.

    changes: settings that were not as recorded. tried: under them; a step of it takes as long as a
    recorded one. made_up: answer tokens of `beyond` requests that the record does not have, for
    they were cancelled, failed, or cut short there. refused: requests that a server with these
    settings would not have taken.
    """

    format: int = 1
    verdict: str
    path: str
    changes: tuple[Change, ...]
    recorded: StatReport
    tried: StatReport
    made_up: int
    beyond: int
    refused: int
    notes: tuple[str, ...]


def settings(header: Header, given: Iterable[str]) -> tuple[Policy, Geometry]:
    """The tape's settings with NAME=VALUE changes. Raises Unusable, with one sentence."""
    policy, geometry = policy_of(header), header.geometry
    changes: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise Unusable(f"--set {text} has no value: write --set {name}=VALUE")
        if name in SIZES:
            geometry = _resized(geometry, name, value)
        elif name in Policy.__struct_fields__:
            changes[name] = _value(name, value.strip(), getattr(policy, name))
            _require_able(header, name, changes[name])
        else:
            known = ", ".join((*Policy.__struct_fields__, *SIZES))
            raise Unusable(f"there is no setting {name!r} to try; there are {known}")
    policy = structs.replace(policy, **changes)
    try:
        check(policy)
        check_geometry(geometry)
        check_pool(geometry, policy)
    except ValueError as error:
        raise Unusable(f"these settings cannot be tried: {error}") from error
    return policy, geometry


def _value(name: str, text: str, like: object) -> object:
    if isinstance(like, bool):
        if text.lower() in ON + OFF:
            return text.lower() in ON
        raise Unusable(f"{name} is on or off, not {text!r}")
    if isinstance(like, int):
        if text.isdecimal():
            return int(text)
        raise Unusable(f"{name} is a whole number of 0 or more, not {text!r}")
    return text


def _resized(geometry: Geometry, name: str, text: str) -> Geometry:
    """Pools of other sizes: one number for all groups that hold blocks (or slots), or one each."""
    sizes, mine = [part.strip() for part in text.split(",")], _sized(geometry, name)
    if not mine:
        raise Unusable(f"{name} cannot be tried with this model: no group of it holds any")
    if not all(size.isdecimal() for size in sizes) or len(sizes) not in (1, len(mine)):
        raise Unusable(
            f"{name} is a whole number, or {len(mine)} of them with commas (one for each group "
            f"that holds them), not {text!r}"
        )
    groups = list(geometry.groups)
    for number, size in zip(mine, sizes if len(sizes) > 1 else sizes * len(mine), strict=True):
        groups[number] = structs.replace(groups[number], num_blocks=int(size))
    return structs.replace(geometry, groups=tuple(groups))


def _sized(geometry: Geometry, name: str) -> list[int]:
    """The groups whose size is said by this setting."""
    slots = name == NUM_SLOTS
    return [at for at, it in enumerate(geometry.groups) if it.paged and it.recurrent == slots]


def _require_able(header: Header, name: str, value: object) -> None:
    flag = _NEEDS.get(name, "")
    if name == "draft_tokens" and header.capabilities.get("snapshot"):
        return
    if header.capabilities.get(flag, True) or value == _NEUTRAL.get(name, 0):
        return
    reason = header.capabilities.get(f"{flag}_reason", "its caches do not allow it")
    raise Unusable(f"{name}={_shown(value)} cannot be tried with this model: {reason}")


def what_if(path: str, given: Iterable[str]) -> WhatIfReport:
    """Run a tape's load under other settings. Raises Unusable."""
    tape, tried = Tape(path), Tally()
    with progress(tape, "replay what-if") as records:
        recorded = Recorded(tape, iter(records))
        if recorded.header.draft is not None:
            raise Unusable(
                "a draft model guessed for this tape, and what it would have guessed in other "
                "steps is not on it: give a tape of a server without --draft-model"
            )
        policy, geometry = settings(recorded.header, given)
        if recorded.start is not None and geometry != recorded.header.geometry:
            raise Unusable(
                "the tape begins in the middle of a run, with blocks in use: pools of other sizes "
                "cannot be tried on it; give a tape from the server's start"
            )
        run = Resched(recorded, policy, geometry)
        try:
            for record in run.records():
                tried.feed(record)
        except (ValueError, KeyError, StateMachineError) as error:
            # The scheduler takes what it is given for the inputs of a server.
            raise Unusable(
                f"the tape's inputs cannot be run again ({error}): `replay {path}` tells what is "
                "wrong with it"
            ) from error
        recorded.finish()
    header = recorded.header
    changes = _changes(header, policy, geometry)
    before = report_of(recorded.tally, header, path, torn=not tape.ended, notes=tuple(tape.notes))
    after = report_of(tried, structs.replace(header, geometry=geometry), path)
    from .what_if_text import verdict

    return WhatIfReport(
        verdict=verdict(changes, before, after),
        path=path,
        changes=changes,
        recorded=before,
        tried=after,
        made_up=run.made_up,
        beyond=len(run.beyond),
        refused=run.refused,
        notes=tuple(_notes(recorded, run, tape)),
    )


def _changes(header: Header, policy: Policy, geometry: Geometry) -> tuple[Change, ...]:
    recorded = policy_of(header)
    pairs = [
        (name, getattr(recorded, name), getattr(policy, name)) for name in structs.asdict(policy)
    ]
    pairs += [(name, _size(header.geometry, name), _size(geometry, name)) for name in SIZES]
    return tuple(Change(name, _shown(was), _shown(now)) for name, was, now in pairs if was != now)


def _size(geometry: Geometry, name: str) -> str:
    return ",".join(str(geometry.groups[at].num_blocks) for at in _sized(geometry, name))


def _shown(value: object) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _notes(recorded: Recorded, run: Resched, tape: Tape) -> Iterable[str]:
    yield from tape.notes
    if recorded.gap:
        yield "records are missing from a place on (the disk was full): nothing behind it was run"
    if recorded.tally.broken:
        yield f"{recorded.tally.broken}; nothing behind that was run"
    failed = sum(recorded.tally.failed.values())
    if failed:
        yield (
            f"steps that failed when they were recorded: {failed}; none fails in the run that was "
            "tried"
        )
    if run.made_up:
        yield (
            f"{plural(run.made_up, 'answer token')} of {plural(len(run.beyond), 'request')} made "
            "up, for the record ends before them (cancelled, failed or cut short)"
        )
    if run.refused:
        yield f"left out, for they would have been refused: {plural(run.refused, 'request')}"


def main(arguments: list[str]) -> int:
    """`replay what-if`."""
    parser = argparse.ArgumentParser(
        prog="replay what-if",
        description="A recorded load under other settings of the scheduler, without a model: "
        "recorded arrivals, cancels and tokens, this version's scheduler.",
        epilog="settings: " + ", ".join((*Policy.__struct_fields__, *SIZES)),
    )
    parser.add_argument("tape", metavar="TAPE", help=TAPE_HELP)
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting to try, such as max_running=64 or prefix_cache=off; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    given = parser.parse_args(arguments)
    report = what_if(given.tape, given.settings)
    from .what_if_text import as_text

    text = msgspec.json.encode(report).decode() if given.json else as_text(report)
    sys.stdout.write(text + "\n")
    return CLEAN
