"""GGUF: one file that holds a model, its tokenizer and its chat template.

Owns the names of the format: metadata keys, tensor names, token types. Reads through MLX, which
hands Q4_0, Q4_1 and Q8_0 tensors over as weight, scales and biases, in groups of 32.

Source of names and types: the GGUF specification in the ggml project.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from attrs import frozen

from .errors import ModelError
from .narrow import Narrow

ARCHITECTURES = ("llama", "qwen2", "qwen3")
GROUP_SIZE = 32
ROPE_FACTORS = "rope_freqs.weight"

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}


@frozen
class GgufModel:
    """What a GGUF file holds, in the words of a Hugging Face folder.

    weights: arrays of one float type by mlx-lm's names, quantised ones dequantised (lazily).
    narrow: what these were, by the same names.
    rope_factors: [head_dim / 2], or None; each divides the rotation speed of its pair.
    """

    config: dict[str, Any]
    metadata: dict[str, Any]
    weights: dict[str, mx.array]
    narrow: dict[str, Narrow]
    rope_factors: mx.array | None


def read_gguf(path: Path, dtype: mx.Dtype) -> GgufModel:
    """Read a GGUF file of one of ARCHITECTURES, its weights as `dtype`.

    Raises ModelError: not GGUF, cut short, of another architecture, or a field that is missing or
    has no meaning here.
    """
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).removeprefix("[load_gguf] ")
        raise ModelError(
            f"{path} cannot be read as GGUF: {reason.rstrip('.?')}; fetch it again"
        ) from error
    tensors, raw = loaded
    metadata = {key: _plain(value) for key, value in raw.items()}
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path.name} is a GGUF of architecture {architecture}, and only "
            f"{', '.join(ARCHITECTURES)} are served from GGUF: use the model's Hugging Face folder"
        )
    rope_factors = tensors.pop(ROPE_FACTORS, None)
    weights, narrow = _weights(tensors, dtype)
    config = _config(path, metadata, weights)
    if rope_factors is not None:
        # An unscaled llama3 rope, whose wavelengths the loader then stretches by the factors.
        config["rope_scaling"] = {"rope_type": "llama3", "factor": 1.0}
    return GgufModel(config, metadata, weights, narrow, rope_factors)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, mx.array) else value


def _weights(
    tensors: Mapping[str, mx.array], dtype: mx.Dtype
) -> tuple[dict[str, mx.array], dict[str, Narrow]]:
    """Rename and dequantise; a name that is not known is kept, and so is found left over."""
    weights, narrow = {}, {}
    for name, tensor in tensors.items():
        if name.endswith((".scales", ".biases")):
            continue
        held = _narrow(name, tensors, dtype)
        if held is not None:
            narrow[_rename(name)] = held
        weights[_rename(name)] = tensor.astype(dtype) if held is None else held.widened()
    return weights, narrow


def _rename(name: str) -> str:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in NAMES:
        return name
    prefix = f"model.layers.{found[1]}." if found[1] else ""
    return f"{prefix}{NAMES[found[2]]}.{found[3]}"


def _narrow(name: str, tensors: Mapping[str, mx.array], dtype: mx.Dtype) -> Narrow | None:
    """A tensor with its scales, where it has some."""
    tensor, stem = tensors[name], name.removesuffix(".weight")
    scales = tensors.get(f"{stem}.scales")
    if scales is None:
        return None
    # A uint32 holds 32 / bits values and a scale stands for 32 of them.
    bits = tensor.shape[-1] // scales.shape[-1]
    # Widened first: in float32 the result is exact, in float16 each value would be rounded.
    biases = tensors[f"{stem}.biases"].astype(dtype)
    return Narrow(tensor, scales.astype(dtype), biases, GROUP_SIZE, bits)


def _config(path: Path, metadata: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """The model's config.json, had it one."""
    architecture = metadata["general.architecture"]

    def field(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{path.name} lacks the field {architecture}.{key}: convert it again")
        return value

    config: dict[str, Any] = {name: field(key) for name, key in KEYS.items()}
    heads = config["num_attention_heads"]
    head_dim = field("attention.key_length", config["hidden_size"] // heads)
    if field("rope.dimension_count", head_dim) != head_dim or field("expert_count", 0):
        raise ModelError(
            f"{path.name} has experts or rotates a part of each head, which is not served from "
            "GGUF: use the model's Hugging Face folder"
        )
    embedding = weights.get("model.embed_tokens.weight")
    if embedding is None:
        raise ModelError(f"{path.name} has no tensor token_embd.weight: fetch or convert it again")
    return config | {
        "model_type": architecture,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "rope_theta": field("rope.freq_base", 10000.0),
        # Rows of llama's q and k are stored so that neighbours rotate together; others' are not.
        "rope_traditional": architecture == "llama",
        "rope_scaling": _rope_scaling(path, field),
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }


def _rope_scaling(path: Path, field: Any) -> dict[str, Any] | None:
    kind = field("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": field("rope.scaling.factor")}
    raise ModelError(
        f"{path.name} scales its positions by {kind!r}, which is not served from GGUF: use the "
        "model's Hugging Face folder"
    )
