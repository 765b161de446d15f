"""Tiny random llama models as files: Hugging Face folders and GGUF, each byte a token."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kernel.hf import build_llama
from kernel.tensors import parameters

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Two layers, four heads over two key heads, 259 tokens."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(SPECIAL) + len(ALPHABET),
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    return config | changes


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random float32 weights of the size that the config asks for."""
    generator = np.random.default_rng(seed)
    return {
        name: mx.array(generator.normal(0.0, 0.2, array.shape).astype(np.float32))
        for name, array in parameters(build_llama(config))
    }


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Each byte is a token; three special tokens come first."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *ALPHABET])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return core


def write_folder(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, mx.array],
    *,
    shards: int = 1,
    template: str | None = TEMPLATE,
) -> Path:
    """A Hugging Face folder; with several shards, an index too."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[2], "bos_token": {"content": SPECIAL[1]}}
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    names = sorted(weights)
    index = {}
    for shard in range(shards):
        file = (
            f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            if shards > 1
            else "model.safetensors"
        )
        held = {name: weights[name] for name in names[shard::shards]}
        mx.save_safetensors(str(path / file), held, metadata={"format": "pt"})
        index |= dict.fromkeys(held, file)
    if shards > 1:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (path / "model.safetensors.index.json").write_text(text)
    return path


def gguf_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that a converter would write for `config` and `byte_tokenizer`."""
    kind = config["model_type"]
    key_length = (
        {f"{kind}.attention.key_length": config["head_dim"]} if "head_dim" in config else {}
    )
    return key_length | {
        "general.architecture": kind,
        f"{kind}.embedding_length": config["hidden_size"],
        f"{kind}.block_count": config["num_hidden_layers"],
        f"{kind}.feed_forward_length": config["intermediate_size"],
        f"{kind}.attention.head_count": config["num_attention_heads"],
        f"{kind}.attention.head_count_kv": config["num_key_value_heads"],
        f"{kind}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{kind}.context_length": config["max_position_embeddings"],
        f"{kind}.rope.freq_base": float(config["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*SPECIAL, *ALPHABET],
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * len(ALPHABET),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def gguf_tensors(config: dict[str, Any], weights: dict[str, mx.array]) -> dict[str, np.ndarray]:
    """Weights by GGUF's names, the rows of llama's q and k in GGUF's order."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if config["model_type"] != "llama":
        heads = {}
    tensors = {}
    for name, array in weights.items():
        stem, _, part = name.rpartition(".")
        values = np.array(array)
        if (kind := stem.rpartition(".")[2]) in heads:
            rows = values.reshape(heads[kind], 2, -1, values.shape[-1])
            values = rows.swapaxes(1, 2).reshape(values.shape)
        if stem.startswith("model.layers."):
            _, _, layer, inner = stem.split(".", 3)
            tensors[f"blk.{layer}.{GGUF_NAMES[inner]}.{part}"] = values
        else:
            tensors[f"{GGUF_NAMES[stem]}.{part}"] = values
    return tensors


F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, int] | None = None,
) -> Path:
    """A GGUF file, version 3; `kinds` names the tensors that are not F32."""
    kinds = kinds or {}
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    blobs, at = [], 0
    for name, values in tensors.items():
        kind = kinds.get(name, F32)
        shape = values.shape[::-1]
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)
        blob = quantise(values, kind)[0]
        blobs.append(blob + bytes(-len(blob) % 32))
        at += len(blobs[-1])
    path.write_bytes(head + bytes(-len(head) % 32) + b"".join(blobs))
    return path


def quantise(values: np.ndarray, kind: int) -> tuple[bytes, np.ndarray]:
    """The bytes of a tensor in a GGUF type, and the float32 values that they stand for.

    Source: the block layouts of ggml's quantised types (32 values a block, float16 scales).
    """
    values = values.astype(np.float32)
    if kind == F32:
        return values.tobytes(), values
    if kind == F16:
        return values.astype(np.float16).tobytes(), values.astype(np.float16).astype(np.float32)
    blocks = values.reshape(-1, 32)
    low = blocks.min(axis=1, keepdims=True)
    span = np.abs(blocks).max(axis=1, keepdims=True)
    if kind == Q4_1:
        low = low.astype(np.float16)
        scale = ((blocks.max(axis=1, keepdims=True) - low) / 15).astype(np.float16)
        offset, limits = low.astype(np.float32), (0, 15)
    else:
        scale = (span / (7 if kind == Q4_0 else 127)).astype(np.float16)
        offset, limits = np.float32(0), ((-8, 7) if kind == Q4_0 else (-127, 127))
    steps = np.clip(np.round((blocks - offset) / scale.astype(np.float32)), *limits)
    exact = (steps * scale.astype(np.float32) + offset).astype(np.float32)
    if kind == Q8_0:
        parts = [scale.view(np.uint8), steps.astype(np.int8).view(np.uint8)]
    else:
        codes = (steps - limits[0]).astype(np.uint8)
        packed = codes[:, :16] | (codes[:, 16:] << 4)
        parts = [scale.view(np.uint8), *([low.view(np.uint8)] if kind == Q4_1 else []), packed]
    return np.concatenate(parts, axis=1).tobytes(), exact.reshape(values.shape)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind, _ = _scalar(value[0]) if value else (8, b"")
        items = b"".join(_scalar(item)[1] for item in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    kind, data = _scalar(value)
    return struct.pack("<I", kind) + data


def _scalar(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 5, struct.pack("<i", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return 8, _text(value)
