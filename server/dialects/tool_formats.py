"""Tool formats: how the common families of models write calls; one table, FORMATS.

Owns what tells a format (texts in the chat template), its markers, its reader, and how a forced
call is written (tool_grammar.py has the words). A model's name says nothing: whoever brings the
template gets the format.
"""
# ruff: noqa: RUF001 - DeepSeek's markers have full-width bars

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from attrs import frozen

from .tool_bodies import Body, Calls, JsonCalls, NamedCall
from .tool_grammar import (
    ARGUMENT_TAGGED,
    FUNCTION_TAGGED,
    INVOKE_TAGGED,
    VALUE_RULES,
    Spell,
    json_call,
    named_call,
)
from .tool_tags import ARGUMENT_TAGS, FUNCTION_TAGS, INVOKE_TAGS, TaggedCall
from .tools import Tool


@frozen
class Format:
    """told_by: the template has all of these. bare: an answer may begin with { and be a call.

    short_ids: templates of this format take call ids of nine letters and digits only.
    call: the grammar of one call; `joined` are calls one after the other, `between` them a text.
    """

    name: str
    told_by: tuple[str, ...]
    begin: tuple[str, ...]
    body: Callable[[Calls], Body]
    call: Callable[[Tool, Spell], str]
    noise: tuple[str, ...] = ()
    between: str = "\n"
    before: str = ""
    behind: str = ""
    bare: bool = False
    short_ids: bool = False

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, many: bool) -> str:
        """Lark rule `calls` and those it needs: one call of `tools`, or several if `many`."""
        rules = [f"call_{index}: {self.call(tool, spell)}" for index, tool in enumerate(tools)]
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        more = f" ({spell(self.between)} call)*" if many and not self.bare else ""
        calls = f"calls: {spell(self.before)} call{more} {spell(self.behind)}"
        return "\n".join([calls, f"call: {names}", *rules, *VALUE_RULES])


HERMES = Format(
    name="hermes",
    told_by=("<tool_call>",),
    begin=("<tool_call>",),
    body=partial(JsonCalls, close="</tool_call>"),
    call=partial(json_call, before="<tool_call>\n", behind="\n</tool_call>"),
)
HARMONY = Format(
    name="harmony",
    told_by=("<|channel|>", "<|message|>"),
    begin=(),
    body=JsonCalls,
    call=partial(
        named_call,
        before="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    ),
    between="<|end|><|start|>assistant",
)
FORMATS = (
    HARMONY,
    Format(
        name="argument tags",
        told_by=("<arg_key>",),
        begin=("<tool_call>",),
        body=partial(TaggedCall, notation=ARGUMENT_TAGS),
        call=ARGUMENT_TAGGED,
    ),
    Format(
        name="invoke tags",
        told_by=("<minimax:tool_call>", "<invoke name="),
        begin=('<invoke name="',),
        noise=("<minimax:tool_call>", "</minimax:tool_call>"),
        body=partial(TaggedCall, notation=INVOKE_TAGS),
        call=INVOKE_TAGGED,
    ),
    Format(
        name="function tags",
        told_by=("<function=", "<parameter="),
        begin=("<function=",),
        noise=("<tool_call>", "</tool_call>"),
        body=partial(TaggedCall, notation=FUNCTION_TAGS),
        call=FUNCTION_TAGGED,
    ),
    Format(
        name="kimi",
        told_by=("<|tool_call_begin|>",),
        begin=("<|tool_call_begin|>",),
        noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        body=partial(
            NamedCall,
            head=re.compile(
                r"\s*(?:functions\.)?([\w-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
            ),
            closers=("<|tool_call_end|>",),
        ),
        call=partial(
            named_call,
            before="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
            behind="<|tool_call_end|>",
        ),
        before="<|tool_calls_section_begin|>",
        between="",
        behind="<|tool_calls_section_end|>",
    ),
    Format(
        name="deepseek fenced",
        told_by=("<｜tool▁call▁begin｜>", "```json"),
        begin=("<｜tool▁call▁begin｜>",),
        noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        body=partial(
            NamedCall,
            head=re.compile(r"\s*function<｜tool▁sep｜>\s*([\w-]+)\s*```json\s*"),
            closers=("```", "<｜tool▁call▁end｜>"),
        ),
        call=partial(
            named_call,
            before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            behind="\n```<｜tool▁call▁end｜>",
        ),
        before="<｜tool▁calls▁begin｜>",
        behind="<｜tool▁calls▁end｜>",
    ),
    Format(
        name="deepseek",
        told_by=("<｜tool▁call▁begin｜>",),
        begin=("<｜tool▁call▁begin｜>",),
        noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        body=partial(
            NamedCall,
            head=re.compile(r"\s*([\w-]+)\s*<｜tool▁sep｜>\s*"),
            closers=("<｜tool▁call▁end｜>",),
        ),
        call=partial(
            named_call,
            before="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
            behind="<｜tool▁call▁end｜>",
        ),
        before="<｜tool▁calls▁begin｜>",
        between="",
        behind="<｜tool▁calls▁end｜>",
    ),
    Format(
        name="mistral named",
        told_by=("[TOOL_CALLS]", "[ARGS]"),
        begin=("[TOOL_CALLS]",),
        body=partial(
            NamedCall, head=re.compile(r"\s*([\w-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*")
        ),
        call=partial(named_call, before="[TOOL_CALLS]NAME[ARGS]"),
        between="",
        short_ids=True,
    ),
    Format(
        name="mistral",
        told_by=("[TOOL_CALLS]",),
        begin=("[TOOL_CALLS]",),
        body=JsonCalls,
        call=json_call,
        before="[TOOL_CALLS][",
        between=", ",
        behind="]",
        short_ids=True,
    ),
    Format(
        name="token and array",
        told_by=("<|tool_call|>",),
        begin=("<|tool_call|>",),
        noise=("<|/tool_call|>",),
        body=JsonCalls,
        call=json_call,
        before="<|tool_call|>[",
        between=", ",
        behind="]",
    ),
    HERMES,
)
BARE_JSON = Format(
    name="bare json",
    told_by=(),
    begin=("<|python_tag|>",),
    body=JsonCalls,
    call=partial(json_call, key="parameters"),
    between="; ",
    bare=True,
)
"""Llama 3: a JSON object alone. Also of templates that show tools and have none of the markers."""


def format_of(template: str) -> Format:
    """The format that a chat template tells."""
    told = (each for each in FORMATS if all(text in template for text in each.told_by))
    return next(told, BARE_JSON)
