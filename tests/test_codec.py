"""The codec of tape format 1: what goes in comes out, and damage never goes unseen."""

from __future__ import annotations

import math
import struct
from binascii import crc32
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from statemachine import commands
from statemachine import events as ev
from statemachine import records as rec
from statemachine.codec import (
    MAGIC,
    MAX_FRAME_BYTES,
    TapeDecoder,
    TapeEncoder,
    decode_state,
    encode_state,
)
from statemachine.errors import CodecError
from statemachine.geometry import Geometry, Group
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

GEOMETRY = Geometry(4, (Group("full", 64), Group("window", 64, window=6, sink=1)))
PLAIN = rec.Header(1, "mlxtape 0", 5, "m", {"weights": "d"}, GEOMETRY, {"max": 3}, {"pad": True})
DRAFT = rec.DraftModel("small", {"weights": "s"}, Geometry(4, (Group("full", 9),)), {"pad": True})
HEADER = structs.replace(PLAIN, draft=DRAFT)

small = st.integers(0, 6)
ids = st.one_of(small, st.integers(0, 2**64 - 1), st.integers(-(2**63), 0))
some_ids = st.lists(st.one_of(small, ids), max_size=9).map(tuple)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
numbers = st.one_of(
    st.floats(width=32, allow_nan=False), st.floats(allow_nan=False), st.integers(-3, 3).map(float)
)
_BY_HINT: dict[Any, st.SearchStrategy[Any]] = {
    int: ids,
    str: st.one_of(st.sampled_from(ev.PURPOSES), text),
    bool: st.booleans(),
    float: numbers,
    bytes: st.binary(max_size=9),
    tuple[int, ...]: some_ids,
    tuple[int, ...] | None: st.none() | some_ids,
    tuple[int, int]: st.tuples(ids, ids),
    tuple[float, ...]: st.lists(numbers, max_size=9).map(tuple),
    tuple[tuple[int, ...], ...]: st.lists(some_ids, max_size=3).map(tuple),
    tuple[tuple[int, float], ...]: st.lists(st.tuples(ids, numbers), max_size=3).map(tuple),
    tuple[str, ...]: st.lists(text, max_size=3).map(tuple),
    dict[str, int]: st.dictionaries(text, ids, max_size=3),
    dict[str, str]: st.dictionaries(text, text, max_size=3),
    dict[str, bool | int | float | str]: st.dictionaries(text, ids, max_size=3),
    dict[str, bool | int | str]: st.dictionaries(text, text, max_size=3),
    Geometry: st.just(GEOMETRY),
}


def _any(kind: type) -> st.SearchStrategy[Any]:
    """Any value of a struct; step, seq and rows are drawn small as often as not."""
    return st.builds(kind, **{name: _BY_HINT[hint] for name, hint in get_type_hints(kind).items()})


_BY_HINT[ev.Namespace] = _any(ev.Namespace)
any_event = st.one_of([_any(kind) for kind in ev.Event.__args__])
_BY_HINT[tuple[ev.Event, ...]] = st.lists(any_event, max_size=6).map(tuple)
_BY_HINT[rec.Parameters] = _any(rec.Parameters)
_BY_HINT[rec.ShadowFinding] = _any(rec.ShadowFinding)
_BY_HINT[tuple[rec.ShadowFinding, ...]] = st.lists(_any(rec.ShadowFinding), max_size=2).map(tuple)
_BY_HINT[rec.ShadowReport] = _any(rec.ShadowReport)
_BY_HINT[rec.Observation] = _any(rec.Observation)
_BY_HINT[rec.RequestArrived] = _any(rec.RequestArrived)
_BY_HINT[tuple[rec.RequestSnapshot, ...]] = st.lists(_any(rec.RequestSnapshot), max_size=2).map(
    tuple
)
_BY_HINT[tuple[rec.AdapterUsed, ...]] = st.lists(_any(rec.AdapterUsed), max_size=2).map(tuple)
_BY_HINT[tuple[rec.BlocksOffered, ...]] = st.lists(_any(rec.BlocksOffered), max_size=2).map(tuple)
_BY_HINT[rec.DraftModel | None] = st.just(DRAFT)
_BY_HINT[tuple[tuple[int, tuple[int, ...]], ...]] = st.lists(
    st.tuples(ids, some_ids), max_size=2
).map(tuple)
_BY_HINT[rec.DraftSnapshot | None] = st.none() | _any(rec.DraftSnapshot)
_BY_HINT[rec.StepPlanned | rec.StepDone | rec.StepFailed] = st.one_of(
    [_any(kind) for kind in (rec.StepPlanned, rec.StepDone, rec.StepFailed)]
)
any_record = st.one_of([_any(kind) for kind in rec.Record.__args__]).map(
    lambda it: structs.replace(it, format=1) if isinstance(it, rec.Header) else it
)


