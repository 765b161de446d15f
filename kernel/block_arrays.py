"""Block arrays: K and V of a block's layers, between MLX and plain bytes.

Names are `k.LAYER` and `v.LAYER`; tensors of no width are left out. Values pass as bits, for numpy
knows no bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx
import numpy as np

from .block_io import BlockRows, TensorSpec
from .pages import LayerShape

_NAMES: dict[mx.Dtype, str] = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
}
_BITS = {4: (mx.uint32, np.uint32), 2: (mx.uint16, np.uint16)}

Layers = list[tuple[mx.array, mx.array]]


def block_spec(block_size: int, layers: Sequence[LayerShape]) -> dict[str, TensorSpec]:
    """The tensors of one block: [block_size, heads, dim] each."""
    return {
        name: TensorSpec(_NAMES[layers[number].dtype], (block_size, *shape))
        for number, name, shape in _tensors(layers)
    }


def _tensors(layers: Sequence[LayerShape]) -> Iterator[tuple[int, str, tuple[int, int]]]:
    for number, layer in enumerate(layers):
        for name, width in (("k", layer.key_dim), ("v", layer.value_dim)):
            if layer.kv_heads * width:
                yield number, f"{name}.{number}", (layer.kv_heads, width)


def to_host(layers: Layers, tags: Sequence[tuple[int, ...]]) -> list[BlockRows]:
    """Blocks as bytes; `layers` are evaluated, [B, block_size, heads, dim]; tags: of each block."""
    columns = {
        f"{name}.{number}": np.array(array.view(_BITS[array.dtype.size][0]))
        for number, pair in enumerate(layers)
        for name, array in zip("kv", pair, strict=True)
        if array.size
    }
    return [
        BlockRows({name: column[at].tobytes() for name, column in columns.items()}, mine)
        for at, mine in enumerate(tags)
    ]


def to_device(
    rows: Sequence[BlockRows], spec: Mapping[str, TensorSpec], layers: Sequence[LayerShape]
) -> Layers:
    """What `to_host` was given."""
    found: Layers = []
    for number, layer in enumerate(layers):
        pair = []
        for name, width in ((f"k.{number}", layer.key_dim), (f"v.{number}", layer.value_dim)):
            if name not in spec:
                shape = (len(rows), spec_size(spec), layer.kv_heads, width)
                pair.append(mx.zeros(shape, layer.dtype))
                continue
            bits = _BITS[layer.dtype.size][1]
            stacked = np.stack([np.frombuffer(it.tensors[name], bits) for it in rows])
            shaped = mx.array(stacked.reshape(len(rows), *spec[name].shape))
            pair.append(shaped.view(layer.dtype))
        found.append((pair[0], pair[1]))
    return found


def spec_size(spec: Mapping[str, TensorSpec]) -> int:
    """Rows of a block."""
    return next(iter(spec.values())).shape[0]
