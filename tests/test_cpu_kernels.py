"""Kernels for the CPU, compiled for this machine: products against float64, attention against the
gather, and what happens where they cannot be had, or are broken.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn import quantize
from mlx.utils import tree_map

from kernel import attention, extension, few_rows, narrow, narrow_layers, weights
from kernel.adapters import Adapters
from kernel.attention_cpu import CpuDialect
from kernel.extension import Extension
from kernel.layout import look
from kernel.model_kernel import ModelKernel
from kernel.narrow import Narrow
from kernel.paged_attention import Shape
from kernel.paged_check import disagreement
from kernel.paged_choice import choose
from kernel.products_cpu import CpuProducts
from kernel.tiny import tiny_llama
from kernel.weights import load_model
from statemachine.geometry import WINDOW, Geometry, Group

from .lora import write_adapter
from .test_checkpoints import quantised

ROWS = (1, 2, 5, 8, 9, 16, 17, 33, 100, 300)
FEATURES, WIDTH = 176, 384
GROUPS = (Group(), Group(WINDOW, 0, 50, 0), Group(WINDOW, 0, 30, 4))


@pytest.fixture(scope="module")
def native() -> Any:
    found = extension.extension()
    assert found.module is not None, found.reason
    return found.module


@pytest.fixture(autouse=True)
def _dispatch() -> None:
    attention.install()


def affine(bits: int, group: int) -> tuple[Narrow, np.ndarray]:
    """Quantised weights, and the numbers that they stand for."""
    rng = np.random.default_rng(bits + group)
    weights = mx.array(rng.standard_normal((FEATURES, WIDTH), np.float32))
    held = Narrow(*mx.quantize(weights, group, bits), group, bits)
    return held, np.array(held.widened(), np.float64)


def exact(kind: str) -> tuple[Callable[[Any], Any], np.ndarray]:
    """What packs weights of a kind, and these weights."""
    if kind.startswith("affine"):
        bits, group = map(int, kind.split()[1:])
        held, numbers = affine(bits, group)
        parts = (held.words, held.scales, held.biases, bits, group)
        return lambda native: native.Weights.of_affine(*parts), numbers
    rng = np.random.default_rng(0)
    weights = mx.array(rng.standard_normal((FEATURES, WIDTH), np.float32))
    if kind == "bfloat16":
        weights = weights.astype(mx.bfloat16).astype(mx.float32)
    pack = lambda native: native.Weights.of_floats(weights, kind == "bfloat16")  # noqa: E731
    return pack, np.array(weights, np.float64)


KINDS = ["affine 4 32", "affine 4 64", "affine 4 128", "affine 8 32", "affine 8 64"]
KINDS += ["bfloat16", "float32"]


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_as_exact_as_those_of_float32(kind: str, native: Any) -> None:
    pack, numbers = exact(kind)
    weights = pack(native)
    assert (weights.features, weights.width) == (FEATURES, WIDTH)
    rng = np.random.default_rng(1)
    for rows in ROWS:
        # Numbers of all sizes in one row: a part that is dropped shows in small ones.
        sizes = 10.0 ** rng.uniform(-3, 3, (rows, WIDTH))
        x = (rng.standard_normal((rows, WIDTH)) * sizes).astype(np.float32)
        right = x.astype(np.float64) @ numbers.T
        lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(numbers, axis=1)
        off = np.abs(np.array(native.multiplied(mx.array(x), weights)) - right) / lengths
        assert off.max() < 5e-7, (kind, rows)


def test_gates_of_any_size_are_as_exact_as_float32_has_them(native: Any) -> None:
    # A row of ones, normed and multiplied, is value / 32 everywhere, and its products are shares of
    # the value.
    values = [-200, -104, -88, -30, -1, -1e-6, 0, 1e-6, 1, 30, 89, 200]
    weights = native.Weights.of_floats(mx.ones((64, 32)) * mx.arange(64)[:, None] / 64, False)
    share = np.arange(64)[:, None] / 64
    for value in values:
        x = mx.full((1, 32), 1.0 if value >= 0 else -1.0)
        norm = mx.full((32,), abs(value) / 32)
        got = np.array(native.gated(x, norm, 0.0, weights), np.float64)[0]
        gates, others = (value * share[:32, 0]), (value * share[32:, 0])
        right = gates / (1 + np.exp(-gates)) * others
        assert np.all(np.abs(got - right) <= 2e-5 * np.abs(right) + 1e-34), value


def test_a_quantised_weight_takes_the_bytes_of_its_numbers_and_scales(native: Any) -> None:
    held, _ = affine(4, 32)
    weights = native.Weights.of_affine(held.words, held.scales, held.biases, 4, 32)
    assert weights.nbytes < FEATURES * WIDTH * (4 + 64 / 32 + 0.5) / 8


SHAPES = {
    "3 heads share": ((3, 3), (64, 64), 16, False),
    "unshared, sinks": ((2, 1), (32, 32), 16, True),
    "7 heads share, blocks of 7": ((1, 7), (96, 96), 7, False),
    "narrower values": ((2, 4), (192, 128), 16, False),
    "wide, blocks of 1": ((1, 2), (256, 256), 1, True),
    "odd widths": ((2, 2), (40, 24), 16, True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_by_tables_is_the_gathers(name: str, native: Any) -> None:
    heads, dims, size, sinks = SHAPES[name]
    asked = Shape(mx.float32, size, *heads, *dims, dims[0] ** -0.5, sinks)
    assert disagreement(CpuDialect(native, "here"), [(asked, group) for group in GROUPS]) == ""


def test_a_model_of_these_kernels_says_so_and_makes_its_logits_by_them(native: Any) -> None:
    model = tiny_llama(5, layers=2, heads=2, kv_heads=1, hidden=64)
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=8),))
    kernel = ModelKernel(model, geometry)
    assert kernel.attention == f"tables ({native.level()})"
    body, reason = few_rows.few_rows(model, CpuProducts(native))
    assert (body is None, reason) == (False, "")


def test_products_that_are_wrong_are_left_alone(native: Any, monkeypatch: Any) -> None:
    class Wrong(CpuProducts):
        def added(self, x: mx.array, weights: Any, base: mx.array) -> mx.array:
            return super().added(x, weights, base * 1.001)

    model = tiny_llama(5, layers=1, heads=2, kv_heads=1, hidden=64)
    body, reason = few_rows.few_rows(model, Wrong(native))
    assert body is None
    assert reason.startswith("products of 1 rows differ from the model's own by")


def test_attention_that_is_wrong_is_left_to_the_gather(native: Any, monkeypatch: Any) -> None:
    class Wrong(CpuDialect):
        def decode(self, *given: Any) -> mx.array:
            return super().decode(*given) * 1.01

    monkeypatch.setattr("kernel.paged_choice.of_device", lambda: (Wrong(native, "here"), ""))
    model = tiny_llama(1, layers=1, heads=2, kv_heads=1, hidden=32)
    dialect, reason = choose(model, look(model), 16)
    assert dialect is None
    assert "attention differs from the gather's by 0.01 of a row" in reason


def test_launches_of_several_threads_do_not_meet(native: Any) -> None:
    pack, numbers = exact("affine 4 32")
    weights, wrong = pack(native), []
    x = np.random.default_rng(2).standard_normal((20, WIDTH)).astype(np.float32)

    def work() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(200):
                got = np.array(native.multiplied(mx.array(x), weights))
                if not np.allclose(got, x @ numbers.T, atol=1e-3):
                    wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for it in threads:
        it.start()
    for it in threads:
        it.join()
    assert wrong == []


def test_what_is_not_float32_is_refused_by_a_sentence(native: Any) -> None:
    pack, _ = exact("float32")
    with pytest.raises(ValueError, match=r"^x has another dtype$"):
        native.multiplied(mx.zeros((1, WIDTH), mx.float16), pack(native))
    with pytest.raises(ValueError, match=r"^x is not as wide as the weights$"):
        native.multiplied(mx.zeros((1, WIDTH + 1)), pack(native))
    with pytest.raises(ValueError, match=r"^weights of this shape are not multiplied$"):
        native.Weights.of_floats(mx.zeros((7, 33)), False)


# The narrow numbers.


def test_a_file_of_4_bits_is_multiplied_by_4_bits(native: Any, smollm2: Any) -> None:
    layer = smollm2.model.layers[0].mlp
    held = CpuProducts(native).hold_gates(layer.gate_proj, layer.up_proj)
    assert (held.features, held.width) == (3072, 576)
    assert held.nbytes < 3072 * 576 * 0.8
    assert (
        CpuProducts(native).hold_head(smollm2.model.model.embed_tokens).nbytes < 49152 * 576 * 1.3
    )


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load_model("smollm2-135m")


def test_weights_that_changed_are_not_read_from_their_old_numbers(native: Any) -> None:
    model = tiny_llama(5, layers=1, heads=2, kv_heads=1, hidden=64)
    linear = model.layers[0].mlp.down_proj
    held = Narrow(*mx.quantize(linear.weight, 32, 4), 32, 4)
    linear.weight = held.widened()
    narrow.keep(linear, held)
    assert narrow.kept(linear) is held
    wide = linear.weight.size * 4
    assert CpuProducts(native).hold(linear).nbytes < wide / 4
    linear.weight = linear.weight + mx.where(mx.arange(linear.weight.shape[1]) == 5, 1e-3, 0.0)
    assert narrow.kept(linear) is None
    assert CpuProducts(native).hold(linear).nbytes >= wide


def test_numbers_that_are_bfloat16_take_two_bytes(native: Any) -> None:
    model = tiny_llama(5, layers=1, heads=2, kv_heads=1, hidden=64)
    linear = model.layers[0].mlp.down_proj
    linear.weight = linear.weight.astype(mx.bfloat16).astype(mx.float32)
    two = linear.weight.size * 2
    assert two <= CpuProducts(native).hold(linear).nbytes < two * 1.2


def narrow_model() -> Any:
    """A llama whose numbers are bfloat16, with a bias in each layer's network."""
    model = tiny_llama(5, layers=2, heads=2, kv_heads=1, hidden=64, vocab=160, tied=True)
    model.update(tree_map(lambda it: it.astype(mx.bfloat16).astype(mx.float32), model.parameters()))
    for layer in model.layers:
        layer.mlp.down_proj.bias = mx.arange(64) / 64
    return model


