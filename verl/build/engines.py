"""Builds the rollout engines: their limits, their share of a GPU, and sampling parameters."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from verl.build.ranks import DTYPES, choose_device
from verl.build.threads import threads_of
from verl.chat.template import ChatTemplate
from verl.config.schema import Config, ModelConfig, RolloutConfig
from verl.errors import ConfigError
from verl.host.scratch import scratch_folder
from verl.lora import lora_of
from verl.pretrained import check_weights, read_model_config, read_tokenizer
from verl.rollout.engine import TRUNCATION, RolloutEngine, Sampling
from verl.rollout.gpu_share import ALONE, ENGINE_CONTEXT_GIB, MANY_SEQUENCES, MANY_TOKENS, engine_share, many_fit
from verl.rollout.layer_options import check_layers
from verl.single_controller.group import WorkerContext
from verl.single_controller.ray import RayGroup, joins
from verl.transfer.bucket import BUCKET_BYTES
from verl.units import GIB
from verl.workers.memory import ModelShape, cache_per_sequence, cache_per_token
from verl.workers.rank import TrainingRank

_COMPILED_FROM = 130_000  # decoding passes of a run: three times what a small model needs, as responses end early


async def start_engine(
    config: Config, device: str, seat: WorkerContext, share: float | None = None, compiled: bool = False
) -> RolloutEngine:
    """Start a rollout engine in its worker process; its heavy imports happen only there.

    share: of a GPU that it shares with a trainer rank; None: nothing else is on its GPU
    compiled: whether vLLM compiles the model on a CPU, too, as it does on a GPU
    """
    if seat.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seat.devices)
    dtype, model, lora = engine_dtype(config), config.model, lora_of(config.lora)
    assert model.path is not None
    adapter = None if lora is None or lora.merged else replace(lora, nf4=False)  # its base's files are rounded already
    # Only multi-turn episodes stop at strings, for which the engine needs a tokenizer.
    tokenizer_path = (model.tokenizer_path or model.path) if config.env.multi_turn else None
    if config.rollout.name == "hf":
        from verl.rollout.hf_engine import MAX_BATCH, load_hf_engine

        torch.set_num_threads(threads_of(config))
        tokenizer = read_tokenizer(tokenizer_path) if tokenizer_path else None
        batch = config.rollout.max_num_seqs or MAX_BATCH
        return load_hf_engine(model.path, DTYPES[dtype], device, batch, tokenizer, adapter)
    from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings

    options = dict(config.rollout.engine_options)
    eager = options.pop("enforce_eager", None)
    eager = device == "cpu" and not compiled if eager is None else eager
    return await VLLMEngine.start(
        VLLMSettings(
            model_path=model.path,
            max_model_len=sequence_length(config),
            dtype=dtype,
            tokenizer_path=tokenizer_path,
            tensor_parallel_size=config.rollout.tensor_model_parallel_size,
            gpu_memory_utilization=share or config.rollout.gpu_memory_utilization or ALONE,
            sleeps=share is not None,
            kv_cache_gib=config.rollout.kv_cache_gib if device == "cpu" else None,
            max_num_seqs=config.rollout.max_num_seqs,
            max_num_batched_tokens=config.rollout.max_num_batched_tokens,
            speculation=speculation(config.rollout, device),
            lora=adapter,
            enforce_eager=eager,
            options=options,
            num_threads=threads_of(config),
            seed=config.trainer.seed + seat.rank,
            health_timeout_s=config.trainer.health_timeout_s,
        )
    )


def check_engine_layers(config: Config) -> None:
    """Raises ConfigError for a model that vLLM cannot run, before anything starts, if its engines will be on this
    machine."""
    if config.rollout.name == "vllm" and not joins(config.trainer.nnodes > 1):
        assert config.model.path is not None
        on_cpu = choose_device(config.trainer) == "cpu"
        check_layers(read_model_config(config.model.path), engine_dtype(config), on_cpu)


def engine_dtype(config: Config) -> str:
    return config.model.compute_dtype if config.rollout.dtype == "auto" else config.rollout.dtype


def sequence_length(config: Config) -> int:
    """Max tokens of prompt plus response. Raises ConfigError if the model supports fewer positions."""
    length = config.data.max_prompt_length + config.data.max_response_length
    if (limit := max_positions(config.model)) is not None and length > limit:
        lengths = "data.max_prompt_length + data.max_response_length"
        raise ConfigError(f"{lengths} is {length} tokens, but the model supports {limit}")
    return length


def max_positions(config: ModelConfig) -> int | None:
    """max_position_embeddings of the model, if its config has it. Raises ConfigError if there is no model."""
    assert config.path is not None
    limit: int | None = getattr(read_model_config(config.path).get_text_config(), "max_position_embeddings", None)
    return limit


def speculation(config: RolloutConfig, device: str) -> str | None:
    """rollout.speculation; None: no drafts. Raises ConfigError on a CPU (tests/verl/rollout/test_speculation.py)."""
    if config.speculation != "none" and device == "cpu":
        raise ConfigError(
            f"rollout.speculation={config.speculation} needs a GPU: the rejection sampler of vLLM's CPU build (0.32) "
            "reads uninitialized temperatures, so responses would not follow the policy; leave it none"
        )
    return None if config.speculation == "none" else config.speculation


def compiling_pays(config: Config, total_steps: int) -> bool:
    """Whether a run decodes long enough on a CPU to pay for a compiled model (bench/compiled_rollout.py)."""
    passes = total_steps * config.data.max_response_length  # at most, of each engine
    alone = config.rollout.tensor_model_parallel_size == 1  # compilation with several workers is untested
    return passes >= _COMPILED_FROM and alone and shutil.which(os.environ.get("CXX", "g++")) is not None


def share_beside(config: Config, trainer: RayGroup) -> float:
    """The share of each GPU for engines that sleep while its rank trains. Raises ConfigError if nothing is left."""
    if (share := config.rollout.gpu_memory_utilization) is not None:
        return share
    states, contexts = trainer.call(TrainingRank.held_bytes, BUCKET_BYTES), trainer.call(TrainingRank.context_bytes)
    held = max(map(sum, zip(states, contexts, strict=True))) + ENGINE_CONTEXT_GIB * GIB
    total = min(trainer.call(TrainingRank.device_bytes))
    share = engine_share(held, total)
    if share <= 0:
        raise ConfigError(
            f"rollout.placement=colocated: a trainer rank holds {held / GIB:.1f} of the GPU's {total / GIB:.1f} GiB "
            "during rollouts, which leaves no memory for an engine; set actor.offload=optimizer, use more GPUs, "
            "or rollout.placement=separate"
        )
    return share


def with_limits(config: Config, trainer: RayGroup, share: float) -> Config:
    """With rollout.max_num_seqs and max_num_batched_tokens where they have defaults for a share of the ranks' GPUs."""
    if config.rollout.max_num_seqs is not None:
        return config
    shape, total = trainer.call(TrainingRank.policy_shape)[0], min(trainer.call(TrainingRank.device_bytes))
    if (sequences := default_num_seqs(config, shape, share * total)) is None:
        return config
    tokens = config.rollout.max_num_batched_tokens or MANY_TOKENS
    return replace(config, rollout=replace(config.rollout, max_num_seqs=sequences, max_num_batched_tokens=tokens))