def encode(*records: rec.Record) -> bytes:
    return TapeEncoder().encode(records)


def decode(data: bytes) -> list[rec.Record]:
    return list(TapeDecoder().feed(data))


@settings(max_examples=400, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(any_record, max_size=8))
def test_any_records_come_back_equal_however_little_sense_they_make(
    records: list[rec.Record],
) -> None:
    assert decode(encode(HEADER, *records)) == [HEADER, *records]


@settings(max_examples=60, deadline=None)
@given(st.lists(any_record, max_size=4), st.integers(1, 50))
def test_the_size_of_the_pieces_fed_changes_nothing(
    records: list[rec.Record], piece_bytes: int
) -> None:
    data, decoder, found = encode(HEADER, *records), TapeDecoder(), []
    for at in range(0, len(data), piece_bytes):
        found += list(decoder.feed(data[at : at + piece_bytes]))
    assert found == [HEADER, *records]
    assert decoder.position == len(data)
    assert not decoder.torn


def a_run() -> tuple[list[rec.Record], State]:
    """A prompt in two pieces, decode steps in columns, a publication, a fork and a preemption."""
    state = new_state(GEOMETRY)
    prompts = {0: (11, 12, 13, 14, 15), 1: (70_000, 2, 3)}
    streams = {seq: list(tokens) for seq, tokens in prompts.items()}
    records: list[rec.Record] = [HEADER]
    for seq, tokens in prompts.items():
        records.append(rec.RequestArrived(seq, f"r{seq}", tokens, rec.Parameters(9)))

    def step(number: int, events: tuple[ev.Event, ...], pieces: list[tuple[int, int, int]]) -> None:
        nonlocal state
        state = apply_all(state, events)
        records.append(rec.StepPlanned(number, events, state.digest))
        closing = commands.step_written(state, number)
        state = apply_all(state, closing)
        for seq, _, _ in pieces:
            published = commands.publish(state, seq)
            state, closing = apply_all(state, published), closing + published
        tokens = tuple(100 * number + seq for seq, _, _ in pieces)
        for (seq, _, _), token in zip(pieces, tokens, strict=True):
            streams[seq].append(token)
        total = sum(rows for _, _, rows in pieces)
        ends = tuple(start + rows for _, start, rows in pieces)
        windowed = tuple(min(end, 6) + min(1, max(0, end - 6)) for end in ends)
        seen = rec.Observation(
            (1, 1), (1, 1), (total, total), (1, 1), 0,
            tuple(start for _, start, _ in pieces),
            tuple(rows for _, _, rows in pieces),
            tuple(zip(ends, windowed, strict=True)),
            tuple(tuple(hash(state.sequences[seq].tables[g]) & 2**64 - 1 for g in (0, 1))
                  for seq, _, _ in pieces),
        )  # fmt: skip
        floats = tuple(struct.unpack("f", struct.pack("f", 0.1 * t))[0] for t in tokens)
        sampled = tuple(range(len(pieces)))
        offsets = tuple(state.sequences[seq].offset for seq, _, _ in pieces)
        records.append(
            rec.StepDone(number, seen, rec.ShadowReport(total), sampled, tokens, floats, floats,
                         closing, offsets, state.digest)
        )  # fmt: skip
        records.append(rec.StepTimed(number, {"plan": 3, "forward": 200 + number}))

    for seq in (0, 1):
        events = commands.open_sequence(state, seq)
        opened = apply_all(state, events)
        step(seq + 1, events + commands.append(opened, seq, seq + 1, prompts[seq]),
             [(seq, 0, len(prompts[seq]))])  # fmt: skip
    for number in range(3, 12):
        seqs = [0, 1]
        tokens = tuple(streams[seq][state.sequences[seq].offset] for seq in seqs)
        events = commands.append_each(state, number, seqs, tokens, ev.DECODE)
        order = [
            seq
            for event in events
            if isinstance(event, ev.AppendedEach | ev.Appended)
            for seq in (event.seqs if isinstance(event, ev.AppendedEach) else (event.seq,))
        ]
        step(number, events, [(seq, state.sequences[seq].offset, 1) for seq in order])
    records.append(rec.TapeEnded(11))
    return records, state


