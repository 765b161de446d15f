"""Tiny random models of many architectures: configs, modules in memory, and folders of them.

Owns what makes each small. Windows are 8 rows, so that a test of thirty tokens leaves them behind;
each kind of layer that an architecture has is there, in an order that has broken an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from kernel.hf import build_model
from kernel.tensors import parameters

from .tiny_models import tiny_config, write_folder

WINDOW = 8
CONTEXT = 512
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SLIDING_FIRST = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
LATENT = {
    "num_layers": 2, "ffn_hidden_size": 64, "moe_topk": 2, "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4, "zero_expert_num": 2, "zero_expert_type": "identity",
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "routed_scaling_factor": 1.5, "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True, "attention_bias": False, "attention_method": "MLA",
}  # fmt: skip
SSM = {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}

SLOW_DECAY = 5.0
"""Taken from the logarithm of a running state's decay, which else forgets all in a few rows."""


def _block(attention: dict[str, Any], ffn: dict[str, Any]) -> dict[str, Any]:
    return {"attention": attention, "ffn": ffn}


NO_OP = {"no_op": True, "replace_with_linear": False}
LINEAR = {"no_op": False, "replace_with_linear": True}
HEADS = {"n_heads_in_group": 2}
FFN = {"ffn_mult": 1.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "exaone4": {
        "num_hidden_layers": 4, "head_dim": 16, "rope_scaling": ROPE,
        "sliding_window": WINDOW, "sliding_window_pattern": "LLGL",
    },
    "gpt_oss": {
        "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 64, "sliding_window": WINDOW, "layer_types": SLIDING_FIRST,
    },
    "ministral3": {
        "num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW,
        "layer_types": SLIDING_FIRST,
        "rope_parameters": {
            **ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16,
        },
    },
    "step3p5": {
        "num_hidden_layers": 4, "num_attention_groups": 2, "head_dim": 16,
        "sliding_window": WINDOW, "layer_types": SLIDING_FIRST, "moe_num_experts": 4,
        "moe_top_k": 2, "moe_intermediate_size": 32, "share_expert_dim": 32,
        "moe_layers_enum": "1,3",
    },
    "mellum": {
        "num_hidden_layers": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "sliding_window": WINDOW,
        "layer_types": SLIDING_FIRST,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "laguna": {
        "num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW,
        "layer_types": SLIDING_FIRST, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "gemma3_text": {
        "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW, "sliding_window_pattern": 3,
    },
    "nemotron-nas": {
        # The first slot belongs to a linear layer, which never writes it; the second layer has
        # no attention, and no slot.
        "num_hidden_layers": 4,
        "block_configs": [
            _block(LINEAR, FFN), _block(NO_OP, FFN), _block(HEADS, FFN), _block(HEADS, LINEAR),
        ],
    },
    "longcat_flash": LATENT,
    "longcat_flash_ngram": LATENT | {"emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": SSM | {"time_step_rank": "auto"},
    "mamba2": SSM | {
        "num_heads": 8, "head_dim": 16, "n_groups": 2, "layer_norm_epsilon": 1e-5,
        "intermediate_size": 128, "time_step_limit": [0.0, 100.0], "time_step_rank": "auto",
    },
    "qwen3_next": {
        "num_hidden_layers": 4, "head_dim": 16, "full_attention_interval": 2,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32, "mlp_only_layers": [],
        "moe_intermediate_size": 32, "partial_rotary_factor": 0.5,
    },
    "lfm2": {
        "num_hidden_layers": 3, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
        "block_dim": 64, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3, "attention_bias": False, "conv1d_width": 4,
        "logits_soft_cap": 30.0, "num_key_value_heads": 1, "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "norm_eps": 1e-5, "head_dim": 32, "a_low_rank_dim": 8, "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8, "decay_low_rank_dim": 8,
    },
    "deepseek_v41": {
        # The one that nothing but its own caches can serve: they keep compressed rows.
        "num_hidden_layers": 3, "head_dim": 64, "q_lora_rank": 32, "qk_rope_head_dim": 16,
        "o_groups": 2, "o_lora_rank": 16, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": WINDOW, "compress_ratios": [1, 4, 4],
        "kv_source_layer_ids": [1], "index_source_layer_ids": [1], "index_n_heads": 2,
        "index_head_dim": 32, "index_topk": 4, "hc_mult": 2,
    },
    "gemma2": {"num_hidden_layers": 2, "head_dim": 16, "query_pre_attn_scalar": 16.0},
    "qwen3": {"head_dim": 16},
    "mistral3": {
        "text_config": tiny_config(
            model_type="ministral3", head_dim=16, num_hidden_layers=4, sliding_window=WINDOW,
            layer_types=SLIDING_FIRST, max_position_embeddings=CONTEXT,
            rope_parameters={
                **ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16,
            },
        ),
    },
}  # fmt: skip
"""What each architecture asks for beside `tiny_config`."""


def family_config(name: str) -> dict[str, Any]:
    """config.json of a tiny model."""
    config = tiny_config(max_position_embeddings=CONTEXT, tie_word_embeddings=False)
    return config | {"model_type": name} | FAMILIES[name]


def family_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random float32 weights, wide enough that the best score stands clear of the next."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name, array in parameters(build_model(config)):
        if array.dtype in (mx.uint32, mx.float16) or name.endswith(".signs"):
            weights[name] = _packed(name, array, generator)
            continue
        matrix = array.ndim > 1
        center, spread = (0.0, 2.0 * array.shape[-1] ** -0.5) if matrix else (1.0, 0.2)
        if name.endswith(("A_log", "w_lora.lora.2.bias")):
            center -= SLOW_DECAY
        values = center + spread * generator.normal(0.0, 1.0, array.shape)
        weights[name] = mx.array(values.astype(np.float32))
    return weights


def _packed(name: str, array: mx.array, generator: np.random.Generator) -> mx.array:
    """A part of a matrix of 2-bit numbers q: words of 16, and of each 128 the scale and the bias of
    scale * q + bias; or the signs that turn what is multiplied with it.
    """
    if array.dtype == mx.uint32:
        return mx.array(generator.integers(0, 1 << 32, array.shape, np.uint32))
    if name.endswith(".signs"):
        return mx.array(generator.choice(np.array([-1, 1], np.float32), array.shape))
    spread = 2.0 * (128 * array.shape[-1]) ** -0.5
    bias = name.endswith(".biases")
    return mx.full(array.shape, -1.5 * spread if bias else spread, array.dtype)


def family_model(name: str, seed: int = 0) -> Any:
    """mlx-lm's module with random weights."""
    return random_model(family_config(name), seed)


def random_model(config: dict[str, Any], seed: int) -> Any:
    """The module that a configuration asks for, with random weights."""
    model = build_model(config)
    model.update(tree_unflatten(list(family_weights(config, seed).items())))
    mx.eval(model.parameters())
    model.eval()
    return model


def family_folder(path: Path, name: str, seed: int = 0) -> Path:
    """A folder as a person would give to `mlxtape serve --model`."""
    config = family_config(name)
    return write_folder(path, config, family_weights(config, seed))