def test_models_of_another_form_multiply_by_narrow_numbers_in_their_own_layers() -> None:
    tokens = mx.array([[3, 1, 4, 1, 5]])
    model = narrow_model()
    wanted = np.array(model(tokens))
    kernel = ModelKernel(model, Geometry(block_size=4, groups=(Group(num_blocks=8),)))
    assert kernel.attention.startswith("tables")
    kinds = [type(it).__name__ for _, it in model.named_modules()]
    assert (kinds.count("NarrowLinear"), kinds.count("NarrowEmbedding")) == (2 * 7, 1)
    assert kinds.count("Linear") == 0
    np.testing.assert_allclose(np.array(model(tokens)), wanted, rtol=0, atol=1e-4)
    assert narrow_layers.quicken(model) == (extension.extension().name, "")


def test_layers_whose_weights_are_float32_stay_as_they_are() -> None:
    model = tiny_llama(5, layers=2, heads=2, kv_heads=1, hidden=64, vocab=160)
    assert narrow_layers.quicken(model) == ("", "")


def test_without_room_for_narrow_numbers_all_is_left_to_mlx(monkeypatch: Any) -> None:
    monkeypatch.setattr("kernel.products_cpu.memory_bytes", lambda: 1 << 16)
    model = tiny_llama(5, layers=2, heads=2, kv_heads=1, hidden=64, vocab=160)
    kernel = ModelKernel(model, Geometry(block_size=4, groups=(Group(num_blocks=8),)))
    reason = "weights stay float32 alone, since memory has no room for narrow ones beside them"
    assert kernel.attention.endswith(f"; {reason}")
    assert [type(it).__name__ for _, it in model.named_modules()].count("NarrowLinear") == 0


