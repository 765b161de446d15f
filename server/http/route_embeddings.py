"""Route: POST /v1/embeddings. An input's vector is what the model holds behind its last token."""

from __future__ import annotations

import base64

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from kernel.tokenizer import Tokenizer
from statemachine.events import Namespace
from statemachine.records import Parameters

from .asking import Ask
from .prompts import prompts_of
from .replies import Exchange, Shape
from .routing import desk_of, read_body, response_id
from .stream import News, usage_of
from .wire_embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
    check_dimensions,
    read_embedding_request,
)


async def embeddings(request: Request) -> Response:
    """The handler."""
    desk = desk_of(request)
    body = await read_body(request, desk.max_body_bytes)
    asked = read_embedding_request(body)
    desk.check_model(asked.model)
    check_dimensions(asked.dimensions, desk.engine.embedding_size)
    external_id = response_id(request, "embd-")
    ask = await desk.aside(len(body), ask_of_embedding, asked, desk.tokenizer, external_id)
    answers = desk.admit(ask)
    exchange = Exchange(desk, answers, EmbeddingShape(asked, answers[0].model), external_id)
    return await exchange.respond(request.receive, stream=False)


def ask_of_embedding(request: EmbeddingRequest, tokenizer: Tokenizer, external_id: str) -> Ask:
    """What the engine is asked for by a checked body. Raises ApiError (400)."""
    return Ask(
        prompts=prompts_of(request.input, tokenizer, "input"),
        parameters=Parameters(max_tokens=0, embed=True, priority=request.priority or 0),
        external_id=external_id,
        namespace=Namespace(salt=request.cache_salt or ""),
        prompt_param="input",
        model=request.model,
    )


class EmbeddingShape(Shape):
    """replies.Shape of embeddings, which are never streamed."""

    def __init__(self, request: EmbeddingRequest, model: str) -> None:
        self._request = request
        self._model = model

    def whole(self, news: list[News]) -> EmbeddingList:
        vectors = [told.answer.embedding for told in news]
        tokens = usage_of([told.answer for told in news]).prompt_tokens
        return EmbeddingList(
            [Embedding(place, self._written(vector)) for place, vector in enumerate(vectors)],
            self._model,
            EmbeddingUsage(tokens, tokens),
        )

    def _written(self, vector: tuple[float, ...]) -> list[float] | str:
        if self._request.encoding_format != "base64":
            return list(vector)
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
