"""Settings: what a server is told, from a TOML file, the environment and flags, in this order.

Owns names, defaults and the words of a refusal. A later source wins over an earlier one; unknown
names are refused in all of them. Every setting has one name: `max_running` in TOML,
MLXTAPE_MAX_RUNNING in the environment, --max-running as a flag.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NewType

import attrs
import cattrs

from .policy import Policy, check

PREFIX = "MLXTAPE_"
NOT_SETTINGS = ("MLXTAPE_CACHE", "MLXTAPE_CONFIG")
"""Variables that other parts read: the folder of fetched models, the TOML file's path."""

SANITIZE_MODES = ("edges", "full", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")
EITHER = {"num_blocks": "kv_memory", "kv_memory": "num_blocks"}

Size = NewType("Size", int)
"""Bytes; written as a number or with a unit, such as 2GiB."""

DEFAULT_BODY = Size(8 * 2**20)

Raw = dict[str, Any]


class SettingsError(Exception):
    """A setting that makes no sense; one sentence that names it and its source."""


# attrs.field with a help text. Ruff knows attrs.field only, hence two exceptions to RUF009 below.
def _setting(default: Any, text: str) -> Any:
    return attrs.field(default=default, metadata={"help": text})


@attrs.frozen(kw_only=True)
class Settings:
    """All settings of `mlxtape serve`; each one's help says what it is, with its unit."""

    model: str = _setting("smollm2-135m", "path of a GGUF file or a model folder, or smollm2-135m")
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8080, "port to listen on; 0 takes a free one")
    capture: str | None = _setting(None, "tape: a file, or a folder of segments; none without it")
    block_size: int = _setting(16, "tokens a block")
    num_blocks: int | None = _setting(
        None, "blocks of the pool (default: 16384 tokens, in a quarter of the memory at most)"
    )
    kv_memory: Size | None = _setting(  # noqa: RUF009
        None, "size of the pool instead of num_blocks, as in 2GiB"
    )
    max_batch_tokens: int = _setting(512, "rows of one step at most, padding included")
    max_running: int = _setting(32, "requests that run at once at most")
    prefill_chunk: int = _setting(256, "prompt rows of one request in a step at most")
    prefill_tile: int = _setting(1, "pad prompt pieces to a multiple of it; 1 pads nothing")
    prefill_cohort: bool = _setting(False, "pad all prompt pieces of a step to the longest")
    prefix_cache: bool = _setting(True, "share rows of equal prompt beginnings")
    prefix_aware: bool = _setting(
        True, "let a request wait while a running one computes more of its prompt"
    )
    lookahead: bool = _setting(True, "issue a step before the last one's tokens are read")
    draft_tokens: int = _setting(
        0, "tokens guessed ahead of an answer at most, by looking its end up in its own text"
    )
    lookup_ngram: int = _setting(3, "tokens at the end of a text that are looked up in it")
    scheduling: str = _setting("fcfs", "fcfs, or priority: the lowest `priority` first")
    sanitize: str = _setting("edges", "rows whose tags are compared each step: edges, full or off")
    max_body_bytes: Size = _setting(DEFAULT_BODY, "largest request body")  # noqa: RUF009
    grace_s: float = _setting(5.0, "seconds that running requests get when the server stops")
    log_level: str = _setting("info", "debug, info, warning or error")

    def policy(self, context_tokens: int | None = None) -> Policy:
        """The scheduler's part; `context_tokens` as the model has it."""
        policy = Policy(
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
            prefill_chunk=self.prefill_chunk,
            prefill_tile=self.prefill_tile,
            prefill_cohort=self.prefill_cohort,
            prefix_cache=self.prefix_cache,
            prefix_aware=self.prefix_aware,
            lookahead=self.lookahead,
            draft_tokens=self.draft_tokens,
            lookup_ngram=self.lookup_ngram,
            scheduling=self.scheduling,
        )
        if context_tokens is None:
            return policy
        return Policy(**{**_fields(policy), "context_tokens": context_tokens})


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], config: str | None = None
) -> Settings:
    """Settings from all sources. `flags` and the file map names to values, as text or typed.

    Raises SettingsError.
    """
    config = config or environment.get(PREFIX + "CONFIG")
    merged: Raw = {}
    sources: dict[str, str] = {}
    layers = [
        (f"in {config}", _read_toml(config) if config else {}),
        ("in the environment", _read_environment(environment)),
        ("among the flags", dict(flags)),
    ]
    for source, layer in layers:
        _check_names(layer, source)
        for name, value in layer.items():
            merged.pop(EITHER.get(name, ""), None)
            merged[name] = value
            sources[name] = source
    values = {name: _structure(name, value, sources[name]) for name, value in merged.items()}
    return _checked(Settings(**values))


