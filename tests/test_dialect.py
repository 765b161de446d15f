"""Dialects: what is found out about a template, prompts with tools, grammars of forced calls."""
# ruff: noqa: RUF001 - DeepSeek's markers have full-width bars

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from kernel.grammar import check_grammar
from kernel.tokenizer import Tokenizer
from server.dialects.dialect import Dialect, dialect_of
from server.dialects.parts import Part, Whole, join
from server.dialects.tool_formats import BARE_JSON, FORMATS
from server.dialects.tools import AUTO, Tool, ToolChoice
from server.http.wire import ApiError

from . import templates
from .fake_engine import byte_tokenizer

ADD = Tool(
    "add",
    "Adds.",
    {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/number"}, "note": {"type": "string"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"number": {"type": "integer"}},
    },
)
SAY = Tool(
    "say",
    "Says.",
    {
        "type": "object",
        "properties": {"how": {"type": "string", "enum": ["loud", "low"]}},
        "required": ["how"],
        "additionalProperties": False,
    },
)
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


def called(arguments: str, call_id: str = "abcdefghi") -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return [*HI, {"role": "assistant", "content": "Sure.", "tool_calls": [call]}]


def results(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": text, "tool_call_id": "abcdefghi"} for text in texts]


def dialect(template: str) -> Dialect:
    return dialect_of(byte_tokenizer(template))


def prompt_of(template: str, *arguments: Any, **options: Any) -> str:
    found = dialect(template)
    return found.tokenizer.decode(found.prompt(*arguments, **options).tokens)


def test_each_format_is_told_by_its_template() -> None:
    assert {name: dialect(it).format.name for name, it in templates.BY_FORMAT.items()} == {
        form.name: form.name for form in (*FORMATS, BARE_JSON)
    }


def test_a_template_that_shows_no_tools_gets_them_in_hermes_words() -> None:
    found = dialect(templates.PLAIN)
    assert (found.format.name, found.shows_tools) == ("hermes", False)
    turns = [{"role": "system", "content": "Be kind."}, *called('{"x": 1}'), *results("2", "3")]
    prompt = prompt_of(templates.PLAIN, turns, [SAY])
    introduced, rest = prompt.split("\n</tool_call>;", 1)
    assert introduced.startswith("<system>Be kind.\n\nYou may call functions")
    assert json.dumps(SAY.for_template()) in introduced
    assert rest == (
        '<user>Hi;<assistant>Sure.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n'
        "</tool_call>;<user><tool_response>\n2\n</tool_response>\n"
        "<tool_response>\n3\n</tool_response>;<assistant>"
    )


def test_a_template_that_refuses_system_messages_gets_the_tools_from_the_user() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + templates.PLAIN
    )
    prompt = prompt_of(template, HI, [SAY])
    assert prompt.startswith("<user>You may call functions")
    assert prompt.endswith("</tool_call>\n\nHi;<assistant>")


def test_without_tools_the_prompt_is_the_templates_alone() -> None:
    assert prompt_of(templates.PLAIN, HI) == "<user>Hi;<assistant>"
    assert prompt_of(templates.HERMES, HI, [ADD], ToolChoice("none")) == "<user>Hi;<assistant>"


def test_arguments_are_objects_where_the_template_wants_objects() -> None:
    assert not dialect(templates.HERMES).json_arguments
    prompt = prompt_of(templates.HERMES, called('{"x": 1}'))
    assert prompt == (
        '<user>Hi;<assistant>Sure.<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>;'
        "<assistant>"
    )


def test_arguments_are_text_where_the_template_adds_texts() -> None:
    assert dialect(templates.DEEPSEEK).json_arguments
    assert '<｜tool▁sep｜>{"x": 1}<｜' in prompt_of(templates.DEEPSEEK, called('{"x": 1}'))


@pytest.mark.parametrize("arguments", ["{x}", "[1]"])
def test_arguments_that_are_no_object_are_refused_with_their_place(arguments: str) -> None:
    with pytest.raises(ApiError, match="must be the text of a JSON object") as refusal:
        dialect(templates.HERMES).prompt(called(arguments))
    assert refusal.value.param == "messages[1].tool_calls[0].function.arguments"


