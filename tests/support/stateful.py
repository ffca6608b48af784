"""Tiny configurations of model types whose layers have state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.tiny import MINI

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

# Large enough for vLLM's kernels: heads of 32.
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
}
_LARGE_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
ENGINE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **_LARGE_MAMBA,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.18,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    },
    "falcon_h1": {**_LARGE_MAMBA, "mamba_d_ssm": 256, "lm_head_multiplier": 0.5},
    "nemotron_h": {
        "initializer_range": 0.02,  # the square in its MLPs lets larger weights round by more
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        # vLLM reads these of config.json, which published ones have
        "conv_dim": 128,
        "block_dim": 128,
        "block_ff_dim": 64,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
}


def engine_config(kind: str, vocabulary: int, **more: Any) -> PretrainedConfig:
    """Of a model in ENGINE, with large weights."""
    values = {**_SIZES, **ENGINE[kind], "vocab_size": vocabulary, **more}
    if kind == "nemotron_h":
        del values["num_hidden_layers"]  # which its list of layers has
    config: PretrainedConfig = CONFIG_MAPPING[kind](**values)
    return config


def save_stateful(kind: str, folder: Path) -> Path:
    """An untrained model of ENGINE with the tokenizer of dataset/mini."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = engine_config(kind, len(tokenizer), max_position_embeddings=1024, **tokens)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
