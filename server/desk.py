"""Desk: what the routes share: the engine, the model's names, and who is being answered.

Owns admission on the HTTP side and its end: `drain` lets answers finish, then cancels them.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from kernel.tokenizer import Tokenizer

from . import wire
from .chat import prompt_tokens, submission_of
from .settings import Settings
from .stream import Answer
from .submission import EngineApi, EngineStopped, RequestRefused
from .wire import ApiError

BIG_BODY_BYTES = 32 * 1024
"""Above it a prompt is tokenised on another thread, so that streams go on meanwhile."""

RATE_LIMITED = "rate_limit_exceeded"

log = structlog.get_logger()


class Desk:
    """See the module. Used on the event loop's thread only."""

    def __init__(
        self, engine: EngineApi, tokenizer: Tokenizer, model_name: str, settings: Settings
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = wire.Model(id=model_name, created=int(time.time()))
        self.max_body_bytes = settings.max_body_bytes
        self.closing = False
        self._answers: set[Answer] = set()
        self._idle = asyncio.Event()

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) unless `name` is the model's name, or the last part of it."""
        if name is None or name in (self.model.id, self.model.id.rstrip("/").rsplit("/", 1)[-1]):
            return
        raise ApiError(
            f"The model {name!r} does not exist here; this server has {self.model.id!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )

    async def admit(self, body: bytes, external_id: str) -> tuple[wire.ChatRequest, Answer]:
        """Check a body and hand it to the engine. Raises ApiError."""
        request = wire.read_chat_request(body)
        self.check_model(request.model)
        if len(body) <= BIG_BODY_BYTES:
            tokens = prompt_tokens(request, self.tokenizer)
        else:
            tokens = await asyncio.to_thread(prompt_tokens, request, self.tokenizer)
        if self.closing or not self.engine.healthy:
            raise unavailable(self.closing)
        submission = submission_of(
            request,
            tokens,
            context_tokens=self.engine.context_tokens,
            end_tokens=self.tokenizer.end_tokens,
            external_id=external_id,
        )
        try:
            answer = Answer(self.engine, self.tokenizer, submission)
        except RequestRefused as refusal:
            raise _refusal(refusal) from None
        except EngineStopped:
            raise unavailable(self.closing) from None
        self._answers.add(answer)
        self._idle.clear()
        return request, answer

    def leave(self, answer: Answer) -> None:
        """An answer's response is over, in whatever way."""
        answer.close()
        self._answers.discard(answer)
        if not self._answers:
            self._idle.set()

    async def drain(self, grace_s: float, after_s: float = 1.0) -> None:
        """Admit nobody; give answers `grace_s` to end, then cancel them and wait `after_s`."""
        self.closing = True
        if self._answers:
            log.info("stopping", answers=len(self._answers), grace_s=grace_s)
        for answers_end_s in (grace_s, after_s):
            if not self._answers:
                return
            try:
                await asyncio.wait_for(self._idle.wait(), answers_end_s)
            except TimeoutError:
                for answer in list(self._answers):
                    answer.give_up()


def _refusal(refusal: RequestRefused) -> ApiError:
    """400 for what can never be served, 429 for what may be sent again later."""
    later = refusal.code == RATE_LIMITED
    return ApiError(
        str(refusal),
        status=429 if later else 400,
        kind="rate_limit_error" if later else "invalid_request_error",
        param=refusal.param or None,
        code=refusal.code or None,
    )


def unavailable(closing: bool) -> ApiError:
    """503: the server stops, or its engine did."""
    if closing:
        message, code = "The server is stopping; send the request again later.", "server_stopping"
    else:
        message, code = "The engine has stopped; restart the server.", "engine_stopped"
    return ApiError(message, status=503, kind="server_error", code=code)
