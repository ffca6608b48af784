"""Builds the trainer ranks: their device, models, optimizers and placement."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from verl.algorithms.algorithm import Algorithm
from verl.build.algorithm import needs_reference
from verl.build.threads import threads_of
from verl.config.schema import ActorConfig, Config, ModelConfig, OptimConfig, TrainerConfig
from verl.errors import ConfigError
from verl.lora import RANKS, Lora, check_parts, check_targets, lora_of
from verl.single_controller.ray import Bundle, Cluster, PlacementGroup, RayGroup, joins
from verl.workers.fsdp_engine import Offload
from verl.workers.memory import PackShape, pack_tokens
from verl.workers.optim import OptimizerSettings
from verl.workers.rank import RankSpec, build_rank

_log = logging.getLogger(__name__)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device(config: TrainerConfig, num_gpus: float | None = None) -> str:
    """cuda if a GPU is available and cpu is not requested. Raises ConfigError if CUDA is requested but unavailable.

    num_gpus: GPUs of the joined Ray cluster, which need not be on this machine; None: use those of this machine
    """
    available = torch.cuda.is_available() if num_gpus is None else num_gpus > 0
    if config.device == "cuda" and not available:
        where = "torch sees no GPU" if num_gpus is None else "the Ray cluster has no GPU"
        raise ConfigError(f"trainer.device=cuda, but {where}; see `toolrl doctor`")
    return "cuda" if available and config.device != "cpu" else "cpu"


def check_device(config: TrainerConfig) -> None:
    """Raises as `choose_device` does, before anything starts, if the workers will run on this machine."""
    if not joins(config.nnodes > 1):
        choose_device(config)


def warn_of_slow_dtype(config: Config) -> None:
    """bfloat16 without instructions for it, as on CPUs with AVX2 alone: the first step would look like a hang."""
    slow = config.model.compute_dtype == "bfloat16" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if slow and not sees_gpu(config.trainer) and not joins(config.trainer.nnodes > 1):
        _log.warning("this CPU has no instructions for bfloat16; model.compute_dtype=float32 is many times faster")


def sees_gpu(config: TrainerConfig) -> bool:
    """Whether this machine has a GPU and may use it; a joined cluster may have others."""
    return torch.cuda.is_available() and config.device != "cpu"


def check_adapter(config: Config) -> None:
    """Raises ConfigError for an adapter that the model or the engine cannot have, before anything starts."""
    if (lora := lora_of(config.lora)) is None:
        return
    assert config.model.path is not None
    names = check_targets(lora, config.model.path)
    check_four_bits(lora)
    if config.rollout.name == "vllm" and not lora.merged and lora.rank > RANKS[-1]:
        raise ConfigError(f"lora.rank={lora.rank}: vLLM has adapters of at most rank {RANKS[-1]}; set lora.sync=merged")
    if config.rollout.name == "vllm" and not lora.merged:
        check_parts(names, "lora.targets", "add in_proj_qkv, or set lora.sync=merged or rollout.name=hf")
    if lora.merged and "bfloat16" in (config.rollout.dtype, config.model.compute_dtype):
        _log.warning(
            "lora.sync=merged: weights in bfloat16 round small updates of the adapter away; engine/merged_share is the "
            "share that is left"
        )


def check_four_bits(lora: Lora) -> None:
    """Raises ConfigError for a base in four bits without its library, or whose weights a sync would have to merge."""
    if not lora.nf4:
        return
    if find_spec("bitsandbytes") is None:
        raise ConfigError("lora.base_dtype=nf4 needs bitsandbytes: pip install 'toolrl[nf4]'")
    if lora.merged:
        raise ConfigError("lora.sync=merged: with lora.base_dtype=nf4 engines have the base already; set adapter")


def optimizer_settings(actor: ActorConfig, own: OptimConfig, total_steps: int) -> OptimizerSettings:
    """own: the model's, the actor's or the critic's; everything else is the same for both

    total_steps: optimizer steps of the whole run: end of the cosine schedule and base of a share of warmup
    """
    shared, warmup = actor.optim, own.warmup_steps
    return OptimizerSettings(
        lr=own.lr,
        betas=(shared.betas[0], shared.betas[1]),
        weight_decay=own.weight_decay,
        max_grad_norm=actor.grad_clip,
        warmup_steps=int(warmup * total_steps if warmup < 1 else warmup),
        schedule="cosine" if shared.schedule == "cosine" else "constant",
        total_steps=total_steps,
        min_lr_ratio=shared.min_lr_ratio,
    )


def fused_kernels(config: ModelConfig, device: str) -> str:
    """model.fused_kernels. Raises ConfigError for kernels that the device does not run."""
    if config.fused_kernels == "liger" and device == "cpu":
        raise ConfigError("model.fused_kernels=liger needs a GPU: liger-kernel has no kernels for a CPU; leave it auto")
    return config.fused_kernels


def rank_spec(config: Config, algorithm: Algorithm, device: str, total_steps: int) -> RankSpec:
    """The specification from which every trainer rank builds its models and optimizers."""
    assert config.model.path is not None
    critic_updates = total_steps * config.updates_per_step
    policy_updates = (total_steps - config.trainer.critic_only_updates) * config.updates_per_step
    actor, critic = config.actor, config.critic
    return RankSpec(
        model_path=config.model.path,
        tokenizer_path=config.model.tokenizer_path,
        compute_dtype=DTYPES[config.model.compute_dtype],
        temperature=config.rollout.temperature,
        optimizer=optimizer_settings(actor, actor.optim, policy_updates),
        lora=lora_of(config.lora),
        with_reference=needs_reference(algorithm),
        teacher_path=config.teacher.local if algorithm.teacher_weight else None,
        critic_path=(critic.path or config.model.path) if algorithm.needs_critic else None,
        critic_optimizer=optimizer_settings(actor, critic.optim, critic_updates),
        cliprange_value=critic.cliprange_value,
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
        largest_pack=largest_pack(config, config.data.max_prompt_length),
        fused_kernels=fused_kernels(config.model, device),
        policy_offload=Offload.of(config.actor.offload),
        frozen_offload=Offload(config.ref.offload_params),
        critic_offload=Offload.of(critic.offload),
        shares_device=config.rollout.colocated,
        device=device,
        ranks_per_node=config.trainer.n_gpus_per_node,
        num_threads=threads_of(config),
        seed=config.trainer.seed,
        timeout_s=config.trainer.stall_timeout_s,
    )


def largest_pack(config: Config, prompt: float) -> PackShape:
    """A rank's largest pack: prompts of that length, responses of maximum length."""
    n, response, limit = config.rollout.n, config.data.max_response_length, config.actor.max_tokens_per_pack
    group = (prompt if n > 1 else n * prompt) + n * response
    tokens = pack_tokens(limit, group, config.prompts_per_minibatch, config.num_ranks)
    return PackShape.of(tokens, prompt, response, n, n > 1)


