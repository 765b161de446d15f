"""OpenAI's client on chat completions over the scripted engine: copies, logprobs, grammar, ids."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from server.http.asking import copy_seed
from statemachine.records import NO_LOGPROBS, NO_PARENT

from .fake_engine import FakeEngine, byte_tokenizer, scripted
from .test_openai_client import MODEL, PROMPT_TOKENS, QUESTION, client_of


def create(client: openai.OpenAI, **fields: Any) -> Any:
    ask: Any = client.chat.completions.create
    return ask(model=MODEL, messages=QUESTION, **fields)


def the_request(engine: FakeEngine) -> Any:
    (request,) = engine.requests.values()
    return request.submission


def test_n_choices_have_seeds_of_their_own_and_one_prompt_between_them() -> None:
    with scripted("ok") as engine, client_of(engine) as client:
        answer = create(client, n=3, seed=-1)
        submissions = [request.submission for request in engine.requests.values()]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["ok"] * 3
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    assert [it.parent for it in submissions] == [NO_PARENT, 0, 0]
    assert len({it.tokens for it in submissions}) == 1
    own = 2**64 - 1
    seeds = [it.parameters.seed for it in submissions]
    assert seeds == [own, copy_seed(own, 1), copy_seed(own, 2)]
    assert len(set(seeds)) == 3
    assert [it.external_id for it in submissions] == [answer.id, f"{answer.id}/1", f"{answer.id}/2"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, 6)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_each_choice_of_a_stream_has_its_own_role_text_and_end() -> None:
    with scripted("ab") as engine, client_of(engine) as client:
        options = {"include_usage": True}
        chunks = list(create(client, n=2, stream=True, stream_options=options))
    *parts, last = chunks
    seen: dict[int, list[tuple[Any, Any, Any]]] = {}
    for part in parts:
        (choice,) = part.choices
        delta = choice.delta
        seen.setdefault(choice.index, []).append((delta.role, delta.content, choice.finish_reason))
    one = [
        ("assistant", "", None),
        (None, "a", None),
        (None, "b", None),
        (None, None, "stop"),
    ]
    assert seen == {0: one, 1: one}
    assert last.choices == []
    assert last.usage.completion_tokens == 4


def test_choices_of_a_stream_come_as_they_are_made() -> None:
    tokenizer = byte_tokenizer()
    with FakeEngine(tokenizer) as engine, client_of(engine) as client:
        ask = engine.jobs.put

        def drive() -> None:
            first, second = engine.next_request(), engine.next_request()
            for request, text in ((second, b"2"), (first, b"1"), (second, b"22")):
                request.send(text)
            first.end()
            second.send(b"222")
            second.end("length")

        ask(drive)
        chunks = list(create(client, n=2, stream=True))
    told = [
        (choice.index, choice.delta.content, choice.finish_reason)
        for chunk in chunks
        for choice in chunk.choices
        if not choice.delta.role
    ]
    assert told == [
        (1, "2", None), (0, "1", None), (1, "22", None), (0, None, "stop"),
        (1, "222", None), (1, None, "length"),
    ]  # fmt: skip


def test_a_choice_that_fails_ends_the_others() -> None:
    with FakeEngine(byte_tokenizer()) as engine, client_of(engine) as client:

        def drive() -> None:
            first, second = engine.next_request(), engine.next_request()
            first.send(b"a")
            second.end("error", "It broke.")

        engine.jobs.put(drive)
        with pytest.raises(openai.InternalServerError, match=r"It broke\."):
            create(client, n=2)
    assert engine.cancels_so_far() == [0]


def test_where_one_copy_is_refused_none_is_left() -> None:
    class Full(FakeEngine):
        def submit(self, submission: Any, sink: Any) -> int:
            if len(self.requests) == 2:
                self.refusal = openai_refusal()
            return super().submit(submission, sink)

    def openai_refusal() -> Any:
        from server.submission import RequestRefused

        return RequestRefused("2 wait.", "rate_limit_exceeded")

    with Full(byte_tokenizer()) as engine, client_of(engine) as client:
        with pytest.raises(openai.RateLimitError):
            create(client, n=3)
        assert engine.cancels_so_far() == [0, 1]


# Log-probabilities


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_each_token_its_bytes_and_the_likeliest(stream: bool) -> None:
    with scripted("aBé") as engine, client_of(engine) as client:
        answer = create(client, logprobs=True, top_logprobs=2, stream=stream)
        found = content_of(list(answer) if stream else [answer])
        assert the_request(engine).parameters.logprobs == 2
    assert found == [
        ("a", [97], -0.25, [("a", [97], -0.25), ("b", [98], -0.5)]),
        ("B", [66], -9.0, [("C", [67], -0.25), ("D", [68], -0.5)]),
        ("\\xc3", [0xC3], -9.0, [("\\xc4", [0xC4], -0.25), ("\\xc5", [0xC5], -0.5)]),
        ("\\xa9", [0xA9], -0.25, [("\\xa9", [0xA9], -0.25), ("\\xaa", [0xAA], -0.5)]),
    ]


def content_of(bodies: list[Any]) -> list[Any]:
    """All entries of the one choice."""
    return [
        (
            entry.token,
            entry.bytes,
            entry.logprob,
            [(top.token, top.bytes, top.logprob) for top in entry.top_logprobs],
        )
        for body in bodies
        for choice in body.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]


def test_logprobs_alone_tell_no_others() -> None:
    with scripted("a") as engine, client_of(engine) as client:
        answer = create(client, logprobs=True)
        assert the_request(engine).parameters.logprobs == 0
    assert content_of([answer]) == [("a", [97], -0.25, [])]


def test_without_logprobs_there_are_none() -> None:
    with scripted("a") as engine, client_of(engine) as client:
        answer = create(client, logprobs=False)
        assert the_request(engine).parameters.logprobs == NO_LOGPROBS
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("DEFGHI", "x ", ["x", " "]),
        ("EFGH", "x D", ["x", " ", "DEF"]),
        ("x", "", []),
        ("DEFGHX", "x DEFGHI y", ["x", " ", "DEF", "G", "HI", " ", "y"]),
    ],
)
def test_no_token_is_told_that_a_stop_string_cut_away(
    stop: str, text: str, tokens: list[str], stream: bool
) -> None:
    with scripted("x DEFGHI y") as engine, client_of(engine) as client:
        answer = create(client, logprobs=True, stop=stop, stream=stream)
        bodies = list(answer) if stream else [answer]
    if stream:
        shown = "".join(choice.delta.content or "" for it in bodies for choice in it.choices)
    else:
        shown = answer.choices[0].message.content
    assert shown == text
    assert [entry[0] for entry in content_of(bodies)] == tokens


# Other parameters


def test_penalties_bias_and_order_reach_the_engine_as_they_were_sent() -> None:
    body = {
        "repetition_penalty": 1.5, "top_k": 7, "min_p": 0.1, "priority": -3, "ignore_eos": True,
    }  # fmt: skip
    with scripted("a") as engine, client_of(engine) as client:
        create(
            client,
            frequency_penalty=-2,
            presence_penalty=0.5,
            logit_bias={"9": -100, "5": 1.5},
            max_tokens=1,
            user="me",
            metadata={"a": "b"},
            store=True,
            extra_body=body,
        )
        parameters = the_request(engine).parameters
    assert (parameters.frequency_penalty, parameters.presence_penalty) == (-2.0, 0.5)
    assert parameters.logit_bias == ((5, 1.5), (9, -100.0))
    assert (parameters.repetition_penalty, parameters.top_k, parameters.min_p) == (1.5, 7, 0.1)
    assert (parameters.priority, parameters.end_tokens) == (-3, ())


def test_a_format_reaches_the_engine_as_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with scripted("a") as engine, client_of(engine) as client:
        create(client, response_format=wanted)
        grammar = the_request(engine).parameters.grammar
        with pytest.raises(openai.BadRequestError) as refusal:
            create(client, extra_body={"guided_regex": "("})
        assert refusal.value.param == "guided_regex"
    assert grammar == '{"json_schema":{"type":"object","properties":{"a":{"type":"integer"}}}}'


def test_max_tokens_0_is_an_answer_without_text_that_ends_by_length() -> None:
    with scripted("abc") as engine, client_of(engine) as client:
        answer = create(client, max_tokens=0, logprobs=True)
        assert the_request(engine).parameters.max_tokens == 1
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.logprobs.content == []
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, 0)


def test_the_fingerprint_goes_with_what_answers_and_nothing_else() -> None:
    found = []
    for identity in ("mlxtape 1 weights=a", "mlxtape 1 weights=a", "mlxtape 1 weights=b"):
        with scripted("a") as engine:
            engine.identity = identity
            with client_of(engine) as client:
                whole = create(client)
                chunks = list(create(client, stream=True))
        assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
        found.append(whole.system_fingerprint)
    assert found[0] == found[1] != found[2]
    assert found[0].startswith("fp_")


def test_a_request_id_names_the_response_and_the_request_on_tape() -> None:
    with scripted("a") as engine, client_of(engine) as client:
        answer = create(client, extra_headers={"x-request-id": "mine-7"})
        assert the_request(engine).external_id == "chatcmpl-mine-7"
    assert answer.id == "chatcmpl-mine-7"
