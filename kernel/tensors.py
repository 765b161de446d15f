"""Tensors: what a checkpoint must hold, compared with what it does hold; digests of its files.

Knows names, shapes and types only, computes nothing, and reads files only to digest them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import xxhash
from mlx.utils import tree_flatten

SHOWN_MAX = 3
CHUNK_BYTES = 1 << 24


def parameters(model: Any) -> list[tuple[str, Any]]:
    """Name and array of each of a module's parameters."""
    flat: Any = tree_flatten(model.parameters())
    return list(flat)


def compare(wanted: Mapping[str, mx.array], found: Mapping[str, mx.array]) -> str:
    """What differs, as the end of a sentence; empty where nothing does.

    Any float type will do where a float is wanted; what is packed must be of the very type.
    """
    missing = sorted(wanted.keys() - found.keys())
    left_over = sorted(found.keys() - wanted.keys())
    common = sorted(wanted.keys() & found.keys())
    wrong = [
        f"{name} is {list(found[name].shape)}, not {list(wanted[name].shape)}"
        for name in common
        if wanted[name].shape != found[name].shape
    ]
    unlike = [
        f"{name} is {_type(found[name])}, not {_type(wanted[name])}"
        for name in common
        if _type(wanted[name]) != _type(found[name])
    ]
    parts = [
        f"{what}: {_shown(names)}"
        for what, names in (
            ("missing tensors", missing),
            ("left-over tensors", left_over),
            ("tensors of another shape", wrong),
            ("tensors of another type", unlike),
        )
        if names
    ]
    return "; ".join(parts)


def _type(array: mx.array) -> str:
    return "float" if mx.issubdtype(array.dtype, mx.floating) else str(array.dtype)


def _shown(names: list[str]) -> str:
    more = len(names) - SHOWN_MAX
    return ", ".join(names[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def digest_files(paths: Iterable[Path]) -> str:
    """xxh3 (128 bits, hex) of the files' sizes and bytes, in the order of their names.

    The names are left out, so that a renamed model is the same model.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(f"{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def digest_json(value: Any) -> str:
    """xxh3 (128 bits, hex) of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(text.encode())
