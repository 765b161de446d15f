"""Asking: prompts of a real model, mlx-lm's dense answers, and the margin rule between the two."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from replay.cli import main as replay_command
from replay.reader import Tape
from server.policy import Policy
from statemachine.geometry import Geometry, Group
from statemachine.records import RequestArrived, StepDone, StepPlanned

from ..faults import loads, real
from ..faults.catalogue import BY_NAME
from ..faults.fault import Witness
from ..faults.loads import SMOLLM2, Load, Played, Request
from ..faults.runner import record

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
QUESTION_ROWS = 37
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 37, 41, 48, 64)
MARGIN = 0.05
"""Dense and paged scores differ by 1e-4 at most; a flip above this is no rounding."""

POLICY = Policy(max_batch_tokens=256, prefill_chunk=128, context_tokens=256)
POOL = Geometry(block_size=16, groups=(Group(num_blocks=128),))


@functools.cache
def question() -> tuple[int, ...]:
    """The question with SmolLM2's chat template: 37 tokens."""
    turns = [{"role": "user", "content": QUESTION}]
    return tuple(real.model(SMOLLM2).tokenizer.apply_chat_template(turns))


def end_tokens() -> tuple[int, ...]:
    """What ends an answer of SmolLM2."""
    return tuple(real.model(SMOLLM2).tokenizer.end_tokens)


def text(tokens: tuple[int, ...]) -> str:
    """An answer's text."""
    return str(real.model(SMOLLM2).tokenizer.decode(tokens))


def ask(at: int = 1, max_tokens: int = 12) -> Request:
    """The question as a greedy request."""
    return Request(question(), max_tokens, at=at, end_tokens=end_tokens())


def of_length(kernel: str, rows: int) -> tuple[int, ...]:
    """A prompt of `rows` tokens: the question's, cut or repeated; random for another model."""
    if kernel == SMOLLM2:
        return (question() * 2)[:rows]
    return loads.tokens(rows, rows)


def load(kernel: str, requests: tuple[Request, ...], policy: Policy = POLICY, **more: Any) -> Load:
    """A load on a roomy pool."""
    return Load("incident", requests, policy, more.pop("geometry", POOL), kernel=kernel, **more)


def neighbours() -> tuple[Request, ...]:
    """Seven requests that are unlike the question and each other."""
    lengths = (5, 80, 23, 16, 41, 64, 9)
    return tuple(
        Request(tuple(token + 40 * number for token in loads.tokens(rows, number)), 3)
        for number, rows in enumerate(lengths)
    )


@functools.cache
def dense(kernel: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What mlx-lm's own caches answer, alone and greedily, up to an end token of SmolLM2."""
    caches, fed, tokens = _caches(kernel), prompt, list[int]()
    ends = end_tokens() if kernel == SMOLLM2 else ()
    while len(tokens) < max_tokens:
        token = int(_scores(kernel, fed, caches)[-1].argmax())
        if token in ends:
            break
        tokens.append(token)
        fed = (token,)
    return tuple(tokens)


def flips(kernel: str, prompt: tuple[int, ...], got: tuple[int, ...]) -> int:
    """How many tokens of an answer mlx-lm's own caches would not have given at their place.

    Each is judged behind the tokens before it, by one dense forward, and fails above the margin.
    """
    assert got, "an answer without tokens agrees with anything"
    scores = _scores(kernel, (*prompt, *got[:-1]), _caches(kernel))[len(prompt) - 1 :]
    flipped = 0
    for place, (token, row) in enumerate(zip(got, scores, strict=True)):
        behind = float(row.max() - row[token])
        assert behind < MARGIN, f"token {place} of {got} is {behind:.3f} behind {row.argmax()}"
        flipped += int(row.argmax()) != token
    return flipped


def _caches(kernel: str) -> list[Any]:
    model = real.model(kernel).model
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def _scores(kernel: str, fed: tuple[int, ...], caches: list[Any]) -> Any:
    """Logits of each token fed: [n, vocab] float32."""
    model = real.model(kernel).model
    import mlx.core as mx
    import numpy as np

    return np.array(model(mx.array([fed]), cache=caches)[0].astype(mx.float32))


@frozen
class Seen:
    """What the caches saw of one piece: first position, rows, visible rows of its last one."""

    step: int
    sequence: int
    start: int
    rows: int
    visible: int
    offset_after: int


def pieces(tape: Path) -> Iterator[Seen]:
    """All pieces of a tape, in order, as observed. Every layer agrees on each, or this fails."""
    planned: StepPlanned | None = None
    for item in Tape(str(tape)):
        if isinstance(item, StepPlanned):
            planned = item
        if not isinstance(item, StepDone):
            continue
        assert planned is not None
        seen = item.observation
        rows = sum(seen.rows)
        assert seen.rows_updated == (rows, rows), "layers took different rows"
        assert seen.updates == (1, 1)
        assert seen.strangers == 0
        columns = zip(
            _batch_order(planned), seen.starts, seen.rows, seen.visible, item.offsets, strict=True
        )
        for seq, start, count, visible, offset in columns:
            yield Seen(item.step, seq, start, count, visible[0], offset)


def _batch_order(planned: StepPlanned) -> list[int]:
    order: dict[int, None] = {}
    for event in planned.events:
        if hasattr(event, "seqs"):
            order.update(dict.fromkeys(event.seqs))
        elif hasattr(event, "purpose"):
            order[event.seq] = None
    return list(order)


def prompts_of(tape: Path) -> dict[int, int]:
    """Prompt length by request."""
    arrived = [item for item in Tape(str(tape)) if isinstance(item, RequestArrived)]
    return {item.request: len(item.tokens) for item in arrived}


def replayed(tape: Path, kernel: str, depth: str, capsys: Any) -> tuple[int, dict[str, Any]]:
    """`replay TAPE --depth DEPTH --json`: its exit code and report."""
    capsys.readouterr()
    code = replay_command([str(tape), "--depth", depth, "--json", "--model", real.path_of(kernel)])
    return code, json.loads(capsys.readouterr().out)


def with_fault(name: str, asked: Load, tape: Path) -> tuple[Played, Witness]:
    """Play a load with a fault in."""
    witness = Witness()
    return record(asked, tape, BY_NAME[name], witness), witness
