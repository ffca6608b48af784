"""From a configuration to processes: trainer ranks and rollout engines, and where they sit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from verl.algorithms.algorithm import Algorithm
from verl.config.schema import Config, ModelConfig, OptimConfig, RunConfig
from verl.daemon import run_async, run_in_daemon_thread
from verl.errors import ConfigError, EngineError
from verl.rollout.engine import RolloutEngine
from verl.rollout.pool import close_engine, join_broadcast
from verl.single_controller.group import WorkerContext, WorkerError
from verl.single_controller.ray import Bundle, Cluster, Pool, RayGroup, joins
from verl.trainer.build_algorithm import needs_reference
from verl.trainer.policy import Policy
from verl.trainer.threads import threads_of
from verl.transfer.bucket import BucketLayout, OpenSender
from verl.transfer.gpu import CudaIpc, NcclBroadcast, Rendezvous
from verl.transfer.memory import ByReference, SharedMemory
from verl.utils.pretrained import read_model_config, read_tokenizer
from verl.workers.offload import Offload
from verl.workers.optim import OptimizerSettings
from verl.workers.rank import RankSpec, build_rank

_CLOSE_S = 20.0
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class WeightTransport:
    """The ways that weights take."""

    outlets: Sequence[OpenSender]  # by trainer rank
    sources: Sequence[Sequence[int]]  # by engine: the ranks whose offers are meant for it
    meeting: Rendezvous | None = None  # where rank 0 waits for the engines


@dataclass(frozen=True)
class Workers:
    """The processes of a run."""

    trainer: RayGroup
    engines: RayGroup
    links: WeightTransport

    async def remake_engine(self, rank: int) -> None:
        """Start another engine in the place of one that is lost. Raises EngineError where its weights could not come
        to it: NCCL's group of ranks and engines ends with any of them."""
        if self.links.meeting is not None:
            raise EngineError(
                f"rollout engine {rank} is lost, and engines on GPUs of their own cannot be replaced one by one. "
                "Start the run again: it resumes from its newest checkpoint"
            )
        await self._close_engine(rank)
        await self.engines.remake(rank)

    async def close_engines(self) -> None:
        """Let the engines end what they have started, for as long as that is quick."""
        await asyncio.gather(*(self._close_engine(rank) for rank in range(self.engines.size)))

    async def _close_engine(self, rank: int) -> None:
        with suppress(TimeoutError, WorkerError):
            async with asyncio.timeout(_CLOSE_S):
                await self.engines.submit(rank, close_engine)

    def close(self) -> None:
        """End them; what is already dead stays so. Ranks first: an update would only take cores from what tidies up."""
        self.trainer.close()
        run_async(self.close_engines())
        self.engines.close()


def choose_device(config: RunConfig, num_gpus: float | None = None) -> str:
    """cuda where there is a GPU and nothing else is asked for. Raises ConfigError if cuda is asked for in vain.

    num_gpus: of the cluster that is joined, whose GPUs need not be this machine's; None: this machine's count
    """
    there = torch.cuda.is_available() if num_gpus is None else num_gpus > 0
    if config.device == "cuda" and not there:
        where = "torch sees no GPU" if num_gpus is None else "the Ray cluster has no GPU"
        raise ConfigError(f"trainer.device=cuda, but {where}; see `python -m verl.doctor`")
    return "cuda" if there and config.device != "cpu" else "cpu"


def check_device(config: RunConfig) -> None:
    """Raises as `choose_device` does, before anything starts, where the workers are to be on this machine."""
    if not joins(config.nnodes > 1):
        choose_device(config)


def sees_gpu(config: RunConfig) -> bool:
    """Whether this machine has a GPU that may be used; the workers may be in a cluster that has others."""
    return torch.cuda.is_available() and config.device != "cpu"


def optimizer_settings(config: OptimConfig, grad_clip: float, total_steps: int) -> OptimizerSettings:
    """total_steps: optimizer steps of the whole run, where a cosine ends and of which a warmup may be a share"""
    return OptimizerSettings(
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        weight_decay=config.weight_decay,
        max_grad_norm=grad_clip,
        warmup_steps=config.warmup_steps or int(config.warmup_ratio * total_steps),
        schedule="cosine" if config.schedule == "cosine" else "constant",
        total_steps=total_steps,
        min_lr_ratio=config.min_lr_ratio,
    )


