"""Tiny configurations of multimodal models, by model type, in the form of their config.json."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.stateful import DENSE

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_attention_heads": 2, "patch_size": 4}
_OF_QWEN = {**_TOWER, "depth": 2, "out_hidden_size": 64}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_OTHER = {**_TOWER, "num_hidden_layers": 2, "image_size": 16}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": DENSE["qwen3_5_text"], "vision_config": _OF_QWEN},
    "qwen2_5_vl": {"text_config": _ROPE, "vision_config": {**_OF_QWEN, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {"text_config": _ROPE, "vision_config": {**_OF_QWEN, "deepstack_visual_indexes": [0]}},
    "gemma3": {"text_config": {"sliding_window": 5}, "vision_config": _OTHER, "mm_tokens_per_image": 4},
    "mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": {**_OTHER, "model_type": "pixtral"}},
    "smolvlm": {"text_config": {"model_type": "llama"}, "vision_config": _OTHER, "scale_factor": 2},
}


def multimodal_config(kind: str, vocabulary: int, **text: Any) -> PretrainedConfig:
    settings = MULTIMODAL[kind]
    nested = {**_TEXT, "vocab_size": vocabulary, **settings["text_config"], **text}
    config: PretrainedConfig = CONFIG_MAPPING[kind](**{**settings, "text_config": nested})
    return config