def default_num_seqs(config: Config, shape: ModelShape, share_bytes: float) -> int | None:
    """max_num_seqs of a colocated engine: many if they fit into its KV cache, else None, which is vLLM's default.

    share_bytes: what the engine gets of a GPU
    """
    rollout, itemsize = config.rollout, DTYPES[engine_dtype(config)].itemsize
    if rollout.max_num_batched_tokens is not None and rollout.max_num_batched_tokens < MANY_SEQUENCES:
        return None
    tokens = config.data.max_prompt_length / rollout.n + config.data.max_response_length  # a group shares its prompt
    parallel = rollout.tensor_model_parallel_size
    weights = shape.parameters * itemsize / parallel
    cached = (cache_per_token(shape, itemsize) * tokens + cache_per_sequence(shape, itemsize)) / parallel
    return MANY_SEQUENCES if many_fit(share_bytes - weights, cached) else None


def build_sampling(config: Config, stop_token_ids: tuple[int, ...]) -> Sampling:
    length, rollout = config.data.max_response_length, config.rollout
    truncation = {name: getattr(rollout, name) for name in TRUNCATION}
    return Sampling(length, rollout.temperature, stop_token_ids=stop_token_ids, **truncation)


def with_model_limits(config: Config) -> Config:
    """The configuration with its prompt and response lengths limited by the model's context length.

    If both do not fit, a prompt gets what the response leaves, at least half.
    """
    room = max_positions(config.model)
    if room is None:
        return config
    prompt_length = min(config.data.max_prompt_length, max(room // 2, room - config.data.max_response_length))
    response_length = min(config.data.max_response_length, room - prompt_length)
    data = replace(config.data, max_prompt_length=prompt_length, max_response_length=response_length)
    return replace(config, data=data)


@asynccontextmanager
async def standalone_engine(config: Config, chat: ChatTemplate) -> AsyncIterator[tuple[RolloutEngine, Sampling]]:
    """An engine in this process and its sampling parameters. config: as of `with_model_limits`"""
    assert config.model.path is not None
    check_weights(config.model.path)
    with scratch_folder():  # vLLM leaves files behind if its parent process is killed
        engine = await start_engine(config, choose_device(config.trainer), WorkerContext(0, 1))
        try:
            yield engine, build_sampling(config, chat.stop_token_ids)
        finally:
            await engine.close()