# Where there are none.


def fresh(monkeypatch: Any, **environment: str) -> Extension:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return extension.find()


def test_the_switch_leaves_all_to_mlx_and_a_reason(monkeypatch: Any) -> None:
    found = fresh(monkeypatch, MLXTAPE_CPU_KERNELS="off")
    assert (found.module, found.reason) == (None, "MLXTAPE_CPU_KERNELS is off")
    monkeypatch.setattr("kernel.paged_choice.extension", lambda: found)
    model = tiny_llama(1)
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=8),))
    assert ModelKernel(model, geometry).attention == "gather: MLXTAPE_CPU_KERNELS is off"


def test_without_a_compiler_a_sentence_says_what_to_install(monkeypatch: Any) -> None:
    found = fresh(monkeypatch, CXX="no-such-compiler")
    reason = "kernels for this processor need a compiler: install no-such-compiler"
    assert (found.module, found.reason) == (None, reason)


def test_sources_that_do_not_compile_are_told_and_nothing_is_kept(
    monkeypatch: Any, tmp_path: Path
) -> None:
    sources = tmp_path / "native"
    shutil.copytree(extension.SOURCES, sources)
    (sources / "threads.h").write_text("#error broken on purpose\n")
    monkeypatch.setattr(extension, "SOURCES", sources)
    found = fresh(monkeypatch, MLXTAPE_CACHE=str(tmp_path / "cache"))
    assert found.module is None
    assert found.reason.startswith("kernels for this processor do not compile: ")
    assert "broken on purpose" in found.reason
    assert list((tmp_path / "cache").rglob("*.so")) == []


