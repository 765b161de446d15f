"""Desk: what the routes share: the engine, the model's names, and who is being answered.

Owns admission on the HTTP side and its end: `drain` lets answers finish, then cancels them. An
endpoint checks its body, makes an `Ask` of it (`aside`), `admit`s that, and gives its answers back
with `leave`, which replies.Exchange does on every way out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import structlog
import xxhash
from msgspec import structs

from kernel.tokenizer import Tokenizer

from ..adapters import MODEL_NOT_FOUND, base_name
from ..settings import Settings
from ..submission import EngineApi, EngineStopped, RequestRefused, Submission
from . import wire
from .asking import ANSWERS_MAX, Ask, submissions_of
from .pace import Pace
from .stream import Answer
from .wire import ApiError

BIG_BODY_BYTES = 4 * 1024
"""Above it a prompt is tokenised on another thread; so much takes some 2 ms."""

RATE_LIMITED = "rate_limit_exceeded"

Made = TypeVar("Made")
Body = TypeVar("Body")

log = structlog.get_logger()


class Desk:
    """See the module. Used on the event loop's thread only, but for `ask`."""

    def __init__(
        self, engine: EngineApi, tokenizer: Tokenizer, model_name: str, settings: Settings
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = wire.Model(model_name, int(time.time()), engine.context_tokens)
        self.fingerprint = f"fp_{xxhash.xxh3_64_hexdigest(engine.identity.encode())}"
        self.max_body_bytes = settings.max_body_bytes
        # More than the queue holds would be told to come again later, for ever.
        self._answers_max = min(ANSWERS_MAX, settings.max_waiting)
        self.closing = False
        self.pace = Pace()
        self._answers: set[Answer] = set()
        self._idle = asyncio.Event()

    @property
    def models(self) -> list[wire.Model]:
        """What requests may name: the model, then its adapters."""
        base = self.model
        adapters = (structs.replace(base, id=it, parent=base.id) for it in self.engine.adapters)
        return [base, *adapters]

    def check_model(self, name: str | None) -> wire.Model:
        """What a name stands for. Raises ApiError (404)."""
        models = self.models
        if name is None or name == base_name(self.model.id):
            return self.model
        for model in models:
            if name == model.id:
                return model
        first, *more = (repr(model.id) for model in reversed(models))
        known = " and ".join([", ".join(reversed(more)), first]) if more else first
        raise ApiError(
            f"The model {name!r} does not exist here; this server has {known}.",
            status=404,
            param="model",
            code=MODEL_NOT_FOUND,
        )

    def _named(self, ask: Ask) -> Ask:
        """An Ask of what its model's name stands for. Raises ApiError (404)."""
        model = self.check_model(ask.model)
        adapter = self.engine.adapters.get(model.id) if model.parent else None
        if adapter is None:
            return structs.replace(ask, model=self.model.id)
        name, version = adapter.key
        space = structs.replace(ask.namespace, adapter=name, version=version)
        return structs.replace(ask, model=name, namespace=space)

    async def aside(
        self, bytes_read: int, work: Callable[..., Made], *arguments: Any, slow: bool = False
    ) -> Made:
        """`work(*arguments)`; on another thread where a body is large, or the work `slow` for
        another reason, so that streams go on.
        """
        if bytes_read <= BIG_BODY_BYTES and not slow:
            return work(*arguments)
        return await asyncio.to_thread(work, *arguments)

    def ask(self, ask_of: Callable[[Body, Tokenizer, str], Ask], body: Body, name: str) -> Ask:
        """What `ask_of` makes of a checked body; the grammar is ready by then. May be called from
        any thread. Raises ApiError (400).
        """
        ask = ask_of(body, self.tokenizer, name)
        if not ask.parameters.grammar:
            return ask
        return structs.replace(ask, prepared=self.engine.prepare(ask.parameters.grammar))

    def admit(self, ask: Ask) -> list[Answer]:
        """Hand a request to the engine: answer prompt * n + copy, all of them or none.

        Whoever gets them calls `leave` with them in the end. Raises ApiError.
        """
        if self.closing or not self.engine.healthy:
            raise unavailable(self.closing)
        named = self._named(ask)
        while True:
            try:
                return self._submit_all(named)
            except RequestRefused as refusal:
                tried = named
                if refusal.code == MODEL_NOT_FOUND:
                    named = self._named(ask)
                if named.namespace == tried.namespace:
                    raise _refusal(refusal, ask.prompt_param) from None
                # Its adapter was loaded anew just now: all answers are of the new one.
            except EngineStopped:
                raise unavailable(self.closing) from None

    def _submit_all(self, ask: Ask) -> list[Answer]:
        """All answers of an Ask, or none. Raises ApiError, RequestRefused, EngineStopped."""
        submissions = submissions_of(
            ask,
            context_tokens=self.engine.context_tokens,
            end_tokens=self.tokenizer.end_tokens,
            answers_max=self._answers_max,
        )
        answers: list[Answer] = []
        try:
            for index, submission in enumerate(submissions):
                answers.append(self._submit(ask, index, submission, answers))
        except (RequestRefused, EngineStopped):
            _close(answers)
            raise
        self._answers.update(answers)
        self._idle.clear()
        return answers

    def _submit(self, ask: Ask, index: int, submission: Submission, before: list[Answer]) -> Answer:
        copy = index % ask.n
        parent = before[index - copy] if copy else None
        if parent is not None:
            submission = structs.replace(submission, parent=parent.request)
        first = before[0] if before else None
        answer = Answer(self.engine, self.tokenizer, ask, index, submission, first)
        if parent is not None:
            answer.scores = parent.scores
        return answer

    def leave(self, answers: list[Answer]) -> None:
        """The response to a request is over, in whatever way: what is open yet is cancelled."""
        _close(answers)
        self.pace.ended()
        self._answers.difference_update(answers)
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


def _close(answers: list[Answer]) -> None:
    for answer in answers:
        answer.close()


def _refusal(refusal: RequestRefused, prompt_param: str) -> ApiError:
    """400 for what can never be served, 404 for a model that has gone, 429 for what may be sent
    again later.
    """
    later = refusal.code == RATE_LIMITED
    missing = refusal.code == MODEL_NOT_FOUND
    param = prompt_param if refusal.param == "messages" else refusal.param
    return ApiError(
        str(refusal),
        status=429 if later else 404 if missing else 400,
        kind="rate_limit_error" if later else "invalid_request_error",
        param=param or None,
        code=refusal.code or None,
    )


def unavailable(closing: bool) -> ApiError:
    """503: the server stops, or its engine did."""
    if closing:
        message, code = "The server is stopping; send the request again later.", "server_stopping"
    else:
        message, code = "The engine has stopped; restart the server.", "engine_stopped"
    return ApiError(message, status=503, kind="server_error", code=code)
