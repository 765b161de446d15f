"""Checkpoints as people have them: quantised, sharded, tied, with several end tokens, as GGUF."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel.blas import load_blas

load_blas()  # before anything imports mlx

import mlx.core as mx  # noqa: E402
from mlx_lm.utils import quantize_model  # noqa: E402

from kernel.errors import ModelError  # noqa: E402
from kernel.families import family_of  # noqa: E402
from kernel.hf import build_model  # noqa: E402
from kernel.tensors import parameters  # noqa: E402
from kernel.weights import load_model  # noqa: E402

from . import tiny_models as tiny  # noqa: E402
from .tiny_architectures import architecture_config  # noqa: E402
from .tiny_families import family_weights  # noqa: E402

TOKENS = mx.array([[5, 17, 200, 31, 8, 8, 91, 120, 44, 3, 77, 250, 6, 19, 140, 33, 61, 2, 1, 58]])


def logits(model: Any) -> np.ndarray:
    """Logits of TOKENS, [tokens, vocabulary]."""
    return np.array(model(TOKENS)[0].astype(mx.float32))


def model_of(config: dict[str, Any]) -> Any:
    """mlx-lm's module with random weights, made without any file."""
    model = build_model(config)
    model.load_weights(list(family_weights(config).items()))
    return model


@contextmanager
def taking() -> Iterator[list[int]]:
    """How many bytes of arrays MLX holds at the most, beyond those that it held before."""
    gc.collect()
    taken, before = list[int](), mx.get_active_memory()
    mx.reset_peak_memory()
    yield taken
    taken.append(mx.get_peak_memory() - before)


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(path))
    return str(caught.value)


def quantised(path: Path, name: str, mode: str, bits: int) -> Any:
    """A folder in two shards as mlx_lm.convert writes it; returns the model that is in it."""
    config = architecture_config(name)
    group = {"affine": 32, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}[mode]
    model, config = quantize_model(model_of(config), config, group, bits, mode=mode)
    tiny.write_folder(path, config, dict(parameters(model)), shards=2)
    return model


MODES = [("affine", 4), ("affine", 8), ("mxfp4", 4), ("nvfp4", 4), ("mxfp8", 8)]


@pytest.mark.parametrize(("mode", "bits"), MODES, ids=str)
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "mixtral"])
def test_a_quantised_folder_says_what_its_weights_say_and_is_served_packed(
    tmp_path: Path, name: str, mode: str, bits: int
) -> None:
    held = quantised(tmp_path, name, mode, bits)
    loaded = load_model(str(tmp_path))
    assert {array.dtype for _, array in parameters(loaded.model)} == {mx.float32}
    np.testing.assert_allclose(logits(loaded.model), logits(held), atol=2e-4)
    assert family_of(loaded.model).way == "packed"


def test_what_memory_does_not_hold_in_float32_stays_quantised_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = quantised(tmp_path / "toy", "qwen3", "affine", 4)
    monkeypatch.setattr("kernel.weights.memory_bytes", lambda: 1 << 18)
    said: list[str] = []
    loaded = load_model(str(tmp_path / "toy"), progress=said.append)
    assert said == [
        "loading toy",
        "its weights take 0.0 GiB in float32, and there are 0.0 GiB here: they are held as they "
        "are, which is many times slower",
    ]
    assert mx.uint32 in {array.dtype for _, array in parameters(loaded.model)}
    np.testing.assert_allclose(logits(loaded.model), logits(held), atol=1e-5)


def test_scales_that_are_missing_or_of_another_group_are_named(tmp_path: Path) -> None:
    quantised(tmp_path, "qwen3", "affine", 4)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        weights |= mx.load(str(file))
        file.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    del weights["model.layers.0.mlp.up_proj.biases"]
    name = "model.layers.1.self_attn.o_proj"
    weights[f"{name}.scales"] = weights[f"{name}.scales"][:, :1]
    text = refusal(tiny.write_folder(tmp_path, config, weights))
    assert "missing tensors: model.layers.0.mlp.up_proj.biases;" in text
    # mlx-lm tells the size of a layer's groups by its scales.
    assert f"tensors of another shape: {name}.biases is [64, 2], not [64, 1]" in text


def test_tensors_of_a_type_that_is_not_what_the_model_has_are_named(tmp_path: Path) -> None:
    config = architecture_config("qwen2")
    weights = family_weights(config)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(mx.int32)
    text = refusal(tiny.write_folder(tmp_path, config, weights))
    assert text.endswith("tensors of another type: model.norm.weight is mlx.core.int32, not float")


