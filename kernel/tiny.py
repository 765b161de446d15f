"""Tiny random models of mlx-lm's llama, float32: for tests and probes, in place of real weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama


def tiny_llama(
    seed: int = 0,
    *,
    tied: bool = True,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 32,
    vocab: int = 97,
    rope_scaling: dict[str, Any] | None = None,
    sliding_window: int | None = None,
    sliding_layers: tuple[int, ...] = (),
    max_positions: int = 2048,
) -> Any:
    """An mlx_lm llama whose weights depend on `seed` alone.

    `sliding_layers` are the layers with `sliding_window`; at least one layer must keep all rows.
    """
    kinds = [
        "sliding_attention" if i in sliding_layers else "full_attention" for i in range(layers)
    ]
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        rope_scaling=rope_scaling,
        tie_word_embeddings=tied,
        layer_types=kinds,
        sliding_window=sliding_window,
    )
    model = llama.Model(arguments)
    model.update(tree_unflatten(_random_weights(model, seed)))
    mx.eval(model.parameters())
    model.eval()
    return model


def _random_weights(model: Any, seed: int) -> list[tuple[str, mx.array]]:
    """Normal weights, wide enough that logits differ by whole numbers, not by rounding."""
    flat = list(dict(tree_flatten(model.parameters())).items())
    keys = mx.random.split(mx.random.key(seed), len(flat))
    weights = []
    for key, (name, value) in zip(keys, flat, strict=True):
        matrix = value.ndim > 1
        center, spread = (0.0, 2.0 * value.shape[-1] ** -0.5) if matrix else (1.0, 0.2)
        weights.append((name, center + spread * mx.random.normal(value.shape, key=key)))
    return weights
