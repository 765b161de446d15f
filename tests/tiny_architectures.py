"""A tiny random model of every architecture that mlx-lm has: one set of small sizes for all of
them, and what some ask for beside it.

Owns no weights of its own: those are tiny_families'. Windows are 8 rows, and every kind of layer
that an architecture has is there.
"""

from __future__ import annotations

import functools
import pkgutil
from typing import Any

import mlx_lm.models

from .tiny_families import (
    CONTEXT,
    FAMILIES,
    ROPE,
    SLIDING_FIRST,
    WINDOW,
    family_config,
    random_model,
)
from .tiny_models import tiny_config

NO_MODELS = frozenset({
    "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline",
    "rope_utils", "ssm", "switch_layers",
})  # fmt: skip
"""Modules beside the architectures, which share them."""

UNABLE = {
    "bitnet": "its kernels are Metal's",
    "muse_spark": "its kernels are Metal's",
}
"""What cannot be made tiny, or run, here, and why."""

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "num_layers": 4, "n_layers": 4, "n_layer": 4,
    "num_transformer_layers": 4, "n_embd": 64, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "n_kv_heads": 2, "num_kv_heads": 2, "head_dim": 16, "n_positions": CONTEXT, "n_ctx": CONTEXT,
    "block_size": CONTEXT, "hidden_dim": 64, "d_model": 64, "model_dim": 64, "n_inner": 96,
    "num_vocab": 259, "kv_channels": 16, "hidden_size_per_head": 16,
    "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
    "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5, "norm_epsilon": 1e-5, "post_norm_eps": 1e-5,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "bias": False,
    "qkv_bias": False, "use_qkv_bias": False, "use_qk_norm": True, "qk_norm": True,
    "post_norm": False, "sliding_window": WINDOW, "sliding_window_size": WINDOW,
    "window_size": WINDOW, "sliding_window_pattern": 2, "layer_types": SLIDING_FIRST,
    "rope_parameters": ROPE, "rope_scaling": None, "partial_rotary_factor": 0.5,
    "rotary_dim": 8, "rotary_pct": 0.5, "rotary_emb_base": 10000, "rope_embedding_base": 10000,
    "query_pre_attn_scalar": 16, "hidden_act": "silu",
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "moe_top_k": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "n_shared_experts": 1, "num_shared_experts": 1, "num_shared_expert": 1,
    "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 3,
    "moe_layer_interval": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "num_dense_layers": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
    "intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0], "dim_model_base": 64,
    "scale_depth": 1.4, "scale_emb": 1.0, "logits_scaling": 2.0, "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logit_scale": 0.25,
    "original_max_position_embeddings": CONTEXT,
}  # fmt: skip
"""Each is heeded by those architectures that have such a field."""

LINEAR_ATTENTION = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip
LATENT_SCALING = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "mscale": 1.0,
                  "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
                  "beta_fast": 32, "beta_slow": 1}  # fmt: skip
MLP_FIRST = ["dense", "sparse", "sparse", "sparse"]
CONV_FIRST = ["conv", "full_attention", "conv", "full_attention"]
BOTH_ROPES = {"sliding_attention": ROPE, "full_attention": ROPE}


def _pack(path: str, block: int, embedding: bool = False) -> dict[str, Any]:
    """A module of 2-bit weights, turned in blocks; 0 for one that is not turned."""
    return {"path": path, "embedding": embedding, "dtype": "float16", "block": block}


