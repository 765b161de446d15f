"""What takes more than some milliseconds is done beside the event loop; the rest is not."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from kernel.tokenizer import Tokenizer
from server.http import route_chat, route_completions

from .fake_engine import WAIT_S
from .speaking import Speaking, speaking

LOOP = "live-server"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Threads(list[str]):
    """Names of the threads on which something was called."""

    def watch(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            self.append(threading.current_thread().name)
            return work(*given, **named)

        patch.setattr(owner, name, watched)

    def kinds(self) -> set[str]:
        """LOOP, or what a thread beside it is called, without its number."""
        return {name.partition("_")[0] for name in self}


def post(server: Speaking, path: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(server.url + path, json=body, timeout=WAIT_S)
    assert reply.status_code == 200
    return reply.json()


@pytest.mark.parametrize(("letters", "thread"), [(3_000, LOOP), (4_060, "asyncio")])
def test_a_prompt_of_some_thousand_letters_is_tokenised_beside_the_loop(
    letters: int, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads()
    threads.watch(monkeypatch, route_chat, "ask_of_chat")
    with speaking("x") as server:
        turns = [{"role": "user", "content": "a" * letters}]
        answer = post(server, CHAT, {"messages": turns, "max_tokens": 2})
    assert answer["usage"]["prompt_tokens"] >= letters
    assert threads.kinds() == {thread}


@pytest.mark.parametrize(("letters", "thread"), [(200, LOOP), (300, "asyncio")])
def test_log_probabilities_of_a_long_prompt_are_written_beside_the_loop(
    letters: int, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads()
    threads.watch(monkeypatch, route_completions.CompletionShape, "whole")
    body = {"prompt": "a" * letters, "echo": True, "logprobs": 1, "max_tokens": 1}
    with speaking("x") as server:
        (choice,) = post(server, COMPLETIONS, body)["choices"]
    assert choice["text"] == "a" * letters + "x"
    assert choice["logprobs"]["tokens"] == ["a"] * letters + ["x"]
    assert threads.kinds() == {thread}


@pytest.mark.parametrize(("letters", "thread"), [(100, LOOP), (3_000, "asyncio")])
def test_many_tokens_are_made_text_beside_the_loop(
    letters: int, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads()
    threads.watch(monkeypatch, Tokenizer, "prompt_text")
    with speaking("x") as server:
        text = post(server, "/detokenize", {"tokens": [97] * letters})["prompt"]
    assert text == "a" * letters
    assert threads.kinds() == {thread}


def test_the_names_of_many_tokens_are_written_with_them() -> None:
    with speaking("x") as server:
        body = {"prompt": "a" * 5_000, "return_token_strs": True}
        found = post(server, "/tokenize", body)
        plain = post(server, "/tokenize", {"prompt": "ab"})
    assert found["token_strs"] == ["a"] * 5_000
    assert (plain["tokens"], plain.get("token_strs")) == ([97, 98], None)
