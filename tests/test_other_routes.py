"""Embeddings, tokenize, detokenize, models, health, ready and version over the scripted engine."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from server.http.app import create_app
from server.settings import Settings

from .fake_engine import END, WAIT_S, FakeEngine, byte_tokenizer
from .http_server import live_server

MODEL = "models/tiny"
SETTINGS = Settings(grace_s=0.0)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(byte_tokenizer(), lambda _: b"", context_tokens=400) as engine:
        yield engine


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    app = create_app(engine, engine.tokenizer, MODEL, SETTINGS)
    with (
        live_server(app, SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
    ):
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(http: httpx.Client, path: str, **body: Any) -> tuple[int, str | None]:
    response = http.post(path, json=body)
    return response.status_code, response.json()["error"]["param"]


# Embeddings


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        ("abc", [[3.0, 99.0, -0.5]]),
        (["a", "bc"], [[1.0, 97.0, -0.5], [2.0, 99.0, -0.5]]),
        ([65, 66], [[2.0, 66.0, -0.5]]),
        ([[65], [66, 67]], [[1.0, 65.0, -0.5], [2.0, 67.0, -0.5]]),
    ],
)
def test_each_input_has_its_vector(
    http: httpx.Client, engine: FakeEngine, given: Any, vectors: list[list[float]]
) -> None:
    body = post(http, "/v1/embeddings", input=given)
    assert body["data"] == [
        {"index": index, "embedding": vector, "object": "embedding"}
        for index, vector in enumerate(vectors)
    ]
    tokens = int(sum(vector[0] for vector in vectors))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["model"], body["object"]) == (MODEL, "list")
    parameters = [request.submission.parameters for request in engine.requests.values()]
    assert [(it.embed, it.max_tokens) for it in parameters] == [(True, 1)] * len(vectors)
    assert engine.cancels_so_far() == []


def test_openais_client_reads_a_vector_as_it_is(http: httpx.Client) -> None:
    url = str(http.base_url) + "/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=WAIT_S) as client:
        # It asks for base64 by itself.
        answer = client.embeddings.create(model=MODEL, input="abc", dimensions=3)
    assert answer.data[0].embedding == [3.0, 99.0, -0.5]


def test_base64_is_little_endian_float32(http: httpx.Client) -> None:
    body = post(http, "/v1/embeddings", input="abc", encoding_format="base64")
    data = base64.b64decode(body["data"][0]["embedding"])
    assert np.frombuffer(data, "<f4").tolist() == [3.0, 99.0, -0.5]


def test_a_vector_of_another_size_is_refused_before_anything_is_queued(
    http: httpx.Client, engine: FakeEngine
) -> None:
    response = http.post("/v1/embeddings", json={"input": ["a", "b"], "dimensions": 4})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "dimensions")
    assert error["message"] == ("dimensions is 4, but this model's vectors have 3; leave it out.")
    assert engine.requests == {}


def test_wrong_fields_of_embeddings_are_named(http: httpx.Client) -> None:
    path = "/v1/embeddings"
    assert refused(http, path) == (400, "input")
    assert refused(http, path, input="") == (400, "input")
    assert refused(http, path, input=["a", 5]) == (400, "input[1]")
    assert refused(http, path, input="a", dimensions=4) == (400, "dimensions")
    assert refused(http, path, input="a", encoding_format="hex") == (400, "encoding_format")
    assert refused(http, path, input="x" * 400) == (400, "input")
    assert refused(http, path, input="a", model="large") == (404, "model")


# Tokenize and detokenize


def test_a_text_is_tokenised_and_back(http: httpx.Client) -> None:
    body = post(http, "/tokenize", prompt="hé DEF")
    tokens = [0x68, 0xC3, 0xA9, 0x20, 257]
    assert body == {"count": 5, "max_model_len": 400, "tokens": tokens}
    assert post(http, "/detokenize", tokens=tokens) == {"prompt": "hé DEF"}


def test_messages_are_tokenised_as_the_template_makes_them(
    http: httpx.Client, engine: FakeEngine
) -> None:
    body = post(http, "/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert bytes(body["tokens"]) == b"<user>hi\n<assistant>"
    assert engine.requests == {}


def test_special_tokens_are_written_out(http: httpx.Client, engine: FakeEngine) -> None:
    body = post(http, "/tokenize", prompt="a" + END, return_token_strs=True)
    assert body["token_strs"] == ["a", END]
    assert post(http, "/detokenize", tokens=body["tokens"]) == {"prompt": "a" + END}


def test_wrong_fields_of_both_are_named(http: httpx.Client) -> None:
    assert refused(http, "/tokenize") == (400, "prompt")
    assert refused(http, "/tokenize", prompt="a", messages=[]) == (400, "prompt")
    assert refused(http, "/tokenize", prompt=5) == (400, "prompt")
    assert refused(http, "/tokenize", messages=[{"role": "x"}]) == (400, "messages[0].role")
    assert refused(http, "/tokenize", prompt="a", model="large") == (404, "model")
    assert refused(http, "/detokenize") == (400, "tokens")
    assert refused(http, "/detokenize", tokens=[-1]) == (400, "tokens")
    assert refused(http, "/detokenize", tokens=[0, 100_000]) == (400, "tokens")
    assert refused(http, "/detokenize", tokens=["a"]) == (400, "tokens[0]")
    assert post(http, "/detokenize", tokens=[]) == {"prompt": ""}


# The state of the server


def test_models_say_how_long_prompt_and_answer_may_be(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 400)
    assert http.get(f"/v1/models/{MODEL}").json() == model


def test_the_version_is_the_packages(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": metadata.version("mlxtape")}


def test_a_dead_engine_is_neither_healthy_nor_ready(http: httpx.Client, engine: FakeEngine) -> None:
    assert [http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
    engine.healthy = False
    assert [http.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
    assert http.get("/health").json()["status"] == "engine stopped"


def test_a_server_that_stops_is_neither_healthy_nor_ready_while_answers_end() -> None:
    settings = Settings(grace_s=WAIT_S)
    with FakeEngine(byte_tokenizer()) as engine:
        app = create_app(engine, engine.tokenizer, MODEL, settings)
        with (
            live_server(app, settings) as server,
            httpx.Client(base_url=server.url, timeout=WAIT_S) as asking,
            httpx.Client(base_url=server.url, timeout=WAIT_S) as looking,
        ):
            looking.get("/health")
            # The status comes with the first token.
            engine.jobs.put(lambda: engine.next_request().send(b"b"))
            body = {"prompt": "a", "stream": True}
            with asking.stream("POST", "/v1/completions", json=body) as answer:
                server.begin_stop()
                while looking.get("/health").status_code == 200:
                    pass
                assert looking.get("/health").json()["status"] == "stopping"
                assert looking.get("/ready").status_code == 503
                engine.requests[0].end()
                assert list(answer.iter_lines())[-2:] == ["data: [DONE]", ""]
