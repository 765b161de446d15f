"""Adapter files: a LoRA folder as mlx-lm writes it, read and checked by itself.

Owns the format: adapter_config.json and adapters.safetensors (mlx_lm.tuner.utils.load_adapters).
Knows no model. A folder's digest is of the bytes that were loaded, not of what lies there later.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import xxhash
from attrs import frozen

from .errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"
A, B = "lora_a", "lora_b"


@frozen(eq=False)
class AdapterFiles:
    """A folder's content. digest: xxh3, 128 bits in hex, of both files' sizes and bytes.

    tensors: by the layer's name in the model, `lora_a` [in, rank] and `lora_b` [rank, out].
    """

    folder: Path
    digest: str
    scale: float
    tensors: dict[str, dict[str, mx.array]]


def read_files(path: str) -> AdapterFiles:
    """Read a folder. Raises AdapterError where it is missing, damaged, or of another kind."""
    folder = Path(path).expanduser().resolve()
    config, weights = (_bytes(folder, file) for file in (CONFIG_FILE, WEIGHTS_FILE))
    scale = _scale(folder, config)
    return AdapterFiles(folder, _digest((config, weights)), scale, _tensors(folder, weights))


def version_of(digest: str) -> int:
    """An adapter's version: the first 64 bits of its digest."""
    return int(digest[:16], 16)


def _bytes(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        hint = f"give a folder that mlx_lm.lora wrote, with {CONFIG_FILE} and {WEIGHTS_FILE}"
        raise AdapterError(f"{folder / name} cannot be read ({error.strerror}): {hint}") from None


def _digest(files: Iterable[bytes]) -> str:
    digest = xxhash.xxh3_128()
    for data in files:
        digest.update(f"{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _scale(folder: Path, data: bytes) -> float:
    """The scale that a folder's config says. Raises AdapterError for another kind of adapter."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(data)
        kind = config.get("fine_tune_type", "lora")
        parameters = config.get("lora_parameters") or {}
        scale = parameters.get("scale")
    except (ValueError, AttributeError) as error:
        raise AdapterError(f"{file} is no JSON object of an adapter: save it again") from error
    if kind != "lora":
        raise AdapterError(
            f"{file}: an adapter of type {kind!r} cannot be served, only lora: fuse it into the "
            "model"
        )
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise AdapterError(
            f"{file} lacks lora_parameters.scale, a number: give an adapter in mlx-lm's format"
        )
    return float(scale)


def _tensors(folder: Path, data: bytes) -> dict[str, dict[str, mx.array]]:
    file = folder / WEIGHTS_FILE
    load: Callable[..., Any] = mx.load
    try:
        tensors: dict[str, mx.array] = load(io.BytesIO(data), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise AdapterError(f"{file} is damaged ({error}): save it again") from error
    layers: dict[str, dict[str, mx.array]] = {}
    for name in sorted(tensors):
        layer, _, end = name.rpartition(".")
        if end not in (A, B):
            raise AdapterError(f"{file} holds {name}, which is no tensor of a LoRA adapter")
        layers.setdefault(layer, {})[end] = tensors[name]
    if not layers:
        raise AdapterError(f"{file} holds no tensors: save the adapter again")
    return layers