def test_a_token_that_the_tape_holds_already_is_not_written_again() -> None:
    records, _ = a_run()
    data = encode(*records)
    assert decode(data) == records
    last = next(r for r in reversed(records) if isinstance(r, rec.StepPlanned))
    (each,) = [event for event in last.events if isinstance(event, ev.AppendedEach)][:1]
    assert each.tokens is not None
    for token in each.tokens:
        assert data.count(struct.pack("<H", token)) <= 1
    assert data.count(struct.pack("<I", 70_000)) == 1


RUN = a_run()[0]
_COLUMNS = ("starts", "rows", "visible", "tables", "sampled", "tokens", "logits", "offsets")


def _other(value: Any, data: st.DataObject) -> Any:
    """A number, or a number somewhere inside of nested tuples, made another one."""
    if isinstance(value, tuple):
        if not value:
            return (0,)
        place = data.draw(st.integers(0, len(value) - 1))
        return (*value[:place], _other(value[place], data), *value[place + 1 :])
    return value + data.draw(st.sampled_from([1, 2**40]))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_run_that_differs_from_what_is_expected_anywhere_comes_back_equal(
    data: st.DataObject,
) -> None:
    places = [at for at, record in enumerate(RUN) if isinstance(record, rec.StepDone)]
    records = list(RUN)
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True)):
        done: Any = records[place]
        name = data.draw(st.sampled_from(_COLUMNS))
        if hasattr(done, name):
            done = structs.replace(done, **{name: _other(getattr(done, name), data)})
        else:
            seen = done.observation
            seen = structs.replace(seen, **{name: _other(getattr(seen, name), data)})
            done = structs.replace(done, observation=seen)
        records[place] = done
    assert decode(encode(*records)) == records


def test_a_record_of_a_draft_models_pool_is_refused_where_the_header_names_none() -> None:
    drafted = rec.Drafted(rec.StepPlanned(1, (ev.Opened(0),), 5))
    with pytest.raises(CodecError, match="the header names no draft model"):
        encode(PLAIN, drafted)
    assert decode(encode(HEADER, drafted)) == [HEADER, drafted]


def test_the_prompt_that_a_draft_model_reads_is_not_written_again() -> None:
    prompt = tuple(range(30_000, 30_050))
    records = [
        HEADER,
        rec.RequestArrived(0, "", prompt, rec.Parameters(4)),
        rec.Drafted(
            rec.StepPlanned(1, (ev.Opened(0), ev.Appended(0, 1, 50, prompt, ((1,),), "prompt")), 0)
        ),
        rec.StepPlanned(1, (ev.Opened(0), ev.Appended(0, 1, 50, prompt, ((1,),), "prompt")), 0),
    ]
    data = encode(*records)
    assert decode(data) == records
    assert data.count(struct.pack("<H", 30_001)) == 1


