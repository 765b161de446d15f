"""Submission: what the HTTP side hands the engine, and what it hears back.

Thread boundary: `submit` and `cancel` may be called from any thread; a sink is called on the
engine's thread and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from kernel.batch import Logprob
from statemachine.events import Namespace
from statemachine.records import NO_PARENT, Parameters

if TYPE_CHECKING:
    from .adapters import Adapter
    from .counters import Counters
    from .view import View

STOP = "stop"
LENGTH = "length"
CANCELLED = "cancelled"
ERROR = "error"


class Submission(Struct, frozen=True):
    """One request: prompt tokens [n], sampling parameters, who may share its rows.

    parent: a request with the same prompt, sent before; while that runs, this one shares its rows
    (n > 1).
    """

    tokens: tuple[int, ...]
    parameters: Parameters
    external_id: str = ""
    namespace: Namespace = Namespace()
    parent: int = NO_PARENT


class Update(Struct, frozen=True):
    """News of one request: answer tokens since the last update; the last one has a finish reason.

    finish_reason: stop, length, cancelled or error (then `error` says why, in one sentence).
    cached_tokens: prompt tokens that were adopted at first admission; -1 until it was admitted.
    logprobs: empty, or one for each of `tokens`. scores: log-probabilities of the prompt tokens
    from position scores_at on; a request that was preempted may tell some twice. embedding: the
    answer of a request that asked for one.
    """

    request: int
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    cached_tokens: int = -1
    error: str = ""
    logprobs: tuple[Logprob, ...] = ()
    scores: tuple[Logprob, ...] = ()
    scores_at: int = -1
    embedding: tuple[float, ...] = ()


Sink = Callable[[Update], None]


class RequestRefused(Exception):
    """A request that can never be served as it is; `code` is OpenAI's error code for it."""

    def __init__(self, message: str, code: str = "invalid_request_error", param: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class EngineStopped(Exception):
    """The engine is not running (stopped, or failed eight times in a row)."""


class EngineApi(Protocol):
    """The engine as HTTP sees it."""

    @property
    def healthy(self) -> bool:
        """Whether submissions are accepted and steps still succeed."""

    @property
    def identity(self) -> str:
        """What answers: the software's version and the model's digests, in one line."""

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that requests may ask for, by name: a value."""

    def load_adapter(self, name: str, path: str) -> Adapter:
        """Read a folder and offer it; waits for it. Raises AdapterError, EngineStopped."""

    def unload_adapter(self, name: str) -> None:
        """Offer it no more; requests that have it go on. Raises RequestRefused, EngineStopped."""

    @property
    def context_tokens(self) -> int:
        """The longest prompt + answer that this model and pool can hold."""

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding; 0 where there are none, and who asks for one is refused."""

    @property
    def counters(self) -> Counters:
        """What was counted so far; to be read only."""

    @property
    def view(self) -> View:
        """The scheduler's view after the last step: a value, safe to read from any thread."""

    def submit(self, submission: Submission, sink: Sink) -> int:
        """Queue a request; returns its id. Raises RequestRefused, EngineStopped."""

    def prepare(self, grammar: str) -> object:
        """Do what the first token under a grammar would wait for; from any thread, best not the
        event loop's. It stays done while the caller holds what is returned. What cannot be followed
        is refused by `submit`.
        """

    def cancel(self, request: int) -> None:
        """Give a request up; a request that already ended, or is unknown, is left alone."""

    def status(self) -> dict[str, int]:
        """running, waiting, held, free, cached, num_blocks, steps, preemptions, shadow_found."""
