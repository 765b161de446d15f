"""The real server in this process: engine, ModelKernel, Hypercorn, OpenAI's client, tape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import openai
from attrs import field, frozen

from replay.cli import main as replay_command
from replay.reader import Tape
from replay.subset import batch_of
from server.build import build_engine
from server.engine import Engine
from server.http.app import create_app
from server.settings import Settings
from statemachine.events import Closed
from statemachine.records import RequestArrived, StepDone, StepPlanned

from .http_server import WAIT_S, LiveServer, live_server
from .tiny_models import ALPHABET, SPECIAL, tiny_config, tiny_weights, write_folder

SMOLLM2 = "smollm2-135m"
CONTEXT = 4096
MARGIN = 0.05
"""The two best scores of a token that may flip when a batch has another shape."""


def tiny_folder(path: Path, **changes: Any) -> Path:
    """A llama folder with random weights that answers in printable ASCII, a character a token.

    Scores are spread so wide that rounding hardly ever decides; the context is long enough that an
    answer is still being made when a test gives it up.
    """
    config = tiny_config(tie_word_embeddings=False, max_position_embeddings=CONTEXT, **changes)
    weights = tiny_weights(config, seed=3)
    head = np.array(weights["lm_head.weight"]) * 4
    printable = [len(SPECIAL) + place for place, char in enumerate(ALPHABET) if "!" <= char <= "~"]
    mask = np.zeros((config["vocab_size"], 1), dtype=np.float32)
    mask[printable] = 1
    weights["lm_head.weight"] = mx.array(head * mask)
    return write_folder(path, config, weights)


@frozen
class Served:
    """A running server, and the ways into it."""

    engine: Engine
    server: LiveServer
    client: openai.OpenAI
    model: str

    def ask(self, text: str, **fields: Any) -> Any:
        """A greedy completion of one user's message; `fields` go into the body."""
        return self.chat([{"role": "user", "content": text}], **fields)

    def chat(self, messages: list[Any], **fields: Any) -> Any:
        """A greedy completion."""
        body = {"model": self.model, "temperature": 0, "max_tokens": 16} | fields
        create: Any = self.client.chat.completions.create
        return create(messages=messages, **body)

    def until(self, holds: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Wait until the engine's counts are so; returns them."""
        end_s = time.monotonic() + WAIT_S
        while not holds(status := self.engine.status()):
            assert time.monotonic() < end_s, f"it never came to be: {status}"
            time.sleep(0.001)
        return status

    def idle(self) -> dict[str, int]:
        """Wait until nothing runs, then check that no block is held and none was lost."""
        status = self.until(lambda now: not (now["running"] or now["waiting"]))
        status = self.until(lambda now: now["held"] == 0)
        assert status["free"] + status["cached"] == status["num_blocks"]
        assert status["failed_steps"] == status["shadow_found"] == status["capture_failures"] == 0
        assert status["divergences"] == 0
        return status


@contextmanager
def serving(model: str | Path, **settings: Any) -> Iterator[Served]:
    """Serve a model with these settings while the block runs; the tape is whole afterwards."""
    chosen = Settings(model=str(model), grace_s=0.0, **settings)
    engine, tokenizer = build_engine(chosen)
    try:
        app = create_app(engine, tokenizer, chosen.model, chosen)
        with (
            live_server(app, chosen) as server,
            openai.OpenAI(
                base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=120.0
            ) as client,
        ):
            yield Served(engine, server, client, chosen.model)
    finally:
        engine.stop()


def text_of(answer: Any) -> str:
    """The text of a completion."""
    return str(answer.choices[0].message.content)


def cached_of(answer: Any) -> int:
    """Its cached_tokens."""
    return int(answer.usage.prompt_tokens_details.cached_tokens)


@frozen
class Taped:
    """A request on tape: its prompt, its answer and the margin of each token of it."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(factory=list)
    margins: list[float] = field(factory=list)


def on_tape(tape: Path) -> dict[int, Taped]:
    """All requests of a tape, by id."""
    found: dict[int, Taped] = {}
    orders: dict[int, list[int]] = {}
    ended: set[int] = set()
    for record in Tape(str(tape)):
        if isinstance(record, RequestArrived):
            found[record.request] = Taped(record.tokens)
        elif isinstance(record, StepPlanned):
            orders[record.step], _ = batch_of(record.events)
        elif isinstance(record, StepDone):
            rows = zip(record.sampled, record.tokens, record.margins, strict=True)
            order = orders.pop(record.step)
            for place, token, margin in rows:
                if order[place] not in ended:
                    found[order[place]].tokens.append(token)
                    found[order[place]].margins.append(margin)
        ended |= {it.seq for it in getattr(record, "events", ()) if isinstance(it, Closed)}
    return found


def flips(got: Taped, alone: Taped) -> int:
    """0 where an answer is the one made alone, 1 where it leaves it at a token that may flip.

    Fails where it leaves it anywhere else. What follows a flip is another text: not compared.
    """
    assert got.prompt == alone.prompt
    for place, token in enumerate(alone.tokens):
        if got.tokens[place : place + 1] != [token]:
            margin = alone.margins[place]
            assert margin < MARGIN, f"token {place}: {got.tokens} is not {alone.tokens}"
            return 1
    assert len(got.tokens) == len(alone.tokens)
    return 0


def replayed(tape: Path, *depths: str) -> list[int]:
    """Exit codes of `replay` at some depths."""
    return [replay_command([str(tape), "--depth", depth]) for depth in depths or ("fold", "plan")]