def test_the_token_of_a_lookahead_row_is_not_written_again_when_it_is_committed() -> None:
    done = next(record for record in RUN if isinstance(record, rec.StepDone))
    blank = structs.replace(done.observation, starts=(), rows=(), visible=(), tables=())
    sizes = []
    for token in (31_337, 31_338):
        records = [
            HEADER,
            rec.RequestArrived(0, "", (5, 6), rec.Parameters(4)),
            rec.StepPlanned(1, (ev.Opened(0), ev.Appended(0, 1, 2, (5, 6), ((1,),), "prompt")), 0),
            rec.StepPlanned(2, (ev.Appended(0, 2, 1, None, ((),), "lookahead"),), 0),
            structs.replace(
                done,
                step=1,
                observation=blank,
                sampled=(0,),
                tokens=(31_337,),
                logits=(1.0,),
                margins=(1.0,),
                events=(ev.Committed(0, (token,)),),
            ),
        ]
        assert decode(encode(*records)) == records
        sizes.append(len(encode(*records)))
    assert sizes[0] < sizes[1]


def test_a_decode_row_takes_at_most_32_bytes() -> None:
    records, _ = many_rows(rows=64, steps=20)
    encoder = TapeEncoder()
    encoder.encode(records[: -20 * 3])
    assert len(encoder.encode(records[-20 * 3 :])) / (64 * 20) <= 32


def many_rows(rows: int, steps: int) -> tuple[list[rec.Record], int]:
    """`rows` sequences of unlike lengths, prefilled in one step, then decoded together."""
    geometry = Geometry(16, (Group("full", 1024),))
    state, records = new_state(geometry), [structs.replace(HEADER, geometry=geometry)]
    tokens = {seq: tuple(range(seq * 7, seq * 8 + 3)) for seq in range(rows)}
    opening: list[ev.Event] = []
    for seq, prompt in tokens.items():
        records.append(rec.RequestArrived(seq, "", prompt, rec.Parameters(99)))
        opening += commands.open_sequence(apply_all(state, tuple(opening)), seq)
        opening += commands.append(apply_all(state, tuple(opening)), seq, 1, prompt)
    events = tuple(opening)
    for number in range(1, steps + 2):
        if number > 1:
            row = tuple(number * 400 - 400 + seq for seq in tokens)
            events = commands.append_each(state, number, list(tokens), row, ev.DECODE)
        before, state = state, apply_all(state, events)
        records.append(rec.StepPlanned(number, events, state.digest))
        order: list[int] = []
        for event in events:
            if isinstance(event, ev.AppendedEach):
                order += event.seqs
            elif isinstance(event, ev.Appended):
                order.append(event.seq)
        starts = tuple(before.sequences[s].offset if number > 1 else 0 for s in order)
        ends = tuple(state.sequences[seq].offset for seq in order)
        counts = tuple(end - start for start, end in zip(starts, ends, strict=True))
        closing = commands.step_written(state, number)
        state = apply_all(state, closing)
        seen = rec.Observation(
            (9, 9), (9, 9), (sum(counts),) * 2, (9, 9), 0, starts, counts,
            tuple((end,) for end in ends),
            tuple((crc32(repr(state.sequences[seq].tables).encode()) << 20,) for seq in order),
        )  # fmt: skip
        sampled = tuple(number * 400 + seq for seq in order)
        floats = tuple(float(struct.unpack("f", struct.pack("f", math.pi * t))[0]) for t in sampled)
        records.append(
            rec.StepDone(number, seen, rec.ShadowReport(2 * rows), tuple(range(rows)), sampled,
                         floats, floats, closing, ends, state.digest)
        )  # fmt: skip
        records.append(rec.StepTimed(number, {"forward": 1000 + number}))
    return records, state.digest


def test_a_tape_cut_anywhere_reads_to_its_last_whole_frame() -> None:
    records, _ = a_run()
    ends = [len(encode(*records[:count])) for count in range(len(records) + 1)]
    data = encode(*records)
    for cut in range(len(MAGIC), len(data)):
        decoder = TapeDecoder()
        whole = sum(end <= cut for end in ends) - 1
        assert list(decoder.feed(data[:cut])) == records[:whole]
        assert decoder.position == ends[whole]
        assert decoder.torn == (cut != ends[whole])


def test_one_flipped_byte_anywhere_is_corruption() -> None:
    records, _ = a_run()
    data = encode(*records)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 0x5A
        with pytest.raises(CodecError):
            decode(bytes(flipped))


