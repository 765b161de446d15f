"""Hostile bodies: texts, nesting, grammars and templates that are made to break what reads them.

On real sockets, over the scripted engine. Each is answered or a 400, never a 5xx, and the server
answers afterwards. What a reader says of each is in test_wire.py, test_grammar.py and
test_tokenizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.http.app import create_app
from server.settings import Settings

from .fake_engine import END, WAIT_S, FakeEngine, byte_tokenizer
from .http_server import live_server

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% endif %}{% endfor %}{% if x %}{{ x | tojson }}{{ x }}{% endif %}"
)
"""It shows the messages as they are, and what it is told beside them."""
ROOM_TOKENS = 2**22
HI = '"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1'
CALL = '{"type": "function", "function": {"name": "f", "parameters": %s}}'


def said_with(fields: str) -> str:
    """The body of a chat with more fields."""
    return "{" + HI + ", " + fields + "}"


BODIES = [
    ("/v1/chat/completions", said_with('"unknown": %s')),
    ("/v1/chat/completions", said_with('"chat_template_kwargs": {"x": %s}')),
    ("/v1/chat/completions", said_with('"tools": [' + CALL + "]")),
    ("/v1/chat/completions", said_with('"guided_json": %s')),
    ("/v1/chat/completions", '{"messages": %s}'),
    ("/v1/completions", '{"prompt": %s}'),
    ("/v1/messages", said_with('"tools": [{"name": "f", "input_schema": %s}]')),
    ("/v1/messages/count_tokens", '{"messages": %s}'),
    ("/v1/responses", '{"input": %s}'),
    ("/v1/responses", '{"input": "hi", "text": {"format": {"type": "json_schema", "schema": %s}}}'),
    ("/v1/embeddings", '{"input": %s}'),
    ("/tokenize", '{"prompt": %s}'),
    ("/detokenize", '{"tokens": %s}'),
]
"""Paths, and bodies with a place for something."""


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    tokenizer = byte_tokenizer(TEMPLATE)
    said = tokenizer.encode("ok" + END)
    with FakeEngine(tokenizer, lambda _: said, context_tokens=ROOM_TOKENS) as engine:
        yield engine


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    settings = Settings(grace_s=0.0)
    with (
        live_server(create_app(engine, engine.tokenizer, "models/tiny", settings)) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as http,
    ):
        yield http
        assert http.get("/health").status_code == 200


def asked(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | fields
    return http.post("/v1/chat/completions", json=body)


def prompt(engine: FakeEngine) -> str:
    """What the engine was last given."""
    return engine.tokenizer.decode(list(engine.next_request().submission.tokens))


# Nesting


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_what_is_nested_is_answered_or_refused_at_every_depth(
    http: httpx.Client, path: str, body: str
) -> None:
    """Around each limit: of schemas, of what JSON is read by, of what writes it into a prompt."""
    for opened, closed in (('{"a":', "}"), ("[", "]"), ('{"properties":{"a":', "}}")):
        for depth in (10, 90, 110, 200, 300, 330, 480, 600, 900, 950, 1000, 3000, 9000, 9900):
            nested = opened * depth + "{}" + closed * depth
            response = http.post(path, content=body.replace("%s", nested).encode())
            assert response.status_code in (200, 400), (depth, response.text)
        # 3.14 passes over a field that nobody reads, however deep, as far as its stack goes.
        for end, expected in (("", {400}), ("{}" + closed * 100_000, {200, 400})):
            deep = opened * 100_000 + end
            response = http.post(path, content=body.replace("%s", deep).encode())
            assert response.status_code in expected, response.text


# Texts


TEXTS = [
    "\x00",
    "a\x00b",
    "\x00" * 10_000,
    "\x1b[31m\r\n",
    "\ufeff",
    "\ufffe",
    "\u202e",
    "\U0010ffff",
]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_odd_characters_reach_the_prompt_as_they_are(
    http: httpx.Client, engine: FakeEngine, text: str
) -> None:
    response = asked(http, messages=[{"role": "user", "content": f"<{text}>"}])
    assert response.json()["choices"][0]["message"]["content"] == "ok"
    assert prompt(engine) == f"<{text}>"
    found = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": found}).json()["prompt"] == text


@pytest.mark.parametrize(
    "text",
    ["\\u0000", "\\ud800", "\\udc00\\ud800", "\\ud83d\\ude00", "\ud800"],
    ids=ascii,
)
@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": "%s"}]}',
        '{"messages": [{"role": "%s", "content": "hi"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "%s", "text": "%s"}]}]}',
        '{"messages": [{"role": "user", "content": "hi", "name": "%s"}]}',
        said_with('"model": "%s"'),
        said_with('"stop": ["%s"]'),
        said_with('"user": "%s", "prompt_cache_key": "%s"'),
        said_with('"guided_regex": "%s"'),
        said_with('"guided_choice": ["%s"]'),
        said_with('"guided_json": {"enum": ["%s"], "pattern": "%s"}'),
        said_with('"chat_template_kwargs": {"x": "%s", "%s": 1}'),
        said_with('"tools": [{"type": "function", "function": {"name": "%s"}}]'),
        said_with('"logit_bias": {"%s": 1}'),
    ],
)
def test_nuls_and_halves_of_pairs_are_answered_or_refused_in_every_field(
    http: httpx.Client, body: str, text: str
) -> None:
    """Escaped, or as bytes that no UTF-8 has."""
    content = body.replace("%s", text).encode("utf-8", "surrogatepass")
    response = http.post("/v1/chat/completions", content=content)
    whole = text in ("\\u0000", "\\ud83d\\ude00")
    assert response.status_code in ((200, 400, 404) if whole else (400,)), response.text


# Grammars


EXPLODING: dict[str, dict[str, Any]] = {
    "counts": {"guided_regex": "(a{1000}){1000}"},
    "one count": {"guided_regex": "a{1000000}"},
    "parentheses": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    "a long one": {"guided_regex": "a" * 300_000},
    "a pattern": {"guided_json": {"type": "string", "pattern": "^(a{1000}){1000}$"}},
    "properties": {"guided_json": {"properties": {f"p{at}": {} for at in range(4000)}}},
    "all of any of": {
        "guided_json": {
            "allOf": [
                {"anyOf": [{"properties": {f"{name}{at}": {}}} for name in "ab"]}
                for at in range(20)
            ]
        }
    },
    "itself": {"guided_json": {"$ref": "#"}},
    "an enum": {"guided_json": {"enum": [str(at) * 9 for at in range(20_000)]}},
    "lark": {"guided_grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "choices": {"guided_choice": [str(at) * 9 for at in range(20_000)]},
}


@pytest.mark.parametrize("name", EXPLODING)
def test_a_grammar_made_to_explode_is_a_400_and_asks_the_engine_for_nothing(
    http: httpx.Client, engine: FakeEngine, name: str
) -> None:
    """The bounds are counts (kernel.grammar.LIMITS), so that it depends on no machine's speed."""
    response = asked(http, **EXPLODING[name])
    assert (response.status_code, response.json()["error"]["param"]) == (400, *EXPLODING[name])
    assert len(response.json()["error"]["message"]) < 500
    assert engine.requests == {}


