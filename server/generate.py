"""Generate: one answer on the command line, from the same engine that the server runs.

Text goes to standard output as it comes, and nothing else does.
"""

from __future__ import annotations

import queue
import sys
from typing import TextIO

from kernel.tokenizer import Detokenizer, Tokenizer

from .asking import submissions_of
from .chat import ask_of_chat
from .submission import CANCELLED, LENGTH, STOP, EngineApi, Update
from .text import TextStream
from .wire import ApiError
from .wire_chat import ChatRequest

NEWS_S = 0.5
"""How often a wait for tokens looks up, so that Ctrl-C is heard on every platform."""


class GenerateError(Exception):
    """The answer could not be made; one sentence."""


def generate(
    engine: EngineApi, tokenizer: Tokenizer, request: ChatRequest, out: TextIO | None = None
) -> str:
    """Print the answer to a checked request; returns its finish reason (stop or length).

    Raises GenerateError, RequestRefused, EngineStopped. An interrupt cancels the request.
    """
    out = out or sys.stdout
    try:
        (submission,) = submissions_of(
            ask_of_chat(request, tokenizer, "generate"),
            context_tokens=engine.context_tokens,
            end_tokens=tokenizer.end_tokens,
        )
    except ApiError as error:
        raise GenerateError(str(error)) from None
    updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
    number = engine.submit(submission, updates.put)
    try:
        return _print_answer(updates, TextStream(Detokenizer(tokenizer), request.stops), out)
    except BaseException:
        engine.cancel(number)
        raise


def _print(text: str, out: TextIO) -> None:
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise GenerateError(f"the answer cannot be written: {error.strerror}") from None


def _print_answer(updates: queue.SimpleQueue[Update], text: TextStream, out: TextIO) -> str:
    while True:
        try:
            update = updates.get(timeout=NEWS_S)
        except queue.Empty:
            continue
        fresh = "".join(map(text.feed, update.tokens))
        if update.finish_reason is not None:
            fresh += text.finish() + "\n"
        _print(fresh, out)
        if update.finish_reason in (STOP, LENGTH):
            return update.finish_reason
        if update.finish_reason is not None:
            what = "was cancelled" if update.finish_reason == CANCELLED else "failed"
            raise GenerateError(f"the answer {what}: {update.error or 'the engine stopped'}")
