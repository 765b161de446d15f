"""Tool calls: every format of the table, wherever the text is cut; what is no call is content."""
# ruff: noqa: RUF001 - DeepSeek's markers have full-width bars

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.dialects.harmony import HarmonySplitter
from server.dialects.parts import Part, Splitter, ToolCallArguments, ToolCallBegun, Whole, join
from server.dialects.tool_bodies import Calls
from server.dialects.tool_formats import BARE_JSON, FORMATS, HARMONY, Format
from server.dialects.tools import OneCall, ToolSplitter

SCHEMAS = {
    "add": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        "required": ["x"],
    },
    "say": {"type": "object", "properties": {"text": {"type": "string"}}},
}
BY_NAME = {form.name: form for form in (*FORMATS, BARE_JSON)}


def splitter_of(form: Format) -> Splitter:
    numbers = count()

    def new_id() -> str:
        return f"id{next(numbers)}"

    if form is HARMONY:
        return HarmonySplitter(SCHEMAS, new_id)
    calls = Calls(SCHEMAS, new_id)
    return ToolSplitter(form.begin, form.noise, form.body, calls, bare=form.bare)


def split(form: str, pieces: list[str]) -> Whole:
    splitter = splitter_of(BY_NAME[form])
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    return join([*parts, *splitter.finish()])


