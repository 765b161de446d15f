"""Tapes of bytes that nobody wrote: every command ends in a report or in one sentence.

Bytes of a sound tape are flipped, cut out, doubled and put in; or values inside of its records are
changed, with all checksums made right again, so that they reach what is behind them.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay.cli import main
from replay.run import CLEAN, DIVERGED, TORN, UNUSABLE
from statemachine.codec import MAGIC

from .tapes import golden

SOUND = [
    golden.PATH.with_name(name).read_bytes()[:6000]
    for name in ("golden.tape", "flights.tape", "diverged.tape")
]
COMMANDS: list[list[str]] = [
    ["TAPE"],
    ["TAPE", "--depth", "plan"],
    ["TAPE", "--invariants", "event", "--json"],
    ["TAPE", "--from", "5", "--until", "9"],
    ["show", "TAPE", "--at", "5"],
    ["show", "TAPE", "--at", "-1"],
    ["show", "TAPE", "--seq", "2"],
    ["show", "TAPE", "--block", "3"],
]
CASES = 250
"""Each of the two tests; every case runs one command."""


def frames(tape: bytes) -> list[bytes]:
    """The payloads of a tape's whole frames."""
    at, found = len(MAGIC), []
    while at + 8 <= len(tape):
        (length,) = struct.unpack_from("<I", tape, at)
        if at + 12 + length > len(tape):
            break
        found.append(tape[at + 8 : at + 8 + length])
        at += 12 + length
    return found


def sealed(payloads: list[bytes]) -> bytes:
    """A tape of these payloads, all of its checksums right."""
    crc, parts = crc32(MAGIC), [MAGIC]
    for payload in payloads:
        length = struct.pack("<I", len(payload))
        check = struct.pack("<I", crc32(struct.pack("<I", crc), crc32(length)))
        crc = crc32(payload)
        parts += [length, check, payload, struct.pack("<I", crc)]
    return b"".join(parts)


def ends_well(
    path: Path, data: bytes, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 comes with one sentence, and any other with a report; nothing is raised."""
    path.write_bytes(data)
    code = main([str(path) if it == "TAPE" else it for it in command])
    said = capsys.readouterr()
    assert code in (CLEAN, DIVERGED, UNUSABLE, TORN)
    assert "Traceback" not in said.err
    if code == UNUSABLE:
        assert said.out == ""
        assert said.err.startswith("replay: ")
        assert said.err.count("\n") == 1
        assert len(said.err) < 1000
    else:
        assert said.out
        assert said.err == ""


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "double", "put"]),
        st.integers(0, 5999),
        st.integers(1, 200),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=3,
)


def edited(tape: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    for kind, at, size, put in edits:
        at %= max(1, len(tape))
        if kind == "flip":
            tape = tape[:at] + bytes(it ^ put[0] or 1 for it in tape[at : at + 1]) + tape[at + 1 :]
        elif kind == "cut":
            tape = tape[:at] + tape[at + size :]
        elif kind == "double":
            tape = tape[: at + size] + tape[at:]
        else:
            tape = tape[:at] + put + tape[at:]
    return tape


SLOW = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@SLOW
@given(st.sampled_from(SOUND), EDITS, st.sampled_from(COMMANDS))
def test_bytes_that_were_changed_end_in_a_report_or_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tape: bytes, edits: Any, command: list[str]
) -> None:
    ends_well(tmp_path / "tape.log", edited(tape, edits), command, capsys)


NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 7, 255, 2**31, 2**32, 2**63, 2**64 - 1])
VALUES = st.one_of(
    NUMBERS, st.none(), st.booleans(), st.text(max_size=4), st.just([]), st.binary(max_size=4),
    st.lists(NUMBERS, max_size=3), st.floats(),
)  # fmt: skip


def changed(value: Any, path: list[int], new: Any) -> Any:
    """A value with another one deep inside of it."""
    if isinstance(value, dict) and value and path:
        keys = sorted(value)
        key = keys[path[0] % len(keys)]
        return {**value, key: changed(value[key], path[1:], new)}
    if isinstance(value, list) and value and path:
        at = path[0] % len(value)
        return [*value[:at], changed(value[at], path[1:], new), *value[at + 1 :]]
    return new


@SLOW
@given(
    st.sampled_from(SOUND),
    st.lists(
        st.tuples(st.integers(0, 200), st.lists(st.integers(0, 40), max_size=5), VALUES),
        min_size=1,
        max_size=2,
    ),
    st.sampled_from(COMMANDS),
)
def test_records_that_were_changed_end_in_a_report_or_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tape: bytes, edits: Any, command: list[str]
) -> None:
    payloads = frames(tape)
    for number, path, new in edits:
        number %= len(payloads)
        record = msgspec.msgpack.decode(payloads[number])
        payloads[number] = msgspec.msgpack.encode(changed(record, [*path], new))
    ends_well(tmp_path / "tape.log", sealed(payloads), command, capsys)


def test_the_fuzzed_tapes_are_sound_before_they_are_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tape in SOUND:
        path = tmp_path / "tape.log"
        path.write_bytes(sealed(frames(tape)))
        assert main([str(path)]) in (TORN, DIVERGED)
        assert capsys.readouterr().err == ""