def test_ids_suit_the_template_that_will_get_them_back() -> None:
    for template, length in ((templates.MISTRAL, 9), (templates.HERMES, 29)):
        found = dialect(template)
        splitter = found.prompt(HI, [ADD]).splitter()
        begin = found.format.begin[0]
        text = f'{begin}{{"name": "add", "arguments": {{}}}}'
        (call,) = join([*splitter.feed(text), *splitter.finish()]).calls
        assert len(call.id) == length
        assert '"x": 1' in prompt_of(template, called('{"x": 1}', call.id))


def test_a_template_that_refuses_is_a_400_in_a_sentence() -> None:
    with pytest.raises(ApiError) as refusal:
        dialect(templates.MISTRAL).prompt(called('{"x": 1}', "short"))
    assert str(refusal.value) == (
        "The chat template refuses these messages: call ids have nine letters."
    )


def read(template: str, text: str, **options: Any) -> Whole:
    splitter = dialect(template).prompt(HI, [ADD, SAY], **options).splitter()
    parts: list[Part] = [part for character in text for part in splitter.feed(character)]
    return join([*parts, *splitter.finish()])


def test_a_prompt_that_opens_reasoning_makes_answers_begin_as_reasoning() -> None:
    whole = read(templates.THINKS, "Hm.\n</think>\n\nYes.")
    assert (whole.reasoning, whole.text) == ("Hm.", "Yes.")
    whole = read(templates.THINKS, 'Hm. <tool_call>{"name": "add", "arguments": {}}</tool_call>')
    assert (whole.text, whole.calls) == ("", ())


def test_a_prefilled_answer_closes_what_the_template_opened() -> None:
    prompt = prompt_of(templates.THINKS, HI, prefill="So")
    assert prompt == "<user>Hi;<assistant><think>\n</think>\n\nSo"
    assert read(templates.THINKS, " it is.", prefill="So") == Whole(" it is.", "", ())


def test_without_tools_markers_of_calls_are_content() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    splitter = dialect(templates.HERMES).prompt(HI, [ADD], ToolChoice("none")).splitter()
    assert join([*splitter.feed(text), *splitter.finish()]) == Whole(text, "", ())


