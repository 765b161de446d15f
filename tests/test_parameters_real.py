"""The parameters of requests over the real server: what the answers are, not their shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replay.reader import Tape
from statemachine.events import Forked

from .real_server import SMOLLM2, Served, cached_of, replayed, serving, text_of, tiny_folder

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTION = "Name a colour."
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tape = tmp_path_factory.mktemp("tapes") / "parameters.log"
    with serving(SMOLLM2, num_blocks=128, capture=str(tape)) as served:
        yield served
        served.idle()
    assert replayed(tape) == [0, 0]


def complete(served: Served, prompt: Any, **fields: Any) -> Any:
    create: Any = served.client.completions.create
    return create(model=served.model, prompt=prompt, **({"temperature": 0} | fields))


def test_the_first_of_some_choices_is_what_its_seed_answers_alone(tmp_path: Path) -> None:
    body = {"temperature": 1, "seed": 11, "max_tokens": 24}
    tape = tmp_path / "capture.log"
    with serving(tiny_folder(tmp_path / "tiny"), num_blocks=64, capture=str(tape)) as served:
        alone = served.ask(QUESTION, extra_body={"cache_salt": "alone"}, **body)
        answers = [served.ask(QUESTION, n=3, **body) for _ in range(2)]
        served.idle()
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert texts[0][0] == text_of(alone)
    assert len(set(texts[0])) == 3
    assert {answer.usage.prompt_tokens for answer in (alone, *answers)} == {19 + len(QUESTION)}
    assert [cached_of(answer) for answer in answers] == [0, 32]
    assert sum(isinstance(event, Forked) for event in events_of(tape)) == 4
    assert replayed(tape) == [0, 0]


def events_of(tape: Path) -> Iterator[Any]:
    for record in Tape(str(tape)):
        yield from getattr(record, "events", ())


def test_logprobs_are_of_the_tokens_of_the_text_best_first(served: Served) -> None:
    answer = served.ask(QUESTION, logprobs=True, top_logprobs=4, max_tokens=12)
    entries = answer.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == text_of(answer)
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len(values) == 4
        # Greedy: the token is the likeliest.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0])
        assert sum(map(math.exp, values)) <= 1 + 1e-5


def test_an_echo_scores_a_text_as_its_generation_did(served: Served) -> None:
    made = complete(served, PROMPT, max_tokens=8, logprobs=1).choices[0]
    whole = complete(served, PROMPT + made.text, echo=True, logprobs=1, max_tokens=0)
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason) == (PROMPT + made.text, "length")
    assert whole.usage.completion_tokens == 0
    scores = choice.logprobs.token_logprobs
    assert scores[0] is None
    count = len(made.logprobs.tokens)
    assert choice.logprobs.tokens[-count:] == made.logprobs.tokens
    assert scores[-count:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
    offsets = choice.logprobs.text_offset
    texts = [choice.text[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)]
    assert texts == choice.logprobs.tokens
    # Computed and not adopted where scores are asked for, so again the same.
    again = complete(served, PROMPT + made.text, echo=True, logprobs=1, max_tokens=0)
    assert again.choices[0].logprobs.token_logprobs[1:] == pytest.approx(scores[1:], abs=1e-3)


def test_a_schema_is_followed_whatever_the_model_would_say(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    whole = served.ask(QUESTION, response_format=wanted, max_tokens=64)
    body = json.loads(text_of(whole))
    assert whole.choices[0].finish_reason == "stop"
    assert list(body) == ["name", "count"]
    assert body["name"] in ("red", "blue")
    assert isinstance(body["count"], int)
    chunks = served.ask(QUESTION, response_format=wanted, max_tokens=64, stream=True)
    text = "".join(it.choices[0].delta.content or "" for it in chunks if it.choices)
    assert json.loads(text) == body


def test_a_choice_of_texts_is_one_of_them(served: Served) -> None:
    for extra in ({"guided_choice": ["Paris!", "Rome?"]}, {"guided_regex": "(Paris!|Rome\\?)"}):
        answer = served.ask(QUESTION, max_tokens=16, extra_body=extra)
        assert text_of(answer) in ("Paris!", "Rome?")


def test_bias_bans_a_token_or_forces_it(served: Served) -> None:
    first = complete(served, PROMPT, max_tokens=1, logprobs=0)
    tokens = tokenize(served, PROMPT + first.choices[0].text)
    banned = complete(served, PROMPT, max_tokens=1, logit_bias={str(tokens[-1]): -100})
    assert banned.choices[0].text != first.choices[0].text
    (comma,) = tokenize(served, ",")
    forced = complete(served, PROMPT, max_tokens=5, logit_bias={str(comma): 100})
    assert forced.choices[0].text == ",,,,,"


def test_penalties_keep_an_answer_from_repeating_itself(served: Served) -> None:
    def tokens(**fields: Any) -> list[str]:
        prompt = "a b a b a b a b a b a b a b a"
        answer = complete(served, prompt, max_tokens=12, logprobs=0, **fields)
        told: list[str] = answer.choices[0].logprobs.tokens
        return told

    assert tokens() == [" b", " a"] * 6
    for fields in ({"frequency_penalty": 2}, {"presence_penalty": 2}):
        found = tokens(**fields)
        # The prompt does not count for these.
        assert found[:2] == [" b", " a"]
        assert found[2] != " b"
    assert tokens(extra_body={"repetition_penalty": 5})[0] != " b"


def tokenize(served: Served, text: str) -> list[int]:
    url = served.server.url + "/tokenize"
    response = served.client._client.post(url, json={"prompt": text})
    tokens: list[int] = response.json()["tokens"]
    return tokens


def test_texts_that_are_alike_have_vectors_that_are_alike(served: Served) -> None:
    texts = ["A cat sat on the mat.", "A cat sat on a mat.", "Interest rates fell by 2 %."]
    create = served.client.embeddings.create
    vectors = [entry.embedding for entry in create(model=served.model, input=texts).data]
    assert {len(vector) for vector in vectors} == {served.engine.embedding_size} == {576}
    cat, mat, rates = vectors
    assert cosine(cat, mat) > cosine(cat, rates)
    again = create(model=served.model, input=texts[0]).data[0].embedding
    assert cosine(again, cat) == pytest.approx(1, abs=1e-5)


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)
