"""A rollout engine in this process, for commands that do not train."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from verl.chat.template import ChatTemplate
from verl.config.schema import Config, EnvConfig, InferenceConfig, RolloutConfig
from verl.pretrained import check_weights
from verl.rollout.engine import TRUNCATION, RolloutEngine, Sampling
from verl.single_controller.group import WorkerContext
from verl.system.scratch import scratch_folder
from verl.trainer.builders.threads import num_threads
from verl.trainer.builders.workers import choose_device, max_positions, start_engine


def response_lengths(config: InferenceConfig) -> tuple[int, int]:
    """(max prompt tokens, max response tokens): as configured, limited by the model's context length."""
    room = max_positions(config.model)
    if room is None:
        return config.max_prompt_length, config.max_response_length
    prompt_length = min(config.max_prompt_length, room // 2)
    return prompt_length, min(config.max_response_length, room - prompt_length)


@asynccontextmanager
async def standalone_engine(
    config: InferenceConfig, chat: ChatTemplate, env: EnvConfig
) -> AsyncIterator[tuple[RolloutEngine, Sampling]]:
    """An engine in this process and its sampling parameters. env: of the episodes, or of any of several kinds"""
    base = Config()
    prompt_length, response_length = response_lengths(config)
    whole = replace(
        base,
        model=replace(config.model, compute_dtype=config.dtype),
        data=replace(base.data, max_prompt_length=prompt_length, max_response_length=response_length),
        env=env,
        actor=replace(base.actor, max_tokens_per_pack=max(16384, prompt_length + response_length)),
        rollout=RolloutConfig(
            name=config.engine,
            placement="separate",
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_gib=config.kv_cache_gib,
        ),
        trainer=replace(
            base.trainer, device=config.device, num_threads=num_threads(config.num_threads, 1), seed=config.seed
        ),
    )
    assert config.model.path is not None
    check_weights(config.model.path)
    sampling = Sampling(
        response_length,
        config.temperature,
        config.n,
        chat.stop_token_ids,
        **{name: getattr(config, name) for name in TRUNCATION},
    )
    with scratch_folder():  # vLLM leaves files behind if its parent process is killed
        engine = await start_engine(whole, choose_device(whole.trainer), WorkerContext(0, 1))
        try:
            yield engine, sampling
        finally:
            await engine.close()
