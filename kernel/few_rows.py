"""A body for steps of few rows: a transformer of Llama's form in two to five launches a layer.

Owns which models have that form, what their layers say of themselves, and the comparison with the
model's own modules before use. mlx-lm's modules make fifteen launches a layer, and MLX takes 3 to
17 microseconds of the processor's time for each: more than an H200 needs to compute them. Caches
and attention are used as the modules use them.
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

from . import chain
from .attention import dispatch
from .chain import Apart, Chain, LayerWeights, Onward
from .errors import describe
from .products import PART, ROWS_MAX, TILE, CudaProducts, Norm, Products, Rope
from .split import Body

FORMS = (llama.Model,)
"""Models whose body is: embedding, blocks of attention and gated network, norm."""
CHECKED_ROWS = (1, 11, 20, ROWS_MAX)
"""One number for each kernel that is compiled."""
POSITION_MAX = 4096
TOLERANCE = 2e-2
"""Of a row's length: products are rounded to 8 bits here and there."""


@frozen(eq=False)
class _Layer:
    """A layer's modules, and what the products are given of it."""

    attention: Any
    network: Any
    weights: LayerWeights


class FewRows:
    """The body, of up to ROWS_MAX rows. Raises Unlike where a model is not of this form."""

    def __init__(self, model: Any, products: Products) -> None:
        if type(model) not in FORMS:
            raise Unlike(f"{type(model).__module__} is not known to be of this form")
        self._body = model.model
        self._products = products
        if self._body.swa_idx is not None:
            raise Unlike("its layers have windows")
        self._layers = [_looked_at(it) for it in self._body.layers]
        self._apart = Apart(products)
        self._chain = Chain(products) if isinstance(products, CudaProducts) else None

    def __call__(self, tokens: mx.array, cache: Items[Any]) -> mx.array:
        """What leaves the body, [T, 1, D], of tokens [T, 1]."""
        hidden = self._body.embed_tokens(tokens[:, 0])
        onward, following = self._onward(len(hidden)), self._layers[0].weights
        heads = self._apart.heads(hidden, following, cache[0].offset)
        for number, (layer, held) in enumerate(zip(self._layers, cache, strict=True), 1):
            queries, keys, values = heads
            read = held.update_and_fetch(keys, values)
            mixed = dispatch(queries, read[0], read[1], held, layer.attention.scale, None)
            if number == len(self._layers):
                hidden = onward.ending(mixed, hidden, layer.weights)
            else:
                following, offset = self._layers[number].weights, cache[number].offset
                hidden, heads = onward.between(mixed, hidden, layer.weights, following, offset)
        normed: mx.array = self._body.norm(hidden)
        return normed[:, None]

    def _onward(self, rows: int) -> Onward:
        return self._apart if self._chain is None or rows > chain.ROWS_MAX else self._chain

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
        for rows in CHECKED_ROWS:
            far = self._far(layer, rows, rng)
            if not far <= TOLERANCE:
                return f"products of {rows} rows differ from the model's own by {far:.2g} of a row"
        return ""

    def unchained(self) -> str:
        """Why its products are left apart, where they could be chained: found by a comparison, and
        heeded from here on. Empty where they agree, or where nothing chains them.
        """
        if self._chain is None:
            return ""
        layers = [it.weights for it in self._layers]
        try:
            reason = chain.disagreement(self._chain, self._apart, layers)
        except Exception as error:  # a kernel that does not compile, say
            reason = describe(error)
        if reason:
            self._chain = None
        return reason

    def _far(self, layer: _Layer, rows: int, rng: np.random.Generator) -> float:
        attention, network, weights = layer.attention, layer.network, layer.weights
        products = self._products

        def random(count: int, width: int) -> mx.array:
            return mx.array(rng.standard_normal((count, width), np.float32)).astype(mx.bfloat16)

        places = mx.array(rng.integers(0, POSITION_MAX, rows).astype(np.int32))
        width, inner = attention.q_proj.weight.shape[1], network.down_proj.weight.shape[1]
        x, base = random(rows, width) * 3, random(rows, width)
        mixed, gated = random(rows, attention.o_proj.weight.shape[1]), random(rows, inner)
        made = [
            *self._apart.heads(x, weights, places),
            products.added(mixed, weights.out, base),
            products.gated(x, weights.between, weights.gates),
            products.added(gated, weights.down, base),
        ]
        normed = mx.fast.rms_norm(x, weights.before.weights, weights.before.eps)
        heads = [
            it(normed).reshape(rows, -1, 1, weights.rope.dim)
            for it in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        normed = mx.fast.rms_norm(x, weights.between.weights, weights.between.eps)
        wanted = [
            *(attention.rope(it, offset=places) for it in heads[:2]),
            heads[2],
            base + attention.o_proj(mixed),
            silu(network.gate_proj(normed)) * network.up_proj(normed),
            base + network.down_proj(gated),
        ]
        return max(chain.distance(one, other) for one, other in zip(made, wanted, strict=True))


class Unlike(Exception):
    """A model that is not of the form; the message says in what."""


def few_rows(model: Any, products: Products | None) -> tuple[FewRows | None, str]:
    """The body for few rows, compared with the model's own; else None. And why it is not used, or
    takes more launches than it might, where that was not to be expected.
    """
    if products is None:
        return None, ""
    try:
        body = FewRows(model, products)
    except Unlike:
        return None, ""
    try:
        reason = body.disagreement()
    except Exception as error:  # a kernel that does not compile, say
        reason = describe(error)
    return (None, reason) if reason else (body, body.unchained())


def _looked_at(block: Any) -> _Layer:
    """What the products need of a block, where they take all of it."""
    attention, network = block.self_attn, block.mlp
    linear = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    linear += [network.gate_proj, network.up_proj, network.down_proj]
    for it in linear:
        if type(it) is not Linear or "bias" in it:
            raise Unlike(f"{type(it).__name__} stands where a plain product is expected")
        features, width = it.weight.shape
        if it.weight.dtype != mx.bfloat16 or width % PART or features % TILE:
            raise Unlike(f"it has weights of {it.weight.shape} in {it.weight.dtype}")
    norms = []
    for it in (block.input_layernorm, block.post_attention_layernorm):
        if type(it) is not RMSNorm or it.weight.dtype != mx.bfloat16:
            raise Unlike(f"{type(it).__name__} stands where an RMSNorm is expected")
        norms.append(Norm(it.weight, float(it.eps)))
    gates = _gates_of(network)
    weights = LayerWeights(
        before=norms[0],
        projections=(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        rope=_rope_of(attention),
        out=attention.o_proj.weight,
        between=norms[1],
        gates=gates,
        down=network.down_proj.weight,
    )
    return _Layer(attention, network, weights)


def _gates_of(network: Any) -> mx.array:
    """The weights of gate and up in one array, [2 * features, width]; the modules keep views."""
    gate, up = network.gate_proj, network.up_proj
    if gate.weight.shape != up.weight.shape:
        raise Unlike(f"gates of {gate.weight.shape} and {up.weight.shape}")
    gates = mx.concatenate([gate.weight, up.weight])
    mx.eval(gates)
    gate.weight, up.weight = mx.split(gates, 2)
    mx.eval(gate.weight, up.weight)
    return gates


def _rope_of(attention: Any) -> Rope:
    rope, dim = attention.rope, attention.head_dim
    if type(rope) is RoPE:
        rates = rope.scale * np.float64(rope.base) ** -(np.arange(0, rope.dims, 2) / rope.dims)
    elif type(rope) is Llama3RoPE:
        rates = 1.0 / np.array(rope._freqs, np.float64)
    else:
        raise Unlike(f"positions are turned by {type(rope).__name__}")
    if rope.dims != dim or dim % TILE:
        raise Unlike(f"of heads of {dim}, {rope.dims} are turned")
    return Rope(dim, mx.array(rates.astype(np.float32)), bool(rope.traditional))
