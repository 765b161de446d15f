"""LoRA folders of random weights, made and read by mlx-lm's own tuner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from kernel.weights import load_model

LAYERS = 2
RANK = 4
SCALE = 2.0


def write_adapter(path: Path, model: Path, seed: int, kind: str = "lora", **lora: Any) -> Path:
    """An adapter for the model at a path, large enough to change what it says."""
    path.mkdir(parents=True, exist_ok=True)
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0} | lora
    tuned = load_model(str(model)).model
    tuned.freeze()
    linear_to_lora_layers(tuned, LAYERS, parameters, use_dora=kind == "dora")
    generator = np.random.default_rng(seed)
    flat: Any = tree_flatten(tuned.trainable_parameters())
    tensors = {
        name: mx.array(generator.normal(0.0, 0.1, array.shape).astype(np.float32))
        for name, array in flat
    }
    mx.save_safetensors(str(path / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": kind, "num_layers": LAYERS, "lora_parameters": parameters}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def mlx_lm_model(model: Path, adapter: Path | None) -> Any:
    """The model with mlx-lm's own layers for an adapter in it."""
    loaded = load_model(str(model)).model
    if adapter is not None:
        loaded = load_adapters(loaded, str(adapter))
    loaded.eval()
    return loaded
