"""Grammars that are made ready before the engine's thread needs them: on the thread that asks."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kernel import grammar as grammars
from kernel.fake import FakeKernel
from kernel.grammar import GRAMMARS_MAX, Grammars
from server.build import build_engine
from server.engine import Engine
from server.http.completions import ask_of_completion
from server.http.desk import Desk
from server.http.wire_completions import read_completion_request
from server.parts import Parts
from server.policy import Policy
from server.settings import Settings
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .fake_engine import WAIT_S, FakeEngine, byte_tokenizer
from .speaking import speaking

DIGITS = json.dumps({"regex": "[0-9]{3}"})
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = "/v1/chat/completions"
TURNS = [{"role": "user", "content": "hi"}]


class Compiled:
    """The threads on which grammars were compiled, and vocabularies made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.grammars: list[threading.Thread] = []
        self.vocabularies: list[threading.Thread] = []
        patch.setattr(grammars, "_compiled", self._told(grammars._compiled, self.grammars))
        vocabulary = self._told(grammars._Vocabulary, self.vocabularies)
        patch.setattr(grammars, "_Vocabulary", vocabulary)

    def _told(self, make: Any, threads: list[threading.Thread]) -> Any:
        def made(given: Any) -> Any:
            threads.append(threading.current_thread())
            return make(given)

        return made


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    grammars.check_grammar.cache_clear()
    yield Compiled(monkeypatch)
    grammars.check_grammar.cache_clear()


def on_a_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return thread


def first_mask(masks: Grammars, grammar: str) -> int:
    parameters = Parameters(8, grammar=grammar, end_tokens=(260,))
    words = masks.allowed(0, parameters, (), 0, 9)
    assert words is not None
    return int(words[1])


def test_what_was_prepared_elsewhere_is_not_compiled_again(compiled: Compiled) -> None:
    masks = Grammars(byte_tokenizer())
    load = on_a_thread(masks.load)
    prepare = on_a_thread(lambda: masks.prepare(DIGITS))
    assert first_mask(masks, DIGITS) == 0x03FF0000
    assert compiled.vocabularies == [load]
    assert set(compiled.grammars) == {prepare}


def test_what_was_not_prepared_is_compiled_where_it_is_needed(compiled: Compiled) -> None:
    masks = Grammars(byte_tokenizer())
    assert first_mask(masks, DIGITS) == 0x03FF0000
    here = threading.current_thread()
    assert (compiled.vocabularies, compiled.grammars) == ([here], [here])


def test_a_grammar_that_cannot_be_followed_is_left_to_whoever_refuses_it(
    compiled: Compiled,
) -> None:
    masks = Grammars(byte_tokenizer())
    masks.prepare('{"json_schema": {"type": "strin"}}')
    assert compiled.vocabularies == []


def test_the_grammars_that_were_prepared_first_are_let_go_of_first(compiled: Compiled) -> None:
    masks = Grammars(byte_tokenizer())
    for number in range(GRAMMARS_MAX + 1):
        masks.prepare(json.dumps({"regex": f"a{number}"}))
    kept = [f'{{"regex": "a{it}"}}' for it in range(1, GRAMMARS_MAX + 1)]
    assert list(masks._recent) == sorted(masks._prepared, key=kept.index) == kept


def test_a_grammar_that_is_held_is_never_compiled_again_however_many_others_there_are(
    compiled: Compiled,
) -> None:
    masks = Grammars(byte_tokenizer())
    texts = [json.dumps({"regex": f"[0-9]{{3}}a{it}"}) for it in range(3 * GRAMMARS_MAX)]
    held = [masks.prepare(text) for text in texts]
    compiled.grammars.clear()
    for seq, text in enumerate(texts):
        masks.allowed(seq, Parameters(8, grammar=text, end_tokens=(260,)), (), 0, 9)
    assert compiled.grammars == []
    del held
    assert len(masks._prepared) == GRAMMARS_MAX


def test_a_request_keeps_its_grammar_ready_from_its_arrival_to_its_end() -> None:
    tokenizer = byte_tokenizer()

    async def ask_and_leave(engine: FakeEngine) -> None:
        desk = Desk(engine, tokenizer, "m", Settings())
        body = read_completion_request({"prompt": "hi", "guided_regex": "[0-9]", "n": 2})
        answers = desk.admit(desk.ask(ask_of_completion, body, "x"))
        gc.collect()
        assert [kept() is not None for kept in engine.kept] == [True]
        desk.leave(answers)

    with FakeEngine(tokenizer) as engine:
        asyncio.run(ask_and_leave(engine))
    engine.requests.clear()
    while not engine.submitted.empty():
        engine.submitted.get()
    gc.collect()
    assert [kept() for kept in engine.kept] == [None]


def test_an_engine_prepares_on_the_callers_thread_and_may_have_nothing_to_prepare() -> None:
    geometry = Geometry(4, (Group(num_blocks=8),))
    told: list[tuple[str, threading.Thread]] = []

    def prepare(grammar: str) -> None:
        told.append((grammar, threading.current_thread()))

    for parts in (
        Parts(FakeKernel(geometry), Policy(), prepare=prepare),
        Parts(FakeKernel(geometry), Policy()),
    ):
        engine = Engine(lambda parts=parts: parts)  # type: ignore[misc]
        engine.start()
        engine.prepare(DIGITS)
        engine.stop()
    assert told == [(DIGITS, threading.current_thread())]


FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": TURNS, "response_format": FORMAT}),
        (CHAT, {"messages": TURNS, "tools": [TOOL], "tool_choice": "required"}),
        (CHAT, {"messages": TURNS, "tools": [TOOL], "response_format": FORMAT}),
        ("/v1/completions", {"prompt": "hi", "guided_regex": "[0-9]"}),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {**FORMAT["json_schema"], "type": "json_schema"}}},  # type: ignore[dict-item]
        ),
        (
            "/v1/messages",
            {
                "messages": TURNS,
                "max_tokens": 4,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "any"},
            },
        ),
    ],
)
def test_the_grammar_that_the_engine_gets_was_prepared_off_the_event_loop(
    path: str, body: dict[str, Any]
) -> None:
    with speaking("{}") as server:
        assert httpx.post(server.url + path, json=body, timeout=WAIT_S).status_code == 200
        request = server.engine.next_request()
        ((grammar, thread),) = server.engine.prepared
    assert grammar == request.submission.parameters.grammar
    assert thread.name.startswith("asyncio_")


def test_free_text_has_nothing_prepared() -> None:
    with speaking("x") as server:
        httpx.post(server.url + CHAT, json={"messages": TURNS}, timeout=WAIT_S)
        assert server.engine.next_request().submission.parameters.grammar == ""
        assert server.engine.prepared == []


@pytest.mark.model
def test_a_server_makes_its_vocabulary_before_it_serves_and_prepares_with_it(
    compiled: Compiled,
) -> None:
    engine, _ = build_engine(Settings(model="smollm2-135m", num_blocks=8))
    try:
        assert [thread.name for thread in compiled.vocabularies] == ["engine"]
        engine.prepare(DIGITS)
        assert set(compiled.grammars) == {threading.current_thread()}
        assert len(compiled.vocabularies) == 1
    finally:
        engine.stop()