MARKERS = [
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_call|>",
    "<|start|>",
    "<|end|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]


def marked_tokenizer(template: str) -> Tokenizer:
    """The byte-level one, with the formats' markers as special tokens."""
    return byte_tokenizer(template, MARKERS)


class Vocabulary:
    """A tokenizer as llguidance wants to see one."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        (self.eos_token_id,) = tokenizer.end_tokens
        self.special_token_ids = sorted(tokenizer.special_tokens)
        # It has no room for tokens as long as the longest of the fake ones.
        tokens = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.written_bytes(token)[:100] for token in tokens]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text)


def follows(tokenizer: Tokenizer, grammar: str, text: str) -> tuple[bool, bool]:
    """(whether `text` is allowed as far as it goes, whether the answer may end there)."""
    known = LLTokenizer(TokenizerWrapper(Vocabulary(tokenizer)))
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(json.loads(grammar)["lark"]))
    tokens = tokenizer.encode(text)
    taken = matcher.try_consume_tokens(tokens)
    assert not matcher.is_error(), matcher.get_error()
    return taken == len(tokens), matcher.is_accepting()


FORCED = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"x": 1, "note": "a"}}\n</tool_call>',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 1, "note": "a"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek fenced": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"x": 1, "note": "a"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1, "note": "a"}}]',
    "mistral named": '[TOOL_CALLS]add[ARGS]{"x": 1, "note": "a"}',
    "bare json": '{"name": "add", "parameters": {"x": 1, "note": "a"}}',
    "harmony": "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"x": 1, "note": "a"}',
    "function tags": "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n"
    "<parameter=note>\na\n</parameter>\n</function>\n</tool_call>",
    "invoke tags": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="x">1</parameter>\n'
    '<parameter name="note">a</parameter>\n</invoke>\n</minimax:tool_call>',
    "argument tags": "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>note</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"x": 1, "note": "a"}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "token and array": '<|tool_call|>[{"name": "add", "arguments": {"x": 1, "note": "a"}}]',
}


@pytest.mark.parametrize("form", templates.BY_FORMAT)
@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
def test_a_forced_call_follows_its_grammar_and_is_read_as_that_call(
    form: str, special: bool
) -> None:
    template = templates.BY_FORMAT[form]
    tokenizer = marked_tokenizer(template) if special else byte_tokenizer(template)
    prompt = dialect_of(tokenizer).prompt(HI, [ADD, SAY], ToolChoice("required"))
    assert check_grammar(prompt.grammar) == ""
    text = FORCED[form]
    assert follows(tokenizer, prompt.grammar, text) == (True, True)
    assert follows(tokenizer, prompt.grammar, "No.")[0] is False
    assert follows(tokenizer, prompt.grammar, text.replace("add", "sub"))[0] is False
    assert follows(tokenizer, prompt.grammar, text.replace("1", "true"))[0] is False
    splitter = prompt.splitter()
    said = tokenizer.decode(tokenizer.encode(text))
    whole = join([*splitter.feed(said), *splitter.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [
        ("add", {"x": 1, "note": "a"})
    ]
    assert (whole.text, whole.reasoning) == ("", "")


def test_a_named_choice_allows_one_call_of_that_tool_only() -> None:
    tokenizer = byte_tokenizer(templates.HERMES)
    prompt = dialect_of(tokenizer).prompt(HI, [ADD, SAY], ToolChoice("required", "say"))
    say = '<tool_call>\n{"name": "say", "arguments": {"how": "low"}}\n</tool_call>'
    assert follows(tokenizer, prompt.grammar, say) == (True, True)
    assert follows(tokenizer, prompt.grammar, FORCED["hermes"])[0] is False
    assert follows(tokenizer, prompt.grammar, f"{say}\n{say}")[0] is False


def test_required_calls_may_be_several_unless_they_must_not() -> None:
    tokenizer = byte_tokenizer(templates.HERMES)
    two = f"{FORCED['hermes']}\n{FORCED['hermes']}"
    for parallel in (True, False):
        grammar = (
            dialect_of(tokenizer)
            .prompt(HI, [ADD], ToolChoice("required"), parallel=parallel)
            .grammar
        )
        assert follows(tokenizer, grammar, two)[0] is parallel


def test_a_model_that_thinks_may_do_so_before_a_forced_call() -> None:
    for template, thought in (
        (templates.THINKS, "Hm.</think>\n\n"),
        (templates.HERMES + "{# <think> #}", "<think>\nHm.\n</think>\n\n"),
    ):
        for tokenizer in (byte_tokenizer(template), marked_tokenizer(template)):
            prompt = dialect_of(tokenizer).prompt(HI, [ADD], ToolChoice("required"))
            text = thought + FORCED["hermes"]
            assert follows(tokenizer, prompt.grammar, text) == (True, True)
            assert follows(tokenizer, prompt.grammar, thought + "No.")[0] is False
    assert follows(tokenizer, prompt.grammar, FORCED["hermes"]) == (True, True)


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
def test_a_model_of_channels_may_think_in_one_before_a_forced_call(special: bool) -> None:
    markers = MARKERS if special else ()
    tokenizer = byte_tokenizer(templates.HARMONY, markers)
    prompt = dialect_of(tokenizer).prompt(HI, [ADD], ToolChoice("required"))
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert follows(tokenizer, prompt.grammar, thought + FORCED["harmony"]) == (True, True)
    assert follows(tokenizer, prompt.grammar, thought + "No.")[0] is False


def test_an_answer_that_must_be_json_may_be_a_call_instead() -> None:
    tokenizer = byte_tokenizer(templates.HERMES)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = json.dumps({"json_schema": schema})
    prompt = dialect_of(tokenizer).prompt(HI, [ADD], AUTO, grammar=wanted)
    assert follows(tokenizer, prompt.grammar, '{"a": 1}') == (True, True)
    assert follows(tokenizer, prompt.grammar, FORCED["hermes"]) == (True, True)
    assert follows(tokenizer, prompt.grammar, "No.")[0] is False
    assert dialect_of(tokenizer).prompt(HI, grammar=wanted).grammar == wanted


def test_an_answer_that_must_match_anything_else_is_all_content() -> None:
    wanted = json.dumps({"regex": "[a-z<>]+"})
    found = dialect(templates.THINKS).prompt(HI, grammar=wanted)
    assert found.grammar == wanted
    splitter = found.splitter()
    assert join([*splitter.feed("a<think>b"), *splitter.finish()]) == Whole("a<think>b", "", ())


def test_tools_that_no_grammar_can_follow_are_refused() -> None:
    tool = Tool("odd", "", {"type": "object", "properties": {"x": {"type": "colour"}}})
    with pytest.raises(ApiError, match=r"The tools cannot be made a grammar: .*colour") as refusal:
        dialect(templates.HERMES).prompt(HI, [tool], ToolChoice("required"))
    assert refusal.value.param == "tools"
