"""The seams to mlx-lm: what we put in place, what we rely on, what we refuse.

These tests fail where mlx-lm moves what we patch, so that an upgrade is a decision.
"""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models import activations, base, llama, qwen3
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from kernel import attention, fastmath
from kernel.batch import Batch, BuildFailed
from kernel.caches import PagedCache
from kernel.context import StepContext
from kernel.errors import ModelError
from kernel.families import capabilities_of, family_of, groups_for, layer_shapes, owned_groups
from kernel.handles import HandleMisused
from kernel.metadata import build
from kernel.model_kernel import ModelKernel
from kernel.pages import LayerShape, Pages
from kernel.split import body_and_head
from kernel.tiny import tiny_llama
from statemachine.geometry import Geometry, Group

from .paged import Book

GEOMETRY = Geometry(block_size=4, groups=(Group(num_blocks=8),))


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_models_take_attention_from_base_with_the_signature_that_we_stand_in_for() -> None:
    wanted = ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
    assert names(base.scaled_dot_product_attention) == wanted
    assert names(attention.dispatch) == wanted
    assert attention.ORIGINAL is base.scaled_dot_product_attention
    source = inspect.getsource(llama.Attention.__call__)
    assert "scaled_dot_product_attention(" in source
    assert "cache.update_and_fetch(keys, values)" in source
    assert "offset=cache.offset" in source


def test_mlx_lm_finds_a_configs_module_where_we_ask_it_to() -> None:
    assert names(utils._get_classes) == ["config"]
    assert utils._get_classes({"model_type": "mistral"}) == (llama.Model, llama.ModelArgs)
    assert {"model_path", "lazy", "model_config"} <= set(names(utils.load_model))


def test_the_dispatch_stands_in_every_loaded_module_but_base() -> None:
    modules = attention.install()
    assert {llama, qwen3} <= set(modules)
    assert base not in modules
    assert base.scaled_dot_product_attention is attention.ORIGINAL
    assert all(vars(module)[attention.SEAM] is attention.dispatch for module in modules)
    assert attention.install() == modules


def test_the_swiglu_that_we_stand_in_for_is_mlx_lms_and_agrees_with_it() -> None:
    assert names(activations.swiglu) == names(fastmath.swiglu) == ["gate", "x"]
    assert llama in fastmath.install()
    gate = mx.random.normal((64, 96), key=mx.random.key(1)) * 12
    x = mx.random.normal((64, 96), key=mx.random.key(2))
    got, wanted = fastmath.swiglu(gate, x), activations.swiglu(gate, x)
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=2e-6, atol=1e-7)
    extremes = mx.array([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4])
    got, wanted = (f(extremes, mx.ones(7)) for f in (fastmath.swiglu, activations.swiglu))
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=2e-6, atol=1e-30)


def test_turned_weights_are_the_same_numbers() -> None:
    model, turned = tiny_llama(tied=False), tiny_llama(tied=False)
    assert fastmath.turn_weights(turned) == 3 * 7 + 1
    weights = dict(tree_flatten(model.parameters()))
    for name, weight in tree_flatten(turned.parameters()):
        np.testing.assert_array_equal(np.array(weight), np.array(weights[name]))
    tokens = mx.array([[1, 2, 3]])
    np.testing.assert_allclose(np.array(turned(tokens)), np.array(model(tokens)), atol=1e-5)


def test_powers_of_two_are_right_to_five_units_in_ten_million() -> None:
    y = np.linspace(-126, 126, 100001).astype(np.float32)
    got = np.array(fastmath.exp2(mx.array(y))).astype(np.float64)
    assert np.abs(got / np.exp2(y.astype(np.float64)) - 1).max() < 5e-7
    assert np.isnan(np.array(fastmath.exp2(mx.array([float("nan")])))).all()


def test_prompt_caches_are_of_the_kinds_that_groups_are_read_from() -> None:
    model = tiny_llama(layers=4, sliding_window=8, sliding_layers=(1, 2))
    assert [type(cache) for cache in make_prompt_cache(model)] == [
        KVCache,
        RotatingKVCache,
        RotatingKVCache,
        KVCache,
    ]
    assert [shape.group for shape in layer_shapes(model)] == [0, 1, 1, 0]
    assert groups_for(model, 9) == (Group("full", 9), Group("window", 9, 8, 0))
    capabilities = capabilities_of(groups_for(model, 9))
    assert capabilities.rewind.reason == "window 8: rewind up to what is still held"
    assert capabilities.as_flags() == {"batch": True, "pad": True, "rewind": True, "share": True}


