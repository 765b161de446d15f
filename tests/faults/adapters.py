"""Faults of adapters: a row has another one's, or none, while lengths, tags and names agree.

Owns two LoRA folders for the tiny llama, made without MLX: a load names their versions before a
model is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash

from statemachine.events import Namespace

from . import loads
from .fault import DONE, Catalogue, Make, Witness
from .loads import TINY, Load, Request

FAULTS = Catalogue()

NAMES = ("one", "two")
RANK, WIDTH = 4, 64
"""Of the tiny llama's o_proj."""


def _files(name: str) -> dict[str, bytes]:
    generator = np.random.default_rng(NAMES.index(name))
    layers = [f"model.layers.{number}.self_attn.o_proj" for number in (0, 1)]
    tensors = {
        f"{layer}.{end}": generator.normal(0.0, 0.2, shape).astype(np.float32)
        for layer in layers
        for end, shape in (("lora_a", (WIDTH, RANK)), ("lora_b", (RANK, WIDTH)))
    }
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"scale": 4.0}}
    return {
        "adapter_config.json": json.dumps(config).encode(),
        "adapters.safetensors": safetensors.numpy.save(tensors),
    }


def write(folder: Path, name: str) -> Path:
    """The folder of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in _files(name).items():
        (folder / file).write_bytes(data)
    return folder


def space(name: str) -> Namespace:
    """The namespace of an adapter's requests, with its version."""
    digest = xxhash.xxh3_128()
    for data in _files(name).values():
        digest.update(f"{len(data)}\0".encode() + data)
    return Namespace(name, digest.intdigest() >> 64)


MIXED = Load(
    "two adapters and the base in one batch",
    tuple(
        Request(loads.tokens(9, 1 + number), 6, namespace=kind)
        for number, kind in enumerate((space("one"), space("two"), Namespace()) * 2)
    ),
    kernel=TINY,
)


def _lanes(change: Any) -> Make:
    """`change` makes other lanes of a step's, [T] each row's place among the adapters."""

    def make(original: Any, witness: Witness) -> Any:
        def serving(adapters: Any, pieces: Any) -> Any:
            found = original(adapters, pieces)
            lane = found._lane
            other = change(lane) if witness.on and len(lane) else lane
            if (other != lane).any():
                witness.note(-1, DONE)
                found._lane = other
            return found

        return serving

    return make


FAULTS.add(
    "adapter-of-a-neighbour",
    "each row of a batch has the adapter of the row before it",
    "kernel.adapters:Adapters.serving",
    MIXED,
    "forward",
    "token",
    "logit",
)(_lanes(lambda lane: np.roll(lane, 1)))

FAULTS.add(
    "adapter-forgotten",
    "an adapter that is not the first of a batch is left out: its rows are the base's",
    "kernel.adapters:Adapters.serving",
    MIXED,
    "forward",
    "token",
    "logit",
)(_lanes(lambda lane: np.where(lane > 0, -1, lane)))