def seen(form: str, text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, reasoning, [(name, arguments)])."""
    whole = split(form, [text])
    assert [call.id for call in whole.calls] == [f"id{at}" for at in range(len(whole.calls))]
    return whole.text, whole.reasoning, [(call.name, call.arguments) for call in whole.calls]


ADD, SAY = ("add", '{"x": 1, "y": 2}'), ("say", '{"text": "a } \\" <b>"}')
ANSWERS: dict[tuple[str, str], tuple[str, str, list[tuple[str, str]]]] = {
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "say", "arguments": {"text": "a } \\" <b>"}}\n</tool_call> Done.\n',
    ): ("Sure.Done.\n", "", [ADD, SAY]),
    (
        "hermes",
        '<tool_call>{"arguments": {"x": 1, "y": 2}, "name": "add"}</tool_call>',
    ): ("", "", [ADD]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1, \\"y\\": 2}"}</tool_call>',
    ): ("", "", [ADD]),
    (
        "hermes",
        '<tool_call>{"name": "add"}</tool_call>',
    ): ("", "", [("add", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"x": 1, "y": 2}, "id": "}"}\n'
        '{"name": "add", "arguments": {}}</tool_call>',
    ): ("", "", [ADD, ("add", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"text": "two\nlines\t"}}</tool_call>',
    ): ("", "", [("say", '{"text": "two\\nlines\\t"}')]),
    (
        "mistral",
        'Well [TOOL_CALLS] [{"name": "add", "arguments": {"x": 1, "y": 2}}, '
        '{"name": "say", "arguments": {"text": "a } \\" <b>"}, "id": "abcdefghi"}]',
    ): ("Well", "", [ADD, SAY]),
    (
        "mistral named",
        '[TOOL_CALLS]add[ARGS]{"x": 1, "y": 2}[TOOL_CALLS]say[CALL_ID]abcdefghi[ARGS]'
        '{"text": "a } \\" <b>"}',
    ): ("", "", [ADD, SAY]),
    (
        "bare json",
        '{"name": "add", "parameters": {"x": 1, "y": 2}}; '
        '{"type": "function", "function": "say", "parameters": {"text": "a } \\" <b>"}}',
    ): ("", "", [ADD, SAY]),
    (
        "bare json",
        '<|python_tag|>{"name": "add", "parameters": {"x": 1, "y": 2}}',
    ): ("", "", [ADD]),
    (
        "token and array",
        '<|tool_call|>[{"name": "add", "arguments": {"x": 1, "y": 2}}]<|/tool_call|>',
    ): ("", "", [ADD]),
    (
        "function tags",
        "I add.\n\n<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<function=say><parameter=text>\n<a>\n</b>\n\n"
        "</parameter></function>",
    ): ("I add.", "", [ADD, ("say", '{"text": "<a>\\n</b>\\n"}')]),
    (
        "function tags",
        "<tool_call>\n<function=say>\n</function>\n</tool_call>",
    ): ("", "", [("say", "{}")]),
    (
        "invoke tags",
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="x">1</parameter>\n'
        '<parameter name="y">2</parameter>\n</invoke>\n</minimax:tool_call>',
    ): ("", "", [ADD]),
    (
        "argument tags",
        "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>y</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
    ): ("", "", [ADD]),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"x": 1, "y": 2}<|tool_call_end|><|tool_call_begin|>'
        'functions.say:1<|tool_call_argument_begin|>{"text": "a } \\" <b>"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ): ("", "", [ADD, SAY]),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 1, "y": 2}'
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>say<｜tool▁sep｜>{"text": "a } \\" <b>"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ): ("", "", [ADD, SAY]),
    (
        "deepseek fenced",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"x": 1, "y": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>say\n'
        '```json\n{"text": "a } \\" <b>"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ): ("", "", [ADD, SAY]),
    (
        "harmony",
        "<|channel|>analysis<|message|>They want a sum.<|end|><|start|>assistant<|channel|>"
        "commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"x": 1, "y": 2}',
    ): ("I add.", "They want a sum.", [ADD]),
    (
        "harmony",
        "<|channel|>final<|message|>Two < three.\n",
    ): ("Two < three.\n", "", []),
    (
        "harmony",
        ' to=functions.add<|channel|>commentary json<|message|>{"x": 1, "y": 2}<|end|>',
    ): ("", "", [ADD]),
}
NO_CALLS: list[tuple[str, str]] = [
    ("hermes", "a < b <tool and </tool_call> \n"),
    ("hermes", '\n<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>\n'),
    ("hermes", "<tool_call> {'name': 'add'} </tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"nam": "add"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments"'),
    ("hermes", '<tool_call>{"name": "\\q", "arguments": {"x": 1}}</tool_call>'),
    ("hermes", "<tool_call>"),
    ("mistral", '[TOOL_CALLS] "add"'),
    ("mistral named", "[TOOL_CALLS]add[ARG]{}"),
    ("mistral named", "[TOOL_CALLS]" + "x" * 600 + "[ARGS]{}"),
    ("bare json", '{"title": "add", "parameters": {}} \n'),
    ("bare json", '{"name": "Bob", "parameters": {}}'),
    ("bare json", ' \n{"name'),
    ("bare json", " \n"),
    ("bare json", 'No: {"name": "add", "parameters": {}}'),
    ("argument tags", "<tool_call>other\n<arg_key>x</arg_key></tool_call>"),
    ("harmony", "No channel at all"),
]
SAMPLES = [*ANSWERS, *NO_CALLS]


@pytest.mark.parametrize(("form", "text"), ANSWERS, ids=lambda value: value[:12])
def test_each_format_gives_its_content_reasoning_and_calls(form: str, text: str) -> None:
    assert seen(form, text) == ANSWERS[form, text]


@pytest.mark.parametrize(("form", "text"), NO_CALLS, ids=lambda value: value[:12])
def test_what_is_no_call_of_a_known_tool_is_content_as_it_stands(form: str, text: str) -> None:
    assert seen(form, text) == (text, "", [])


@pytest.mark.parametrize(("form", "text"), SAMPLES, ids=lambda value: value[:12])
def test_every_single_cut_and_one_character_at_a_time_give_the_same_parts(
    form: str, text: str
) -> None:
    whole = split(form, [text])
    assert split(form, list(text)) == whole
    for at in range(len(text)):
        assert split(form, [text[:at], text[at:]]) == whole


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SAMPLES), st.lists(st.integers(0, 400), max_size=12))
def test_any_cuts_give_the_same_parts(sample: tuple[str, str], cuts: list[int]) -> None:
    form, text = sample
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert split(form, pieces) == split(form, [text])


BITS = ["<tool_call>", "</tool_call>", '{"name": "add", "arguments": ', "{", "}", '"', "\\", " \n"]


HALF = '"\\ud800 arguments": 1, "name": "add"'
"""Half a UTF-16 pair, which JSON can carry and UTF-8 cannot."""
TAGS = [
    "<function=add>",
    "<parameter=x>",
    "</parameter>",
    "</function>",
    "<arg_key>",
    "<arg_value>",
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(BY_NAME)),
    st.lists(
        st.sampled_from(
            [*BITS, "[TOOL_CALLS]", "[ARGS]", "[", "]", ",", "add", "x", "<|", HALF, *TAGS]
        ),
        max_size=14,
    ),
)
def test_no_text_raises_or_depends_on_how_it_is_cut(form: str, bits: list[str]) -> None:
    text = "".join(bits)
    whole = split(form, [text])
    assert split(form, list(text)) == split(form, bits) == whole
    msgspec.json.encode(whole)


def fed(form: str, text: str) -> Iterator[list[Part]]:
    """What each character gives."""
    splitter = splitter_of(BY_NAME[form])
    for piece in text:
        yield splitter.feed(piece)


def test_a_call_begins_as_soon_as_its_name_is_known_and_its_arguments_stream() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"x": 1}}'
    parts = list(fed("hermes", text))
    opened = text.index('{"x"')
    begun = ToolCallBegun(0, "id0", "add")
    assert parts[:opened] == [[]] * opened
    assert parts[opened] == [begun, ToolCallArguments(0, "{")]
    assert parts[opened + 1 :] == [[ToolCallArguments(0, piece)] for piece in '"x": 1}'] + [[]]


def test_no_half_of_a_marker_is_ever_shown() -> None:
    splitter = splitter_of(BY_NAME["hermes"])
    assert [join(splitter.feed(piece)).text for piece in ["a <", "tool", "_", "x"]] == [
        "a",
        "",
        "",
        " <tool_x",
    ]


def test_json_that_is_no_call_streams_once_its_first_key_says_so() -> None:
    text = '{"title": 1, "x": 2}'
    shown = [join(parts).text for parts in fed("bare json", text)]
    assert "".join(shown[:7]) == ""
    assert shown[7] == '{"title"'
    assert "".join(shown[8:]) == ': 1, "x": 2}'


def test_an_answer_cut_in_a_call_keeps_what_the_model_wrote_of_it() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"x": 1, "y'
    assert seen("hermes", text) == ("", "", [("add", '{"x": 1, "y')])
    text = "<function=add><parameter=x>1</parameter><parameter=y>2"
    assert seen("function tags", text) == ("", "", [("add", '{"x": 1, "y": "2')])


def test_a_tagged_call_ends_at_what_is_no_tag_of_it() -> None:
    text = "<function=add><parameter=x>1</parameter>So <b>.</function>"
    assert seen("function tags", text) == ("So <b>.</function>", "", [("add", '{"x": 1}')])
    assert seen("argument tags", "<tool_call>add <b>") == ("<b>", "", [("add", "{}")])


def test_half_a_pair_in_arguments_stays_an_escape() -> None:
    text = '<tool_call>{"arguments": {"text": "é\\ud800"}, "name": "say"}</tool_call>'
    assert seen("hermes", text) == ("", "", [("say", '{"text": "\\u00e9\\ud800"}')])
    text = '<function=add><parameter=x>"\\ud800"</parameter></function>'
    assert seen("function tags", text) == ("", "", [("add", '{"x": "\\ud800"}')])


def test_json_nested_too_deeply_to_be_read_is_content() -> None:
    text = '<tool_call>{"arguments": ' + "[" * 9000 + "]" * 9000 + ', "name": "add"}</tool_call>'
    assert seen("hermes", text) == (text, "", [])


def test_arguments_that_break_once_they_stream_are_given_as_they_are() -> None:
    text = '<tool_call>{"name": "add", "arguments": {\'x\': 1}}</tool_call> So.'
    assert seen("hermes", text) == ("So.", "", [("add", "{'x': 1}")])


def test_a_second_call_that_is_none_is_content_behind_the_first() -> None:
    text = '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "no", "arguments": {}}]'
    expected = ('{"name": "no", "arguments": {}}]', "", [("add", "{}")])
    assert seen("mistral", text) == expected


def test_without_parallel_calls_what_follows_the_first_is_left_out() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    splitter = OneCall(splitter_of(BY_NAME["hermes"]))
    parts = [*splitter.feed("One" + call), *splitter.feed("two" + call + "three")]
    whole = join([*parts, *splitter.feed("four"), *splitter.finish()])
    assert (whole.text, [call.name for call in whole.calls]) == ("Onetwo", ["add"])
