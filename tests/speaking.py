"""Scripted engines whose answers are exact texts, for models that think and call tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from server.http.app import create_app
from server.settings import Settings

from .fake_engine import END, FakeEngine, byte_tokenizer
from .http_server import LiveServer, live_server

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %};{% endfor %}<assistant>"
)
"""Shows tools and calls in Hermes' format, and marks reasoning."""
MODEL = "talker"


class Speaking:
    """A live server over an engine that says `text`; `prompts` are those it was asked."""

    def __init__(self, server: LiveServer, engine: FakeEngine) -> None:
        self.url = server.url
        self.engine = engine

    @property
    def prompts(self) -> list[str]:
        """The prompts as text, in order."""
        requests = self.engine.requests.values()
        return [self.engine.tokenizer.decode(it.submission.tokens) for it in requests]


@contextmanager
def speaking(text: str, template: str = TEMPLATE, *, fails: bool = False) -> Iterator[Speaking]:
    """Serve an engine that answers everything with `text`, and fails behind it if `fails`."""
    tokenizer, said = byte_tokenizer(template), text + ("" if fails else END)
    settings = Settings(grace_s=0.0)
    with FakeEngine(tokenizer, lambda _: tokenizer.encode(said)) as engine:
        app = create_app(engine, tokenizer, MODEL, settings)
        with live_server(app, settings) as server:
            yield Speaking(server, engine)
