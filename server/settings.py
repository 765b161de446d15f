"""Settings: what a server is told, from a TOML file, the environment and flags, in this order.

Owns names, defaults and the words of a refusal. A later source wins over an earlier one; unknown
names are refused in all of them. Every setting has one name: `max_running` in TOML,
MLXTAPE_MAX_RUNNING in the environment, --max-running as a flag.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from .adapters import named_path
from .policy import ADOPTS_MAX, OPENS_MAX, Policy, check
from .values import MASK, Size, Texts, structure

PREFIX = "MLXTAPE_"
NOT_SETTINGS = (
    "MLXTAPE_BLAS",
    "MLXTAPE_CACHE",
    "MLXTAPE_CONFIG",
    "MLXTAPE_CPU_KERNELS",
    "MLXTAPE_CPU_THREADS",
)
"""Variables that other parts read: the folder of fetched models, the TOML file's path."""

GUARD_MODES = ("warn", "abort-request", "stop")
SANITIZE_MODES = ("edges", "full", "off")
KV_BITS = (4, 8)
GUESSED = 4
"""Tokens that a draft model guesses where draft_tokens does not say."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
EITHER = {"num_blocks": "kv_memory", "kv_memory": "num_blocks"}

DEFAULT_BODY = Size(8 * 2**20)
DEFAULT_STORE = Size(8 * 2**30)
DEFAULT_HEADERS = Size(32 * 2**10)
NO_TEXTS = Texts(())

Raw = dict[str, Any]


class SettingsError(Exception):
    """A setting that makes no sense; one sentence that names it and its source."""


# attrs.field with a help text. Ruff knows attrs.field only, hence two exceptions to RUF009 below.
def _setting(default: Any, text: str, *, secret: bool = False) -> Any:
    return attrs.field(default=default, repr=not secret, metadata={"help": text, "secret": secret})


@attrs.frozen(kw_only=True)
class Settings:
    """All settings of `mlxtape serve`; each one's help says what it is, with its unit."""

    model: str = _setting("smollm2-135m", "path of a GGUF file or a model folder, or smollm2-135m")
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8080, "port to listen on; 0 takes a free one")
    capture: str | None = _setting(None, "tape: a file, or a folder of segments; none without it")
    capture_redact: bool = _setting(
        False, "leave what users said out of the tape: it folds and plans, and runs no model again"
    )
    adapter: Texts = _setting(  # noqa: RUF009
        NO_TEXTS, "NAME=FOLDER: a LoRA adapter as mlx_lm.lora wrote it, asked for as model NAME"
    )
    adapter_loading: bool = _setting(
        False, "let clients that send an API key load and unload adapters while the server runs"
    )
    block_size: int = _setting(16, "tokens a block")
    num_blocks: int | None = _setting(
        None, "blocks of the pool (default: 16384 tokens, in a quarter of the memory at most)"
    )
    kv_memory: Size | None = _setting(  # noqa: RUF009
        None, "size of the pool instead of num_blocks, as in 2GiB"
    )
    num_slots: int | None = _setting(
        None,
        "states of recurrent layers to hold, in slots: up to two for each request that runs, the "
        "others for prefixes (default: 4 for each of max_running, an eighth of the memory at most)",
    )
    kv_bits: int | None = _setting(
        None, "8 or 4: keep K and V in as many bits a number, and more tokens in the memory"
    )
    max_batch_tokens: int = _setting(512, "rows of one step at most, padding included")
    max_running: int = _setting(32, "requests that run at once at most")
    prefill_chunk: int = _setting(256, "prompt rows of one request in a step at most")
    prefill_tile: int = _setting(1, "pad prompt pieces to a multiple of it; 1 pads nothing")
    prefill_cohort: bool = _setting(False, "pad all prompt pieces of a step to the longest")
    prefix_cache: bool = _setting(True, "share rows of equal prompt beginnings")
    prefix_store: str | None = _setting(
        None, "folder that keeps computed rows of prompts, also for servers to come; none without"
    )
    prefix_store_bytes: Size = _setting(  # noqa: RUF009
        DEFAULT_STORE, "what the files of prefix_store may take; the oldest used go first"
    )
    prefix_aware: bool = _setting(
        True, "let a request wait while a running one computes more of its prompt"
    )
    lookahead: bool = _setting(True, "issue a step before the last one's tokens are read")
    draft_tokens: int = _setting(
        0, "tokens guessed ahead of an answer at most, by looking its end up in its own text"
    )
    draft_model: str | None = _setting(
        None,
        "path of a small model of the same vocabulary, which guesses instead; 4 tokens at most, "
        "or draft_tokens",
    )
    lookup_ngram: int = _setting(3, "tokens at the end of a text that are looked up in it")
    scheduling: str = _setting("fcfs", "fcfs, or priority: the lowest `priority` first")
    sanitize: str = _setting("edges", "rows whose tags are compared each step: edges, full or off")
    on_divergence: str = _setting(
        "warn",
        "where a step's cache is found wrong: warn, abort-request (and all that share its rows) "
        "or stop",
    )
    max_waiting: int = _setting(1024, "requests that wait at most; one more is refused with 429")
    max_body_bytes: Size = _setting(DEFAULT_BODY, "largest request body")  # noqa: RUF009
    max_header_bytes: Size = _setting(DEFAULT_HEADERS, "path and headers of a request")  # noqa: RUF009
    body_timeout_s: float = _setting(60.0, "seconds that a request's body may take to arrive")
    request_timeout_s: float = _setting(
        3600.0, "seconds that a POST may take in all, then it is cancelled (504); 0: no limit"
    )
    keep_alive_s: float = _setting(
        75.0, "seconds that a connection may be idle, or take to send a request's headers"
    )
    grace_s: float = _setting(5.0, "seconds that running requests get when the server stops")
    api_key: Texts = _setting(  # noqa: RUF009
        NO_TEXTS,
        "keys that clients must send one of; better in MLXTAPE_API_KEY or api_key_file, "
        "for other users of a machine can read flags",
        secret=True,
    )
    api_key_file: str | None = _setting(
        None, "file of more keys, one a line, # comments; read again when it changes"
    )
    public_metrics: bool = _setting(False, "/metrics needs no key")
    cors_origins: Texts = _setting(  # noqa: RUF009
        NO_TEXTS, "origins whose pages may call this server from a browser, or *"
    )
    tls_cert: str | None = _setting(None, "PEM file: certificate and chain; serves https")
    tls_key: str | None = _setting(None, "PEM file: the certificate's key, without a passphrase")
    log_level: str = _setting("info", "debug, info, warning or error")
    log_format: str = _setting("text", "text, or json: one object a line")

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
            draft_tokens=self.draft_tokens or (0 if self.draft_model is None else GUESSED),
            lookup_ngram=self.lookup_ngram,
            scheduling=self.scheduling,
            store_evicted=self.prefix_store is not None,
            opens_max=OPENS_MAX,
            adopts_max=ADOPTS_MAX,
        )
        if context_tokens is None:
            return policy
        return Policy(**{**_fields(policy), "context_tokens": context_tokens})


