"""kernel/paged_source on the CPU: dialects whose blocks are run by tests/emulator.

The text that a GPU's compiler is given is compiled by g++ against what tests/emulator says of CUDA
and Metal. Calls evaluate their inputs: a step's graph is computed as it is built.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

from kernel import attention_cuda, attention_metal, drawing
from kernel.attention_cuda import decode_body
from kernel.drawing import Sampler
from kernel.fastmath import LOG2E
from kernel.kernel_text import SOURCE, TYPES
from kernel.paged_attention import Layer, OnGpu, Shape
from kernel.paged_plan import RowsPlan
from kernel.product_forms import Source
from kernel.products import CudaProducts, Products, Shapes
from kernel.sampling import Samples

EMULATOR = Path(__file__).parent / "emulator"
ALIGNMENT = 256
Change = tuple[str, str]
"""A text of the kernel's source, and what stands in its place: to see that it is noticed."""


class NoCompiler(RuntimeError):
    """There is no g++ to compile the emulator with."""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="emulated-")


def _compile(*arguments: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompiler("the kernels' tests need g++ to run them on the CPU: install it")
    command = [compiler, "-std=c++17", "-O1", "-w", "-fPIC", f"-I{_folder().name}", f"-I{EMULATOR}"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ does not take the kernel's source: {done.stderr[:2000]}")


@functools.cache
def _precompile(header: str) -> None:
    """What sources begin with, compiled once: g++ takes as long for it as for the rest of them."""
    _compile("-x", "c++-header", str(EMULATOR / header), "-o", f"{_folder().name}/{header}.gch")


@functools.cache
def _library(source: str) -> ctypes.CDLL:
    _precompile(source.split('"', 2)[1])
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = Path(_folder().name) / f"{name}.cpp"
    library = file.with_suffix(".so")
    file.write_text(source)
    _compile("-shared", str(file), "-o", str(library))
    return ctypes.CDLL(str(library))


def _text(headers: tuple[str, ...], changes: tuple[Change, ...]) -> str:
    text = "".join((SOURCE / name).read_text() + "\n" for name in headers)
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in the kernel's source")
        text = text.replace(old, new)
    return text.replace("#pragma once", "")


def _entry(name: str, parameters: list[str], body: str) -> str:
    return (
        f'extern "C" void {name}(int columns_, int rows_, int threads_, {", ".join(parameters)}) '
        f"{{ emulator::launch(columns_, rows_, threads_, [&] {{ {body} }}); }}\n"
    )


def _pointer(shape: Shape, name: str, kind: str = "") -> str:
    """An input's type; kind: what a dialect calls the layer's numbers, CUDA's words if empty."""
    found = attention_cuda.kind_of(shape, name)
    return f"const {kind if kind and found == TYPES[shape.dtype] else found}*"


def _memory(array: mx.array) -> np.ndarray:
    """An evaluated array's own bytes."""
    view = array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array
    mx.eval(view)
    return np.array(view, copy=False).reshape(-1).view(np.uint8)


def _aligned(memory: np.ndarray) -> np.ndarray:
    """A copy where a GPU's allocator would put it: MLX aligns to 8 bytes on the CPU."""
    room = np.empty(memory.size + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    copied = room[begin : begin + memory.size]
    copied[:] = memory
    return copied


def _call(
    entry: Callable[..., None], grid: tuple[int, int, int], arrays: list[mx.array | None]
) -> None:
    """Run blocks over copies, and put back what they hold afterwards: pages are written so."""
    held = [None if array is None else mx.contiguous(array) for array in arrays]
    memories = [None if array is None else _memory(array) for array in held]
    copies = [None if memory is None else _aligned(memory) for memory in memories]
    entry(*grid, *(None if it is None else ctypes.c_void_p(it.ctypes.data) for it in copies))
    for memory, copied in zip(memories, copies, strict=True):
        if memory is not None and not np.array_equal(memory, copied):
            memory[:] = copied


def _poisoned(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """What an output is before anything is written to it."""
    array = mx.full(shape, 0 if dtype == mx.uint32 else float("nan"), dtype)
    mx.eval(array)
    return array


class EmulatedProducts(CudaProducts):
    """CudaProducts, emulated."""

    on_hopper = True

    def __init__(self, changes: tuple[Change, ...] = ()) -> None:
        super().__init__()
        self.calls = 0
        self._changes = changes

    @property
    def counters(self) -> np.ndarray:
        return np.array(self._counters)

    def launch(
        self, source: Source, inputs: list[mx.array], blocks: int, shapes: Shapes
    ) -> list[mx.array]:
        self.calls += 1
        kinds = {"positions": "int", "rates": "float", "counters": "unsigned", "parts": "float"}
        dtype = inputs[0].dtype
        word = TYPES[dtype]
        values = [f"const {kinds.get(name, word)}* {name}" for name in source.inputs]
        values += [f"{kinds.get(name, word)}* {name}" for name in source.outputs]
        values += [f"const int* {name}_shape" for name in source.inputs]
        words = [name for name in ("cuda.h", "hopper.h") if name in source.headers]
        library = _library(
            "".join(f'#include "{name}"\n' for name in words)
            + _text(source.headers, self._changes)
            + _entry("run_product", values, source.body)
        )
        floats = [name == "parts" for name in source.outputs]
        outputs = [
            _poisoned(shape, mx.float32 if long else dtype)
            for shape, long in zip(shapes, floats, strict=True)
        ]
        told = [mx.array(np.array(it.shape, np.int32)) for it in inputs]
        _call(library.run_product, (blocks, 1, source.threads), [*inputs, *outputs, *told])
        return outputs


class EmulatedSampler:
    """CudaSampler, emulated."""

    def __init__(self, changes: tuple[Change, ...] = ()) -> None:
        self.calls = 0
        self._changes = changes

    def sample(self, logits: mx.array, asked: mx.array) -> Samples:
        self.calls += 1
        values = ["const float* logits", "const float* asked", "unsigned* tokens"]
        values += ["float* chosen", "float* margins", "const int* logits_shape"]
        library = _library(
            '#include "cuda.h"\n'
            + _text(drawing.HEADERS, self._changes)
            + _entry("run_sample", values, drawing.body())
        )
        rows = len(logits)
        tokens = mx.full((rows,), 2**32 - 1, mx.uint32)
        mx.eval(tokens)
        chosen, margins = (_poisoned((rows,), mx.float32) for _ in range(2))
        told = [asked, tokens, chosen, margins]
        shape = mx.array(np.array(logits.shape, np.int32))
        _call(library.run_sample, (rows, 1, drawing.THREADS), [logits, *told, shape])
        return Samples(tokens, chosen, margins)


class EmulatedCuda(OnGpu):
    """CudaDialect, emulated. changes: to the source."""

    in_place = True
    products: Products | None = None
    sampler: Sampler | None = None

    def __init__(self, blocks: int = 24, changes: tuple[Change, ...] = ()) -> None:
        self.blocks = blocks
        self.calls = 0
        self._changes = changes
        self._counters = mx.zeros((4096,), mx.uint32)
        mx.eval(self._counters)

    @property
    def counters(self) -> np.ndarray:
        return np.array(self._counters)

    def _compiled(self, shape: Shape) -> ctypes.CDLL:
        kind = TYPES[shape.dtype]
        names = {"sinks": "const void*", "counters": "unsigned*"}
        inputs = [f"{names.get(n, _pointer(shape, n))} {n}" for n in attention_cuda.DECODE_INPUTS]
        entries = (
            ""
            if shape.dtype == mx.uint32
            else "".join(
                _entry(
                    f"run_decode_{int(split)}",
                    inputs + [f"{kind if it == 'out' else 'float'}* {it}" for it in given],
                    decode_body(shape, split),
                )
                for split, given in (
                    (it, attention_cuda.decode_outputs(it)) for it in (False, True)
                )
            )
        )
        fetch = [f"{_pointer(shape, n)} {n}" for n in attention_cuda.FETCH_INPUTS]
        fetch += [f"{kind}* out_keys", f"{kind}* out_values"]
        return _library(
            '#include "cuda.h"\n'
            + _text(attention_cuda.HEADERS, self._changes)
            + entries
            + _entry("run_fetch", fetch, attention_cuda.fetch_body(shape))
        )

    def decode(
        self, shape: Shape, plan: mx.array, counts: RowsPlan, queries: mx.array, layer: Layer
    ) -> mx.array:
        self.calls += 1
        sinks = None if layer.sinks is None else layer.sinks.astype(mx.float32) * LOG2E
        heads = queries.shape[1]
        out = _poisoned((*queries.shape[:-1], shape.value_dim), shape.dtype)
        parts = _poisoned((counts.items, heads, shape.value_dim), mx.float32)
        tops = _poisoned((counts.items, heads, 2), mx.float32)
        grid = (shape.columns, counts.items, attention_cuda.warps_of(shape) * 32)
        arrays = [plan, queries, layer.key_pages, layer.value_pages, layer.keys, layer.values]
        split = counts.splits > 1
        outputs = [out, parts, tops][: len(attention_cuda.decode_outputs(split))]
        entry = getattr(self._compiled(shape), f"run_decode_{int(split)}")
        _call(entry, grid, [*arrays, sinks, self._counters, *outputs])
        return out

    def fetch(
        self, shape: Shape, plan: mx.array, rows: int, layer: Layer
    ) -> tuple[mx.array, mx.array]:
        self.calls += 1
        keys = _poisoned((shape.kv_heads, rows, shape.key_dim), shape.dtype)
        values = _poisoned((shape.kv_heads, rows, shape.value_dim), shape.dtype)
        threads = rows * shape.kv_heads * shape.row_parts
        arrays = [plan, layer.key_pages, layer.value_pages, layer.keys, layer.values, keys, values]
        _call(self._compiled(shape).run_fetch, (-(-threads // 64), 1, 64), arrays)
        return keys, values

    def reset(self) -> None:
        self._counters[:] = 0


class EmulatedMetal(OnGpu):
    """MetalDialect, emulated."""

    in_place = False
    products: Products | None = None
    sampler: Sampler | None = None
    blocks = 24

    def __init__(self, changes: tuple[Change, ...] = ()) -> None:
        self.calls = 0
        self._changes = changes

    def _compiled(self, shape: Shape) -> ctypes.CDLL:
        kind = attention_metal.TYPES[shape.dtype]
        parts = [f"{_pointer(shape, n, kind)} {n}" for n in attention_metal.PARTS_INPUTS]
        merge = ["const int* plan", "const float* parts", "const float* tops", "const float* sinks"]
        return _library(
            '#include "metal.h"\n'
            + _text(attention_metal.HEADERS, self._changes)
            + _entry(
                "run_parts",
                [*parts, "float* parts", "float* tops"],
                attention_metal.parts_body(shape).replace("\nthreadgroup", "\nstatic"),
            )
            + _entry("run_merge", [*merge, f"{kind}* out"], attention_metal.merge_body(shape))
        )

    def decode(
        self, shape: Shape, plan: mx.array, counts: RowsPlan, queries: mx.array, layer: Layer
    ) -> mx.array:
        self.calls += 1
        sinks = None if layer.sinks is None else layer.sinks.astype(mx.float32) * LOG2E
        heads = queries.shape[1]
        parts = _poisoned((counts.items, heads, shape.value_dim), mx.float32)
        tops = _poisoned((counts.items, heads, 2), mx.float32)
        out = _poisoned((*queries.shape[:-1], shape.value_dim), shape.dtype)
        columns, library = attention_metal.columns(shape), self._compiled(shape)
        threads = attention_metal.WARPS * 32
        pages = [layer.key_pages, layer.value_pages]
        grid = (columns, counts.items, threads)
        _call(library.run_parts, grid, [plan, queries, *pages, parts, tops])
        grid = (columns, counts.items, attention_metal.MERGE_THREADS)
        _call(library.run_merge, grid, [plan, parts, tops, sinks, out])
        return out

    def fetch(
        self, shape: Shape, plan: mx.array, rows: int, layer: Layer
    ) -> tuple[mx.array, mx.array]:
        raise AssertionError("never asked of a dialect that does not write in place")

    def reset(self) -> None:
        """Nothing outlives a call."""