@pytest.mark.parametrize("name", ["gemma3_text", "mixtral", "deepseek_v3", "starcoder2"])
def test_missing_left_over_and_misshapen_tensors_of_any_architecture_are_named(
    tmp_path: Path, name: str
) -> None:
    config = architecture_config(name)
    weights = family_weights(config)
    weights["model.extra.weight"] = mx.zeros((2,))
    weights["model.norm.weight"] = mx.zeros((3,))
    del weights["model.layers.0.self_attn.o_proj.weight"]
    text = refusal(tiny.write_folder(tmp_path, config, weights))
    assert "missing tensors: model.layers.0.self_attn.o_proj.weight;" in text
    assert "left-over tensors: model.extra.weight;" in text
    assert "tensors of another shape: model.norm.weight is [3], not [64]" in text


def test_nothing_of_a_tensor_is_read_before_all_headers_were_compared(tmp_path: Path) -> None:
    config = architecture_config("qwen3")
    weights = family_weights(config)
    weights["model.extra.weight"] = mx.zeros((2,))
    file = tiny.write_folder(tmp_path, config, weights) / "model.safetensors"
    size = file.stat().st_size
    del weights
    with taking() as taken:
        assert "left-over tensors: model.extra.weight" in refusal(tmp_path)
    assert taken[0] < size / 100
    tiny.write_folder(tmp_path, config, family_weights(config))
    with taking() as taken:
        load_model(str(tmp_path))
    assert taken[0] > size / 2


def test_an_output_head_in_the_files_of_any_architecture_is_used(tmp_path: Path) -> None:
    config = architecture_config("qwen2")
    expected, weights = logits(model_of(config)), family_weights(config)
    del config["tie_word_embeddings"]
    loaded = load_model(str(tiny.write_folder(tmp_path, config, weights)))
    np.testing.assert_array_equal(logits(loaded.model), expected)


def test_heads_of_a_size_that_is_no_power_of_two_are_served_packed(tmp_path: Path) -> None:
    config = architecture_config("qwen3") | {"head_dim": 18, "num_attention_heads": 6}
    tiny.write_folder(tmp_path, config, family_weights(config))
    loaded = load_model(str(tmp_path))
    np.testing.assert_array_equal(logits(loaded.model), logits(model_of(config)))
    assert family_of(loaded.model).way == "packed"


def test_end_tokens_of_the_generation_config_go_before_those_of_the_config(tmp_path: Path) -> None:
    config = tiny.tiny_config(eos_token_id=7)
    tiny.write_folder(tmp_path, config, tiny.tiny_weights(config))
    assert load_model(str(tmp_path)).tokenizer.end_tokens == (0, 2, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    # The tokenizer's own stay: 2 is what its settings name, 0 what models end texts with.
    assert load_model(str(tmp_path)).tokenizer.end_tokens == (0, 2, 5, 9)


def test_a_template_in_a_file_of_its_own_goes_before_that_of_the_settings(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tiny.write_folder(tmp_path, config, tiny.tiny_weights(config))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = load_model(str(tmp_path)).tokenizer
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "hi!"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_gguf_of_qwen_gives_the_logits_of_the_folder_it_was_made_from(
    tmp_path: Path, name: str, tied: bool
) -> None:
    config = architecture_config(name) | {"tie_word_embeddings": tied}
    if name == "qwen2":
        del config["head_dim"]
    tensors = tiny.gguf_tensors(config, family_weights(config))
    assert ("blk.1.attn_k.bias" in tensors) == (name == "qwen2")
    metadata = tiny.gguf_metadata(config) | {"tokenizer.ggml.pre": "qwen2"}
    loaded = load_model(str(tiny.write_gguf(tmp_path / "toy.gguf", metadata, tensors)))
    np.testing.assert_allclose(logits(loaded.model), logits(model_of(config)), atol=1e-5)
    assert (loaded.context_tokens, loaded.config["model_type"]) == (512, name)
    assert family_of(loaded.model).way == "packed"


def test_a_qwen_vocabulary_cuts_digits_one_by_one_and_composes_its_text(tmp_path: Path) -> None:
    config = architecture_config("qwen3")
    metadata = tiny.gguf_metadata(config) | {"tokenizer.ggml.pre": "qwen2"}
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "12"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    metadata["tokenizer.ggml.merges"] = ["1 2"]
    path = tmp_path / "toy.gguf"
    tensors = tiny.gguf_tensors(config, family_weights(config | {"vocab_size": 260}))
    tokenizer = load_model(str(tiny.write_gguf(path, metadata, tensors))).tokenizer
    assert len(tokenizer.encode("12")) == 2
    assert tokenizer.encode("e\N{COMBINING ACUTE ACCENT}") == tokenizer.encode("é")
