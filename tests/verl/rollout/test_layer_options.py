"""What layers with state need of vLLM, by device, and what is refused before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.conftest import ROOT
from tests.support.multimodal import MULTIMODAL
from tests.support.stateful import DENSE
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


def test_a_missing_torchvision_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps torchvision --index-url .*/whl/cpu`"):
        check_layers("qwen3_5_text", "bfloat16", True)
    with pytest.raises(ConfigError, match=r"/whl/<CUDA>`"):
        check_layers("gemma3", "bfloat16", False, multimodal=True)
    check_layers("qwen2", "bfloat16", True)


def in_short(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What vLLM's CPU build does with a model, as in the documentation's table."""
    needs: list[str] = []
    monkeypatch.setattr(module, "find_spec", needs.append)  # returns None: not installed
    torchvision = ""
    for dtype in ("bfloat16", "float32"):
        try:
            check_layers(kind, dtype, True, kind in MULTIMODAL)
        except ConfigError as error:
            if "Triton" in str(error):
                return "refused"
            torchvision = "needs torchvision" if needs else torchvision
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    try:
        check_layers(kind, "float32", True)
        dtypes = ""
    except ConfigError:
        dtypes = "in bfloat16"
    options = layer_options(kind, True, {})
    without = {"enable_prefix_caching": "without prefix cache", "compilation_config": "without its own operators"}
    return ", ".join(filter(None, [dtypes, *(without[name] for name in options), torchvision])) or "as any model"


def test_the_documentation_lists_what_a_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    section = text.partition("### Layers with state, and multimodal models")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `") and "model_type" not in line]
    rows = [re.findall(r"[^|]+", line) for line in lines]
    listed = {kind: (cells[1].strip(), cells[2].strip()) for cells in rows for kind in re.findall("`(.+?)`", cells[0])}
    assert listed.keys() == {*DENSE, *MULTIMODAL}
    assert {kind: limits for kind, (limits, _) in listed.items()} == {
        kind: in_short(kind, monkeypatch) for kind in listed
    }
    compared = (ROOT / "tests" / "verl" / "rollout" / "test_vllm_state.py").read_text(encoding="utf-8")
    assert {kind: yes for kind, (_, yes) in listed.items()} == {
        kind: "yes" if f'"{kind}"' in compared else "no" for kind in listed
    }


def test_towers_are_not_loaded() -> None:
    without = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    assert layer_options("gemma3", True, {}, multimodal=True) == layer_options("gemma3", False, {}, True) == without


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    """In the dtype that the engine will have; the engine on transformers computes such a model."""
    CONFIG_MAPPING["qwen3_5_text"]().save_pretrained(tmp_path)
    model, on_cpu = ModelConfig(path=str(tmp_path), compute_dtype="float32"), TrainerConfig(device="cpu")
    with pytest.raises(ConfigError, match="qwen3_5_text in float32 on a CPU"):
        check_engine_layers(Config(model=model, trainer=on_cpu, rollout=RolloutConfig(name="vllm")))
    check_engine_layers(Config(model=model, trainer=on_cpu, rollout=RolloutConfig(name="hf")))
