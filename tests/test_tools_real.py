"""Forced calls by the bundled model, whose template knows no tools: a grammar makes it call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic

from kernel.blas import load_blas

load_blas()  # before real_server imports mlx

from .real_server import SMOLLM2, replayed, serving  # noqa: E402

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TEXT = "What will the weather be in Rome in the next 3 days?"


def check(arguments: Any) -> None:
    assert sorted(arguments) == ["city", "days"]
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9


def test_the_bundled_model_calls_where_it_must_through_every_endpoint(tmp_path: Path) -> None:
    with serving(SMOLLM2, num_blocks=256, capture=str(tmp_path / "tape.log")) as served:
        chat = {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"}
        answer = served.ask(TEXT, max_tokens=100, parallel_tool_calls=False, **chat)
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert call.function.name == "get_weather"
        check(json.loads(call.function.arguments))

        create: Any = served.client.responses.create
        flat = {"type": "function", **WEATHER}
        named = {"type": "function", "name": "get_weather"}
        response = create(
            model=served.model,
            input=TEXT,
            tools=[flat],
            tool_choice=named,
            temperature=0,
            max_output_tokens=100,
        )
        (item,) = response.output
        assert (response.status, item.type, item.name) == (
            "completed",
            "function_call",
            "get_weather",
        )
        assert item.arguments == call.function.arguments

        url = str(served.client.base_url).removesuffix("/v1/")
        with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
            schema = WEATHER["parameters"]
            tool: Any = {"name": "get_weather", "description": "", "input_schema": schema}
            with client.messages.stream(
                model=served.model,
                max_tokens=100,
                extra_body={"temperature": 0},
                messages=[{"role": "user", "content": TEXT}],
                tools=[tool],
                tool_choice={"type": "tool", "name": "get_weather"},
            ) as stream:
                message = stream.get_final_message()
        (block,) = message.content
        assert block.type == "tool_use"
        assert message.stop_reason == "tool_use"
        check(block.input)
        served.idle()
    assert replayed(tmp_path / "tape.log") == [0, 0]
