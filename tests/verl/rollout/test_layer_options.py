"""What layers with state need of vLLM, by device, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from scripts.families import FAMILIES, TESTED
from tests.conftest import ROOT, need_vllm
from tests.support.multimodal import MULTIMODAL
from tests.support.stateful import DENSE, EXPERTS_OF_DENSE, WITH_EXPERTS
from tests.verl.chat.test_native import needs_vllm
from verl.build.engines import check_engine_layers
from verl.config.schema import Config, ModelConfig, RolloutConfig, TrainerConfig
from verl.errors import ConfigError
from verl.rollout import layer_options as module
from verl.rollout.layer_options import check_layers, layer_options


def config_of(kind: str, **values: Any) -> PretrainedConfig:
    config: PretrainedConfig = CONFIG_MAPPING[kind](**values)
    return config


def test_a_cpu_has_no_prefix_cache_for_mamba2() -> None:
    for kind in ("granitemoehybrid", "falcon_h1", "nemotron_h"):
        assert layer_options(config_of(kind), True, {}) == {"enable_prefix_caching": False}
        assert layer_options(config_of(kind), False, {}) == {}


def test_a_cpu_has_no_operators_of_its_own_for_lfm2() -> None:
    """Beside what the user sets; a custom operator cannot come back."""
    assert layer_options(config_of("lfm2"), True, {}) == {"compilation_config": {"custom_ops": ["none"]}}
    given = {"compilation_config": {"level": 0, "custom_ops": ["all"]}}
    assert layer_options(config_of("lfm2"), True, given) == {"compilation_config": {"level": 0, "custom_ops": ["none"]}}
    assert layer_options(config_of("lfm2"), False, given) == {}


def test_other_models_have_the_usual_arguments() -> None:
    assert layer_options(config_of("qwen2"), True, {}) == layer_options(config_of("qwen3_5_text"), True, {}) == {}
    check_layers(config_of("qwen2"), "float32", True)
    check_layers(config_of("granitemoehybrid"), "float32", True)


def test_gated_delta_nets_are_bfloat16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"cannot run qwen3_5_text in float32 on a CPU.* set rollout\.dtype=bfloat16"):
        check_layers(config_of("qwen3_5_text"), "float32", True)
    check_layers(config_of("qwen3_5_text"), "bfloat16", True)
    check_layers(config_of("qwen3_5_text"), "float32", False)
    with pytest.raises(ConfigError, match="olmo_hybrid on a CPU: its layers need Triton"):
        check_layers(config_of("olmo_hybrid"), "bfloat16", True)


def test_a_cpu_has_kernels_for_two_sizes_of_heads_of_delta_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    for key, value in ((64, 64), (128, 128), (32, 32), (256, 256), (64, 128)):
        sizes = {"linear_key_head_dim": key, "linear_value_head_dim": value}
        for config in (config_of("qwen3_5_text", **sizes), config_of("qwen3_5", text_config=sizes)):
            check_layers(config, "bfloat16", False)
            if key == value and key in (64, 128):
                check_layers(config, "bfloat16", True)
                continue
            with pytest.raises(
                ConfigError, match=rf"sizes {key} \(key\) and {value} \(value\), .* set rollout\.name=hf"
            ):
                check_layers(config, "bfloat16", True)


def test_the_cpu_computes_those_heads_alone() -> None:
    """vLLM's own kernels, which end a request, not the start."""
    need_vllm()
    from vllm import _custom_ops

    def prefill(size: int) -> Tensor:
        query, value = torch.randn(2, 1, 70, 2, size, dtype=torch.bfloat16)
        decay, beta = torch.zeros(1, 70, 2), torch.ones(1, 70, 2, dtype=torch.bfloat16)
        states, row = torch.zeros(1, 2, size, size), torch.tensor([0, 70], dtype=torch.int32)
        options = {"head_first": False, "use_qk_l2norm_in_kernel": True, "initial_state_indices": row[:1]}
        out, _ = _custom_ops.chunk_gated_delta_rule_cpu(query, query, value, decay, beta, states, True, row, **options)
        return out

    for size in (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 512):
        if size in module._DELTA_HEADS:
            assert prefill(size).isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="head"):
                prefill(size)


def test_a_missing_torchvision_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps torchvision --index-url .*/whl/cpu`"):
        check_layers(config_of("qwen3_5_text"), "bfloat16", True)
    with pytest.raises(ConfigError, match=r"/whl/<CUDA>`"):
        check_layers(config_of("gemma3"), "bfloat16", False)
    check_layers(config_of("qwen2"), "bfloat16", True)


def in_short(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What vLLM's CPU build needs for a model, as in the documentation's table."""
    needs: list[str] = []
    monkeypatch.setattr(module, "find_spec", needs.append)  # returns None: not installed
    torchvision = ""
    for dtype in ("bfloat16", "float32"):
        try:
            check_layers(config_of(kind), dtype, True)
        except ConfigError as error:
            if "Triton" in str(error):
                return "refused: needs Triton"
            if "no class" in str(error):
                return "refused: no class"
            torchvision = "needs torchvision" if needs else torchvision
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    try:
        check_layers(config_of(kind), "float32", True)
        dtypes = ""
    except ConfigError:
        dtypes = "in bfloat16"
    options = layer_options(config_of(kind), True, {})
    without = {"enable_prefix_caching": "without prefix cache", "compilation_config": "without its own operators"}
    return ", ".join(filter(None, [dtypes, *(without[name] for name in options if name in without), torchvision]))


def test_the_table_of_families_has_what_an_engine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = {kind: family for family in FAMILIES if family.refused is None for kind in family.kinds}
    assert trained.keys() == {*DENSE, *MULTIMODAL}
    assert {kind: family.needs for kind, family in trained.items()} == {
        kind: in_short(kind, monkeypatch) for kind in trained
    }


def test_the_table_of_families_has_what_tests_compare() -> None:
    compared = (ROOT / "tests" / "verl" / "rollout" / "test_vllm_state.py").read_text(encoding="utf-8")
    for family in FAMILIES:
        for kind in family.kinds:
            assert (family.compared == TESTED) is (f'"{kind}"' in compared)
    refused = {kind for family in FAMILIES if family.refused for kind in family.kinds}
    assert {*WITH_EXPERTS} <= refused and {*EXPERTS_OF_DENSE} <= {*DENSE}


@needs_vllm
def test_the_table_of_families_has_the_classes_of_this_vllm() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for family in FAMILIES:
        for kind in family.kinds:
            names = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind), MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)}
            assert bool(names & {*known}) is (kind != "bamba"), kind


def test_a_removed_class_is_refused_on_any_device() -> None:
    for on_cpu in (True, False):
        with pytest.raises(ConfigError, match=r"cannot run bamba: since 0\.24 it has no class of this model"):
            check_layers(config_of("bamba"), "bfloat16", on_cpu)


def test_towers_are_not_loaded() -> None:
    without = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    assert layer_options(config_of("gemma3"), True, {}) == layer_options(config_of("gemma3"), False, {}) == without


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    """In the dtype that the engine will have; the engine on transformers computes such a model."""
    CONFIG_MAPPING["qwen3_5_text"]().save_pretrained(tmp_path)
    model, on_cpu = ModelConfig(path=str(tmp_path), compute_dtype="float32"), TrainerConfig(device="cpu")
    with pytest.raises(ConfigError, match="qwen3_5_text in float32 on a CPU"):
        check_engine_layers(Config(model=model, trainer=on_cpu, rollout=RolloutConfig(name="vllm")))
    check_engine_layers(Config(model=model, trainer=on_cpu, rollout=RolloutConfig(name="hf")))