def rank_spec(config: Config, algorithm: Algorithm, device: str, total_steps: int) -> RankSpec:
    """What every training rank builds."""
    assert config.model.path is not None
    updates = total_steps * config.updates_per_step
    of_policy = (total_steps - config.trainer.critic_warmup) * config.updates_per_step
    critic = config.critic
    return RankSpec(
        model_path=config.model.path,
        tokenizer_path=config.model.tokenizer_path,
        compute_dtype=DTYPES[config.model.compute_dtype],
        temperature=config.rollout.temperature,
        optimizer=optimizer_settings(config.actor.optim, config.actor.grad_clip, of_policy),
        with_reference=needs_reference(algorithm),
        critic_path=(critic.path or config.model.path) if algorithm.needs_critic else None,
        critic_optimizer=optimizer_settings(critic.optim, critic.grad_clip, updates),
        cliprange_value=critic.cliprange_value,
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
        policy_offload=Offload(config.actor.offload_params, config.actor.offload_optimizer),
        reference_offload=Offload(config.ref.offload_params),
        critic_offload=Offload(critic.offload_params, critic.offload_optimizer),
        device=device,
        ranks_per_node=config.trainer.n_gpus_per_node,
        num_threads=threads_of(config),
        seed=config.trainer.seed,
        timeout_s=config.trainer.call_timeout_s,
    )


def start_workers(config: Config, cluster: Cluster, algorithm: Algorithm, device: str, total_steps: int) -> Workers:
    """Trainer ranks and rollout engines, beside each other or in pools of their own."""
    sequence_length(config)
    config = located(config)
    gpus, parallel = (1.0 if device == "cuda" else 0.0), config.rollout.tensor_model_parallel_size
    colocated = config.rollout.colocated
    trainer, pool, homes = start_ranks(config, cluster, algorithm, device, total_steps)
    make = partial(start_engine, config, device)
    if colocated:
        beside = [range(first * parallel, (first + 1) * parallel) for first in range(config.num_engines)]
        places = [homes[ranks[0]] for ranks in beside]
        devices = [tuple(gpu for rank in ranks for gpu in trainer.gpus[rank]) for ranks in beside]
        engines = cluster.group("rollout", make, pool, Bundle(1.0, 0.0), places, devices)
    else:
        alone = Bundle(1.0, gpus * parallel)
        engines = cluster.group("rollout", make, cluster.pool([alone] * config.num_engines), alone)
    on_gpus = device == "cuda" and config.rollout.name == "vllm"
    links = gpu_links(config, trainer) if on_gpus else cpu_links(trainer.nodes, engines.nodes)
    return Workers(trainer, engines, links)


