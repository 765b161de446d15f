"""OpenAPI: what the routes take and give, as an OpenAPI 3.1 document made from the bodies' types.

Owns the table of operations. A route that it lacks fails a test; what a body may hold is read off
the msgspec types that decode and encode it, so it cannot be out of date.
"""

from __future__ import annotations

import re
from functools import cache
from http import HTTPStatus
from importlib import metadata
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from .auth import open_paths
from .error_shape import ANTHROPIC, AnthropicRefusal, Refusal
from .route_adapters import LoadRequest, UnloadRequest
from .route_tokenize import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
)
from .wire import Model, ModelList
from .wire_chat import ChatRequest, Chunk, Completion
from .wire_completions import CompletionRequest, TextCompletion
from .wire_embeddings import EmbeddingList, EmbeddingRequest
from .wire_messages import Counted, MessageAnswer, MessagesRequest
from .wire_responses import ResponseBody, ResponsesRequest

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
SCHEMA = "#/components/schemas/{name}"

BODY = (400, 408, 413)
"""What any body may be refused with."""
MODEL = (404,)
"""A model that this server has not got."""
ENGINE = (429, 503)
"""A full queue; a server that stops, or an engine that has."""

LOADING = (403, 503)
"""A server that loads no adapters while it runs; an engine that has stopped."""


class Operation(Struct, frozen=True, kw_only=True):
    """One method of one path.

    gives: the type of its answer as JSON. takes: that of its body. events: that of what a stream's
    events carry, where an answer can be streamed. media: the content type of an answer that is no
    JSON. refuses: statuses of refusals, beside those that every path, or every POST, has. also:
    statuses at which the body is an answer too.
    """

    what: str
    gives: Any = None
    takes: Any = None
    events: Any = None
    media: str = JSON
    refuses: tuple[int, ...] = ()
    also: tuple[int, ...] = ()


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        what="An answer to a conversation.",
        takes=ChatRequest,
        gives=Completion,
        events=Chunk,
        refuses=MODEL + ENGINE,
    ),
    ("POST", "/v1/completions"): Operation(
        what="What follows a text.",
        takes=CompletionRequest,
        gives=TextCompletion,
        events=TextCompletion,
        refuses=MODEL + ENGINE,
    ),
    ("POST", "/v1/responses"): Operation(
        what="A response, in the shapes of OpenAI's responses; none is stored.",
        takes=ResponsesRequest,
        gives=ResponseBody,
        events=dict[str, Any],
        refuses=MODEL + ENGINE,
    ),
    ("POST", "/v1/messages"): Operation(
        what="An answer to a conversation, in Anthropic's shapes.",
        takes=MessagesRequest,
        gives=MessageAnswer,
        events=dict[str, Any],
        refuses=MODEL + ENGINE,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        what="The tokens of a conversation, in Anthropic's shapes.",
        takes=Counted,
        gives=dict[str, int],
        refuses=MODEL,
    ),
    ("POST", "/v1/embeddings"): Operation(
        what="Vectors of texts.",
        takes=EmbeddingRequest,
        gives=EmbeddingList,
        refuses=MODEL + ENGINE,
    ),
    ("POST", "/v1/load_lora_adapter"): Operation(
        what="Load an adapter, in the place of one of the same name.",
        takes=LoadRequest,
        media=TEXT,
        refuses=LOADING,
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        what="Take an adapter away; requests that have it go on.",
        takes=UnloadRequest,
        media=TEXT,
        refuses=LOADING + MODEL,
    ),
    ("POST", "/tokenize"): Operation(
        what="A text's or a conversation's tokens.",
        takes=TokenizeRequest,
        gives=Tokenized,
        refuses=MODEL,
    ),
    ("POST", "/detokenize"): Operation(
        what="The text of tokens.", takes=DetokenizeRequest, gives=Detokenized, refuses=MODEL
    ),
    ("GET", "/tokenizer_info"): Operation(
        what="What a client needs to make prompts itself.", gives=TokenizerInfo
    ),
    ("GET", "/v1/models"): Operation(
        what="The model that is served, and its adapters.", gives=ModelList
    ),
    ("GET", "/v1/models/{name}"): Operation(what="A model.", gives=Model, refuses=MODEL),
    ("GET", "/health"): Operation(
        what="Whether the engine works, and its counts; 503 where it does not.",
        gives=dict[str, str | int],
        also=(503,),
    ),
    ("GET", "/ready"): Operation(
        what="Whether a request sent now would be taken; 503 where not.",
        gives=dict[str, bool],
        also=(503,),
    ),
    ("GET", "/version"): Operation(what="The version of mlxtape.", gives=dict[str, str]),
    ("GET", "/openapi.json"): Operation(what="This document.", gives=dict[str, Any]),
    ("GET", "/metrics"): Operation(what="Metrics, as Prometheus reads them.", media=TEXT),
    ("GET", "/"): Operation(what="A page for a person.", media="text/html"),
    ("GET", "/page.css"): Operation(what="The page's style.", media="text/css"),
    ("GET", "/page.js"): Operation(what="The page's script.", media="text/javascript"),
    ("GET", "/events"): Operation(
        what="Snapshots of the engine and its pool, as server-sent events without an end.",
        media=EVENTS,
        refuses=(429,),
    ),
}


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return Response(_encoded(open_paths(request.app.state.settings)), media_type=JSON)