def test_what_would_explode_written_out_is_followed_as_it_stands(
    http: httpx.Client, engine: FakeEngine
) -> None:
    """Repeats inside of repeats, and definitions of which each names the next twice."""
    twice = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(40)}
    schema = {"$defs": twice | {"d40": {"type": "null"}}, "$ref": "#/$defs/d0"}
    for fields in (
        {"guided_regex": "(((a+)+)+)+b"},
        {"guided_regex": "(a|b)*a(a|b){200}c"},
        {"guided_json": schema},
        {"guided_json": {"type": "array", "maxItems": 10**9, "items": {"type": "integer"}}},
    ):
        assert asked(http, **fields).status_code == 200
    assert len(engine.requests) == 4


# Templates

INJECTIONS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for x in range(10**9) %}x{% endfor %}",
    "{{ messages }}{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% endfor %}{{ 7 * 7 }}{# hidden #}{% raw %}",
    "{{ raise_exception('no') }}",
]


@pytest.mark.parametrize("text", INJECTIONS)
def test_a_template_in_a_message_or_a_variable_is_text(
    http: httpx.Client, engine: FakeEngine, text: str
) -> None:
    parts = [{"type": "text", "text": text}]
    for content in (text, parts):
        assert asked(http, messages=[{"role": "user", "content": content}]).status_code == 200
        assert prompt(engine) == text
    assert asked(http, chat_template_kwargs={"x": text}).status_code == 200
    assert prompt(engine).endswith(text)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_no_variable_takes_the_place_of_what_a_template_is_given(
    http: httpx.Client, engine: FakeEngine, name: str
) -> None:
    response = asked(http, chat_template_kwargs={name: []})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"chat_template_kwargs.{name}"
    assert engine.requests == {}


@pytest.mark.parametrize(
    "name", ["self", "range", "loop", "raise_exception", "__class__", "a b", ""]
)
def test_a_variable_of_any_name_changes_nothing_that_the_template_does_not_ask_for(
    http: httpx.Client, engine: FakeEngine, name: str
) -> None:
    assert asked(http, chat_template_kwargs={name: "{{ 7 * 7 }}"}).status_code == 200
    assert prompt(engine) == "hi"


def test_a_chat_template_is_never_taken_from_a_client(
    http: httpx.Client, engine: FakeEngine
) -> None:
    mine = "{{ ''.__class__ }}"
    for fields in ({"chat_template": mine}, {"chat_template_kwargs": {"chat_template": mine}}):
        assert asked(http, **fields).status_code == 200
        assert prompt(engine) == "hi"