def test_caches_of_unknown_kinds_are_not_put_into_pages() -> None:
    model = tiny_llama()
    model.make_cache = lambda: [object()]
    with pytest.raises(ModelError, match="cache 0 is a object, which pages cannot hold yet"):
        groups_for(model, 4)
    assert family_of(model).way == "opaque"
    assert "cache 0 is a object" in family_of(model).reason


def test_what_a_model_over_its_own_caches_cannot_do_is_said_with_a_reason_each() -> None:
    capabilities = capabilities_of(owned_groups())
    flags = capabilities.as_flags()
    for name in ("batch", "pad", "rewind", "share"):
        assert flags[name] is False
        assert "the model's own caches" in str(flags[f"{name}_reason"])


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_made_for_the_sampled_rows_only(tied: bool) -> None:
    model = tiny_llama(tied=tied)
    body, head = body_and_head(model)
    tokens = mx.array([[1, 2, 3]])
    np.testing.assert_array_equal(np.array(head(body(tokens))), np.array(model(tokens)))


def test_a_model_that_is_cut_in_another_way_makes_all_logits() -> None:
    def model(tokens: mx.array) -> mx.array:
        return tokens * 2

    body, head = body_and_head(model)
    assert head(body(mx.array([4]))).item() == 8


@pytest.fixture
def cache() -> PagedCache:
    """The cache of a layer in the middle of a forward of two rows."""
    piece = Book(GEOMETRY).append(0, [1, 2])
    cache = PagedCache(0, 0)
    pages = Pages(GEOMETRY, (LayerShape(0, 2, 8, 8, mx.float32),))
    cache.bind(StepContext(build(Batch(1, (piece,)), GEOMETRY)), pages.begin())
    return cache


def rows(heads: int = 2) -> mx.array:
    return mx.ones((2, heads, 1, 8))


MISUSES: dict[str, Any] = {
    "size": lambda keys, values: keys.size,
    "cast": lambda keys, values: values.astype(mx.bfloat16),
    "left product": lambda keys, values: keys @ rows(),
    "sum": lambda keys, values: values + 1,
    "index": lambda keys, values: keys[0],
    "iteration": lambda keys, values: list(values),
    "truth": lambda keys, values: bool(keys),
    "swap": lambda keys, values: keys.swapaxes(-1, -2),
    "array": lambda keys, values: np.asarray(keys),
    "compare": lambda keys, values: keys == values,
}


def test_a_handle_may_be_cast_to_what_attention_computes_in(cache: PagedCache) -> None:
    keys, values = cache.update_and_fetch(rows().astype(mx.bfloat16), rows())
    assert (keys.dtype, values.dtype) == (mx.bfloat16, mx.float32)
    assert keys.astype(mx.float32) is keys


@pytest.mark.parametrize("kind", MISUSES)
def test_a_handle_that_is_used_as_an_array_raises(kind: str, cache: PagedCache) -> None:
    keys, values = cache.update_and_fetch(rows(), rows())
    with pytest.raises(HandleMisused, match="of layer 0; paged rows can only be attended to"):
        MISUSES[kind](keys, values)


def test_a_handle_in_an_mlx_operation_raises(cache: PagedCache) -> None:
    keys, values = cache.update_and_fetch(rows(), rows())
    with pytest.raises(TypeError, match="KeyHandle"):
        rows() @ keys
    with pytest.raises(TypeError, match="KeyHandle"):
        mx.fast.scaled_dot_product_attention(rows(4), keys, values, scale=1.0)


def test_the_dispatch_goes_by_the_handle_and_not_by_the_cache(cache: PagedCache) -> None:
    keys, values = cache.update_and_fetch(rows(), rows())
    out = attention.dispatch(rows(4), keys, values, None, 1.0, None)
    assert out.shape == (2, 4, 1, 8)
    plain = attention.dispatch(rows(4), rows(), rows(), cache, 1.0, None)
    wanted = mx.fast.scaled_dot_product_attention(rows(4), rows(), rows(), scale=1.0, mask=None)
    np.testing.assert_array_equal(np.array(plain), np.array(wanted))


