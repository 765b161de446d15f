"""Grammars: what is checked, which tokens may follow, and that answers match."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from msgspec import structs
from tokenizers import decoders, models

from kernel.batch import Batch
from kernel.grammar import MATCHERS_MAX, Grammars, check_grammar, lark_term
from kernel.masks import GrammarFailed, Words
from kernel.model_kernel import ModelKernel
from kernel.tokenizer import Tokenizer
from kernel.weights import load_model
from server.loop import FAILURES_MAX
from server.policy import Policy
from server.submission import RequestRefused
from statemachine.events import DRAFT
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters, StepFailed

from .paged import random_tokens
from .sim import Sim
from .wishes import OWNED, POLICIES, POLICY, VOCAB, assert_clean, run, tiny, tokenizer

WIDTH = -(-VOCAB // 32)
ENDS = (0, 2)
DIGITS = json.dumps({"regex": "[0-9]{3,5}"})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
OBJECT = json.dumps({"json_schema": SCHEMA})
PROMPTS = [tuple(random_tokens(seed, 3 + 4 * seed, VOCAB)) for seed in range(6)]


def wanted(grammar: str, max_tokens: int = 220, **values: Any) -> Parameters:
    return Parameters(max_tokens, grammar=grammar, end_tokens=ENDS, **values)


def tokens_of(words: Words | None) -> list[int]:
    assert words is not None
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def allowed(text: str, grammar: str, masks: Grammars | None = None, seq: int = 0) -> str:
    """The characters that may follow a text, as one string; $ for an end."""
    held, answer = masks or Grammars(tokenizer()), tuple(tokenizer().encode(text))
    found = tokens_of(held.allowed(seq, wanted(grammar), answer, len(answer), WIDTH))
    return "".join("$" if it in ENDS else tokenizer().decode([it]) for it in found)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (OBJECT, ""),
        ('{"json_object": {}}', ""),
        ('{"regex": "a+"}', ""),
        ('{"lark": "start: \\"a\\" b\\nb: \\"c\\""}', ""),
        ("no", "the grammar is no JSON object: Input data was truncated"),
        ("[]", "the grammar is no JSON object: Expected `object`, got `array`"),
        ("{}", "a grammar has one key of json_schema, json_object, lark, regex, not none"),
        (
            '{"regex": "a", "lark": "b"}',
            "a grammar has one key of json_schema, json_object, lark, regex, not regex, lark",
        ),
        ('{"json_schema": "x"}', "the grammar's json_schema is no object"),
        ('{"regex": {}}', "the grammar's regex is no text"),
        ('{"lark": "start: b"}', 'the grammar cannot be followed: at 1(8): unknown name: "b"'),
        (
            '{"json_schema": {"type": "strin"}}',
            "the grammar cannot be followed: Invalid type: strin",
        ),
        (
            '{"json_schema": {"not": {}}}',
            'the grammar cannot be followed: Unimplemented keys: ["not"]',
        ),
    ],
)
def test_a_grammar_is_checked_in_a_sentence(grammar: str, said: str) -> None:
    assert check_grammar(grammar) == said


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "(("},
        {"regex": "a" * 300_000},
        {"json_schema": {"enum": [str(number) * 9 for number in range(20_000)]}},
        {"lark": "start: /(?=a)/"},
        {"json_schema": {"$ref": "#/$defs/none"}},
        {"json_schema": {"$ref": "#"}},
        {"lark": "start: start"},
        {"regex": "[^\\s\\S]"},
        {"regex": "a{1000000}"},
    ],
)
def test_what_would_fail_later_is_found_before(grammar: dict[str, Any]) -> None:
    said = check_grammar(json.dumps(grammar))
    assert said
    assert "\n" not in said
    assert len(said) < 400


@pytest.mark.parametrize("levels", [200, 2000, 9000, 20_000])
def test_deeply_nested_grammars_are_refused_and_not_raised(levels: int) -> None:
    """Which library refuses which depth differs by Python; with 9,000 levels 3.13 once crashed."""
    deep = '{"json_schema": ' + '{"items": ' * levels + "{}" + "}" * levels + "}"
    said = check_grammar(deep)
    assert said.startswith(("the grammar is no JSON object: ", "the grammar cannot be followed: "))


def test_only_what_goes_on_may_follow_and_an_end_only_where_it_is_satisfied() -> None:
    assert allowed("", DIGITS) == "0123456789"
    assert allowed("12", DIGITS) == "0123456789"
    assert sorted(allowed("123", DIGITS)) == sorted("$$0123456789")
    assert allowed("12345", DIGITS) == "$$"


def test_the_requests_own_end_tokens_end_it_and_no_others() -> None:
    other = Parameters(9, grammar=DIGITS, end_tokens=(1,))
    answer = tuple(tokenizer().encode("12345"))
    masks = Grammars(tokenizer())
    assert tokens_of(masks.allowed(0, other, answer, 5, WIDTH)) == [1]
    found = tokens_of(masks.allowed(0, other, answer[:3], 3, WIDTH))
    assert [token for token in found if token in (0, 1, 2)] == [1]


def test_an_answer_may_go_back_and_forth_and_seats_may_be_taken_by_others() -> None:
    """Matchers are derived data: whatever was asked before, the same answer has the same mask."""
    masks = Grammars(tokenizer())
    texts = ["", "1", "12", "1", "19", "195", "12", "", "12345", "4"]
    for text in texts:
        assert allowed(text, DIGITS, masks) == allowed(text, DIGITS)
    for seq in range(1, MATCHERS_MAX + 5):
        assert allowed("12", DIGITS, masks, seq) == "0123456789"
    assert allowed("123", DIGITS, masks) == allowed("123", DIGITS)
    assert allowed("a", '{"regex": "ab"}', masks) == "b"


def test_a_guess_that_breaks_the_grammar_leaves_later_samples_free() -> None:
    masks, parameters = Grammars(tokenizer()), wanted(DIGITS)
    one, letter = tokenizer().encode("1x")
    assert masks.allowed(0, parameters, (one, letter), 1, WIDTH) is None
    assert masks.allowed(0, parameters, (one, letter, one), 1, WIDTH) is None
    assert masks.allowed(0, parameters, (one, one, one, 2, one), 3, WIDTH) is None
    assert allowed("11", DIGITS, masks) == "0123456789"
    with pytest.raises(GrammarFailed, match=r"token \d+ of the answer breaks it"):
        masks.allowed(0, parameters, (one, letter), 2, WIDTH)


def test_a_special_token_is_no_text_and_can_be_named() -> None:
    term = lark_term(tokenizer(), "<|im_start|>")
    assert (term, lark_term(tokenizer(), "<x>")) == ("<[1]>", '"<x>"')
    grammar = json.dumps({"lark": f'start: "a" {term} "b"'})
    masks = Grammars(tokenizer())
    a, start = tokenizer().encode("a<|im_start|>")
    assert tokens_of(masks.allowed(0, wanted(grammar), (a,), 1, WIDTH)) == [1]
    assert tokens_of(masks.allowed(0, wanted(grammar), (a, start), 2, WIDTH)) == [
        tokenizer().encode("b")[0]
    ]
    quoted = json.dumps({"lark": 'start: "<|im_start|>"'})
    assert allowed("", quoted) == "<"


def test_a_sentencepiece_vocabulary_is_followed_by_its_bytes() -> None:
    texts = ["<unk>", "</s>", "\u2581", "\u258112", "1", "2", "x", "<0x31>", "<0xC3>", "<0xA9>"]
    core = tokenizers.Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(texts)}, merges=[]))
    core.add_special_tokens(["<unk>", "</s>"])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    spm = Tokenizer(core, end_tokens=(1,))
    parameters = Parameters(9, grammar='{"regex": " [12]+\u00e9"}', end_tokens=(1,))
    masks = Grammars(spm)
    assert tokens_of(masks.allowed(0, parameters, (), 0, 1)) == [2, 3]
    assert tokens_of(masks.allowed(0, parameters, (2,), 1, 1)) == [4, 5, 7]
    assert tokens_of(masks.allowed(0, parameters, (3,), 1, 1)) == [4, 5, 7, 8]
    assert tokens_of(masks.allowed(0, parameters, (3, 8), 2, 1)) == [9]
    assert tokens_of(masks.allowed(0, parameters, (3, 8, 9), 3, 1)) == [1]


def _valid(tokens: tuple[int, ...]) -> None:
    jsonschema.validate(json.loads(tokenizer().decode(tokens)), SCHEMA)


ASKING = [
    (PROMPTS[0], wanted(OBJECT)),
    (PROMPTS[1], wanted(OBJECT, temperature=1.0, seed=4)),
    (PROMPTS[2], wanted(DIGITS, temperature=1.0, seed=5)),
    (PROMPTS[3], wanted(DIGITS, frequency_penalty=1.0)),
    (PROMPTS[3], Parameters(12)),
]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """What each of ASKING is answered with nobody beside it."""
    return [run([asked]).inboxes[0].tokens for asked in ASKING]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_answers_match_alone_and_together_and_replay_clean(
    policy: Policy,
    alone: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = run(ASKING, policy)
    assert [inbox.tokens for inbox in made.inboxes] == alone
    assert [inbox.reason for inbox in made.inboxes] == [*["stop"] * 4, "length"]
    _valid(made.inboxes[0].tokens)
    _valid(made.inboxes[1].tokens)
    for inbox in made.inboxes[2:4]:
        assert re.fullmatch("[0-9]{3,5}", tokenizer().decode(inbox.tokens))
    assert bool(made.appended(DRAFT)) == bool(policy.draft_tokens)
    assert_clean(made, tmp_path, monkeypatch)


def test_answers_match_over_the_models_own_caches_and_under_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = [(prompt, wanted(OBJECT, temperature=1.0, seed=8)) for prompt in PROMPTS[:4]]
    plain = [inbox.tokens for inbox in run(asking).inboxes]
    for tokens in plain:
        _valid(tokens)
    tight = run(asking, blocks=14)
    assert tight.status["preemptions"] > 0
    assert [inbox.tokens for inbox in tight.inboxes] == plain
    owned = run(asking, OWNED, owned=True)
    assert [inbox.reason for inbox in owned.inboxes] == ["stop"] * 4
    for inbox in owned.inboxes:
        _valid(inbox.tokens)
    assert_clean(owned, tmp_path, monkeypatch)


class Failing(Grammars):
    """Raises for some sequences."""

    def __init__(self, *given: Any, seqs: Collection[int] = (1,)) -> None:
        super().__init__(*given)
        self._seqs = seqs

    def allowed(self, seq: int, *rest: Any) -> Words | None:
        if seq in self._seqs:
            raise GrammarFailed("it is too complex")
        return super().allowed(seq, *rest)


def test_a_grammar_that_fails_ends_its_own_request_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.wishes.Grammars", Failing)
    made = run([(prompt, wanted(OBJECT)) for prompt in PROMPTS[:3]])
    assert [inbox.reason for inbox in made.inboxes] == ["stop", "error", "stop"]
    assert "the grammar cannot be followed: it is too complex" in made.inboxes[1].error
    (failed,) = [it for it in made.records if isinstance(it, StepFailed)]
    assert (failed.stage, failed.blamed) == ("build", (1,))
    assert_clean(made, tmp_path, monkeypatch, deep=False)


def test_any_number_of_failing_grammars_in_a_row_leaves_the_engine_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = range(FAILURES_MAX + 2)
    monkeypatch.setattr("tests.wishes.Grammars", functools.partial(Failing, seqs=failing))
    policy = structs.replace(POLICY, max_running=16)
    asking = [(PROMPTS[0], wanted(DIGITS))] * len(failing)
    made = run(asking, policy)
    assert [inbox.reason for inbox in made.inboxes] == ["error"] * len(failing)
    assert made.status["failed_steps"] == len(failing)
    assert made.healthy


def test_an_engine_without_grammars_refuses_them_and_so_does_one_without_an_end() -> None:
    with pytest.raises(RequestRefused, match="end token"):
        run([(PROMPTS[0], Parameters(4, grammar=DIGITS))])
    with pytest.raises(RequestRefused, match="unknown name"):
        run([(PROMPTS[0], wanted('{"lark": "start: b"}'))])
    kernel = ModelKernel(tiny(), Geometry(8, (Group(num_blocks=64),)), check=False)
    assert kernel.cannot["grammar"] == (
        "this engine was built without a tokenizer, which grammars need"
    )
    sim = Sim()
    monkey: Any = sim.engine
    monkey._limits = structs.replace(monkey._limits, cannot={"grammar": kernel.cannot["grammar"]})
    with pytest.raises(RequestRefused, match="without a tokenizer"):
        sim.submit([1, 2], 4, grammar=DIGITS, end_tokens=ENDS)
    assert sim.kernel.batches == list[Batch]()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "zip": {"type": "integer", "minimum": 0, "maximum": 99999},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_answers_by_a_schema_at_any_temperature() -> None:
    loaded = load_model("smollm2-135m")
    held = loaded.tokenizer
    prompt = tuple(
        held.apply_chat_template([{"role": "user", "content": "Describe a person as JSON."}])
    )
    grammar = json.dumps({"json_schema": PERSON})
    ends = held.end_tokens
    asking = [(prompt, Parameters(160, grammar=grammar, end_tokens=ends))]
    asking += [
        (prompt, Parameters(160, temperature=1.0, seed=seed, grammar=grammar, end_tokens=ends))
        for seed in range(8)
    ]
    policy = structs.replace(POLICY, max_running=32, context_tokens=512)
    made = run(asking, policy, blocks=1200, loaded=loaded)
    assert [inbox.reason for inbox in made.inboxes] == ["stop"] * 9
    texts = [held.decode(inbox.tokens) for inbox in made.inboxes]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 6