def test_what_was_compiled_is_used_again(monkeypatch: Any) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None
    made = extension.built([compiler])
    written = made.stat().st_mtime_ns
    monkeypatch.setattr(subprocess, "run", only_versions(subprocess.run))
    assert (extension.built([compiler]), made.stat().st_mtime_ns) == (made, written)


def only_versions(run: Callable[..., Any]) -> Callable[..., Any]:
    def ran(command: list[str], **named: Any) -> Any:
        assert command[1:] == ["--version"]
        return run(command, **named)

    return ran


PROGRAM = """
from kernel.blas import load_blas
load_blas()
from kernel.extension import extension
print(extension().module.threads())
"""


def test_the_environment_says_how_many_threads_there_are() -> None:
    environment = os.environ | {"MLXTAPE_CPU_THREADS": "3"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "3\n"


# What keeps it from the engine.


def test_kernels_to_which_arrays_are_not_mlx_s_are_left_alone(monkeypatch: Any) -> None:
    class Stranger:
        multiplied = None

        class Weights:
            @staticmethod
            def of_floats(*_: Any) -> None:
                raise TypeError("of_floats(): incompatible function arguments")

    monkeypatch.setattr(extension, "_loaded", lambda _: Stranger)
    found = fresh(monkeypatch)
    assert found.module is None
    assert found.reason == (
        "kernels for this processor cannot be used: "
        "TypeError: of_floats(): incompatible function arguments"
    )


@pytest.mark.parametrize("damage", ["cut", "emptied", "digest lost"])
def test_a_library_that_is_not_whole_is_made_anew(
    damage: str, monkeypatch: Any, tmp_path: Path
) -> None:
    good = extension.built(["g++"]).read_bytes()
    made: list[str] = []

    def compiled(command: list[str], **named: Any) -> Any:
        if command[1:] == ["--version"]:
            return subprocess.CompletedProcess(command, 0, b"a compiler")
        made.append(command[-1])
        Path(command[-1]).write_bytes(good)
        return None

    monkeypatch.setenv("MLXTAPE_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", compiled)
    kept = extension.built(["g++"])
    assert extension.built(["g++"]) == kept
    assert len(made) == 1
    if damage == "digest lost":
        kept.with_suffix(".sha256").unlink()
    else:
        kept.write_bytes(good[: len(good) // 2] if damage == "cut" else b"")
    assert extension.built(["g++"]).read_bytes() == good
    assert len(made) == 2


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no", "False"])
def test_the_switch_is_off_in_any_of_the_usual_words(word: str, monkeypatch: Any) -> None:
    assert fresh(monkeypatch, MLXTAPE_CPU_KERNELS=word).reason == "MLXTAPE_CPU_KERNELS is off"


@pytest.mark.parametrize("asked", ["0", "-3", "abc", "", "1000"])
def test_a_number_of_threads_that_is_none_is_told(asked: str, monkeypatch: Any) -> None:
    reason = f"MLXTAPE_CPU_THREADS must be a whole number from 1 to 256, not {asked!r}"
    assert fresh(monkeypatch, MLXTAPE_CPU_THREADS=asked).reason == reason


def test_a_compiler_may_be_named_with_arguments(monkeypatch: Any) -> None:
    command = extension._command(["ccache", "g++", "-O2"])
    assert command[:3] == ["ccache", "g++", "-O2"]
    found = fresh(monkeypatch, CXX="no-such-cache g++")
    assert found.reason == "kernels for this processor need a compiler: install no-such-cache"


def test_several_threads_that_ask_at_once_get_one_module(monkeypatch: Any) -> None:
    monkeypatch.setattr(extension, "_found", [])
    calls: list[int] = []

    def slow() -> Extension:
        calls.append(1)
        time.sleep(0.05)
        return Extension(None, "once")

    monkeypatch.setattr(extension, "find", slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: extension.extension(), range(4)))
    assert (len(calls), len({id(it) for it in found})) == (1, 1)


def test_rows_of_long_pieces_that_are_wrong_are_seen_at_load(native: Any) -> None:
    class Wrong(CpuDialect):
        def decode(self, *given: Any) -> mx.array:
            made = super().decode(*given)
            # The last rows are those of a piece that a GPU would fetch for.
            last = mx.arange(len(made)) >= len(made) - 5
            return mx.where(last.reshape(-1, *[1] * (made.ndim - 1)), made * 3, made)

    asked = Shape(mx.float32, 16, 2, 4, 64, 64, 0.125, False)
    reason = disagreement(Wrong(native, "here"), [(asked, Group())])
    assert "attention differs from the gather's by" in reason


@pytest.mark.parametrize(("window", "sink"), [(1, 1), (3, 2), (8, 4), (16, 8)])
def test_small_windows_with_sinks_are_attended_to(window: int, sink: int, native: Any) -> None:
    asked = Shape(mx.float32, 16, 2, 2, 32, 32, 0.2, False)
    group = Group(WINDOW, 0, window, sink)
    assert disagreement(CpuDialect(native, "here"), [(asked, group)]) == ""


def test_an_adapter_goes_on_a_layer_of_narrow_numbers(tmp_path: Path) -> None:
    quantised(tmp_path / "toy", "qwen3", "affine", 4)
    path = write_adapter(tmp_path / "style", tmp_path / "toy", seed=1)
    loaded = load_model(str(tmp_path / "toy"))
    assert narrow_layers.quicken(loaded.model)[0] == extension.extension().name
    adapters = Adapters(loaded.model)
    adapters.load("style", str(path))
    assert [it.name for it in adapters.held] == ["style"]


def test_inputs_of_the_wrong_size_are_refused(native: Any) -> None:
    pack, _ = exact("float32")
    weights, x = pack(native), mx.zeros((2, WIDTH))
    for call in (
        lambda: native.added(x, weights, mx.zeros((1,))),
        lambda: native.gated(x, mx.zeros((3,)), 1e-5, weights),
        lambda: native.multiplied(mx.zeros((4, WIDTH // 2)), weights),
        lambda: native.Weights.of_affine(
            mx.zeros((32, 8), mx.uint32), mx.zeros((2, 2)), mx.zeros((32, 2)), 4, 32
        ),
    ):
        with pytest.raises(ValueError, match=r"size|wide"):
            call()


def test_quantised_weights_are_widened_without_rounding() -> None:
    model = tiny_llama(5, layers=1, heads=2, kv_heads=1, hidden=64)
    quantize(model, group_size=32, bits=4)
    model.set_dtype(mx.bfloat16)  # as files have their scales
    layer = weights._widened(model, lambda _: None).layers[0].mlp.down_proj
    numbers = narrow.kept(layer)
    assert numbers is not None
    assert numbers.bits == 4


def test_layers_that_were_narrow_before_one_was_not_are_told_of(monkeypatch: Any) -> None:
    packed, count = CpuProducts.hold_narrow, [0]

    def full(products: CpuProducts, layer: Any) -> Any:
        count[0] += 1
        if count[0] > 3:
            raise MemoryError("no room for another")
        return packed(products, layer)

    monkeypatch.setattr(CpuProducts, "hold_narrow", full)
    model = narrow_model()
    name, reason = narrow_layers.quicken(model)
    assert (name, reason) == (extension.extension().name, "MemoryError: no room for another")
    kinds = [type(it).__name__ for _, it in model.named_modules()]
    assert kinds.count("NarrowLinear") + kinds.count("NarrowEmbedding") == 3
