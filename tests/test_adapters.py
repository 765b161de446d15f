"""LoRA adapters: several in one step, each row as mlx-lm computes it with that adapter alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kernel.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx.nn.layers.quantized import QuantizedLinear  # noqa: E402
from mlx_lm.tuner.utils import load_adapters  # noqa: E402
from msgspec import structs  # noqa: E402

from kernel.adapters import Adapters  # noqa: E402
from kernel.batch import Batch, BuildFailed, Piece  # noqa: E402
from kernel.context import StepContext  # noqa: E402
from kernel.errors import AdapterError  # noqa: E402
from kernel.families import owned_groups  # noqa: E402
from kernel.layout import ALONE, GATHERED, PACKED, Way, look  # noqa: E402
from kernel.metadata import build  # noqa: E402
from kernel.model_kernel import ModelKernel  # noqa: E402
from kernel.model_owned import ModelOwnedKernel  # noqa: E402
from kernel.weights import load_model  # noqa: E402
from statemachine.events import Namespace  # noqa: E402
from statemachine.geometry import Geometry  # noqa: E402
from statemachine.tags import root_key  # noqa: E402

from .lora import mlx_lm_model, write_adapter  # noqa: E402
from .paged import Runner, dense_logits  # noqa: E402
from .tiny_models import (  # noqa: E402
    gguf_metadata,
    gguf_tensors,
    tiny_config,
    tiny_weights,
    write_folder,
    write_gguf,
)

PROMPTS = {"": [5, 9, 77, 31, 8], "a": [40, 41, 42, 43, 44, 45, 46], "b": [200, 3]}
ANSWERS = {"": [11, 12, 13], "a": [21, 22, 23], "b": [31, 32, 33]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny llama ("") and two adapters of it."""
    root = tmp_path_factory.mktemp("adapters")
    config = tiny_config()
    model = write_folder(root / "model", config, tiny_weights(config))
    return {
        "": model,
        "a": write_adapter(root / "a", model, seed=1),
        "b": write_adapter(root / "b", model, seed=2, rank=2, keys=["self_attn.v_proj"], scale=9.0),
    }


class Mixed(Runner):
    """Forwards over pages whose sequences have adapters: sequence `number` is that of a name."""

    def __init__(self, folders: dict[str, Path], way: Way = PACKED, model: Any = None) -> None:
        model = model or load_model(str(folders[""])).model
        super().__init__(model, layout=look(model, way))
        self.model = model
        self.adapters = Adapters(model)
        self.spaces = {"": Namespace()}
        for name in folders:
            if name:
                adapter = self.adapters.load(name, str(folders[name]))
                self.spaces[name] = Namespace(*adapter.key)

    def open(self, seq: int, name: str) -> None:
        space = self.spaces[name]
        key = root_key(self.geometry, space)
        sequence = self.book.open(seq)
        self.book.sequences[seq] = structs.replace(sequence, namespace=space, root=key)

    def context(self, pieces: tuple[Piece, ...]) -> StepContext:
        metadata = build(Batch(1, pieces), self.geometry)
        return self.forward.context(metadata, serving=self.adapters.serving(pieces))

    def run(self, *pieces: Piece) -> np.ndarray:
        pages = self.pages.begin()
        logits, _, self.seen = self.forward.run(self.context(pieces), pages)
        self.pages.commit(pages)
        assert logits is not None
        mx.eval(logits)
        return np.array(logits)


def answers(mixed: Mixed, names: list[str]) -> dict[str, np.ndarray]:
    """Logits of the known answers, all names in each step: the prompt's last row, then decoding."""
    for seq, name in enumerate(names):
        mixed.open(seq, name)
    steps = [mixed.run(*(mixed.book.append(s, PROMPTS[n]) for s, n in enumerate(names)))]
    for at in range(len(ANSWERS[""])):
        steps.append(
            mixed.run(*(mixed.book.append(s, [ANSWERS[n][at]]) for s, n in enumerate(names)))
        )
    return {name: np.stack([rows[seq] for rows in steps]) for seq, name in enumerate(names)}


def alone(folders: dict[str, Path], name: str) -> np.ndarray:
    """The same by mlx-lm: the model with one adapter in it, or none."""
    model = mlx_lm_model(folders[""], folders[name] if name else None)
    tokens = PROMPTS[name] + ANSWERS[name]
    return dense_logits(model, tokens, len(PROMPTS[name]))


@pytest.mark.parametrize("way", [PACKED, GATHERED, ALONE], ids=lambda way: way.name)
def test_each_row_of_a_mixed_step_is_what_mlx_lm_says_with_its_adapter_alone(
    folders: dict[str, Path], way: Way
) -> None:
    found = answers(Mixed(folders, way), ["a", "", "b"])
    for name in ("", "a", "b"):
        np.testing.assert_allclose(found[name], alone(folders, name), atol=1e-4)
    assert np.abs(found["a"] - dense_logits_of_base(folders, "a")).max() > 0.1
    assert np.abs(found["b"] - dense_logits_of_base(folders, "b")).max() > 0.1


