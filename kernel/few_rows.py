"""A body for steps of few rows: a transformer of Llama's form in five launches a layer.

Owns which models have that form, what their layers say of themselves, and the comparison with the
model's own modules before use. mlx-lm's modules make fifteen launches a layer, and MLX takes 3 to
17 microseconds of the processor's time for each: more than an H200 needs to compute them. Caches
and attention are used as the modules use them. How many rows are few, the products say: on a CPU
with a unit for matrices, any number.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import frozen
from mlx.nn.layers.activations import silu
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import llama
from mlx_lm.models.rope_utils import Llama3RoPE

from .attention import dispatch
from .errors import describe
from .products import Norm, Products, Rope, Weights
from .split import Body

HEAD_STEP = 32
"""Heads have a multiple of as many numbers."""
FORMS = (llama.Model,)
"""Models whose body is: embedding, blocks of attention and gated network, norm."""
POSITION_MAX = 4096


@frozen(eq=False)
class _Layer:
    """What the products are given of a layer. out, down: weights that lead back from attention and
    network to what the layer was given.
    """

    attention: Any
    network: Any
    projections: Weights
    gates: Weights
    out: Weights
    down: Weights
    before: Norm
    between: Norm
    rope: Rope


class FewRows:
    """The body, of up to `rows_max` rows. Raises Unlike where a model is not of this form."""

    def __init__(self, model: Any, products: Products) -> None:
        if type(model) not in FORMS:
            raise Unlike(f"{type(model).__module__} is not known to be of this form")
        self._body = model.model
        self._products = products
        if self._body.swa_idx is not None:
            raise Unlike("its layers have windows")
        for it in self._body.layers:
            _check_form(it, products)
        self._layers = [_held(it, products) for it in self._body.layers]
        tied = model.args.tie_word_embeddings
        self._head_layer = self._body.embed_tokens if tied else model.lm_head
        self._head = products.hold_head(self._head_layer)

    @property
    def rows_max(self) -> int:
        return self._products.rows_max

    @property
    def makes_logits(self) -> bool:
        return self._head is not None

    def logits(self, hidden: mx.array) -> mx.array:
        """[T, vocab] of what left the body, [T, D]."""
        return self._products.multiplied(hidden, self._head)

    def __call__(self, tokens: mx.array, cache: Items[Any]) -> mx.array:
        """What leaves the body, [T, 1, D], of tokens [T, 1]."""
        hidden = self._body.embed_tokens(tokens[:, 0])
        for layer, held in zip(self._layers, cache, strict=True):
            hidden = self._layer(layer, hidden, held)
        normed: mx.array = self._body.norm(hidden)
        return normed[:, None]

    def _layer(self, layer: _Layer, hidden: mx.array, cache: Any) -> mx.array:
        products = self._products
        queries, keys, values = products.heads(
            hidden, layer.before, layer.projections, cache.offset, layer.rope
        )
        held = cache.update_and_fetch(keys, values)
        mixed = dispatch(queries, held[0], held[1], cache, layer.attention.scale, None)
        hidden = products.added(mixed, layer.out, hidden)
        gated = products.gated(hidden, layer.between, layer.gates)
        return products.added(gated, layer.down, hidden)

    def ending(self, rows: mx.array) -> Body:
        """The model's own layers, for a step of many rows of which `rows` alone are looked at: the
        last layer's network is for these. The others leave the body as zeros.
        """

        def body(tokens: mx.array, cache: Items[Any]) -> mx.array:
            hidden = self._body.embed_tokens(tokens)
            *blocks, last = self._body.layers
            for block, held in zip(blocks, cache[:-1], strict=True):
                hidden = block(hidden, None, held)
            mixed = last.self_attn(last.input_layernorm(hidden), None, cache[-1])
            kept = hidden[rows] + mixed[rows]
            kept = kept + last.mlp(last.post_attention_layernorm(kept))
            left = mx.zeros_like(hidden)
            left[rows] = self._body.norm(kept)
            return left

        return body

    def disagreement(self) -> str:
        """Why it must not be used, by the products of its first layer; empty where they agree."""
        rng = np.random.default_rng(0)
        layer = self._layers[0]
        for rows in self._products.checked_rows:
            apart = self._apart(layer, rows, rng)
            if not apart <= self._products.tolerance:
                return (
                    f"products of {rows} rows differ from the model's own by {apart:.2g} of a row"
                )
        return ""

    def _apart(self, layer: _Layer, rows: int, rng: np.random.Generator) -> float:
        attention, network, products = layer.attention, layer.network, self._products
        dtype = attention.o_proj.weight.dtype

        def random(count: int, width: int) -> mx.array:
            return mx.array(rng.standard_normal((count, width), np.float32)).astype(dtype)

        places = mx.array(rng.integers(0, POSITION_MAX, rows).astype(np.int32))
        width, inner = attention.q_proj.weight.shape[1], network.down_proj.weight.shape[1]
        x, base = random(rows, width) * 3, random(rows, width)
        mixed, gated = random(rows, attention.o_proj.weight.shape[1]), random(rows, inner)
        out, down, gates = layer.out, layer.down, layer.gates
        made = [
            *products.heads(x, layer.before, layer.projections, places, layer.rope),
            products.added(mixed, out, base),
            products.gated(x, layer.between, gates),
            products.added(gated, down, base),
        ]
        normed = mx.fast.rms_norm(x, layer.before.weights, layer.before.eps)
        heads = [
            it(normed).reshape(rows, -1, 1, layer.rope.dim)
            for it in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        normed = mx.fast.rms_norm(x, layer.between.weights, layer.between.eps)
        wanted = [
            *(attention.rope(it, offset=places) for it in heads[:2]),
            heads[2],
            base + attention.o_proj(mixed),
            silu(network.gate_proj(normed)) * network.up_proj(normed),
            base + network.down_proj(gated),
        ]
        if self.makes_logits:
            head = self._head_layer
            made.append(self.logits(x))
            wanted.append(x @ head.weight.T)
        return max(_far(one, other) for one, other in zip(made, wanted, strict=True))


class Unlike(Exception):
    """A model that is not of the form; the message says in what."""


def few_rows(model: Any, products: Products | None) -> tuple[FewRows | None, str]:
    """The body for few rows, compared with the model's own; else None, and why where it was
    expected to be used.
    """
    if products is None:
        return None, ""
    if reason := products.lacks(model):
        return None, reason
    try:
        body = FewRows(model, products)
        reason = body.disagreement()
    except Unlike:
        return None, ""
    except Exception as error:  # a kernel that does not compile, say
        return None, describe(error)
    return (None, reason) if reason else (body, "")


def _check_form(block: Any, products: Products) -> None:
    """Raise Unlike where products do not take all of a block."""
    attention, network = block.self_attn, block.mlp
    linear = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    linear += [network.gate_proj, network.up_proj, network.down_proj]
    dtype = linear[0].weight.dtype
    for it in linear:
        if type(it) is not Linear or "bias" in it:
            raise Unlike(f"{type(it).__name__} stands where a plain product is expected")
        same = it.weight.dtype == dtype and dtype in products.dtypes
        if not same or not products.takes(*it.weight.shape):
            raise Unlike(f"it has weights of {it.weight.shape} in {it.weight.dtype}")
    for it in (block.input_layernorm, block.post_attention_layernorm):
        if type(it) is not RMSNorm or it.weight.dtype != dtype:
            raise Unlike(f"{type(it).__name__} stands where an RMSNorm is expected")
    gate, up = network.gate_proj.weight.shape, network.up_proj.weight.shape
    if gate != up:
        raise Unlike(f"gates of {gate} and {up}")
    _rope_of(attention)


def _held(block: Any, products: Products) -> _Layer:
    """What the products need of a block."""
    attention, network = block.self_attn, block.mlp
    norms = [
        Norm(it.weight, float(it.eps))
        for it in (block.input_layernorm, block.post_attention_layernorm)
    ]
    return _Layer(
        attention=attention,
        network=network,
        projections=products.hold_projections(attention.q_proj, attention.k_proj, attention.v_proj),
        gates=products.hold_gates(network.gate_proj, network.up_proj),
        out=products.hold(attention.o_proj),
        down=products.hold(network.down_proj),
        before=norms[0],
        between=norms[1],
        rope=_rope_of(attention),
    )


def _rope_of(attention: Any) -> Rope:
    rope, dim = attention.rope, attention.head_dim
    if type(rope) is RoPE:
        rates = rope.scale * np.float64(rope.base) ** -(np.arange(0, rope.dims, 2) / rope.dims)
    elif type(rope) is Llama3RoPE:
        rates = 1.0 / np.array(rope._freqs, np.float64)
    else:
        raise Unlike(f"positions are turned by {type(rope).__name__}")
    if rope.dims != dim or dim % HEAD_STEP:
        raise Unlike(f"of heads of {dim}, {rope.dims} are turned")
    return Rope(dim, mx.array(rates.astype(np.float32)), bool(rope.traditional))


def _far(one: mx.array, other: mx.array) -> float:
    """The largest distance of two rows, relative to their length."""
    a, b = (np.array(it.astype(mx.float32)) for it in (one, other))
    far = np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-6)
    return float(far.max())