EXTRA: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2, "hidden_dim_scale_factor": 2.0},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 2, "score_function": "sigmoid"},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": {"layer_group_size": 2, "short_conv_kernel_size": 4},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": LATENT_SCALING},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_d_conv": 4,
    },
    "gemma4_text": {
        "global_head_dim": 32, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 259,
        "hidden_size_per_layer_input": 16, "rope_parameters": None, "sliding_window_pattern": 2,
    },
    "gear": {
        "layer_types": ["conv_mixer", "full_attention", "sliding_attention", "conv_mixer"],
        "conv_L_cache": 3,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba", "attention"], "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_groups": 2,
        "mamba_proj_bias": False, "mamba_conv_bias": True, "position_embedding_type": "rope",
    },
    "hunyuan": {
        "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2,
    },
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 4, "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": CONTEXT, "num_experts_per_token": 2, "num_expert_group": 1,
        "q_lora_rank": None,
    },
    "lfm2_moe": {
        "layer_types": CONV_FIRST, "conv_bias": False, "conv_L_cache": 3, "use_expert_bias": True,
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0], "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 1,
        "swa_head_dim": 16, "swa_v_head_dim": 8,
    },
    "minicpm3": {
        "rope_scaling": {
            "short_factor": [1.0] * 4, "long_factor": [1.0] * 4,
            "original_max_position_embeddings": CONTEXT,
        },
    },
    "mistral4": {
        "rope_parameters": {
            **ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16,
        },
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 8,
        "conv_kernel": 4, "n_groups": 2, "use_conv_bias": True, "num_hidden_layers": 6,
        "hybrid_override_pattern": ["M", "*", "-", "M", "*", "E"], "layers_block_type": None,
        "layer_types": None, "moe_latent_size": None,
    },
    "nemotron": {"hidden_act": "relu2"},
    "olmo": {"mlp_hidden_size": 96, "embedding_size": 259},
    "olmo_hybrid": LINEAR_ATTENTION | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_allow_neg_eigval": True,
    },
    "openelm": {
        "ffn_dim_divisor": 16, "num_query_heads": [4, 4, 4, 4], "num_kv_heads": [2, 2, 1, 1],
        "ffn_multipliers": [0.5, 1.0, 1.5, 2.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2, "ff_intermediate_size": 96, "gegelu_limit": 20.0,
        "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2, "vocab_size": 100_352,
    },
    "phimoe": {
        "rope_scaling": {
            "type": "longrope", "rope_type": "longrope", "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8, "short_mscale": 1.0, "long_mscale": 1.0,
            "original_max_position_embeddings": CONTEXT,
        },
    },
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "full_attention_idx": [1, 3], "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_num_heads": 4,
        "mamba_step": 2, "mamba_chunk_size": 16,
    },
    "prism_hadamard_qwen35": {
        "schema_version": 1, "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            _pack("model.embed_tokens", 512, embedding=True), _pack("lm_head", 512),
            _pack("model.layers.0.mlp.up_proj", 512), _pack("model.layers.1.self_attn.q_proj", 0),
        ],
    },
    "spark2_5": {
        "rope_parameters": BOTH_ROPES, "hidden_act": "gelu", "headwise_attn_output_gate": True,
        "gate_attn_act_mode": "sigmoid",
    },
}  # fmt: skip
"""What an architecture asks for in place of SIZES."""

TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {}),
    "gemma3n": (
        "gemma3n",
        {
            "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 259,
            "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "hidden_size_per_layer_input": 16, "altup_num_inputs": 2, "altup_coef_clip": 120.0,
            "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8,
        },
    ),
    "gemma4": ("gemma4_text", {}),
    "kimi_k25": ("deepseek_v3", {}),
    "kimi_k3": (
        "kimi_linear",
        {
            "hidden_act": "situ", "mla_use_output_gate": True, "num_key_value_heads": 4,
            "moe_router_activation_func": "sigmoid", "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 4.0, "attn_res_block_size": 2,
        },
    ),
    "kimi_vl": ("deepseek_v3", {}),
    "lfm2-vl": ("lfm2", {}),
    "llama4": (
        "llama4",
        {
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8, "floor_scale": 4,
            "rope_scaling": None,
        },
    ),
    "minimax_m3_vl": (
        "minimax_m3_vl",
        {
            "dense_intermediate_size": 96, "layer_types": None, "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_freq": [0, 1, 0, 1], "index_block_size": 4, "index_topk_blocks": 2,
            "rotary_dim": 8,
        },
    ),
    "mistral3": ("ministral3", {}),
    "muse_spark": (
        "muse_spark",
        {
            "rope_parameters": ROPE, "layer_rope_theta": [10000.0, 0, 10000.0, 0],
            "final_logit_softcapping": 20.0, "output_multiplier": 0.2, "moe_hidden_size": 32,
            "num_shared_experts": 0,
        },
    ),
    "pixtral": ("llama", {}),
    "prism_hadamard_qwen35": (
        "qwen3_5", LINEAR_ATTENTION | {"num_experts": 0, "hidden_size": 512},
    ),
    "qwen2_vl": ("qwen2", {}),
    "qwen3_5": ("qwen3_5", LINEAR_ATTENTION | {"num_experts": 0}),
    "qwen3_5_moe": ("qwen3_5", LINEAR_ATTENTION),
    "qwen3_vl": ("qwen3", {}),
    "qwen3_vl_moe": ("qwen3_moe", {}),
}  # fmt: skip
"""Those that wrap a text model: its kind, and what it asks for beside SIZES and EXTRA."""


def architectures() -> list[str]:
    """The modules of mlx-lm that are an architecture, by name, UNABLE ones too. Imports none."""
    names = [found.name for found in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return sorted(set(names) - NO_MODELS)


def architecture_config(name: str) -> dict[str, Any]:
    """config.json of a tiny model."""
    if name in FAMILIES:
        return family_config(name)
    config = tiny_config() | SIZES | {"model_type": name} | EXTRA.get(name, {})
    if name in TEXT:
        kind, wanted = TEXT[name]
        inner = family_config(kind) if kind in FAMILIES else config | EXTRA.get(kind, {})
        config["text_config"] = inner | {"model_type": kind} | wanted
    return config


@functools.cache
def architecture_model(name: str, seed: int = 0) -> Any:
    """mlx-lm's module with random weights; the same one for all tests."""
    return random_model(architecture_config(name), seed)
