"""Modules of mlx-lm's that would end the process, or write beyond an array, as they are loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest

from kernel.errors import ModelError
from kernel.families import family_of
from kernel.hf import build_model, read_folder
from kernel.model_classes import classes_of
from kernel.weights import load_model

from .tiny_architectures import architecture_config, architecture_model
from .tiny_families import family_weights
from .tiny_models import write_folder

LOOKS = """
import sys
try:
    import a_package_of_the_makers{use}
except ImportError:
    print("to run this, install something")
    sys.exit(1)
class Model: pass
class ModelArgs: pass
"""


def module(path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """An architecture `looking` beside mlx-lm's."""
    (path / "looking.py").write_text(source)
    monkeypatch.setattr(mlx_lm.models, "__path__", [*mlx_lm.models.__path__, str(path)])
    monkeypatch.delitem(sys.modules, "mlx_lm.models.looking", raising=False)


def refusal(kind: str) -> str:
    with pytest.raises(ModelError) as caught:
        classes_of({"model_type": kind})
    return str(caught.value)


def test_a_module_that_only_looks_for_a_package_does_without_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module(tmp_path, monkeypatch, LOOKS.format(use=""))
    model, _ = classes_of({"model_type": "looking"})
    assert model.__module__ == "mlx_lm.models.looking"
    assert "a_package_of_the_makers" not in sys.modules
    assert capsys.readouterr().out == ""


NEEDS = "model_type 'looking' needs a_package_of_the_makers, which is not installed: install it"


@pytest.mark.parametrize("use", [".part", " as it; it.answer", "\n    raise ImportError"])
def test_a_module_that_uses_a_package_which_is_missing_is_refused_in_a_sentence(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, monkeypatch, LOOKS.format(use=use))
    said = refusal("looking")
    assert said == NEEDS


def test_a_module_that_ends_the_process_for_another_reason_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, monkeypatch, "raise SystemExit(3)")
    assert refusal("looking") == (
        "model_type 'looking' needs a package, which is not installed: install it"
    )


def test_olmo_is_built_without_the_package_that_its_module_looks_for() -> None:
    assert "hf_olmo" not in sys.modules
    assert build_model(architecture_config("olmo")).model_type == "olmo"
    assert "hf_olmo" not in sys.modules


def test_a_model_whose_own_tokens_are_beyond_its_vocabulary_is_refused_as_it_is_loaded(
    tmp_path: Path,
) -> None:
    config = architecture_config("phi3small") | {"vocab_size": 100_351}
    folder = write_folder(tmp_path / "small", config, {})
    with pytest.raises(ModelError) as caught:
        read_folder(folder)
    assert str(caught.value) == (
        f"{folder / 'config.json'}: this architecture has a token 100351 of its own, but "
        "vocab_size is 100351: fetch the config.json again from where the model came from"
    )
    assert build_model(config | {"vocab_size": 100_352}).model_type == "phi3small"


def test_a_folder_of_weights_packed_to_two_bits_and_turned_is_read_as_it_was_written(
    tmp_path: Path,
) -> None:
    name = "prism_hadamard_qwen35"
    config = architecture_config(name)
    folder = write_folder(tmp_path / "packed", config, family_weights(config))
    read, tokens = load_model(str(folder)).model, mx.array([[3, 1, 2]])
    # Not bit for bit: a loaded model's norms and products are computed in another order.
    np.testing.assert_allclose(
        np.array(read(tokens)), np.array(architecture_model(name)(tokens)), rtol=0, atol=1e-4
    )
    assert family_of(read).reason == "served split over pages and states in slots"


def test_signs_that_are_none_are_refused_as_a_folder_is_read(tmp_path: Path) -> None:
    config = architecture_config("prism_hadamard_qwen35")
    weights = family_weights(config)
    signs = next(key for key in weights if key.endswith(".signs"))
    weights[signs] = weights[signs] * 2
    folder = write_folder(tmp_path / "packed", config, weights)
    with pytest.raises(ModelError, match=r"cannot be loaded: Hadamard signs must contain only -1"):
        load_model(str(folder))