def dense_logits_of_base(folders: dict[str, Path], name: str) -> np.ndarray:
    tokens = PROMPTS[name] + ANSWERS[name]
    return dense_logits(mlx_lm_model(folders[""], None), tokens, len(PROMPTS[name]))


def test_a_step_of_one_adapter_only_is_what_mlx_lm_says_too(folders: dict[str, Path]) -> None:
    found = answers(Mixed(folders), ["a"])
    np.testing.assert_allclose(found["a"], alone(folders, "a"), atol=1e-4)


def test_rows_of_the_base_are_the_same_to_the_last_bit_with_adapters_beside_them(
    folders: dict[str, Path],
) -> None:
    bare = {"": folders[""]}
    plain = answers(Mixed(bare), [""])
    loaded = answers(Mixed(folders), [""])
    assert np.array_equal(plain[""], loaded[""])
    beside = Mixed(bare)
    beside.spaces |= {"a": Namespace(), "b": Namespace()}
    assert np.array_equal(
        answers(beside, ["a", "", "b"])[""], answers(Mixed(folders), ["a", "", "b"])[""]
    )


def test_layers_that_are_quantised_stay_so_under_an_adapter(folders: dict[str, Path]) -> None:
    quantised: Any = vars(nn)["quantize"]
    model, same = (load_model(str(folders[""])).model for _ in range(2))
    for one in (model, same):
        quantised(one, group_size=32, bits=8)
    found = answers(Mixed(folders, model=model), ["", "a"])
    assert isinstance(model.layers[0].self_attn.q_proj, QuantizedLinear)
    base, with_a = PROMPTS[""] + ANSWERS[""], PROMPTS["a"] + ANSWERS["a"]
    expected = dense_logits(same, base, len(PROMPTS[""]))
    np.testing.assert_allclose(found[""], expected, atol=1e-4)
    expected = dense_logits(load_adapters(same, str(folders["a"])), with_a, len(PROMPTS["a"]))
    np.testing.assert_allclose(found["a"], expected, atol=1e-4)


def test_an_adapter_of_the_head_is_added_to_the_sampled_rows_only_where_theirs(
    tmp_path: Path,
) -> None:
    config = tiny_config(tie_word_embeddings=False)
    model = write_folder(tmp_path / "model", config, tiny_weights(config))
    head = write_adapter(tmp_path / "head", model, seed=5, keys=["lm_head"])
    folders = {"": model, "a": head, "b": write_adapter(tmp_path / "b", model, seed=6)}
    found = answers(Mixed(folders), ["", "b", "a"])
    for name in folders:
        np.testing.assert_allclose(found[name], alone(folders, name), atol=1e-4)


def test_an_adapter_fits_a_gguf_file_whose_rows_stand_in_another_order(tmp_path: Path) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    model = write_folder(tmp_path / "model", config, weights)
    folders = {"": model, "a": write_adapter(tmp_path / "a", model, seed=1)}
    file = tmp_path / "tiny.gguf"
    write_gguf(file, gguf_metadata(config), gguf_tensors(config, weights))
    loaded = load_model(str(file))
    assert loaded.turned_head_dim == 16
    mixed = Mixed({"": model}, model=loaded.model)
    mixed.adapters = Adapters(loaded.model, loaded.turned_head_dim)
    mixed.spaces["a"] = Namespace(*mixed.adapters.load("a", str(folders["a"])).key)
    found = answers(mixed, ["a", ""])
    for name in folders:
        np.testing.assert_allclose(found[name], alone(folders, name), atol=1e-4)


def test_a_row_whose_adapter_is_not_there_is_refused_and_not_served_by_the_base(
    folders: dict[str, Path],
) -> None:
    mixed = Mixed(folders)
    model = load_model(str(folders[""])).model
    adapters = Adapters(model)
    adapters.load("a", str(folders["a"]))
    kernel = ModelKernel(model, mixed.geometry, check=False, adapters=adapters)
    mixed.open(0, "")
    mixed.open(1, "b")
    pieces = tuple(mixed.book.append(seq, [1, 2]) for seq in (0, 1))
    with pytest.raises(
        BuildFailed, match=r"adapter b is not loaded in version [0-9a-f]{16}$"
    ) as it:
        kernel.issue(Batch(1, pieces))
    assert it.value.seq == 1


def test_a_layer_that_is_called_for_other_rows_than_the_steps_is_refused(
    folders: dict[str, Path],
) -> None:
    mixed = Mixed(folders)
    for seq, name in enumerate(("a", "", "b")):
        mixed.open(seq, name)
    pieces = tuple(mixed.book.append(seq, [1]) for seq in range(3))
    layer = mixed.model.layers[0].self_attn.v_proj
    with mixed.adapters.serving(pieces).rows():
        assert layer(mx.zeros((3, 1, 64))).shape == (3, 1, 32)
        with pytest.raises(AdapterError, match="is called for 2 rows in a step of 3"):
            layer(mx.zeros((2, 1, 64)))
    assert layer(mx.zeros((2, 1, 64))).shape == (2, 1, 32)


