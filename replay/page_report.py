"""Page report: what a replay came to, as the HTML page shows it: no token ids unless asked for.

Owns what is taken out of a divergence so that nothing of a prompt is left in it: events stand in
words, values that hold tokens are left out, salts too.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from attrs import evolve
from msgspec import Struct, structs

from statemachine.events import (
    Appended,
    AppendedEach,
    Committed,
    CommittedEach,
    Event,
    Namespace,
    Opened,
)

from .advice import MEANING, next_steps
from .divergence import Divergence, Value
from .report import verdict
from .run import CLEAN, DIVERGED, TORN, Outcome
from .words import event_words, plural, span, text_words

STATES = {CLEAN: "clean", DIVERGED: "diverged", TORN: "torn"}
HIDDEN = "(left out: it holds token ids; --tokens shows it)"
BATCH_SHOWN = 24

_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)
_TOKEN = re.compile(r"\b(tokens?) \(?\d+(?:[, ]+\d+)*\)?( was committed as )?(?(2)\d+)")
_HOLDS_TOKENS = ("tokens", "requests")


class Row(Struct, frozen=True):
    """A line of a table."""

    cells: tuple[str, ...]
    marked: bool = False


class PageReport(Struct, frozen=True):
    """The text of the page. state: clean, diverged or torn. facts: name and value. found: where
    the divergence is, name and value. values: name, recorded, derived, observed. last: step,
    record and words. batch: number, sequence, rows. next: command, what it tells.
    """

    state: str
    verdict: str
    path: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    found: tuple[tuple[str, str], ...] = ()
    values: tuple[Row, ...] = ()
    last: tuple[Row, ...] = ()
    batch: tuple[Row, ...] = ()
    batch_left: int = 0
    sequence: int = -1
    meaning: str = ""
    next: tuple[tuple[str, str], ...] = ()


def page_report(outcome: Outcome, tokens: bool) -> PageReport:
    """What the page says of an outcome."""
    header, counts, found = outcome.header, outcome.counts, outcome.divergence
    safe = outcome if tokens or found is None else _without_tokens(outcome, found)
    facts = [("depth", outcome.depth)]
    if header is not None:
        facts += [
            ("model", header.model),
            ("software", header.software),
            ("device", header.device or "unknown"),
            ("BLAS", header.blas or "none"),
        ]
    failed = f" ({counts.failed_steps} failed)" if counts.failed_steps else ""
    facts.append(
        (
            "replayed",
            f"{plural(counts.steps, 'step')}{failed}, {plural(counts.events, 'event')}, "
            f"{plural(counts.rows, 'row')}",
        )
    )
    facts += [(name, str(value)) for name, value in outcome.figures.items()]
    notes = tuple(it if tokens else hide_tokens(it) for it in outcome.notes)
    report = PageReport(
        state=STATES[outcome.exit_code],
        verdict=verdict(safe),
        path=outcome.path,
        facts=tuple(facts),
        notes=notes,
    )
    if safe.divergence is None:
        return report
    return structs.replace(report, **_divergence(safe, safe.divergence, tokens))


def hide_tokens(text: str) -> str:
    """A sentence without the token ids that it names."""
    return _TOKEN.sub(lambda it: f"{it[1]} (hidden)" + (f"{it[2]}another" if it[2] else ""), text)


def event_shown(text: str, tokens: bool) -> str:
    """The words of an event that stands as JSON; without `tokens` no token id and no salt."""
    if tokens:
        return text_words(text)
    try:
        event = _decoder.decode(text)
    except msgspec.MsgspecError:
        return hide_tokens(text)
    return _words(event)


def _words(event: Any) -> str:
    if isinstance(event, Opened):
        space = event.namespace
        event = structs.replace(event, namespace=Namespace(space.adapter, space.version))
    words = event_words(event)
    if isinstance(event, Appended | AppendedEach | Committed | CommittedEach):
        return re.sub(r" \(token \d+\)$", "", words)
    return words


def _without_tokens(outcome: Outcome, found: Divergence) -> Outcome:
    """An outcome whose divergence holds no token id: events in words, in place of their JSON."""
    values = []
    for it in found.values:
        held = [_hidden(it.name, value) for value in (it.recorded, it.derived, it.observed)]
        fields = dict(zip(("recorded", "derived", "observed"), held, strict=True))
        values.append(structs.replace(it, **fields))
    return evolve(
        outcome,
        divergence=structs.replace(
            found,
            summary=hide_tokens(found.summary),
            event=event_shown(found.event, False) if found.event else "",
            values=tuple(values),
            last_events=tuple(
                structs.replace(it, event=event_shown(it.event, False)) for it in found.last_events
            ),
        ),
    )


def _hidden(name: str, value: Value) -> Value:
    if value is None or isinstance(value, float):
        return value
    if name == "event" and isinstance(value, str):
        try:
            event = _decoder.decode(value)
        except msgspec.MsgspecError:
            return hide_tokens(value)
        who = getattr(event, "seq", None)
        return (f"sequence {who}: " if who is not None else "") + _words(event)
    if name in _HOLDS_TOKENS or (isinstance(value, str) and "token" in value):
        return HIDDEN
    return value


def _divergence(outcome: Outcome, found: Divergence, tokens: bool) -> dict[str, Any]:
    where = [("class", found.kind), ("step", str(found.step))]
    if found.record:
        at = f"[{found.event_index}]" if found.event_index >= 0 else ""
        words = event_shown(found.event, tokens) if found.event else ""
        where.append(("event", f"{found.record}{at}" + (f": {words}" if words else "")))
    for name, number in (
        ("sequence", found.sequence),
        ("group", found.group),
        ("block", found.block),
        ("position", found.position),
    ):
        if number >= 0:
            where.append((name, str(number)))
    if found.layer:
        where.append(("layer", found.layer))
    batch, left = _batch(found)
    return {
        "found": tuple(where),
        "values": tuple(
            Row((it.name, _shown(it.recorded), _shown(it.derived), _shown(it.observed)))
            for it in found.values
        ),
        "last": tuple(
            Row((str(it.step), f"{it.record}[{it.index}]", event_shown(it.event, tokens)))
            for it in found.last_events
        ),
        "batch": batch,
        "batch_left": left,
        "sequence": found.sequence,
        "meaning": MEANING[found.kind],
        "next": tuple((it.command, it.tells) for it in next_steps(found, outcome)),
    }


def _batch(found: Divergence) -> tuple[tuple[Row, ...], int]:
    """The pieces around the one at fault, and how many are left out."""
    pieces = found.neighbours
    at = next((it.piece for it in pieces if it.sequence == found.sequence), 0)
    first = max(0, min(at - BATCH_SHOWN // 2, len(pieces) - BATCH_SHOWN))
    shown = pieces[first : first + BATCH_SHOWN]
    rows = tuple(
        Row(
            (
                str(it.piece),
                f"sequence {it.sequence}",
                f"{plural(it.rows, 'row')}, position {span(it.start, it.start + it.rows - 1)}",
            ),
            it.sequence == found.sequence,
        )
        for it in shown
    )
    return rows, len(pieces) - len(shown)


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(str, value)) + ")"
    return "" if value is None else str(value)
