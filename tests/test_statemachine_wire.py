"""Numbers of events on the wire, and what a step of lookahead rows takes on tape."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from statemachine import commands, script, wire
from statemachine import events as ev
from statemachine import records as rec
from statemachine.codec import TapeDecoder, TapeEncoder
from statemachine.geometry import Geometry, Group
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

GEOMETRY = Geometry(16, (Group("full", 1024),))
HEADER = rec.Header(1, "mlxtape 0", 5, "m", {}, GEOMETRY, {}, {})
SEEN = rec.Observation((1, 1), (1, 1), (1, 1), (1, 1), 0, (), (), (), ())
ROWS = 64
NAMES = (
    *("Opened", "PrefixAdopted", "Appended", "AppendedEach", "StepWritten", "Committed"),
    *("Trimmed", "Rewound", "FrontTrimmed", "BlockCopied", "Forked", "BlockPublished"),
    *("BlockEvicted", "Reset", "Preempted", "Closed", "PoolReset", "BlockStored", "BlockLoaded"),
)


def test_the_numbers_of_events_stay_and_20_and_21_are_kept_free() -> None:
    """Tapes name events by these numbers: a new event takes the next one, nothing moves."""
    numbers = {kind.__name__: kind.__struct_config__.tag for kind in wire.EVENT_WIRES}
    wanted = {name: number for number, name in enumerate(NAMES, 1)} | {"CommittedEach": 22}
    assert numbers == wanted
    assert [kind.__name__ for kind in wire.EVENT_TYPES] == list(wanted)
    assert not set(wire.RESERVED) & set(numbers.values())
    assert dict(zip(wanted, wire.EVENT_NUMBERS, strict=False)) == wanted
    assert len(wire.RESERVED) == len(ev.RESERVED)


def _begun() -> tuple[State, list[rec.Record]]:
    """64 sequences with prompts of their own, and their first lookahead row in flight."""
    state, records = new_state(GEOMETRY), list[rec.Record]((HEADER,))
    opening: list[ev.Event] = []
    for seq in range(ROWS):
        prompt = tuple(range(seq, 2 * seq + 3))
        records.append(rec.RequestArrived(seq, "", prompt, rec.Parameters(99)))
        opening += commands.open_sequence(apply_all(state, opening), seq)
        opening += commands.append(apply_all(state, opening), seq, 1, prompt)
    state = apply_all(state, opening)
    records.append(rec.StepPlanned(1, tuple(opening), state.digest))
    return state, records


def _lookahead_steps(count: int) -> list[rec.Record]:
    """P1 P2 D1 P3 D2 ...: each step issues a row to each sequence, each close names its token."""
    state, records = _begun()
    batches = {1: list(range(ROWS))}
    for step in range(2, count + 2):
        events = commands.append_each(state, step, list(range(ROWS)), None, ev.LOOKAHEAD)
        state = apply_all(state, events)
        records.append(rec.StepPlanned(step, events, state.digest))
        order = batches[step] = []
        for event in events:
            if isinstance(event, ev.AppendedEach):
                order += event.seqs
            elif isinstance(event, ev.Appended):
                order.append(event.seq)
        written = commands.step_written(state, step - 1)
        state = apply_all(state, written)
        before = batches[step - 1]
        tokens = tuple(step * 1000 + seq for seq in before)
        closing = commands.commit_each(state, before, tokens)
        state = apply_all(state, closing)
        places = tuple(range(len(before)))
        ends = tuple(state.sequences[seq].offset for seq in before)
        records.append(
            rec.StepDone(step - 1, SEEN, rec.ShadowReport(), places, tokens, (), (),
                         written + closing, ends, state.digest)
        )  # fmt: skip
    return records


def _commits(record: rec.Record) -> tuple[rec.StepDone, ev.CommittedEach]:
    assert isinstance(record, rec.StepDone)
    (column,) = [it for it in record.events if isinstance(it, ev.CommittedEach)]
    return record, column


def test_a_lookahead_step_comes_back_equal_from_few_bytes() -> None:
    """Its tokens are on tape once, as sampled: the commit says True."""
    records = _lookahead_steps(20)
    encoder = TapeEncoder()
    data = encoder.encode(records[:-2])
    data += encoder.encode(records[-2:-1])
    last = encoder.encode(records[-1:])
    assert list(TapeDecoder().feed(data + last)) == records
    assert len(_commits(records[-1])[1].seqs) == ROWS
    assert len(last) < 5 * ROWS, "2 bytes for a sampled token, 1 for the id of its sequence"


@pytest.mark.parametrize("place", [0, ROWS - 1])
def test_a_commit_of_other_tokens_than_were_sampled_comes_back_equal(place: int) -> None:
    """It is written in full; what follows is still read by the right tokens."""
    records = _lookahead_steps(6)
    done, column = _commits(records[-3])
    tokens = (*column.tokens[:place], 5, *column.tokens[place + 1 :])
    events = tuple(ev.CommittedEach(it.seqs, tokens) if it is column else it for it in done.events)
    changed = structs.replace(done, events=events)
    records = [*records[:-3], changed, *records[-2:]]
    assert list(TapeDecoder().feed(TapeEncoder().encode(records))) == records


def test_a_script_takes_a_column_of_commits_as_a_raw_event() -> None:
    lines = [
        {"geometry": {"block_size": 4, "groups": [{"kind": "full", "num_blocks": 8}]}},
        {"do": "open", "seq": "s"},
        {"do": "open", "seq": "t"},
        {"do": "append", "seq": "s", "tokens": [1, 2], "purpose": "prompt"},
        {"do": "append", "seq": "t", "tokens": [1, 2, 3], "purpose": "prompt"},
        {"do": "append", "seq": "s", "rows": 1, "purpose": "lookahead"},
        {"do": "append", "seq": "t", "rows": 1, "purpose": "lookahead"},
        {
            "event": {"type": "CommittedEach", "seqs": [0, 0], "tokens": [7, 8]},
            "error": "InvariantBroken",
        },
        {"event": {"type": "CommittedEach", "seqs": [0, 1], "tokens": [7, 8]}},
        {"expect": {"seq": "s", "committed": 3, "speculative": 0, "tokens": [1, 2, 7]}},
        {"expect": {"seq": "t", "committed": 4, "speculative": 0, "tokens": [1, 2, 3, 8]}},
    ]
    assert script.check([json.dumps(line) for line in lines]) == len(lines)
