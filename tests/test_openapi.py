"""The OpenAPI document: complete, valid, and true of what the server says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from server.http.app import ROUTES, create_app
from server.http.auth import OPEN_PATHS
from server.http.error_shape import AnthropicRefusal, Refusal, error_body
from server.http.openapi import OPERATIONS, document, operation_id
from server.http.wire import ApiError
from server.settings import Settings
from server.submission import RequestRefused
from server.values import Texts

from .fake_engine import WAIT_S, FakeEngine, scripted
from .http_server import LiveServer, live_server

MODEL = "models/tiny"
MESSAGES = [{"role": "user", "content": "hi"}]
SETTINGS = Settings(grace_s=0.0, max_body_bytes=2000, adapter_loading=True)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with scripted("yes") as engine:
        yield engine


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[LiveServer]:
    with live_server(create_app(engine, engine.tokenizer, MODEL, SETTINGS), SETTINGS) as server:
        yield server


def test_every_route_is_described_and_nothing_else() -> None:
    served = set()
    for route in ROUTES:
        assert isinstance(route, Route)
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        served |= {(method, path) for method in (route.methods or set()) - {"HEAD"}}
    assert set(OPERATIONS) == served


@pytest.mark.parametrize("free", [None, OPEN_PATHS])
def test_the_document_is_valid_openapi_3_1(free: frozenset[str] | None) -> None:
    described = document(free)
    assert described["openapi"] == "3.1.0"
    OpenAPIV31SpecValidator(described).validate()


def test_operations_have_names_of_their_own() -> None:
    names = [operation_id(*key) for key in OPERATIONS]
    assert len(set(names)) == len(names)
    assert operation_id("GET", "/v1/models/{name}") == "get_v1_models_name"


def test_the_served_document_says_whether_keys_are_asked_for(engine: FakeEngine) -> None:
    for keys, schemes in [((), None), (("sk-one",), [{"bearer": []}, {"xApiKey": []}])]:
        settings = Settings(grace_s=0.0, api_key=Texts(keys))
        app = create_app(engine, engine.tokenizer, MODEL, settings)
        with live_server(app, settings) as server:
            headers = {"x-api-key": "sk-one"}
            found = httpx.get(server.url + "/openapi.json", headers=headers).json()
        models, health = found["paths"]["/v1/models"]["get"], found["paths"]["/health"]["get"]
        assert (models.get("security"), health.get("security")) == (schemes, None)
        assert ("401" in models["responses"], "401" in health["responses"]) == (bool(keys), False)


def test_a_body_that_is_streamed_has_both_content_types() -> None:
    content = document(None)["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert list(content) == ["application/json", "text/event-stream"]
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    assert data["contentSchema"] == {"$ref": "#/components/schemas/Chunk"}


# Whether what is served is as described

CHAT = {"messages": MESSAGES}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"input": "hi"},
    LOAD: {"lora_name": "one", "lora_path": "word"},
    UNLOAD: {"lora_name": "one"},
    "/tokenize": CHAT,
    "/detokenize": {"tokens": [104, 105]},
}
POSTS = [path for method, path in OPERATIONS if method == "POST"]
GETS = [path for method, path in OPERATIONS if method == "GET"]


def check(response: httpx.Response, method: str, path: str) -> None:
    """It has a documented status, content type and headers, and its JSON the documented schema."""
    described = document(None)
    responses = described["paths"][path][method]["responses"]
    assert str(response.status_code) in responses
    found = responses[str(response.status_code)]
    for header in found["headers"]:
        assert header in response.headers
    media = response.headers["content-type"].split(";")[0]
    assert media in found["content"]
    if media == "application/json":
        response.read()
        schema = found["content"][media]["schema"] | {"components": described["components"]}
        jsonschema.validate(response.json(), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("path", GETS)
def test_what_is_got_is_as_described(server: LiveServer, engine: FakeEngine, path: str) -> None:
    asked = path.replace("{name}", "tiny")
    for healthy in (True, False):
        engine.healthy = healthy
        # Not `get`: some answers never end.
        with httpx.stream("GET", server.url + asked, timeout=WAIT_S) as response:
            check(response, "get", path)
            assert response.status_code == 200 or not healthy
    if asked != path:
        check(httpx.get(server.url + path.replace("{name}", "none")), "get", path)


@pytest.mark.parametrize("path", POSTS)
def test_what_is_posted_is_answered_and_refused_as_described(
    server: LiveServer, engine: FakeEngine, path: str
) -> None:
    def post(body: Any) -> int:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = httpx.post(server.url + path, content=content, timeout=WAIT_S)
        check(response, "post", path)
        return response.status_code

    body = BODIES[path]
    if path == UNLOAD:
        engine.load_adapter("one", "word")
    asks_engine = 429 in OPERATIONS["POST", path].refuses
    statuses = [post(body), post(b"{"), post(b"x" * 3000), post(body | {"model": "none"})]
    # Loading names no model; what was unloaded is not there a second time.
    assert statuses[1:] == [400, 413, 200 if path == LOAD else 404]
    # The scripted engine makes no vectors.
    assert statuses[0] == 200 or path == "/v1/embeddings"
    if OPERATIONS["POST", path].events is not None:
        assert post(body | {"stream": True}) == 200
    if asks_engine:
        engine.refusal = RequestRefused("9 wait.", "rate_limit_exceeded")
        assert post(body) == 429
        engine.healthy = False
        assert post(body) == 503


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/models", Refusal), ("/v1/messages", AnthropicRefusal)]
)
def test_refusals_have_the_described_type_and_no_more(path: str, kind: type[Any]) -> None:
    scope = {"path": path, "state": {"request_id": "r-1"}}
    body = error_body(ApiError("No.", status=404, code="x"), scope)
    again = msgspec.json.encode(msgspec.json.decode(body, type=kind))
    assert json.loads(again) == json.loads(body)