def rank_pool(config: Config, cluster: Cluster, device: str) -> tuple[PlacementGroup, list[int]]:
    """(the ranks' placement group with slots for colocated engines, each rank's bundle index in it)."""
    gpus, per_node = (1.0 if device == "cuda" else 0.0), config.trainer.n_gpus_per_node
    slots = 2.0 if config.rollout.colocated else 1.0
    node = Bundle(per_node * slots, per_node * gpus)
    pool = cluster.pool([node] * config.trainer.nnodes, "STRICT_SPREAD" if config.trainer.nnodes > 1 else "PACK")
    return pool, [rank // per_node for rank in range(config.num_ranks)]


def start_ranks(
    config: Config,
    cluster: Cluster,
    pool: PlacementGroup,
    nodes: Sequence[int],
    algorithm: Algorithm,
    device: str,
    total_steps: int,
    wait: bool = True,
) -> RayGroup:
    """pool, nodes: of `rank_pool`; wait: as for `Cluster.group`"""
    spec = rank_spec(abs_paths(config), algorithm, device, total_steps)
    bundle = Bundle(1.0, 1.0 if device == "cuda" else 0.0)
    return cluster.group("trainer", partial(build_rank, spec), pool, bundle, nodes, wait=wait)


def abs_paths(config: Config) -> Config:
    """The configuration with absolute folder paths: workers of a joined cluster have other working directories."""

    def full(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path

    model = replace(config.model, path=full(config.model.path), tokenizer_path=full(config.model.tokenizer_path))
    lora = replace(config.lora, path=full(config.lora.path))
    critic = replace(config.critic, path=full(config.critic.path))
    teacher = config.teacher if config.teacher.is_policy else replace(config.teacher, path=full(config.teacher.path))
    return replace(config, model=model, lora=lora, critic=critic, teacher=teacher)