def test_masks_of_a_models_own_are_refused_not_dropped(cache: PagedCache) -> None:
    keys, values = cache.update_and_fetch(rows(), rows())
    for mask in ("causal", mx.ones((1, 1), mx.bool_)):
        with pytest.raises(HandleMisused, match="brings a mask of its own"):
            attention.dispatch(rows(4), keys, values, cache, 1.0, mask)


def test_sinks_take_their_share_of_the_weights(cache: PagedCache) -> None:
    keys, values = cache.update_and_fetch(rows(), rows())
    # Scores are 8, the sink's too: of the second row, two keys and a sink share the weight.
    out = attention.dispatch(rows(4), keys, values, cache, 1.0, None, mx.full((4,), 8.0))
    np.testing.assert_allclose(np.array(out[:, :, 0, 0]), [[1 / 2] * 4, [2 / 3] * 4], rtol=1e-6)


def test_values_of_another_update_are_refused(cache: PagedCache) -> None:
    keys, _ = cache.update_and_fetch(rows(), rows())
    _, values = cache.update_and_fetch(rows(), rows())
    with pytest.raises(HandleMisused, match="not of one update"):
        attention.dispatch(rows(4), keys, values, cache, 1.0, None)


def test_masks_that_pages_would_not_honour_are_refused(cache: PagedCache) -> None:
    assert cache.make_mask(1) is None
    with pytest.raises(HandleMisused, match="a mask of 2 rows"):
        cache.make_mask(2)


def test_a_mask_that_names_another_window_than_the_pages_hold_is_refused(cache: PagedCache) -> None:
    keys, values = cache.update_and_fetch(rows(), rows())
    mask = cache.make_mask(1, return_array=True, window_size=4)
    with pytest.raises(HandleMisused, match="a window of 4 rows, but its pages hold all"):
        attention.dispatch(rows(4), keys, values, cache, 1.0, mask)
    with pytest.raises(HandleMisused, match="reads `__add__` of the mask of layer 0"):
        mask + 1  # type: ignore[operator]
    windowed = PagedCache(0, 0, 4)
    assert windowed.make_mask(1, window_size=4) is None


def test_rows_of_another_number_than_the_steps_are_refused(cache: PagedCache) -> None:
    with pytest.raises(HandleMisused, match="not \\[2, heads, 1, dim\\]"):
        cache.update_and_fetch(mx.ones((1, 2, 2, 8)), mx.ones((1, 2, 2, 8)))


def test_a_cache_outside_of_a_forward_is_refused(cache: PagedCache) -> None:
    cache.release()
    with pytest.raises(HandleMisused, match="outside of a forward"):
        cache.update_and_fetch(rows(), rows())


def test_counters_say_what_the_layer_did_and_with_which_metadata(cache: PagedCache) -> None:
    metadata = cache._context.metadata  # type: ignore[union-attr]
    for _ in range(2):
        cache.offset  # noqa: B018
    keys, values = cache.update_and_fetch(rows(), rows())
    attention.dispatch(rows(4), keys, values, None, 1.0, None)
    use = cache.used(metadata)
    assert (use.offset_reads, use.updates, use.rows_updated, use.attends) == (2, 1, 2, 1)
    assert use.strangers == 0
    other = build(Batch(2, (Book(GEOMETRY).append(0, [1, 2]),)), GEOMETRY)
    assert cache.used(other).strangers == 4


def test_a_layer_that_misuses_its_handle_fails_the_build_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama()
    geometry = Geometry(block_size=4, groups=groups_for(model, 8))
    kernel = ModelKernel(model, geometry)
    monkeypatch.setattr(llama, attention.SEAM, lambda q, k, v, **_: q @ k.swapaxes(-1, -2))
    with pytest.raises(BuildFailed, match="this model reads `swapaxes` of the keys of layer 0"):
        kernel.issue(Batch(1, (Book(geometry).append(0, [1]),)))
