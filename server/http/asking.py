"""Asking: an HTTP request as the engine will have it, whatever endpoint it came through.

    body -> chat.py, completions.py, ... -> Ask -> desk.admit -> [Answer] -> stream.news_of -> News

Owns how one request becomes several submissions: answer prompt * n + copy. Copies of a prompt have
seeds of their own, made from the request's, and the first one as parent, whose rows they share.
Never touches the engine or a tokenizer.

max_tokens: NO_LIMIT, or more than the context has room for, is cut to that room. 0 asks for the
prompt alone: the engine computes it and samples one token, for it can do no less; that token is
shown to nobody and counted nowhere, and the answer ends with "length".
"""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash
from msgspec import Struct, structs

from statemachine.events import Namespace
from statemachine.records import NO_SCORES, Parameters

from ..dialects.parts import PlainSplitter, Splitter
from ..submission import Submission
from .wire import ApiError

NO_LIMIT = 2**31 - 1
"""Parameters.max_tokens of an answer that may take all the room there is."""
ANSWERS_MAX = 512
"""Answers (prompts times n) of one request at most."""
SEED_MASK = 2**64 - 1


class Ask(Struct, frozen=True):
    """A checked request.

    prompts: token ids, none of them empty. parameters: as asked, but max_tokens may be 0 or
    NO_LIMIT and end_tokens are the desk's to put in. n: answers to each prompt. splitter: makes
    what tells an answer's content from reasoning and tool calls, one for each answer. prompt_param:
    the field that a refusal of a prompt names. external_id: the response's id, which goes on tape;
    of answer k > 0 "/k" is added. model: as the body names it; an adapter's becomes part of the
    namespace at the desk. prepared: what keeps its grammar compiled (EngineApi.prepare), however
    long its answers wait in the queue behind others.
    """

    prompts: tuple[tuple[int, ...], ...]
    parameters: Parameters
    external_id: str
    n: int = 1
    namespace: Namespace = Namespace()
    splitter: Callable[[], Splitter] = PlainSplitter
    prompt_param: str = "messages"
    ignore_eos: bool = False
    model: str | None = None
    prepared: object = None


def submissions_of(
    ask: Ask,
    *,
    context_tokens: int,
    end_tokens: tuple[int, ...],
    answers_max: int = ANSWERS_MAX,
) -> list[Submission]:
    """One for each answer, in order; who is whose parent is known once they are submitted.

    context_tokens: the most that a prompt and its answer may have together. Raises ApiError (400).
    """
    answers = len(ask.prompts) * ask.n
    if answers > answers_max:
        raise ApiError(
            f"{len(ask.prompts)} prompts times n = {ask.n} make {answers} answers; at most "
            f"{answers_max} are made at once, so send several requests.",
            param=ask.prompt_param if len(ask.prompts) > 1 else "n",
        )
    ends = () if ask.ignore_eos else end_tokens
    found: list[Submission] = []
    for prompt in ask.prompts:
        room = _room(ask, len(prompt), context_tokens)
        for copy in range(ask.n):
            answer = len(found)
            parameters = structs.replace(
                ask.parameters,
                max_tokens=min(ask.parameters.max_tokens or 1, room),
                end_tokens=ends,
                seed=copy_seed(ask.parameters.seed, copy),
                # A copy's prompt is its parent's: nobody needs its scores twice.
                score_from=NO_SCORES if copy else ask.parameters.score_from,
            )
            name = f"{ask.external_id}/{answer}" if answer else ask.external_id
            found.append(Submission(prompt, parameters, name, ask.namespace))
    return found


def _room(ask: Ask, prompt_tokens: int, context_tokens: int) -> int:
    if prompt_tokens < context_tokens:
        return context_tokens - prompt_tokens
    raise ApiError(
        f"The prompt has {prompt_tokens} tokens, but prompt and answer may have "
        f"{context_tokens} together; shorten the {ask.prompt_param}.",
        param=ask.prompt_param,
        code="context_length_exceeded",
    )


def copy_seed(seed: int, copy: int) -> int:
    """The seed of a prompt's answer `copy`, 64 bits: the request's own for the first."""
    if not copy:
        return seed
    return xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little") + copy.to_bytes(8, "little"))


def random_seed() -> int:
    """64 bits from the system."""
    return int.from_bytes(os.urandom(8), "little")
