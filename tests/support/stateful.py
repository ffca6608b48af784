"""Tiny configurations of model types whose layers have state."""

from __future__ import annotations

from typing import Any

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

DENSE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_DELTA, "head_dim": 16},
    "olmo_hybrid": _DELTA,
    "granitemoehybrid": {
        **_MAMBA,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "logits_scaling": 2.0,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128, "lm_head_multiplier": 0.5},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "num_hidden_layers": 3,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], **_EXPERTS, "num_experts": 4, "num_dense_layers": 1},
    "kimi_linear": {
        **_EXPERTS,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
}
STATEFUL = {**DENSE, **WITH_EXPERTS}
# The same model types as in DENSE, but with experts.
EXPERTS_OF_DENSE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {**DENSE["granitemoehybrid"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {
        **DENSE["nemotron_h"],
        **_EXPERTS,
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
    },
}
