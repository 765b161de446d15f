"""Scripts: a cache driven by hand, in JSON lines, with no model. docs/scripts.md has the language.

The first line is the geometry. `do` lines carry out commands, `expect` lines compare, `event` lines
apply raw events as a tape holds them. A line with `error` must be refused, and change nothing.
This module reads no files: it is given lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from . import commands, invariants
from . import events as ev
from .errors import IllegalCommand, InvariantBroken, PoolExhausted, StateMachineError
from .expectation import pool_values, sequence_values
from .geometry import Geometry
from .prefix import Hit
from .state import State, new_state
from .transitions import apply, apply_all

Line = dict[str, Any]


class ScriptError(Exception):
    """A line that failed: an expectation, a refusal that did not come, or no line at all."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        super().__init__(f"line {line}: {message}")


class _Unusable(Exception):
    """A line that means nothing; never taken for a refusal that was asked for."""


class Script:
    """A state and the names that a script uses. Sequence names become ids in order of opening."""

    def __init__(self, geometry: Geometry) -> None:
        self.state = new_state(geometry)
        self._names: dict[str, int] = {}
        self._hits: dict[str, Hit] = {}

    def run(self, line: Line) -> None:
        """Carry out one line, `repeat` times. Raises AssertionError or StateMachineError."""
        if not isinstance(line, dict):
            raise _Unusable(f"a command is a JSON object, not {line!r}")
        repeat = _field(line, "repeat", int) if "repeat" in line else 1
        if repeat < 1:
            raise _Unusable(f"repeat must be a number from 1 on, not {repeat!r}")
        for _ in range(repeat):
            self._run_once(line)

    def _run_once(self, line: Line) -> None:
        refused = line.get("error")
        if refused is None or refused is False:
            self._dispatch(line)
            return
        if refused is not True and (not isinstance(refused, str) or refused not in _KINDS):
            raise _Unusable(f"error is true, or one of {', '.join(_KINDS)}")
        before = self._kept()
        try:
            self._dispatch(line)
        except StateMachineError as error:
            self.state, self._names, self._hits = before
            _require_kind(refused, error)
            return
        raise AssertionError(f"was carried out, and should have been refused ({refused})")

    def _kept(self) -> tuple[State, dict[str, int], dict[str, Hit]]:
        """What a refusal must leave as it was."""
        return self.state, dict(self._names), dict(self._hits)

    def _dispatch(self, line: Line) -> None:
        if "do" in line:
            self._do(line)
        elif "expect" in line:
            self._expect(_field(line, "expect", dict))
        elif "event" in line:
            self._raw_event(line["event"])
        else:
            raise _Unusable("a line says do, expect or event")

    def _do(self, line: Line) -> None:
        action = _ACTIONS.get(_field(line, "do", str))
        if action is None:
            raise _Unusable(f"there is no command {line['do']!r}; there are {', '.join(_ACTIONS)}")
        action(self, line)

    def _apply(self, events: Iterable[ev.Event]) -> None:
        for event in events:
            self.state = apply(self.state, event)
            invariants.check_all(self.state)

    def _seq(self, line: Line, key: str = "seq") -> int:
        name = _field(line, key, str)
        if name not in self._names:
            raise IllegalCommand(f"sequence {name!r} was never opened")
        return self._names[name]

    def _namespace(self, line: Line) -> ev.Namespace:
        fields = {name: line[name] for name in ("adapter", "version", "salt") if name in line}
        try:
            return msgspec.convert(fields, ev.Namespace)
        except msgspec.ValidationError as error:
            raise _Unusable(f"adapter and salt are texts, version a number: {error}") from error

    def _new_name(self, line: Line, key: str) -> tuple[str, int]:
        name = _field(line, key, str)
        if name in self._names and self._names[name] in self.state.sequences:
            raise IllegalCommand(f"sequence {name!r} is open already")
        return name, self.state.last_seq + 1

    def _open(self, line: Line) -> None:
        name, seq = self._new_name(line, "seq")
        self._apply(commands.open_sequence(self.state, seq, self._namespace(line)))
        self._names[name] = seq

    def _fork(self, line: Line) -> None:
        parent, (name, child) = self._seq(line), self._new_name(line, "child")
        self._apply(commands.fork(self.state, parent, child))
        self._names[name] = child

    def _append(self, line: Line) -> None:
        tokens = tuple(_field(line, "tokens", list)) if line.get("tokens") is not None else None
        written = line.get("written", True)
        if not isinstance(written, bool):
            raise _Unusable(f"written is true or false, not {written!r}")
        step = self.state.issued_step + 1
        events = commands.append(
            self.state,
            self._seq(line),
            step,
            tokens,
            _field(line, "rows", int) if line.get("rows") is not None else None,
            _field(line, "purpose", str),
        )
        self._apply(events)
        if written:
            self._apply(commands.step_written(self.state, step))

    def _written(self, _line: Line) -> None:
        self._apply(commands.step_written(self.state, self.state.issued_step))

    def _lookup(self, line: Line) -> None:
        tokens = tuple(_field(line, "tokens", list))
        hit = commands.lookup(self.state, self._namespace(line), tokens)
        self._hits[_field(line, "as", str)] = hit

    def _adopt(self, line: Line) -> None:
        seq = self._seq(line)
        if "from" in line:
            hit = self._hit(_field(line, "from", str))
            tokens = tuple(_field(line, "tokens", list)) if "tokens" in line else hit.tokens
            self._apply(commands.adopt(self.state, seq, tokens, hit))
        else:
            self._apply(commands.adopt(self.state, seq, tuple(_field(line, "tokens", list))))

    def _hit(self, name: str) -> Hit:
        if name not in self._hits:
            raise _Unusable(f"nothing was looked up as {name!r}")
        return self._hits[name]

    def _all(self, line: Line) -> None:
        """All of the commands or none."""
        before = self._kept()
        try:
            for command in _field(line, "commands", list):
                self.run(command)
        except (StateMachineError, AssertionError):
            self.state, self._names, self._hits = before
            raise

    def _raw_event(self, raw: Line) -> None:
        try:
            event: ev.Event = msgspec.convert(raw, ev.Event)
        except msgspec.ValidationError as error:
            raise _Unusable(f"this is no event: {error}") from error
        self.state = apply_all(self.state, (event,))
        invariants.check_all(self.state)

    def _expect(self, expected: Line) -> None:
        if "lookup" in expected:
            found: dict[str, Any] = {"rows": self._hit(_field(expected, "lookup", str)).rows}
        elif "seq" in expected:
            seq = self._seq(expected)
            if seq not in self.state.sequences:
                raise AssertionError(f"sequence {expected['seq']!r} is closed")
            found = sequence_values(self.state, self.state.sequences[seq])
        else:
            found = pool_values(self.state)
        for name, value in expected.items():
            if name in ("seq", "lookup"):
                continue
            if name not in found:
                raise _Unusable(f"there is no {name!r} to expect; there are {', '.join(found)}")
            if found[name] != value:
                raise AssertionError(f"{name} is {found[name]}, not {value}")