def start_ranks(
    config: Config, cluster: Cluster, algorithm: Algorithm, device: str, total_steps: int
) -> tuple[RayGroup, Pool, list[int]]:
    """Trainer ranks, the pool that they are in, which has room for colocated engines, and each rank's place in it."""
    gpus, per_node = (1.0 if device == "cuda" else 0.0), config.trainer.n_gpus_per_node
    slots = 2.0 if config.rollout.colocated else 1.0
    node = Bundle(per_node * slots, per_node * gpus)
    pool = cluster.pool([node] * config.trainer.nnodes, "STRICT_SPREAD" if config.trainer.nnodes > 1 else "PACK")
    spec = rank_spec(located(config), algorithm, device, total_steps)
    homes = [rank // per_node for rank in range(config.num_ranks)]
    return cluster.group("trainer", partial(build_rank, spec), pool, Bundle(1.0, gpus), homes), pool, homes


def cpu_links(of_ranks: Sequence[str], of_engines: Sequence[str]) -> WeightTransport:
    """Shared memory, written by the first rank of each node, where every engine has a rank on its node; else the
    cluster's object store, filled by rank 0. Both arguments are names of nodes."""
    if not set(of_engines) <= set(of_ranks):
        return WeightTransport([ByReference, *[None] * (len(of_ranks) - 1)], [[0]] * len(of_engines))
    sources = [of_ranks.index(node) for node in of_engines]
    outlets: list[OpenSender] = [SharedMemory if rank in sources else None for rank in range(len(of_ranks))]
    return WeightTransport(outlets, [[rank] for rank in sources])


def gpu_links(config: Config, trainer: RayGroup) -> WeightTransport:
    """CUDA IPC on shared devices, for every rank has all of a bucket once it is gathered; else NCCL from rank 0."""
    ranks, parallel = config.num_ranks, config.rollout.tensor_model_parallel_size
    if config.rollout.colocated:
        sources = [range(first * parallel, (first + 1) * parallel) for first in range(config.num_engines)]
        return WeightTransport(
            [CudaIpc if rank < config.num_engines * parallel else None for rank in range(ranks)], sources
        )
    host, port = trainer.addresses()[0]
    meeting = Rendezvous(host, port, 1 + config.num_engines * parallel)
    return WeightTransport(
        [partial(NcclBroadcast, meeting), *[None] * (ranks - 1)], [[0]] * config.num_engines, meeting
    )


def connect(config: Config, policy: Policy, workers: Workers) -> list[BucketLayout]:
    """Open the ways of the weights; the buckets that will take them. Engines that meet rank 0 come while it waits."""
    dtype, size = DTYPES[engine_dtype(config)], config.rollout.bucket_mib * 2**20
    meeting, parallel = workers.links.meeting, config.rollout.tensor_model_parallel_size

    async def both() -> list[BucketLayout]:
        ranks = asyncio.create_task(run_in_daemon_thread(policy.connect, workers.links.outlets, dtype, size))
        if meeting is not None:
            firsts = enumerate(range(1, meeting.size, parallel))
            await asyncio.gather(
                *(workers.engines.submit(number, join_broadcast, meeting, first) for number, first in firsts)
            )
        return await ranks

    return run_async(both())


def engine_dtype(config: Config) -> str:
    """The dtype that engines compute in."""
    return config.model.compute_dtype if config.rollout.dtype == "auto" else config.rollout.dtype


def located(config: Config) -> Config:
    """The same with whole paths of folders, because workers of a cluster that was there before have other ones."""

    def whole(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path

    model = replace(config.model, path=whole(config.model.path), tokenizer_path=whole(config.model.tokenizer_path))
    return replace(config, model=model, critic=replace(config.critic, path=whole(config.critic.path)))


def model_room(config: ModelConfig) -> int | None:
    """Tokens that the model has positions for, where it says so. Raises ConfigError if there is no model."""
    assert config.path is not None
    room: int | None = getattr(read_model_config(config.path), "max_position_embeddings", None)
    return room


def sequence_length(config: Config) -> int:
    """Tokens of the longest prompt and response. Raises ConfigError if the model has no room for them."""
    wanted = config.data.max_prompt_length + config.data.max_response_length
    room = model_room(config.model)
    if room is not None and wanted > room:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length is {wanted} tokens, but the model has room for {room}"
        )
    return wanted


async def start_engine(config: Config, device: str, seat: WorkerContext) -> RolloutEngine:
    """A rollout engine, in the process that will hold it. What it needs is imported there alone."""
    if seat.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seat.devices)
    dtype = engine_dtype(config)
    assert config.model.path is not None
    # Only an engine that stops at strings needs to know what tokens say.
    tokenizer_path = (config.model.tokenizer_path or config.model.path) if config.env.multi_turn else None
    if config.rollout.name == "hf":
        from verl.rollout.hf_engine import MAX_BATCH, load_hf_engine

        torch.set_num_threads(threads_of(config))
        texts = read_tokenizer(tokenizer_path) if tokenizer_path else None
        return load_hf_engine(config.model.path, DTYPES[dtype], device, config.rollout.max_num_seqs or MAX_BATCH, texts)
    from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings

    return await VLLMEngine.start(
        VLLMSettings(
            model_path=config.model.path,
            max_model_len=sequence_length(config),
            dtype=dtype,
            tokenizer_path=tokenizer_path,
            tensor_parallel_size=config.rollout.tensor_model_parallel_size,
            gpu_memory_utilization=config.rollout.gpu_memory_utilization,
            kv_cache_gib=config.rollout.kv_cache_gib if device == "cpu" else None,
            max_num_seqs=config.rollout.max_num_seqs,
            max_num_batched_tokens=config.rollout.max_num_batched_tokens,
            num_threads=threads_of(config),
            seed=config.trainer.seed + seat.rank,
            health_timeout_s=config.trainer.health_timeout_s,
        )
    )
