"""Parts of an answer: joined by kind, in order."""

from __future__ import annotations

from server.dialects.parts import (
    Part,
    PlainSplitter,
    Reasoning,
    Text,
    ToolCall,
    ToolCallArguments,
    ToolCallBegun,
    Whole,
    join,
)


def test_parts_join_by_kind_and_calls_keep_their_order() -> None:
    parts: list[Part] = [
        Reasoning("I "),
        Text("Let me "),
        Reasoning("think"),
        ToolCallBegun(0, "call_a", "add"),
        ToolCallArguments(0, '{"x":'),
        ToolCallArguments(0, "1}"),
        Text("see."),
        ToolCallBegun(1, "call_b", "now"),
        ToolCallArguments(1, "{}"),
    ]
    calls = (ToolCall("call_a", "add", '{"x":1}'), ToolCall("call_b", "now", "{}"))
    assert join(parts) == Whole("Let me see.", "I think", calls)


def test_a_plain_answer_is_content_and_an_empty_piece_is_no_part() -> None:
    splitter = PlainSplitter()
    assert splitter.feed("<think>") == [Text("<think>")]
    assert splitter.feed("") == []
    assert splitter.finish() == []