DEFAULT = "default"


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], config: str | None = None
) -> Settings:
    """Settings from all sources. `flags` and the file map names to values, as text or typed.

    Raises SettingsError.
    """
    return load_with_sources(flags, environment, config)[0]


def load_with_sources(
    flags: Mapping[str, Any], environment: Mapping[str, str], config: str | None = None
) -> tuple[Settings, dict[str, str]]:
    """Settings, and where each one that is not its default comes from. Raises SettingsError."""
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
            sources.pop(EITHER.get(name, ""), None)
            merged[name] = value
            sources[name] = source
    values = {name: _structured(name, value, sources[name]) for name, value in merged.items()}
    return _checked(Settings(**values)), sources


def _check_names(layer: Raw, source: str) -> None:
    known = [field.name for field in attrs.fields(Settings)]
    for name in layer:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"do you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise SettingsError(f"there is no setting {name!r} ({source}); {hint}")
    if all(name in layer for name in EITHER):
        raise SettingsError(f"num_blocks and kv_memory are both given ({source}); give one")


def _structured(name: str, value: Any, source: str) -> Any:
    """A value of the setting's type. Raises SettingsError, which never shows a secret."""
    field = _typed_fields()[name]
    try:
        found = structure(value, field.type)
    except (ValueError, TypeError) as error:
        shown = "" if field.metadata["secret"] else f", not {value!r}"
        raise SettingsError(f"{name} {error}{shown} ({source})") from None
    if field.metadata["secret"] and MASK in found:
        raise SettingsError(
            f"{name} is masked as {MASK} ({source}): give it in the environment, or put the key in"
        )
    return found