@cache
def _encoded(free: frozenset[str] | None) -> bytes:
    return msgspec.json.encode(document(free))


def document(free: frozenset[str] | None) -> dict[str, Any]:
    """The document of a server. free: the paths that need no key, None where none does."""
    types = [Refusal, AnthropicRefusal]
    for operation in OPERATIONS.values():
        types += [operation.gives, operation.takes, operation.events]
    kinds = [kind for kind in types if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=SCHEMA)
    found = _Schemas(list(zip(kinds, schemas, strict=True)))
    paths: dict[str, Any] = {}
    for (method, path), operation in OPERATIONS.items():
        described = _operation(method, path, operation, found, free)
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlxtape",
            "version": metadata.version("mlxtape"),
            "description": "An LLM inference server whose KV cache keeps a tape.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components, **_COMPONENTS},
    }


_COMPONENTS: dict[str, Any] = {
    "headers": {
        "RequestId": {
            "description": "The request's id: in the log, and in the answer's id on the tape.",
            "required": True,
            "schema": {"type": "string"},
        },
        "RetryAfter": {
            "description": "Seconds after which to send the request again.",
            "required": True,
            "schema": {"type": "integer"},
        },
        "Challenge": {"required": True, "schema": {"type": "string", "const": "Bearer"}},
    },
    "parameters": {
        "RequestId": {
            "name": "x-request-id",
            "in": "header",
            "description": "The request's id; a new one where it has not 1 to 128 printable "
            "ASCII characters without spaces.",
            "schema": {"type": "string"},
        },
    },
    "securitySchemes": {
        "bearer": {"type": "http", "scheme": "bearer"},
        "xApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    },
}


class _Schemas:
    """The schema of each type."""

    def __init__(self, pairs: list[tuple[Any, dict[str, Any]]]) -> None:
        self._pairs = pairs

    def of(self, kind: Any) -> dict[str, Any]:
        """By equality: not every type is hashable."""
        return next(schema for known, schema in self._pairs if known == kind)


def _operation(
    method: str, path: str, operation: Operation, schemas: _Schemas, free: frozenset[str] | None
) -> dict[str, Any]:
    named: list[dict[str, Any]] = [{"$ref": "#/components/parameters/RequestId"}]
    for name in re.findall(r"{(\w+)}", path):
        schema = {"type": "string", "minLength": 1}
        named.append({"name": name, "in": "path", "required": True, "schema": schema})
    guarded = free is not None and path not in free
    described: dict[str, Any] = {
        "operationId": operation_id(method, path),
        "summary": operation.what,
        "parameters": named,
        "responses": _responses(method, path, operation, schemas, guarded),
    }
    if operation.takes is not None:
        content = {JSON: {"schema": schemas.of(operation.takes)}}
        described["requestBody"] = {"required": True, "content": content}
    if guarded:
        described["security"] = [{"bearer": []}, {"xApiKey": []}]
    return described


def operation_id(method: str, path: str) -> str:
    """Unique, and a name in any language: post_v1_chat_completions."""
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


def _responses(
    method: str, path: str, operation: Operation, schemas: _Schemas, guarded: bool
) -> dict[str, Any]:
    refusal = AnthropicRefusal if path.startswith(ANTHROPIC) else Refusal
    refused = {JSON: {"schema": schemas.of(refusal)}}
    statuses = {431, 500, *operation.refuses}
    if operation.takes is not None:
        statuses.update(BODY)
    if method == "POST":
        statuses.add(504)
    if guarded:
        statuses.add(401)
    found = {status: _response(status, refused) for status in statuses}
    answer = _answer(operation, schemas)
    found |= {status: _response(status, answer) for status in (200, *operation.also)}
    return {str(status): found[status] for status in sorted(found)}


def _answer(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    """The content of an answer, by content type."""
    if operation.gives is None:
        return {operation.media: {"schema": {"type": "string"}}}
    content = {operation.media: {"schema": schemas.of(operation.gives)}}
    if operation.events is not None:
        content[EVENTS] = {"schema": _event(schemas.of(operation.events))}
    return content


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """One event of a stream: what tools that read streams hold each against."""
    return {
        "type": "object",
        "description": "A server-sent event. In place of its data an error may come, as in a "
        "refusal's body, and ends the stream; OpenAI's streams end with [DONE].",
        "required": ["data"],
        "properties": {
            "event": {"type": "string"},
            "data": {
                "type": "string",
                "contentMediaType": JSON,
                "contentSchema": data,
            },
        },
    }


_HEADERS = {401: ("WWW-Authenticate", "Challenge"), 429: ("Retry-After", "RetryAfter")}


def _response(status: int, content: dict[str, Any]) -> dict[str, Any]:
    headers = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
    if status in _HEADERS:
        name, reference = _HEADERS[status]
        headers[name] = {"$ref": f"#/components/headers/{reference}"}
    return {"description": HTTPStatus(status).phrase, "headers": headers, "content": content}