def _check_names(layer: Raw, source: str) -> None:
    known = [field.name for field in attrs.fields(Settings)]
    for name in layer:
        if name not in known:
            raise SettingsError(
                f"there is no setting {name!r} ({source}); known are {', '.join(known)}"
            )
    if all(name in layer for name in EITHER):
        raise SettingsError(f"num_blocks and kv_memory are both given ({source}); give one")


def _read_toml(path: str) -> Raw:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None


def _read_environment(environment: Mapping[str, str]) -> Raw:
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in NOT_SETTINGS
    }


_converter = cattrs.Converter()
_TYPES: dict[str, Any] = {}


def _structure(name: str, value: Any, source: str) -> Any:
    """A value of the setting's type. Raises SettingsError."""
    if not _TYPES:
        attrs.resolve_types(Settings)
        _TYPES.update({field.name: field.type for field in attrs.fields(Settings)})
    try:
        return _converter.structure(value, _TYPES[name])
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{name} {error}, not {value!r} ({source})") from None


def _whole_number(value: Any, _: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value.strip()):
        return int(value)
    raise ValueError("must be a whole number")


def _number(value: Any, _: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError("must be a number")


_SWITCHES = {"true": True, "1": True, "yes": True, "on": True} | {
    "false": False, "0": False, "no": False, "off": False
}  # fmt: skip


def _switch(value: Any, _: Any) -> bool:
    chosen = _SWITCHES.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(chosen, bool):
        raise ValueError("must be true or false")
    return chosen


def _text(value: Any, _: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text that is not empty")
    return value


_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgt", start=1)
    for name, base in ((letter, 1024), (letter + "ib", 1024), (letter + "b", 1000))
}


def _size(value: Any, _: Any) -> Size:
    """Bytes: 2GiB and 2G are 2 * 1024**3, 2GB is 2 * 1000**3."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]*)\s*", str(value))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or isinstance(value, bool):
        raise ValueError("must be a size such as 512MiB or 2GiB")
    return Size(int(float(match[1]) * unit))


_converter.register_structure_hook(int, _whole_number)
_converter.register_structure_hook(float, _number)
_converter.register_structure_hook(bool, _switch)
_converter.register_structure_hook(str, _text)
_converter.register_structure_hook(Size, _size)


def _checked(settings: Settings) -> Settings:
    """The settings, where each is in its range. Raises SettingsError."""
    _require(0 <= settings.port <= 65535, "port", settings.port, "between 0 and 65535")
    for name in ("block_size", "num_blocks", "kv_memory", "max_body_bytes"):
        value = getattr(settings, name)
        _require(value is None or value >= 1, name, value, "at least 1")
    _require(0 <= settings.grace_s <= 3600, "grace_s", settings.grace_s, "between 0 and 3600")
    _require(
        settings.sanitize in SANITIZE_MODES, "sanitize", settings.sanitize, "edges, full or off"
    )
    _require(
        settings.log_level in LOG_LEVELS,
        "log_level",
        settings.log_level,
        "debug, info, warning or error",
    )
    try:
        check(settings.policy())
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return settings


def _require(holds: bool, name: str, value: Any, what: str) -> None:
    if not holds:
        raise SettingsError(f"{name} must be {what}, not {value}")


def _fields(policy: Policy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in policy.__struct_fields__}
