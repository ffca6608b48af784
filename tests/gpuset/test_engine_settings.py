"""The configuration that vLLM's own Python builds from our settings on an H200: what a rollout's speed rests on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from tests.toolrl.check.plan.test_plan import plan_of
from toolrl.check.head_sizes import FLASH
from verl.errors import ConfigError
from verl.rollout.engine_options import engine_arguments_of_vllm
from verl.rollout.gpu_share import MANY_SEQUENCES, MANY_TOKENS
from verl.rollout.speculation import MAX_DRAFT, DraftCounter
from verl.rollout.vllm_engine import VLLMSettings, _start_vllm
from verl.rollout.vllm_extension import WeightReceiver

pytestmark = pytest.mark.gpuset

MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen2.5-1.5b": (Qwen2Config, {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2}),
    "qwen3-1.7b": (Qwen3Config, {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8}),
    "llama-3.2-3b": (LlamaConfig, {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8}),
}
ARCHITECTURES = {Qwen2Config: "Qwen2ForCausalLM", Qwen3Config: "Qwen3ForCausalLM", LlamaConfig: "LlamaForCausalLM"}


def configured(arguments: Any, start_engine_loop: bool, usage_context: Any, stat_loggers: list[Any]) -> Any:
    """vLLM's VllmConfig."""
    return arguments.create_engine_config(usage_context)


def built(folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, start: Any = configured, **more: Any) -> Any:
    """What `start` makes of vLLM's arguments for an engine with these settings; no process is started."""
    from vllm.v1.engine.async_llm import AsyncLLM

    kind, sizes = MODELS[model]
    config = kind(num_hidden_layers=28, max_position_embeddings=32768, vocab_size=151936, **sizes)
    config.architectures = [ARCHITECTURES[kind]]
    config.save_pretrained(folder)

    monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
    settings = VLLMSettings(str(folder), 3072, gpu_memory_utilization=0.8, **{"sleeps": True, **more})
    return _start_vllm(settings, folder, DraftCounter())


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_an_engine_on_an_h200(model: str, parallel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = built(tmp_path, monkeypatch, model, tensor_parallel_size=parallel)
    scheduler, compilation, cache = config.scheduler_config, config.compilation_config, config.cache_config
    plan, limits = plan_of([], "h200"), (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    assert limits == (plan.max_num_seqs, plan.max_num_batched_tokens) == (1024, 16384)
    assert scheduler.enable_chunked_prefill and scheduler.async_scheduling
    assert cache.enable_prefix_caching and cache.gpu_memory_utilization == 0.8
    assert compilation.cudagraph_mode.name == "FULL_AND_PIECEWISE" and compilation.mode.name == "VLLM_COMPILE"
    assert max(compilation.cudagraph_capture_sizes) == compilation.max_cudagraph_capture_size == 1024
    assert not config.model_config.enforce_eager and config.model_config.enable_sleep_mode
    assert config.model_config.logprobs_mode == "processed_logprobs"
    backend, extension = (
        config.parallel_config.distributed_executor_backend,
        config.parallel_config.worker_extension_cls,
    )
    assert backend == ("mp" if parallel > 1 else "uni")
    assert extension == f"{WeightReceiver.__module__}.{WeightReceiver.__name__}"
    # The first model runner samples seeded rows one by one; training requests have no seeds on either.
    assert config.use_v2_model_runner is (model != "qwen2.5-1.5b")


def test_limits_that_are_given_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = built(tmp_path, monkeypatch, "qwen3-1.7b", max_num_seqs=64, max_num_batched_tokens=4096)
    scheduler = config.scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (64, 4096)
    assert config.compilation_config.cudagraph_capture_sizes == [1, 2, 4, *range(8, 129, 8)]  # vLLM's own


def test_an_eager_engine_has_no_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = built(tmp_path, monkeypatch, "qwen2.5-1.5b", enforce_eager=True, max_num_seqs=1024)
    assert config.model_config.enforce_eager and config.compilation_config.cudagraph_mode.name == "NONE"


def test_options_are_vllms_own_and_take_the_place_of_our_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert set(engine_arguments_of_vllm()) == {each.name for each in fields(AsyncEngineArgs)}
    options = {"attention_backend": "TRITON_ATTN", "cudagraph_capture_sizes": [1, 8, 64]}
    config = built(tmp_path, monkeypatch, "qwen2.5-1.5b", max_num_seqs=1024, options=options)
    assert config.attention_config.backend.name == "TRITON_ATTN"
    assert config.compilation_config.cudagraph_capture_sizes == [1, 8, 64]
    assert config.attention_config.flash_attn_max_num_splits_for_cuda_graph == 32  # vLLM's own
    with pytest.raises(ConfigError, match=r"rollout.engine_options: vLLM refuses attention_backend='NO_SUCH'"):
        built(tmp_path, monkeypatch, "qwen2.5-1.5b", options={"attention_backend": "NO_SUCH"})


def test_flash_attention_computes_the_heads_that_training_takes_and_vllm_all() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.selector import get_attn_backend

    assert [size for size in range(1, 257) if FlashAttentionBackend.supports_head_size(size)] == list(FLASH)
    with set_current_vllm_config(VllmConfig()):
        chosen = {size: get_attn_backend(size, torch.bfloat16, None).get_name() for size in (128, 36, 20, 7)}
    assert chosen == {128: "FLASH_ATTN", 36: "TRITON_ATTN", 20: "FLEX_ATTENTION", 7: "FLEX_ATTENTION"}


def test_many_sequences_have_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of a colocated engine whose cache holds them."""
    limits = {"max_num_seqs": MANY_SEQUENCES, "max_num_batched_tokens": MANY_TOKENS}
    config = built(tmp_path, monkeypatch, "qwen2.5-1.5b", **limits)
    scheduler, sizes = config.scheduler_config, config.compilation_config.cudagraph_capture_sizes
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (MANY_SEQUENCES, MANY_TOKENS)
    assert config.attention_config.flash_attn_max_num_splits_for_cuda_graph == 8  # of 32 with graphs of up to 512
    assert sizes[-4:] == [1280, 1536, 1792, MANY_SEQUENCES] and set(range(16, 513, 16)) < set(sizes)


def test_drafts_cost_overlapped_scheduling_and_the_second_model_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = built(tmp_path, monkeypatch, "qwen3-1.7b", speculation="ngram")
    assert (config.speculative_config.method, config.speculative_config.num_speculative_tokens) == ("ngram", MAX_DRAFT)
    assert not config.scheduler_config.async_scheduling and not config.use_v2_model_runner


def test_an_engine_with_its_own_gpu_has_no_sleep_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sleeps in (False, True):
        model = built(tmp_path, monkeypatch, "qwen2.5-1.5b", sleeps=sleeps).model_config
        assert (model.enable_sleep_mode, model.enable_cumem_allocator) == (sleeps, sleeps)


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "ieee"), ("bfloat16", None)])
def test_tritons_products_of_float32_are_not_rounded(
    dtype: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Triton itself reads it where vLLM starts its processes; TF32 would be within a digit of the canary's bound."""
    from triton import knobs

    found: list[str | None] = []

    def start(arguments: Any, *_: Any) -> None:
        found.append(knobs.language.fp32_default)

    built(tmp_path, monkeypatch, "qwen2.5-1.5b", start, dtype=dtype)
    assert found == [expected] and knobs.language.fp32_default is None