def test_corruption_names_the_byte_where_its_frame_starts() -> None:
    first = encode(HEADER)
    data = bytearray(encode(HEADER, rec.TapeEnded(1)))
    data[-5] ^= 1
    with pytest.raises(CodecError, match=f"at byte {len(first)}:"):
        decode(bytes(data))


def test_frames_in_another_order_are_corruption() -> None:
    start = len(encode(HEADER))
    data = encode(HEADER, rec.TapeEnded(1), rec.TapeEnded(2))
    size = (len(data) - start) // 2
    swapped = data[:start] + data[start + size :] + data[start : start + size]
    with pytest.raises(CodecError, match="header does not fit"):
        decode(swapped)


def test_a_frame_that_claims_four_gigabytes_is_corruption_and_waits_for_nothing() -> None:
    start = encode(HEADER)
    length = struct.pack("<I", 2**32 - 1)
    check = struct.pack("<I", crc32(length + start[-4:]))
    with pytest.raises(CodecError, match=f"claims 4294967295 bytes, more than {MAX_FRAME_BYTES}"):
        decode(start + length + check)


def test_a_picture_and_another_format_are_told_apart() -> None:
    with pytest.raises(CodecError, match="not a tape"):
        decode(b"\xff\xd8\xff\xe0\x00\x10JFIF")
    with pytest.raises(CodecError, match="tape of format 2, and this version reads format 1"):
        decode(b"MLXTAPE2" + b"x" * 40)
    with pytest.raises(CodecError, match=r"format 7, .* \(mlxtape 9\)"):
        decode(encode(structs.replace(HEADER, format=7, software="mlxtape 9")))


def test_a_record_that_does_not_fit_is_refused_with_its_name() -> None:
    with pytest.raises(CodecError, match="TapeEnded record does not fit"):
        encode(HEADER, rec.TapeEnded(2**64))


def test_a_state_comes_back_equal_and_its_bytes_are_canonical() -> None:
    _, state = a_run()
    data = encode_state(state)
    again = decode_state(data)
    assert again == state
    assert encode_state(again) == data


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_state_with_one_changed_byte_is_refused(data: st.DataObject) -> None:
    whole = encode_state(a_run()[1])
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CodecError, match="checksum"):
        decode_state(bytes(changed))


def test_a_state_with_another_digest_than_its_own_is_refused() -> None:
    state = structs.replace(a_run()[1], digest=7)
    with pytest.raises(CodecError, match="digest"):
        decode_state(encode_state(state))


def test_after_a_checkpoint_the_streams_of_live_requests_are_known() -> None:
    records, state = a_run()
    arrived = records[1]
    assert isinstance(arrived, rec.RequestArrived)
    seq = state.sequences[0]
    output = (*seq.tokens[len(arrived.tokens) :], 31_337)
    snapshot = rec.RequestSnapshot(arrived, output, True)
    checkpoint = rec.Checkpoint(12, encode_state(state), (snapshot,), state.digest)
    events = commands.append(state, 0, 12, (31_337,), purpose=ev.DECODE)
    planned = rec.StepPlanned(12, events, apply_all(state, events).digest)
    encoder = TapeEncoder()
    head = encoder.encode([HEADER, checkpoint])
    tail = encoder.encode([planned])
    assert struct.pack(">H", 31_337) not in tail
    assert struct.pack("<H", 31_337) not in tail
    assert decode(head + tail) == [HEADER, checkpoint, planned]


def test_the_prompt_of_a_request_in_the_queue_is_not_copied_by_its_arrival_nor_a_checkpoint() -> (
    None
):
    arrived = rec.RequestArrived(9, "", (5, 6, 7), rec.Parameters(1))
    snapshot = rec.RequestSnapshot(arrived, (), False)
    state = new_state(GEOMETRY)
    checkpoint = rec.Checkpoint(12, encode_state(state), (snapshot,), state.digest)
    for follows in (arrived, checkpoint):
        encoder = TapeEncoder()
        encoder.encode([PLAIN, follows])
        assert encoder._tracker._waiting[9] is arrived.tokens
