"""Words: events, sequences and numbers as a person reads them. Prints nothing, judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from statemachine import events as ev
from statemachine.events import NO_BLOCK, Event
from statemachine.geometry import OPAQUE, WINDOW, Geometry

TOKENS_SHOWN = 12

_decoder = msgspec.json.Decoder(Event)


def plural(count: int, noun: str, nouns: str = "") -> str:
    """ "1 row", "3 rows"."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def span(first: int, last: int) -> str:
    """ "7" or "7-9"."""
    return f"{first}" if first == last else f"{first}-{last}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in their order, neighbours as a range: "4-7 9"; a hole is "_"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number != NO_BLOCK and parts[-1][1] + 1 == number:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join("_" if first == NO_BLOCK else span(first, last) for first, last in parts)


def tokens_text(tokens: tuple[int, ...]) -> str:
    """The first tokens."""
    shown = " ".join(str(token) for token in tokens[:TOKENS_SHOWN])
    return shown if len(tokens) <= TOKENS_SHOWN else shown + " ..."


def called(external_id: str) -> str:
    """A request's external id, quoted, behind a space; "" for none."""
    return f' "{external_id}"' if external_id else ""


def blocks_text(tables: tuple[tuple[int, ...], ...]) -> str:
    """ "blocks 4-7", by group where there are several; "" for none."""
    named = [(group, table) for group, table in enumerate(tables) if table]
    if not named:
        return ""
    if len(tables) == 1:
        return f"{'block' if len(tables[0]) == 1 else 'blocks'} {ranges(tables[0])}"
    return "blocks " + ", ".join(f"{ranges(table)} of group {group}" for group, table in named)


def group_text(geometry: Geometry, number: int) -> str:
    """ "group 1, window of 8 and 2 sinks, 64 blocks of 4 rows"."""
    group = geometry.groups[number]
    kind = group.kind
    if group.kind == WINDOW:
        sinks = f" and {plural(group.sink, 'sink')}" if group.sink else ""
        kind = f"window of {group.window}{sinks}"
    if group.kind == OPAQUE:
        return f"group {number}, opaque: the model holds these caches, there are no blocks"
    if group.recurrent:
        return f"group {number}, {kind}, {group.num_blocks} slots of one state"
    return f"group {number}, {kind}, {group.num_blocks} blocks of {geometry.block_size} rows"


def _with(prefix: str, text: str) -> str:
    return f"{prefix}{text}" if text else ""


def _opened(event: ev.Opened) -> str:
    space = event.namespace
    parts = [_with("adapter ", space.adapter), _with("salt ", space.salt)]
    return "opened" + _with(" in namespace ", ", ".join(part for part in parts if part))


def _appended(event: ev.Appended) -> str:
    new = _with(", new ", blocks_text(event.blocks))
    return f"appended {plural(event.rows, event.purpose + ' row')}{new}"


def _each(event: ev.AppendedEach) -> str:
    rows = plural(len(event.seqs), event.purpose + " row")
    if len(event.seqs) == 1:
        return f"appended {rows}" + (f" (token {event.tokens[0]})" if event.tokens else "")
    return f"appended {rows}, one to each of sequences {ranges(event.seqs)}"


def _committed_each(event: ev.CommittedEach) -> str:
    if len(event.seqs) == 1:
        return f"committed 1 row (token {ranges(event.tokens[:1])})"
    return f"committed 1 row of each of sequences {ranges(event.seqs)}"


_WORDS: dict[type, Callable[[Any], str]] = {
    ev.Opened: _opened,
    ev.PrefixAdopted: lambda it: (
        f"adopted {plural(len(it.tokens), 'row')} of its prompt of {it.prompt_rows} from the prefix"
        f" index, {blocks_text(it.blocks)}"
    ),
    ev.Appended: _appended,
    ev.AppendedEach: _each,
    ev.StepWritten: lambda it: f"the writes of step {it.step} are done",
    ev.Committed: lambda it: f"committed {plural(len(it.tokens), 'row')}",
    ev.CommittedEach: _committed_each,
    ev.Trimmed: lambda it: f"trimmed {plural(it.rows, 'row')} at the end",
    ev.Rewound: lambda it: f"rewound {plural(it.rows, 'speculative row')}",
    ev.FrontTrimmed: lambda it: f"window moved on by {plural(it.rows, 'row')} in group {it.group}",
    ev.BlockCopied: lambda it: (
        f"block {it.source} of group {it.group} copied into block {it.target} at place "
        f"{it.index} of the table, {plural(it.rows, 'row')}"
    ),
    ev.Forked: lambda it: f"sequence {it.seq} forked: sequence {it.child} shares its rows",
    ev.BlockPublished: lambda it: (
        f"block {it.block} of group {it.group} published: it can be found by others"
    ),
    ev.BlockStored: lambda it: (
        f"block {it.block} of group {it.group} read for the prefix store, before it is evicted"
    ),
    ev.BlockLoaded: lambda it: (
        f"kept rows loaded into block {it.block} of group {it.group}: it can be found by others"
    ),
    ev.BlockEvicted: lambda it: f"block {it.block} of group {it.group} evicted from the index",
    ev.Reset: lambda _: "emptied: it starts again at 0",
    ev.Preempted: lambda _: "preempted: it gave its blocks back and waits",
    ev.Closed: lambda it: "closed" + _with(": ", it.reason),
    ev.PoolReset: lambda _: "the pages were lost: every sequence starts again, the index is empty",
}


def event_words(event: Event, named: bool = False) -> str:
    """An event in words; `named`: with the sequence that it is about."""
    words = _WORDS[type(event)](event)
    seq = getattr(event, "seq", None)
    if isinstance(event, ev.AppendedEach | ev.CommittedEach) and len(event.seqs) == 1:
        seq = event.seqs[0]
    return f"sequence {seq}: {words}" if named and seq is not None else words


def text_words(text: str, named: bool = False) -> str:
    """The words of an event that stands as JSON; the text where it is none."""
    try:
        return event_words(_decoder.decode(text), named)
    except msgspec.MsgspecError:
        return text
