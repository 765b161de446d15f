"""OpenAI's client against the real server: real engine, real forwards, tape and replay."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from replay.reader import Tape
from statemachine.events import Closed
from statemachine.records import RequestCancelled, StepDone, StepPlanned, TapeEnded

from .real_server import (
    CONTEXT,
    SMOLLM2,
    Served,
    cached_of,
    flips,
    on_tape,
    replayed,
    serving,
    text_of,
    tiny_folder,
)

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
LONG_ANSWER = CONTEXT - 100
"""Tokens of an answer that is still being made when a test gives it up."""
TEMPLATE_ROWS = 19
"""What the tiny model's template adds to one message of the user."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tape = tmp_path_factory.mktemp("tapes") / "tiny.log"
    settings = {"num_blocks": 600, "max_body_bytes": 100_000, "capture": str(tape)}
    with serving(folder, **settings) as served:
        yield served
        served.idle()
    assert replayed(tape) == [0, 0]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tape = tmp_path_factory.mktemp("tapes") / "smollm2.log"
    with serving(SMOLLM2, num_blocks=64, capture=str(tape)) as served:
        yield served
        served.idle()
    assert replayed(tape) == [0, 0]


def streamed(served: Served, text: str, **fields: Any) -> tuple[str, str, Any]:
    """Joined text, finish reason and usage of a streamed answer."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(served.ask(text, **options, **fields))
    *parts, last = chunks
    assert last.choices == []
    assert [part.usage for part in parts] == [None] * len(parts)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    return text, parts[-1].choices[0].finish_reason, last.usage


@pytest.mark.model
def test_the_capital_of_france_is_paris_whole_streamed_cold_and_cached(smollm2: Served) -> None:
    cold, warm = (smollm2.ask(QUESTION, max_tokens=32) for _ in range(2))
    assert [text_of(answer) for answer in (cold, warm)] == [ANSWER] * 2
    assert cold.choices[0].finish_reason == "stop"
    assert (cold.usage.prompt_tokens, cached_of(cold)) == (37, 0)
    assert 0 < cached_of(warm) < 37
    assert cold.usage.completion_tokens == warm.usage.completion_tokens == 7
    text, reason, usage = streamed(smollm2, QUESTION, max_tokens=32)
    assert (text, reason) == (ANSWER, "stop")
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 7, 44)


@pytest.mark.model
def test_a_conversation_reads_the_rows_of_its_own_answer(smollm2: Served) -> None:
    first = smollm2.ask("Name a river.", max_tokens=24)
    turns = [
        {"role": "user", "content": "Name a river."},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And where does it flow?"},
    ]
    second = smollm2.chat(turns, max_tokens=16)
    # Whole blocks of the first prompt and of its answer, hence more than the prompt's own.
    assert cached_of(second) >= (first.usage.total_tokens - 1) // 16 * 16
    assert cached_of(second) > first.usage.prompt_tokens
    cold = smollm2.chat(turns, max_tokens=16, extra_body={"cache_salt": "cold"})
    assert cached_of(cold) == 0
    assert text_of(second) == text_of(cold)


@pytest.mark.model
def test_answers_of_a_real_model_do_not_depend_on_their_neighbours(smollm2: Served) -> None:
    def ask(job: tuple[int, str]) -> str:
        number, text = job
        body = {"cache_salt": "crowd" if number % 2 else f"alone {number}"}
        return text_of(smollm2.ask(text, max_tokens=12, extra_body=body))

    questions = [QUESTION, "Say hello.", "Count to ten.", QUESTION, "What is 2 + 2?", "Name a cat."]
    jobs = list(enumerate(questions))
    alone = [ask(job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as clients:
        assert list(clients.map(ask, jobs)) == alone
    assert len(set(alone)) == 5


def test_a_stream_is_the_whole_text_and_counts_the_same_tokens(tiny: Served) -> None:
    whole = tiny.ask("stream me", max_tokens=40)
    text, reason, usage = streamed(tiny, "stream me", max_tokens=40)
    assert (text, reason) == (text_of(whole), "length")
    assert len(text) == usage.completion_tokens == whole.usage.completion_tokens == 40
    assert usage.total_tokens == usage.prompt_tokens + 40


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_cuts_the_text_before_it(tiny: Served, stream: bool) -> None:
    whole = text_of(tiny.ask("stop me", max_tokens=40))
    stop = whole[7:12]
    cut = whole.index(stop)
    assert cut > 0
    if stream:
        text, reason, usage = streamed(tiny, "stop me", max_tokens=40, stop=["\t", stop])
    else:
        answer = tiny.ask("stop me", max_tokens=40, stop=["\t", stop])
        text, reason, usage = text_of(answer), answer.choices[0].finish_reason, answer.usage
    assert (text, reason) == (whole[:cut], "stop")
    assert usage.completion_tokens == cut + len(stop)


@pytest.mark.parametrize("rows", [47, 48, 49, 64])
def test_an_exact_repeat_is_cached_but_for_its_last_token_at_least(tiny: Served, rows: int) -> None:
    answers = [tiny.ask(f"{rows} rows ".ljust(rows - TEMPLATE_ROWS, "."), n=1) for _ in range(3)]
    assert [answer.usage.prompt_tokens for answer in answers] == [rows] * 3
    assert len({text_of(answer) for answer in answers}) == 1
    assert cached_of(answers[0]) == 0
    for answer in answers[1:]:
        assert rows - 16 <= cached_of(answer) < rows


def test_a_prompt_is_not_cached_for_another_salt(tiny: Served) -> None:
    text = "A secret that another tenant must not find. " * 2
    mine = [tiny.ask(text, extra_body={"cache_salt": "mine"}) for _ in range(2)]
    theirs = tiny.ask(text, extra_body={"cache_salt": "theirs"})
    assert [cached_of(answer) > 0 for answer in (*mine, theirs)] == [False, True, False]
    assert text_of(theirs) == text_of(mine[0])


def test_a_seed_gives_its_text_whatever_the_neighbours_are(tiny: Served) -> None:
    def ask(seed: int) -> str:
        return text_of(tiny.ask("seeded", temperature=1, seed=seed, max_tokens=24))

    alone = [ask(seed) for seed in range(4)]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(12) as clients:
        together = list(clients.map(ask, [seed for seed in range(4) for _ in range(3)]))
    assert together == [text for text in alone for _ in range(3)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ],
)
def test_a_wrong_value_is_a_400_that_names_the_field(
    tiny: Served, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        tiny.ask("x", extra_body=fields)
    assert refusal.value.param == param
    assert text_of(tiny.ask("still here"))


def test_an_unknown_model_is_a_404_and_unknown_fields_are_ignored(tiny: Served) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        tiny.ask("x", model="gpt-7")
    assert refusal.value.code == "model_not_found"
    plain = text_of(tiny.ask("ignored"))
    extra = {"parallel_tool_calls": True, "store": False, "whatever": {"a": [1]}}
    assert text_of(tiny.ask("ignored", extra_body=extra)) == plain
    assert [model.id for model in tiny.client.models.list()] == [tiny.model]


def test_a_body_over_the_limit_is_a_413(tiny: Served) -> None:
    with pytest.raises(openai.APIStatusError, match="larger than 100000 bytes") as refusal:
        tiny.ask("x" * 100_001)
    assert refusal.value.status_code == 413
    assert text_of(tiny.ask("still here"))


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(tiny: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{CONTEXT} together") as refusal:
        tiny.ask("x" * CONTEXT)
    assert refusal.value.code == "context_length_exceeded"
    assert f"The prompt has {CONTEXT + TEMPLATE_ROWS} tokens" in str(refusal.value)
    assert text_of(tiny.ask("still here"))


def test_a_prompt_longer_than_the_pool_is_refused_with_both_numbers(folder: Path) -> None:
    with serving(folder, num_blocks=4) as small:
        with pytest.raises(openai.BadRequestError, match="64 together") as refusal:
            small.ask("x" * 100)
        assert refusal.value.code == "context_length_exceeded"
        assert "The prompt has 119 tokens" in str(refusal.value)
        # What fits with the answer's first tokens is answered as far as the pool goes.
        answer = small.ask("x" * 30, max_tokens=1000)
        assert answer.usage.total_tokens == 64
        assert answer.choices[0].finish_reason == "length"


def test_a_model_without_a_chat_template_serves_and_says_so_on_chat(tmp_path: Path) -> None:
    bare = tiny_folder(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with serving(bare, num_blocks=16) as served:
        with pytest.raises(openai.BadRequestError, match=r"no chat template: use .*chat_template"):
            served.ask("x")
        assert [model.id for model in served.client.models.list()] == [str(bare)]
        served.idle()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_its_blocks_within_two_steps(
    folder: Path, tmp_path: Path, stream: bool
) -> None:
    tape = tmp_path / "capture.log"
    with serving(folder, num_blocks=400, capture=str(tape)) as served:
        if stream:
            answer = served.ask("goodbye", max_tokens=LONG_ANSWER, stream=True)
            assert [next(answer).choices[0].delta.content for _ in range(3)]
            answer.close()
        else:
            leave_unanswered(served)
        served.idle()
        assert text_of(served.ask("after it"))
    cancel, closed = None, None
    step = 0
    for record in Tape(str(tape)):
        if isinstance(record, StepPlanned | StepDone):
            step = record.step
            gone = [event for event in record.events if isinstance(event, Closed)]
            if closed is None and any(event.seq == 0 for event in gone):
                closed = step
        if isinstance(record, RequestCancelled):
            cancel = step
    assert cancel is not None
    assert closed is not None
    assert 0 <= closed - cancel <= 2
    assert 1 <= len(on_tape(tape)[0].tokens) < LONG_ANSWER
    assert replayed(tape) == [0, 0]


def leave_unanswered(served: Served) -> None:
    """Ask for a long answer, wait until it is being made, and hang up."""
    body = {"messages": [{"role": "user", "content": "goodbye"}], "max_tokens": LONG_ANSWER}
    body["temperature"] = 0  # or it may end at once, by chance
    text = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
    before = served.engine.status()["steps"]
    with socket.create_connection((served.server.host, served.server.port)) as connection:
        connection.sendall(head.encode() + text)
        served.until(lambda now: now["running"] == 1 and now["steps"] >= before + 3)


def test_32_clients_on_a_pool_that_preempts_get_what_each_would_get_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = "All of these begin alike, over more than two blocks of rows. "
    texts = [
        (shared if number % 3 == 0 else "") + f"{number} " + "again " * (number % 11)
        for number in range(30)
    ]
    texts += [texts[0], texts[7]]
    crowded, lonely = tmp_path / "crowded.log", tmp_path / "lonely.log"
    with (
        serving(folder, num_blocks=48, prefill_chunk=32, capture=str(crowded)) as crowd,
        ThreadPoolExecutor(len(texts)) as clients,
    ):
        together = list(clients.map(lambda job: one_of_32(crowd, *job), enumerate(texts)))
        status = crowd.idle()
    assert status["preemptions"] > 0
    with serving(folder, num_blocks=400, prefix_cache=False, capture=str(lonely)) as quiet:
        alone = [text_of(quiet.ask(text, max_tokens=48)) for text in texts]
        assert quiet.engine.status()["preemptions"] == 0
    wanted = {taped.prompt: taped for taped in on_tape(lonely).values()}
    flipped = sum(flips(taped, wanted[taped.prompt]) for taped in on_tape(crowded).values())
    assert replayed(crowded) == [0, 0]
    with capsys.disabled():
        print(f"\n{flipped} of 32 flipped, {status['preemptions']} preemptions")
    if not flipped:
        assert together == alone
    # Or else equal answers would say little.
    assert len(set(alone)) >= 20


def one_of_32(served: Served, number: int, text: str) -> str:
    """An answer of 48 tokens; every other one is streamed."""
    if number % 2:
        return streamed(served, text, max_tokens=48)[0]
    return text_of(served.ask(text, max_tokens=48))


def test_stopping_a_busy_server_tells_its_client_and_ends_the_tape(
    folder: Path, tmp_path: Path
) -> None:
    tape = tmp_path / "capture.log"
    with serving(folder, num_blocks=400, capture=str(tape)) as served:
        answer = served.ask("x", max_tokens=LONG_ANSWER, stream=True)
        assert next(answer).choices[0].delta.role == "assistant"
        served.server.begin_stop()
        with pytest.raises(openai.APIError, match="stopping"):
            list(answer)
    assert isinstance(list(Tape(str(tape)))[-1], TapeEnded)
    assert replayed(tape) == [0, 0]