def test_other_weights_under_a_name_are_another_version_beside_the_first(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load_model(str(folders[""])).model
    adapters = Adapters(model)
    first = adapters.load("a", str(folders["a"]))
    copied = shutil.copytree(folders["a"], tmp_path / "copied")
    assert adapters.load("a", str(copied)).key == first.key
    second = adapters.load("a", str(folders["b"]))
    assert (second.name, second.key == first.key) == ("a", False)
    assert [it.digest for it in adapters.held] == [first.digest, second.digest]
    config = json.loads((copied / "adapter_config.json").read_text())
    config["lora_parameters"]["scale"] += 1
    (copied / "adapter_config.json").write_text(json.dumps(config))
    third = adapters.load("a", str(copied))
    assert third.key not in (first.key, second.key)
    other = write_adapter(tmp_path / "seed", folders[""], seed=7)
    assert (other / "adapter_config.json").read_bytes() == (
        folders["a"] / "adapter_config.json"
    ).read_bytes()
    assert adapters.load("a", str(other)).key not in (first.key, second.key, third.key)
    adapters.keep({second.key})
    assert adapters.held == (second,)
    assert adapters.load("a", str(folders["a"])).key == first.key


def test_a_model_over_its_own_caches_serves_adapters_one_sequence_at_a_time(
    folders: dict[str, Path],
) -> None:
    model = load_model(str(folders[""])).model
    adapters = Adapters(model)
    spaces = {n: Namespace(*adapters.load(n, str(folders[n])).key) for n in ("a", "b")}
    spaces[""] = Namespace()
    geometry = Geometry(4, owned_groups(), "test")
    kernel = ModelOwnedKernel(model, geometry, adapters=adapters)
    mixed = Mixed({"": folders[""]})
    mixed.spaces = spaces
    mixed.book.geometry = geometry
    for seq, name in enumerate(("a", "", "b")):
        mixed.open(seq, name)
        sequence = structs.replace(mixed.book.sequences[seq], committed=len(PROMPTS[name]))
        piece = Piece(sequence, tuple(PROMPTS[name]), samples=1)
        result = kernel.collect(kernel.issue(Batch(seq + 1, (piece,))))
        expected = alone(folders, name)[0]
        assert result.tokens == (int(expected.argmax()),)
        np.testing.assert_allclose(result.logits[0], expected.max(), atol=1e-4)


def test_an_adapter_that_cannot_be_served_is_refused_in_one_sentence(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    adapters = Adapters(load_model(str(folders[""])).model)

    def refused(folder: Path) -> str:
        with pytest.raises(AdapterError) as error:
            adapters.load("x", str(folder))
        return str(error.value).replace(str(folder.resolve()), "X")

    def broken(**changes: Any) -> Path:
        folder = shutil.copytree(folders["a"], tmp_path / "broken", dirs_exist_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text()) | changes
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return Path(folder)

    hint = "give a folder that mlx_lm.lora wrote, with adapter_config.json and adapters.safetensors"
    assert refused(tmp_path / "none") == (
        f"X/adapter_config.json cannot be read (No such file or directory): {hint}"
    )
    dora = write_adapter(tmp_path / "dora", folders[""], seed=1, kind="dora")
    assert refused(dora) == (
        "X/adapter_config.json: an adapter of type 'dora' cannot be served, only lora: fuse it "
        "into the model"
    )
    assert refused(broken(lora_parameters={"alpha": 16})) == (
        "X/adapter_config.json lacks lora_parameters.scale, a number: give an adapter in mlx-lm's "
        "format"
    )
    folder = broken(lora_parameters={"scale": 2})
    tensors = folder / "adapters.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-8])
    assert refused(folder).startswith("X/adapters.safetensors is damaged (")
    embedding = write_adapter(tmp_path / "e", folders[""], seed=1, keys=["model.embed_tokens"])
    assert refused(embedding) == (
        "X changes model.embed_tokens (Embedding), and only linear layers can have adapters: "
        "train it without that layer (lora_parameters.keys)"
    )
    wide = tiny_config(intermediate_size=128)
    other = write_folder(tmp_path / "other", wide, tiny_weights(wide))
    assert refused(write_adapter(tmp_path / "wide", other, seed=1)) == (
        "X is not for this model: model.layers.0.mlp.down_proj takes lora_a (96, rank) and lora_b "
        "(rank, 64), and it has {'lora_a': (128, 4), 'lora_b': (4, 64)}"
    )
    deep = tiny_config(num_hidden_layers=3)
    other = write_folder(tmp_path / "deeper", deep, tiny_weights(deep))
    assert refused(write_adapter(tmp_path / "deep", other, seed=1)) == (
        "X is not for this model, which has no layer 'model.layers.2.mlp.down_proj'"
    )
    assert adapters.held == ()
