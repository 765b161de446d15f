"""Weights: a path or a name to a model that can run, with its tokenizer and digests.

Owns the way from files to an mlx-lm module in memory; `gguf` and `hf` know the formats. On the CPU
weights are float32 where memory holds them so: MLX multiplies narrower and quantised ones many
times slower there. On a GPU they keep their type. Never downloads anything but the bundled model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from attrs import evolve, frozen
from mlx_lm.utils import dequantize_model, get_total_parameters

from .bundled import BUNDLED, Progress, bundled_model
from .errors import ModelError
from .gguf import GgufModel, read_gguf
from .gguf_vocab import tokenizer_from_gguf
from .hf import build_model, read_folder, read_tokenizer
from .lent import memory_bytes
from .machine import on_cpu
from .narrow import keep, narrow_of
from .tensors import compare, digest_files, digest_json, parameters
from .tokenizer import Tokenizer

CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
UNBOUNDED_CONTEXT = 32_768
"""Tokens of a sequence where a model names no bound: recurrent ones keep a state of fixed size."""


@frozen
class LoadedModel:
    """A model in memory.

    model: the mlx-lm module. config: as config.json has it. name: for `GET /v1/models`.
    digests: xxh3 of `weights`, `tokenizer` and `config`, 128 bits in hex.
    context_tokens: the longest sequence that the model was made for.
    vocab_size: the width of the logits, which may exceed the tokenizer's.
    turned_head_dim: rows of a head, where those of q and k stand in another order than in the
    model's folder (GGUF of llama); else 0.
    """

    model: Any
    config: dict[str, Any]
    tokenizer: Tokenizer
    name: str
    digests: dict[str, str]
    layers: int
    context_tokens: int
    vocab_size: int
    num_parameters: int
    weights_bytes: int
    turned_head_dim: int = 0


def load_model(path_or_name: str, *, progress: Progress | None = None) -> LoadedModel:
    """Load a Hugging Face folder, a GGUF file, or a bundled model by its name.

    `progress` is told, in a few words, what is waited for. Call `blas.load_blas` before importing
    this module. Raises ModelError, or its TokenizerError, with one sentence that says what to do.
    """
    tell = progress or (lambda _: None)
    path = _path_of(path_or_name, progress)
    name = path_or_name
    if path_or_name not in BUNDLED:
        name = path.resolve().name.removesuffix(".gguf")
    tell(f"loading {name}")
    return (_from_folder if path.is_dir() else _from_gguf)(path, name, tell)


def load_tokenizer(path_or_name: str) -> tuple[Tokenizer, str]:
    """The tokenizer of whatever `load_model` takes, and its digest; a folder needs no weights.

    Raises as `load_model` does.
    """
    path = _path_of(path_or_name, None)
    if path.is_dir():
        tokenizer, files = read_tokenizer(path)
        return tokenizer, digest_files(files)
    metadata = read_gguf(path, mx.float16).metadata
    return tokenizer_from_gguf(metadata), _digest_vocab(metadata)


def _path_of(path_or_name: str, progress: Progress | None) -> Path:
    """A folder, or a .gguf file. Raises ModelError."""
    if path_or_name in BUNDLED:
        return bundled_model(path_or_name, progress)
    path = Path(path_or_name).expanduser()
    try:
        if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
            return path
        what = "is neither a folder nor a .gguf file" if path.exists() else "does not exist"
    except OSError as error:
        what = f"cannot be looked at ({error.strerror})"
    raise ModelError(
        f"the model path {path_or_name} {what}: give a Hugging Face folder with safetensors, a "
        f".gguf file, or one of {', '.join(BUNDLED)}"
    )


def _from_gguf(path: Path, name: str, tell: Progress) -> LoadedModel:
    held = read_gguf(path, mx.float32 if on_cpu() else mx.float16)
    wide = on_cpu() and _fits(sum(it.size for it in held.weights.values()), "in float16", tell)
    if on_cpu() and not wide:
        held = read_gguf(path, mx.float16)
    model = build_model(held.config)
    _check_tensors(path, model, held.weights)
    if held.rope_factors is not None:
        _stretch_rope(path, model, held)
    model.load_weights(list(held.weights.items()))
    if wide:
        modules = dict(model.named_modules())
        for weight, numbers in held.narrow.items():
            keep(modules[weight.removesuffix(".weight")], numbers)
    digests = {
        "weights": digest_files([path]),
        "tokenizer": _digest_vocab(held.metadata),
        "config": digest_json(held.config),
    }
    loaded = _loaded(model, held.config, tokenizer_from_gguf(held.metadata), name, digests)
    turned = held.config["head_dim"] if held.config.get("rope_traditional") else 0
    return evolve(loaded, turned_head_dim=turned)


def _digest_vocab(metadata: Mapping[str, Any]) -> str:
    return digest_json({k: v for k, v in metadata.items() if k.startswith("tokenizer.")})


def _from_folder(path: Path, name: str, tell: Progress) -> LoadedModel:
    folder = read_folder(path)
    model = _widened(folder.model, tell) if on_cpu() else folder.model
    digests = {
        "weights": digest_files(folder.weight_files),
        "tokenizer": digest_files(folder.tokenizer_files),
        "config": digest_json(folder.config),
    }
    return _loaded(model, folder.config, folder.tokenizer, name, digests)


def _widened(model: Any, tell: Progress) -> Any:
    """The model in float32, as far as memory allows."""
    total: int = get_total_parameters(model)  # type: ignore[no-untyped-call]
    if not _fits(total, "as they are", tell):
        return model
    narrow = {name: found for name, it in model.named_modules() if (found := narrow_of(it))}
    model.set_dtype(mx.float32)  # scales first: in a narrower type each weight would be rounded
    model = dequantize_model(model)
    model.set_dtype(mx.float32)  # what has no scales of its own, in any other mode
    for name, module in model.named_modules():
        if name in narrow:
            keep(module, narrow[name])
    return model


def _fits(weights: int, otherwise: str, tell: Progress) -> bool:
    """Whether memory holds so many weights in float32; tells what is done otherwise."""
    bytes_needed, memory = 4 * weights, memory_bytes()
    if bytes_needed > memory:
        tell(
            f"its weights take {bytes_needed / 2**30:.1f} GiB in float32, and there are "
            f"{memory / 2**30:.1f} GiB here: they are held {otherwise}, which is many times slower"
        )
    return bytes_needed <= memory


def _loaded(
    model: Any,
    config: dict[str, Any],
    tokenizer: Tokenizer,
    name: str,
    digests: dict[str, str],
) -> LoadedModel:
    model.eval()
    arrays = [array for _, array in parameters(model)]
    mx.eval(arrays)
    return LoadedModel(
        model=model,
        config=config,
        tokenizer=tokenizer,
        name=name,
        digests=digests,
        layers=len(model.layers),
        context_tokens=_field(config, CONTEXT_FIELDS, UNBOUNDED_CONTEXT),
        vocab_size=_field(config, ("vocab_size",), getattr(model.args, "vocab_size", 0)),
        num_parameters=sum(array.size for array in arrays),
        weights_bytes=sum(array.nbytes for array in arrays),
    )


def _field(config: Mapping[str, Any], names: tuple[str, ...], otherwise: int) -> int:
    """The first of these fields that a config, or the text part of it, has."""
    for part in (config, config.get("text_config") or {}):
        for name in names:
            if part.get(name) is not None:
                return int(part[name])
    return otherwise


def _check_tensors(path: Path, model: Any, weights: Mapping[str, mx.array]) -> None:
    """Raise ModelError where names or shapes are not those that the config asks for."""
    if complaint := compare(dict(parameters(model)), weights):
        raise ModelError(f"{path.name} does not match its own metadata: {complaint}")


def _stretch_rope(path: Path, model: Any, held: GgufModel) -> None:
    assert held.rope_factors is not None
    if held.rope_factors.size != held.config["head_dim"] // 2:
        raise ModelError(
            f"{path.name}: rope_freqs.weight has {held.rope_factors.size} factors, not "
            f"{held.config['head_dim'] // 2}: convert it again"
        )
    for layer in model.layers:
        rope = layer.self_attn.rope
        rope._freqs = rope._freqs * held.rope_factors.astype(mx.float32)
