"""What a layer may do with the handles of its rows beside attending over them, and what not.

Models that keep compressed rows (DeepSeek V3's way), that tell positions from how many keys there
are, or that count positions on by numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gpt_bigcode

from kernel import attention, handles, probe
from kernel.batch import Batch
from kernel.caches import PagedCache
from kernel.context import StepContext
from kernel.errors import ModelError
from kernel.families import family_of
from kernel.handles import HandleMisused, Positions
from kernel.hf import build_model
from kernel.layout import GATHERED, PACKED, look
from kernel.metadata import build
from kernel.paged_choice import suited
from kernel.pages import LayerShape, Pages
from kernel.quantised import quantised
from statemachine.geometry import Geometry, Group

from . import families
from .emulated import EmulatedCuda
from .paged import Book, Runner, random_tokens
from .tiny_architectures import architecture_config, architecture_model
from .tiny_families import family_weights

GEOMETRY = Geometry(block_size=4, groups=(Group(num_blocks=8),))
LATENT, ROTATED, HEADS = 6, 4, 3


def layer(number: int = 0, own: int = 0) -> PagedCache:
    """A cache in a forward of a piece of two rows and one that decodes its fifth."""
    book = Book(GEOMETRY)
    before = book.append(1, [5, 6, 7, 8])
    assert before.rows == 4
    pieces = (book.append(0, [1, 2]), book.append(1, [9]))
    cache = PagedCache(number, 0, own)
    shapes = (LayerShape(0, 1, LATENT, ROTATED, mx.float32),) * (number + 1)
    cache.bind(StepContext(build(Batch(1, pieces), GEOMETRY)), Pages(GEOMETRY, shapes).begin())
    return cache


def random(*shape: int) -> mx.array:
    seed = sum(shape)
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


LATENTS, ROTATEDS = random(3, 1, 1, LATENT), random(3, 1, 1, ROTATED)
QUERIES, ROTATED_QUERIES = random(3, HEADS, 1, LATENT), random(3, HEADS, 1, ROTATED)


def attended(cache: PagedCache) -> np.ndarray:
    latents, rotateds = cache.update_and_fetch(LATENTS, ROTATEDS)
    scores: Any = ROTATED_QUERIES @ rotateds.swapaxes(-1, -2)
    out = attention.dispatch(QUERIES, latents, latents, None, 0.5, scores)
    return np.array(out)


def test_compressed_rows_are_keys_and_values_and_scores_of_the_rotated_part_are_added() -> None:
    # The first piece's rows see one and two rows; what the third sees of its first four is zero.
    latents, rotateds = np.array(LATENTS[:, 0, 0]), np.array(ROTATEDS[:, 0, 0])
    seen = [[latents[:1], rotateds[:1]], [latents[:2], rotateds[:2]]]
    seen.append([np.pad(it[2:], ((4, 0), (0, 0))) for it in (latents, rotateds)])
    wanted = []
    for row, (keys, turned) in enumerate(seen):
        scores = 0.5 * np.array(QUERIES[row, :, 0]) @ keys.T
        scores += np.array(ROTATED_QUERIES[row, :, 0]) @ turned.T
        weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        wanted.append((weights @ keys)[:, None])
    np.testing.assert_allclose(attended(layer()), np.stack(wanted), rtol=2e-5, atol=1e-6)


def test_scores_of_another_update_are_refused() -> None:
    one, other = layer(), layer()
    latents, _ = one.update_and_fetch(LATENTS, ROTATEDS)
    _, rotateds = other.update_and_fetch(LATENTS, ROTATEDS)
    scores: Any = ROTATED_QUERIES @ rotateds.swapaxes(-1, -2)
    with pytest.raises(HandleMisused, match="keys and values that are not of one update"):
        attention.dispatch(QUERIES, latents, latents, None, 0.5, scores)


def test_scores_are_added_only_where_the_keys_are_the_values() -> None:
    latents, rotateds = layer().update_and_fetch(LATENTS, ROTATEDS)
    scores: Any = ROTATED_QUERIES @ rotateds.swapaxes(-1, -2)
    with pytest.raises(HandleMisused, match="adds scores to values that are not its keys"):
        attention.dispatch(QUERIES, latents, rotateds, None, 0.5, scores)


MISUSES: dict[str, Any] = {
    "product from the right": lambda turned: turned @ ROTATED_QUERIES,
    "sum": lambda turned: turned + 1,
    "sum from the left": lambda turned: ROTATED_QUERIES + turned,
    "shape": lambda turned: turned.shape,
    "cast": lambda turned: turned.astype(mx.float16),
    "turned again": lambda turned: turned.swapaxes(-1, -2),
    "truth": lambda turned: bool(turned),
    "comparison": lambda turned: turned > 1,
    "part": lambda turned: turned[0],
    "scores in a sum": lambda turned: (ROTATED_QUERIES @ turned) + 1,
    "scores' shape": lambda turned: (ROTATED_QUERIES @ turned).shape,
}


@pytest.mark.parametrize("kind", MISUSES)
def test_turned_values_and_their_scores_are_no_arrays(kind: str) -> None:
    _, rotateds = layer().update_and_fetch(LATENTS, ROTATEDS)
    with pytest.raises(HandleMisused, match="of layer 0; paged rows can only be attended to"):
        MISUSES[kind](rotateds.swapaxes(-1, -2))


def test_what_mlx_itself_computes_of_turned_values_is_nothing() -> None:
    _, rotateds = layer().update_and_fetch(LATENTS, ROTATEDS)
    turned = rotateds.swapaxes(-1, -2)
    assert np.isnan(np.array(mx.where(mx.array([True, False]), turned, 0.0))).tolist() == [
        True,
        False,
    ]
    with pytest.raises(ValueError, match="matmul"):
        mx.matmul(ROTATED_QUERIES, turned)


def test_only_the_last_two_axes_of_values_can_be_swapped() -> None:
    _, rotateds = layer().update_and_fetch(LATENTS, ROTATEDS)
    with pytest.raises(HandleMisused, match="reads `swapaxes` of the values of layer 0"):
        rotateds.swapaxes(1, 2)


def test_keys_tell_how_many_rows_each_of_the_batchs_sees() -> None:
    cache = layer()
    latents, rotateds = cache.update_and_fetch(LATENTS, ROTATEDS)
    shape: Any = latents.shape
    count, heads, seen, width = shape
    assert (count, heads, seen.tolist(), width) == (3, 1, [1, 2, 5], LATENT)
    assert rotateds.shape[3] == ROTATED
    assert cache.used(cache._context.metadata).offset_reads == 2  # type: ignore[union-attr]


def test_keys_of_a_window_do_not_tell_how_many_there_are() -> None:
    latents, _ = layer(own=8).update_and_fetch(LATENTS, ROTATEDS)
    with pytest.raises(HandleMisused, match="counts the keys of layer 0, which are those of a win"):
        latents.shape  # noqa: B018


def test_numpy_in_a_model_counts_on_from_each_rows_position() -> None:
    attention.install()
    numpy = vars(gpt_bigcode)["np"]
    offset = layer().offset
    assert isinstance(offset, Positions)
    assert mx.array(numpy.arange(offset, offset + 1)).tolist() == [[0], [1], [4]]
    assert numpy.arange(2, 5).tolist() == [2, 3, 4]
    assert numpy.float32 is np.float32


def test_numpy_outside_of_models_is_left_alone() -> None:
    attention.install()
    ends: Any = (mx.array([1, 2]), mx.array([2, 3]))
    assert np.arange.__module__ == "numpy"
    with pytest.raises(ValueError, match="length-1 arrays"):
        np.arange(*ends)


NAMED = ["deepseek_v3", "longcat_flash", "kimi_k25", "mistral4", "afm7", "gpt_bigcode"]


@pytest.mark.parametrize("name", NAMED)
def test_all_rows_of_a_step_go_through_these_models_in_one_call_and_say_what_mlx_lm_says(
    name: str, tmp_path: Path
) -> None:
    model = architecture_model(name)
    family = family_of(model)
    assert family.reason == "served packed over pages"
    outcome = families.serve(model, family)
    assert families.wrong(model, outcome) == ""
    assert families.replayed(outcome, tmp_path) == ""


def test_deepseek_v3_keeps_a_compressed_row_and_a_rotated_part_in_its_pages() -> None:
    shapes = look(architecture_model("deepseek_v3")).shapes
    assert {(it.kv_heads, it.key_dim, it.value_dim) for it in shapes} == {(1, 16, 8)}


def test_longcat_flash_keeps_two_compressed_rows_a_layer() -> None:
    model = architecture_model("longcat_flash")
    found = look(model)
    assert [len(slot) for slot in found.slots] == [2] * len(model.layers)  # type: ignore[arg-type]
    assert [it.key_dim for it in found.shapes] == [16] * 4


def test_no_kernel_is_chosen_for_compressed_rows() -> None:
    model = architecture_model("deepseek_v3")
    wanted = "HandleMisused: layer 0 adds scores, which no kernel does"
    assert suited(model, look(model), 16, EmulatedCuda()) == (None, wanted)


def refusal(name: str) -> str:
    model = architecture_model(name)
    found = look(model, PACKED)
    with pytest.raises(ModelError) as caught:
        probe.probe(model, found)
    return str(caught.value)


DIFFERS = "over pages it differs from mlx-lm's own caches by"


def test_the_probe_refuses_scores_that_are_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(values: Any, queries: mx.array) -> Any:
        return scores(values, mx.zeros_like(queries))

    scores = handles.ScoresHandle
    monkeypatch.setattr(handles, "ScoresHandle", dropped)
    monkeypatch.setattr(attention, "ScoresHandle", scores)
    assert refusal("mistral4").startswith(DIFFERS)


def test_the_probe_refuses_a_count_of_keys_that_is_off_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PagedCache, "seen_rows", property(lambda cache: cache.offset))
    assert refusal("afm7").startswith(DIFFERS)


def test_the_probe_refuses_positions_that_are_counted_from_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(self: Any, start: Any, stop: Any) -> Any:
        if isinstance(start, Positions):
            return mx.zeros_like(start)[:, None]
        return np.arange(start, stop)

    monkeypatch.setattr(attention._Numpy, "arange", nothing)
    assert refusal("gpt_bigcode").startswith(DIFFERS)


@pytest.mark.parametrize("bits", [8, 4])
def test_compressed_rows_of_few_bits_say_packed_what_they_say_gathered(bits: int) -> None:
    config = architecture_config("deepseek_v3") | {"kv_lora_rank": 64, "qk_rope_head_dim": 32}
    model = build_model(config)
    model.load_weights(list(family_weights(config).items()))
    tokens, rows = random_tokens(3, 40, 250), []
    for way in (PACKED, GATHERED):
        runner = Runner(model, layout=quantised(look(model, way), bits))
        parts = [runner.run(runner.book.append(0, tokens[at : at + 13])) for at in range(0, 39, 13)]
        rows.append(np.concatenate([*parts, runner.run(runner.book.append(0, tokens[39:]))]))
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-4)
    assert np.abs(rows[0]).max() > 1
