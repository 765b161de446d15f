"""Chat templates in the manner of well-known families, as small as their format allows."""
# ruff: noqa: RUF001 - DeepSeek's markers have full-width bars

from __future__ import annotations

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}<assistant>"

PLAIN = TURNS
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %};{% endfor %}<assistant>"
)
THINKS = HERMES + "<think>\n"
DEEPSEEK = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>'"
    " + call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %};{% endfor %}<assistant>"
)
"""Adds texts, so that arguments must be one."""
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('call ids have nine letters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{% endfor %}]{% else %}<{{ m.role }}>{{ m.content }};{% endif %}'
    "{% endfor %}"
)
LLAMA = (
    '{% if tools %}Answer with {"name": ..., "parameters": ...}. {{ tools | tojson }}{% endif %}'
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %};{% endfor %}<assistant>"
)
HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{# answers begin with <|channel|> #}"
)
FUNCTION_TAGS = (
    "{% if tools %}{{ tools | tojson }} <tool_call><function=NAME><parameter=KEY>{% endif %}"
    + TURNS
)
INVOKE_TAGS = (
    "{% if tools %}{{ tools | tojson }} <minimax:tool_call><invoke name=NAME>{% endif %}" + TURNS
)
ARGUMENT_TAGS = "{% if tools %}{{ tools | tojson }} <tool_call><arg_key>{% endif %}" + TURNS
KIMI = "{% if tools %}{{ tools | tojson }} <|tool_call_begin|>{% endif %}" + TURNS
DEEPSEEK_FENCED = (
    "{% if tools %}{{ tools | tojson }} <｜tool▁call▁begin｜>```json{% endif %}" + TURNS
)
MISTRAL_NAMED = "{% if tools %}{{ tools | tojson }} [TOOL_CALLS]NAME[ARGS]{% endif %}" + TURNS
TOKEN_AND_ARRAY = "{% if tools %}{{ tools | tojson }} <|tool_call|>{% endif %}" + TURNS

BY_FORMAT = {
    "hermes": HERMES,
    "deepseek": DEEPSEEK,
    "deepseek fenced": DEEPSEEK_FENCED,
    "mistral": MISTRAL,
    "mistral named": MISTRAL_NAMED,
    "bare json": LLAMA,
    "harmony": HARMONY,
    "function tags": FUNCTION_TAGS,
    "invoke tags": INVOKE_TAGS,
    "argument tags": ARGUMENT_TAGS,
    "kimi": KIMI,
    "token and array": TOKEN_AND_ARRAY,
}
"""One for each format that server.dialects.tool_formats knows."""