@cache
def _typed_fields() -> dict[str, attrs.Attribute[Any]]:
    attrs.resolve_types(Settings)
    return {field.name: field for field in attrs.fields(Settings)}


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


def _checked(settings: Settings) -> Settings:
    """The settings, where each is in its range. Raises SettingsError."""
    _require(0 <= settings.port <= 65535, "port", settings.port, "between 0 and 65535")
    sizes = (
        *("block_size", "num_blocks", "num_slots", "kv_memory", "max_body_bytes", "max_waiting"),
        "prefix_store_bytes",
    )
    for name in sizes:
        value = getattr(settings, name)
        _require(value is None or value >= 1, name, value, "at least 1")
    for name, low, high in _SECONDS:
        value = getattr(settings, name)
        _require(low <= value <= high, name, value, f"between {low} and {high}")
    _require(
        1024 <= settings.max_header_bytes <= 2**24,
        "max_header_bytes",
        settings.max_header_bytes,
        "between 1KiB and 16MiB",
    )
    for name, allowed in _CHOICES:
        value = getattr(settings, name)
        words = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        _require(value in allowed, name, value, words)
    if settings.kv_bits is not None:
        _require(settings.kv_bits in KV_BITS, "kv_bits", settings.kv_bits, "8 or 4")
    _check_access(settings)
    if settings.prefix_store is not None and not settings.prefix_cache:
        raise SettingsError("prefix_store keeps what prefix_cache finds: leave prefix_cache on")
    _check_adapters(settings)
    try:
        check(settings.policy())
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return settings


_SECONDS = (
    ("grace_s", 0, 3600),
    ("body_timeout_s", 1, 86400),
    ("request_timeout_s", 0, 86400),
    ("keep_alive_s", 1, 86400),
)
_CHOICES = (
    ("sanitize", SANITIZE_MODES),
    ("on_divergence", GUARD_MODES),
    ("log_level", LOG_LEVELS),
    ("log_format", LOG_FORMATS),
)


def _check_access(settings: Settings) -> None:
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise SettingsError("tls_cert and tls_key belong together: give both, or none")
    if not all(is_key(key) for key in settings.api_key):
        raise SettingsError("api_key must be printable ASCII without spaces")
    for origin in settings.cors_origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s*]+", origin):
            raise SettingsError(
                f"cors_origins must be * or origins such as https://chat.example, not {origin!r}"
            )


def _check_adapters(settings: Settings) -> None:
    try:
        names = [named_path(text, settings.model)[0] for text in settings.adapter]
    except ValueError as error:
        raise SettingsError(f"adapter {error}") from None
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"adapter {twice[0]} is given twice: give each its own name")
    if settings.adapter_loading and not (settings.api_key or settings.api_key_file):
        raise SettingsError(
            "adapter_loading lets clients name folders of this machine: give an api_key too"
        )


def is_key(text: str) -> bool:
    """Whether a header can carry it: printable ASCII without spaces."""
    return re.fullmatch(r"[!-~]+", text) is not None


def _require(holds: bool, name: str, value: Any, what: str) -> None:
    if not holds:
        raise SettingsError(f"{name} must be {what}, not {value}")


def _fields(policy: Policy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in policy.__struct_fields__}