def _field(line: Line, name: str, kind: type) -> Any:
    value = line.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _Unusable(f"{name!r} must be given, as {_JSON_NAMES[kind]}")
    return value


_JSON_NAMES = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}


def _rows(command: Callable[[State, int, int], commands.Events]) -> Callable[[Script, Line], None]:
    def act(script: Script, line: Line) -> None:
        rows = _field(line, "rows", int)
        script._apply(command(script.state, script._seq(line), rows))

    return act


def _whole(command: Callable[[State, int], commands.Events]) -> Callable[[Script, Line], None]:
    def act(script: Script, line: Line) -> None:
        script._apply(command(script.state, script._seq(line)))

    return act


def _commit(script: Script, line: Line) -> None:
    tokens = tuple(_field(line, "tokens", list))
    script._apply(commands.commit(script.state, script._seq(line), tokens))


def _front_trim(script: Script, line: Line) -> None:
    group, rows = _field(line, "group", int), _field(line, "rows", int)
    script._apply(commands.front_trim(script.state, script._seq(line), group, rows))


def _evict(script: Script, line: Line) -> None:
    blocks = _field(line, "blocks", int) if "blocks" in line else 1
    group = _field(line, "group", int) if "group" in line else None
    script._apply(commands.evict(script.state, blocks, group))


def _load(script: Script, line: Line) -> None:
    """Every whole block of the tokens was kept."""
    tokens, state = tuple(_field(line, "tokens", list)), script.state
    end = len(tokens) // state.geometry.block_size
    step = state.issued_step + 1
    script._apply(commands.load(state, script._seq(line), step, tokens, 0, end))


def _store(script: Script, line: Line) -> None:
    group = _field(line, "group", int) if "group" in line else 0
    script._apply(commands.store(script.state, group, _field(line, "block", int)))


def _flush(script: Script, _line: Line) -> None:
    script._apply(commands.flush(script.state))


def _pool_reset(script: Script, _line: Line) -> None:
    script._apply(commands.pool_reset(script.state))


_ACTIONS: dict[str, Callable[[Script, Line], None]] = {
    "open": Script._open,
    "append": Script._append,
    "written": Script._written,
    "commit": _commit,
    "trim": _rows(commands.trim),
    "rewind": _rows(commands.rewind),
    "front_trim": _front_trim,
    "reset": _whole(commands.reset),
    "close": _whole(commands.close),
    "preempt": _whole(commands.preempt),
    "publish": _whole(commands.publish),
    "fork": Script._fork,
    "lookup": Script._lookup,
    "adopt": Script._adopt,
    "evict": _evict,
    "load": _load,
    "store": _store,
    "flush": _flush,
    "pool_reset": _pool_reset,
    "all": Script._all,
}

_KINDS: dict[str, type[StateMachineError]] = {
    "IllegalCommand": IllegalCommand,
    "InvariantBroken": InvariantBroken,
    "PoolExhausted": PoolExhausted,
}


def _require_kind(wanted: object, error: StateMachineError) -> None:
    if isinstance(wanted, str) and not isinstance(error, _KINDS[wanted]):
        raise AssertionError(f"was refused as {type(error).__name__}, not {wanted}: {error}")


def check(lines: Iterable[str]) -> int:
    """Run a script; returns how many lines it had. Raises ScriptError with the line that failed."""
    script: Script | None = None
    count = 0
    for number, text in enumerate(lines, 1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        count += 1
        try:
            line = _parse(text)
            if script is None:
                script = _begin(line)
            else:
                script.run(line)
        except (StateMachineError, AssertionError, _Unusable) as error:
            raise ScriptError(number, _sentence(error)) from error
        except RecursionError as error:
            raise ScriptError(number, "commands are nested too deeply") from error
    if script is None:
        raise ScriptError(0, "the script is empty: its first line gives the geometry")
    return count


def _sentence(error: Exception) -> str:
    if isinstance(error, StateMachineError):
        return f"{type(error).__name__}: {error}"
    return str(error)


def _parse(text: str) -> Line:
    try:
        line = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise _Unusable(f"this is no JSON: {error}") from error
    if not isinstance(line, dict):
        raise _Unusable("a line is a JSON object")
    return line


def _begin(line: Line) -> Script:
    try:
        return Script(msgspec.convert(line.get("geometry"), Geometry))
    except (msgspec.ValidationError, ValueError) as error:
        raise _Unusable(f"the first line gives the geometry: {error}") from error
