"""Dialect: how one model's chat template wants to be spoken to, and how its answers are read.

Owns what is found out about a template: by its markers, and by rendering it with a tool and a call
made up for it. Never looks at a model's name. Makes prompts, splitters and grammars for requests.

A template that does not show tools (SmolLM2's) gets them in Hermes' words in the system message;
calls and their results then stand in the messages' text, in Hermes' words too.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from attrs import frozen

from kernel.errors import TemplateError
from kernel.grammar import check_grammar, lark_term
from kernel.tokenizer import Tokenizer

from ..http.wire import ApiError
from . import hermes
from .harmony import HarmonySplitter
from .parts import PlainSplitter, Splitter
from .reasoning import ReasoningMarkers, ReasoningSplitter, reasoning_markers
from .tool_bodies import Calls
from .tool_formats import HARMONY, HERMES, Format, format_of
from .tool_grammar import json_term
from .tools import AUTO, OneCall, Tool, ToolChoice, ToolSplitter

Turn = Mapping[str, Any]
"""A message as templates take it, in OpenAI's shape; a call's arguments are JSON text."""

SHORT_ID_CHARACTERS = 9


@frozen
class Prompt:
    """A rendered conversation: its tokens, the grammar of what must follow ("" for anything), and
    what makes a splitter for each of its answers.
    """

    tokens: tuple[int, ...]
    grammar: str
    splitter: Callable[[], Splitter]


@frozen(slots=False)
class Dialect:
    """See the module. shows_tools: the template does; json_arguments: it wants JSON text there;
    takes_system: it does not refuse a system message.
    """

    tokenizer: Tokenizer
    format: Format
    reasoning: ReasoningMarkers | None
    shows_tools: bool
    json_arguments: bool
    takes_system: bool

    def prompt(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Tool] = (),
        choice: ToolChoice = AUTO,
        *,
        parallel: bool = True,
        grammar: str = "",
        prefill: str = "",
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> Prompt:
        """The prompt of `turns`; `extra` are template variables. Raises ApiError (400, messages).

        choice none leaves the tools out. parallel false: one call at most. grammar: of the content
        (kernel.grammar); a JSON one leaves room for reasoning before it and calls in its place,
        any other is the grammar of the whole answer. choice required goes before it. prefill: how
        the answer begins; its splitter sees only what follows.
        """
        offered = () if choice.kind == "none" else tuple(tools)
        text = self.render(turns, offered, extra)
        opened = self.reasoning is not None and self.reasoning.opened_by(text)
        if prefill and self.reasoning and opened:
            text, opened = f"{text.rstrip()}\n{self.reasoning.end}\n\n", False
        text += prefill
        tokens = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        if not tokens:
            raise ApiError("The messages make an empty prompt; send some text.", param="messages")
        called = [tool for tool in offered if choice.name in ("", tool.name)]
        many = parallel and not choice.name
        if choice.kind == "required":
            grammar = self._grammar(opened, called, many=many)
            if wrong := check_grammar(grammar):
                raise ApiError(f"The tools cannot be made a grammar: {wrong}.", param="tools")
        elif (term := _json_answer(grammar)) and (called or self.thinks):
            grammar = self._grammar(opened, called, many=many, answer=term)
        elif grammar:
            return Prompt(tokens, grammar, PlainSplitter)

        def splitter() -> Splitter:
            return self._splitter(offered, opened, parallel)

        return Prompt(tokens, grammar, splitter)

    @property
    def thinks(self) -> bool:
        """Whether reasoning may come before an answer."""
        return self.reasoning is not None or self.format is HARMONY

    def render(self, turns: Sequence[Turn], tools: Sequence[Tool], extra: Mapping[str, Any]) -> str:
        """The prompt's text. Raises ApiError (400, messages)."""
        variables = dict(extra)
        if self.shows_tools:
            turns = [self._with_arguments(turn, index) for index, turn in enumerate(turns)]
            if tools:
                variables["tools"] = [tool.for_template() for tool in tools]
        else:
            turns = hermes.in_words(turns, tools, system=self.takes_system)
        try:
            return self.tokenizer.render_chat(turns, **variables)
        except TemplateError as error:
            reason = str(error)
            message = reason[:1].upper() + reason[1:].rstrip(".") + "."
            raise ApiError(message, param="messages") from None

    def _with_arguments(self, turn: Turn, index: int) -> Turn:
        """The turn with its calls' arguments as the template wants them."""
        if self.json_arguments or not turn.get("tool_calls"):
            return turn
        calls = []
        for at, call in enumerate(turn["tool_calls"]):
            function = call["function"]
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                param = f"messages[{index}].tool_calls[{at}].function.arguments"
                raise ApiError(f"{param} must be the text of a JSON object.", param=param)
            calls.append({**call, "function": {**function, "arguments": arguments}})
        return {**turn, "tool_calls": calls}

    def _splitter(self, tools: Sequence[Tool], opened: bool, parallel: bool) -> Splitter:
        schemas = {tool.name: tool.parameters for tool in tools}
        inner: Splitter = PlainSplitter()
        if self.format is HARMONY:
            inner = HarmonySplitter(schemas, self._new_id)
        elif tools:
            form, calls = self.format, Calls(schemas, self._new_id)
            inner = ToolSplitter(form.begin, form.noise, form.body, calls, bare=form.bare)
        if tools and not parallel:
            inner = OneCall(inner)
        if self.reasoning is None or self.format is HARMONY:
            return inner
        return ReasoningSplitter(self.reasoning, inner, opened=opened)

    def _new_id(self) -> str:
        if not self.format.short_ids:
            return "call_" + secrets.token_hex(12)
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(SHORT_ID_CHARACTERS))

    def _grammar(self, opened: bool, tools: Sequence[Tool], *, many: bool, answer: str = "") -> str:
        """What must follow the prompt: a call of `tools`, or an `answer` (a Lark term) if there is
        one; a model that thinks may do so before.
        """
        rules = [self.format.grammar(tools, self.spell, many=many)] if tools else []
        starts = ["calls"] if tools else []
        if answer:
            starts.append("answer")
            head = "<|channel|>final<|message|>" if self.format is HARMONY else ""
            rules.append(f"answer: {self.spell(head)} {answer}")
        thought = ""
        if self.format is HARMONY:
            thought = f"({self.spell('<|channel|>analysis<|message|>')} thought)?"
            rules += self._until("<|end|><|start|>assistant")
        elif self.reasoning is not None:
            thought = "thought" if opened else f"({self.spell(self.reasoning.begin)} thought)?"
            rules += self._until(self.reasoning.end)
        start = f"start: {thought} ({' | '.join(starts)})"
        return json.dumps({"lark": "\n".join([start, *rules])})

    def _until(self, end: str) -> list[str]:
        """Lark rule `thought`: anything up to `end`, and line breaks behind it."""
        terms = self.spell(end)
        if terms.startswith('"'):
            return [f"thought: thinking /\\n*/\nthinking[suffix={terms}]: /(.|\\n)*/"]
        return [f"thought: /(.|\\n)*/ {terms} /\\n*/"]

    def spell(self, text: str) -> str:
        """`text` as Lark terms, its special tokens as the tokens that they are."""
        pieces = self._specials.split(text) if self._specials else [text]
        return " ".join(lark_term(self.tokenizer, piece) for piece in pieces if piece)

    @cached_property
    def _specials(self) -> re.Pattern[str] | None:
        """Finds the texts of special tokens; None where there are none."""
        known = self.tokenizer
        names = [
            text for text in known.added_tokens if known.added_token(text) in known.special_tokens
        ]
        longest_first = sorted(names, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if names else None


def _json_answer(grammar: str) -> str:
    """The Lark term of a grammar that wants JSON; empty for any other."""
    given = json.loads(grammar) if grammar else {}
    if "json_object" in given:
        return json_term({"type": "object"}, spaced=True)
    return json_term(given["json_schema"], spaced=True) if "json_schema" in given else ""


@lru_cache(maxsize=8)
def dialect_of(tokenizer: Tokenizer) -> Dialect:
    """What this tokenizer's chat template speaks; found out once."""
    tool = Tool("probe_tool", "", {"type": "object", "properties": {"probe_key": {}}})
    shows_tools = "probe_tool" in _probe(tokenizer, [_ASK], tools=[tool.for_template()])
    as_object = _probe(tokenizer, [_ASK, _call({"probe_key": 1})])
    as_text = _probe(tokenizer, [_ASK, _call('{"probe_key": 1}')])
    form = format_of(tokenizer.chat_template)
    return Dialect(
        tokenizer,
        form if shows_tools or form is HARMONY else HERMES,
        reasoning_markers(tokenizer),
        shows_tools,
        '"probe_key"' not in as_object and '"probe_key"' in as_text,
        "probe" in _probe(tokenizer, [{"role": "system", "content": "-"}, _ASK]),
    )


_ASK = {"role": "user", "content": "probe"}


def _call(arguments: object) -> dict[str, Any]:
    function = {"name": "probe_tool", "arguments": arguments}
    call = {"id": "probe0000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _probe(tokenizer: Tokenizer, turns: Sequence[Turn], **extra: Any) -> str:
    try:
        return tokenizer.render_chat(turns, **extra)
    except TemplateError:
        return ""
