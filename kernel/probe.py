"""Probe: a few tokens over pages against mlx-lm's own caches, before anything is served.

Owns the comparison only; uses small pages of its own.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from msgspec import structs

from statemachine.events import Namespace
from statemachine.geometry import Geometry
from statemachine.sequence import Sequence

from .batch import Batch, Piece
from .context import StepContext
from .errors import ModelError
from .forward import Forward
from .metadata import build
from .pages import LayerShape, Pages

PROMPT_ROWS = 6
DECODE_ROWS = 2
TOLERANCE = 1e-3
"""Of the largest logit, in float32; wider types are given their own precision on top."""
BLOCK_SIZE = 4
"""Small, so that a few rows cross blocks."""


def probe(
    model: Any, forward: Forward, geometry: Geometry, shapes: tuple[LayerShape, ...]
) -> float:
    """Largest difference of logits, relative to the largest logit. Raises ModelError above
    TOLERANCE: this architecture is not served right over pages.
    """
    total = PROMPT_ROWS + DECODE_ROWS
    tokens = [(7 * place + 3) % min(model.args.vocab_size, 1000) for place in range(total)]
    wanted = _dense(model, tokens)
    got = _paged(forward, _small(geometry, total), shapes, tokens)
    worst = float(np.abs(got - wanted).max() / max(1.0, float(np.abs(wanted).max())))
    tolerance = TOLERANCE + 16 * float(mx.finfo(shapes[0].dtype).eps)
    if not worst <= tolerance:
        raise ModelError(
            f"{model.model_type} over pages differs from mlx-lm's own caches by {worst:.2g} of the "
            f"largest logit (at most {tolerance:.2g} is rounding): it cannot be served; please "
            "report the model"
        )
    return worst


def _small(geometry: Geometry, rows: int) -> Geometry:
    """The same groups in blocks of BLOCK_SIZE, twice as many as `rows` need."""
    blocks = 2 * -(-rows // BLOCK_SIZE)
    groups = tuple(structs.replace(group, num_blocks=blocks) for group in geometry.groups)
    return structs.replace(geometry, block_size=BLOCK_SIZE, groups=groups)


def _dense(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits after the prompt and after each further token: [1 + DECODE_ROWS, vocab]."""
    caches = make_prompt_cache(model)
    rows = [model(mx.array([tokens[:PROMPT_ROWS]]), cache=caches)[0, -1]]
    for token in tokens[PROMPT_ROWS:]:
        rows.append(model(mx.array([[token]]), cache=caches)[0, -1])
    return np.array(mx.stack(rows).astype(mx.float32))


def _paged(
    forward: Forward, geometry: Geometry, shapes: tuple[LayerShape, ...], tokens: list[int]
) -> np.ndarray[Any, Any]:
    pages = Pages(geometry, shapes)
    groups = geometry.groups
    tables = tuple(tuple(range(group.num_blocks))[::-2] for group in groups)
    rows = []
    done = 0
    for end in range(PROMPT_ROWS, len(tokens) + 1):
        sequence = Sequence(
            0, Namespace(), 0, committed=end, tables=tables, starts=(0,) * len(groups)
        )
        piece = Piece(sequence, tuple(tokens[done:end]), samples=1)
        step = pages.begin()
        logits, _, _ = forward.run(StepContext(build(Batch(end, (piece,)), geometry)), step)
        pages.commit(step)
        assert logits is not None
        rows.append(logits[0])
        mx.eval(rows)
        done = end
    return np.array(mx.stack(rows))
