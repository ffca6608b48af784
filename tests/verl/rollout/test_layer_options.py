"""What layers with state need of vLLM, by device, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl.build.engines import check_engine_layers
from verl.config.schema import Config, ModelConfig, RolloutConfig, TrainerConfig
from verl.errors import ConfigError
from verl.rollout import layer_options as module
from verl.rollout.layer_options import check_layers, layer_options


def test_a_cpu_has_no_prefix_cache_for_mamba2() -> None:
    for kind in ("granitemoehybrid", "falcon_h1", "nemotron_h"):
        assert layer_options(kind, True, {}) == {"enable_prefix_caching": False}
        assert layer_options(kind, False, {}) == {}


def test_a_cpu_has_no_operators_of_its_own_for_lfm2() -> None:
    """Beside what the user sets; a custom operator cannot come back."""
    assert layer_options("lfm2", True, {}) == {"compilation_config": {"custom_ops": ["none"]}}
    given = {"compilation_config": {"level": 0, "custom_ops": ["all"]}}
    assert layer_options("lfm2", True, given) == {"compilation_config": {"level": 0, "custom_ops": ["none"]}}
    assert layer_options("lfm2", False, given) == {}


def test_other_models_have_the_usual_arguments() -> None:
    assert layer_options("qwen2", True, {}) == layer_options("qwen3_5_text", True, {}) == {}
    check_layers("qwen2", "float32", True)
    check_layers("granitemoehybrid", "float32", True)


def test_gated_delta_nets_are_bfloat16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"cannot run qwen3_5_text in float32 on a CPU.* set rollout\.dtype=bfloat16"):
        check_layers("qwen3_5_text", "float32", True)
    check_layers("qwen3_5_text", "bfloat16", True)
    check_layers("qwen3_5_text", "float32", False)
    with pytest.raises(ConfigError, match="olmo_hybrid on a CPU: its layers need Triton"):
        check_layers("olmo_hybrid", "bfloat16", True)


def test_a_missing_torchvision_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps torchvision --index-url .*/whl/cpu`"):
        check_layers("qwen3_5_text", "bfloat16", True)
    with pytest.raises(ConfigError, match=r"/whl/<CUDA>`"):
        check_layers("qwen3_5", "bfloat16", False)
    check_layers("qwen2", "bfloat16", True)


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    """In the dtype that the engine will have; the engine on transformers computes such a model."""
    CONFIG_MAPPING["qwen3_5_text"]().save_pretrained(tmp_path)
    model, on_cpu = ModelConfig(path=str(tmp_path), compute_dtype="float32"), TrainerConfig(device="cpu")
    with pytest.raises(ConfigError, match="qwen3_5_text in float32 on a CPU"):
        check_engine_layers(Config(model=model, trainer=on_cpu, rollout=RolloutConfig(name="vllm")))
    check_engine_layers(Config(model=model, trainer=on_cpu, rollout=RolloutConfig(name="hf")))
