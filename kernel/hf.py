"""Hugging Face folders: config.json, safetensors, tokenizer.json.

Owns the checks that come before a load: fields of the config, names, shapes and types in the
headers of the safetensors files. The load itself is mlx-lm's, quantised folders included, and it
reads headers only: what a tensor holds is read when it is computed. Never runs code that a folder
brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from attrs import frozen
from mlx_lm.models import llama
from mlx_lm.utils import load_config
from mlx_lm.utils import load_model as load_weights
from safetensors import SafetensorError, safe_open

from .errors import ModelError
from .hf_tokenizer import read_json, tokenizer_of
from .model_classes import classes_of
from .tensors import compare, parameters
from .tokenizer import Tokenizer

LLAMA_TYPES = ("llama", "mistral")
"""Their config.json is as Hugging Face writes it, so that what it lacks can be said."""
REQUIRED_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
)


@frozen
class Folder:
    """A folder's model, loaded, and the files that its digests are made of."""

    model: Any
    config: dict[str, Any]
    tokenizer: Tokenizer
    weight_files: list[Path]
    tokenizer_files: list[Path]


def read_folder(path: Path) -> Folder:
    """Load a folder whose model_type mlx-lm knows; quantised weights stay so.

    Raises ModelError or TokenizerError: a file or field is missing or damaged, tensors are
    missing, left over or of another shape.
    """
    config = _config(path)
    tokenizer, tokenizer_files = tokenizer_of(path, config)
    weight_files = sorted(path.glob("model*.safetensors"))
    if not weight_files:
        raise ModelError(
            f"{path} holds no model*.safetensors: convert the model to safetensors, or give a "
            ".gguf file"
        )
    names = _headers(path, weight_files)
    if "lm_head.weight" in names or config.get("model_type") in LLAMA_TYPES:
        config.setdefault("tie_word_embeddings", "lm_head.weight" not in names)
    _checked_model(path, config)
    try:
        model, config = load_weights(
            path, lazy=True, model_config=config, get_model_classes=partial(_checking, path)
        )
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{path} cannot be loaded: {reason}") from error
    return Folder(model, config, tokenizer, weight_files, tokenizer_files)


def build_model(config: Mapping[str, Any]) -> Any:
    """mlx-lm's module for a config; its parameters are not computed.

    Raises ModelError for an architecture that cannot be had, or that names tokens beyond its
    vocabulary, and whatever a module raises for fields that make no sense to it.
    """
    module, arguments = classes_of(config)
    model = module(arguments.from_dict(dict(config)))
    _check_token_ids(model, config.get("vocab_size"))
    return model


def _check_token_ids(model: Any, vocab_size: object) -> None:
    """Some modules hide the scores of tokens whose ids they know. MLX does not look whether there
    are such scores, and writes into other memory where there are none.
    """
    for name, value in model.items():
        held = name.startswith("_") and isinstance(value, mx.array) and value.size
        if not held or value.dtype not in (mx.int32, mx.uint32, mx.int64):
            continue
        highest = int(value.max())
        if isinstance(vocab_size, int) and highest >= vocab_size:
            raise ModelError(
                f"this architecture has a token {highest} of its own, but vocab_size is "
                f"{vocab_size}: fetch the config.json again from where the model came from"
            )


def _checking(path: Path, config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes for a config, of a model that compares what it is given with what it wants.

    By then mlx-lm has renamed the tensors and quantised the layers whose scales are there.
    """
    module, arguments = classes_of(config)

    def make(*given: Any) -> Any:
        model = module(*given)
        load = model.load_weights

        def checked(weights: list[tuple[str, Any]], strict: bool = True) -> Any:
            if complaint := compare(dict(parameters(model)), dict(weights)):
                raise ModelError(
                    f"the safetensors in {path} do not match its config.json: {complaint}"
                )
            del model.load_weights
            return load(weights, strict=strict)

        model.load_weights = checked
        return model

    return make, arguments


def build_llama(config: Mapping[str, Any]) -> Any:
    """mlx-lm's module for a config of type llama; its parameters are not computed."""
    classes: Any = llama
    return classes.Model(classes.ModelArgs.from_dict(config))


def _config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = load_config(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path} holds no config.json: give a model's folder") from error
    except (ValueError, OSError) as error:
        raise ModelError(f"{path / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path / 'config.json'} is no JSON object: fetch the file again")
    if config.get("model_file") is not None:
        raise ModelError(
            f"{path / 'config.json'} names code of the folder's own (model_file), which is never "
            "run: choose a model whose architecture mlx-lm has"
        )
    # Newer configs keep everything about rotation in one place, where mlx-lm does not look.
    rope = dict(config.get("rope_parameters") or {})
    if theta := rope.pop("rope_theta", None):
        config.setdefault("rope_theta", theta)
    if rope.get("rope_type", "default") != "default":
        config.setdefault("rope_scaling", rope)
    required = REQUIRED_FIELDS if config.get("model_type") in LLAMA_TYPES else ()
    missing = [field for field in required if config.get(field) is None]
    if missing:
        raise ModelError(
            f"{path / 'config.json'} lacks {', '.join(missing)}: fetch the file again from where "
            "the model came from"
        )
    return config


def _headers(path: Path, files: list[Path]) -> set[str]:
    """Names of all tensors, without reading them."""
    index = path / "model.safetensors.index.json"
    shards = set(read_json(index).get("weight_map", {}).values()) if index.is_file() else set()
    if absent := sorted(shards - {file.name for file in files}):
        raise ModelError(f"{path} lacks {', '.join(absent)}, named in {index.name}: fetch it again")
    names: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                names.update(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged ({error}): fetch it again") from error
    return names


def _checked_model(path: Path, config: Mapping[str, Any]) -> Any:
    """The config's module, not computed. Raises ModelError where it makes none."""
    try:
        return build_model(config)
    except ModelError as error:
        raise ModelError(f"{path / 'config.json'}: {error}") from error
    except Exception as error:  # whatever a module does with a value that makes no sense
        reason = str(error) or type(error).__name__
        raise ModelError(f"{path / 'config.json'} makes no model: {reason}") from error


def read_tokenizer(path: Path) -> tuple[Tokenizer, list[Path]]:
    """A folder's tokenizer, weights or none, and the files that its digest is made of.

    Raises TokenizerError, or ModelError for a file that is no JSON object.
    """
    config = path / "config.json"
    return tokenizer_of(path, read_json(config) if config.is_file() else {})
