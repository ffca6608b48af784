"""Builds the worker processes: trainer ranks and rollout engines, with their placement and weight transport."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from verl.algorithms.algorithm import Algorithm
from verl.config.schema import ActorConfig, Config, ModelConfig, OptimConfig, RolloutConfig, TrainerConfig
from verl.errors import ConfigError, EngineError
from verl.pretrained import read_model_config, read_tokenizer
from verl.rollout.engine import RolloutEngine
from verl.rollout.engine_options import check_engine_options
from verl.rollout.gpu_share import ALONE, ENGINE_CONTEXT_GIB, MANY_SEQUENCES, MANY_TOKENS, engine_share, many_fit
from verl.single_controller.group import Method, WorkerContext, WorkerError
from verl.single_controller.ray import Bundle, Cluster, PlacementGroup, RayGroup, joins
from verl.system.daemon import run_async, run_in_daemon_thread
from verl.trainer.builders.algorithm import needs_reference
from verl.trainer.builders.threads import threads_of
from verl.trainer.policy import Policy
from verl.transfer.bucket import BucketLayout, OpenSender
from verl.transfer.gpu import CudaIpc, NcclBroadcast, Rendezvous
from verl.transfer.shared_memory import ByReference, SharedMemory
from verl.workers.fsdp_engine import Offload
from verl.workers.memory import ModelShape, PackShape, cache_per_token, pack_tokens
from verl.workers.optim import OptimizerSettings
from verl.workers.rank import RankSpec, TrainingRank, build_rank

_log = logging.getLogger(__name__)
_CLOSE_S = 20.0
_COMPILED_FROM = 130_000  # decoding passes of a run: three times what a small model needs, as responses end early
GIB = 2**30
BUCKET_BYTES = 256 * 2**20  # of the weight sync, which needs memory for two buckets besides the model
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class WeightTransport:
    """How weights get from the trainer ranks to the engines."""

    senders: Sequence[OpenSender]  # per trainer rank
    sources: Sequence[Sequence[int]]  # per engine: the ranks that send to it
    rendezvous: Rendezvous | None = None  # where rank 0 waits for the engines (NCCL only)


@dataclass(frozen=True)
class Workers:
    """The worker processes of a run."""

    trainer: RayGroup
    engines: RayGroup
    transport: WeightTransport

    async def restart_engine(self, rank: int) -> None:
        """Replace a dead engine. Raises EngineError where a new one could not receive weights: the NCCL group of
        ranks and engines ends with any of its members."""
        if self.transport.rendezvous is not None:
            raise EngineError(
                f"rollout engine {rank} died, and engines on dedicated GPUs cannot be replaced one by one. "
                "Run the same command to resume from the newest checkpoint"
            )
        await self._close_engine(rank)
        await self.engines.remake(rank)

    async def close_engines(self) -> None:
        """Let the engines shut down their subprocesses, for at most _CLOSE_S seconds."""
        await asyncio.gather(*(self._close_engine(rank) for rank in range(self.engines.size)))

    async def _close_engine(self, rank: int) -> None:
        with suppress(TimeoutError, WorkerError):
            async with asyncio.timeout(_CLOSE_S):
                await self.engines.submit(rank, Method("close"))

    def close(self) -> None:
        """Shut down all workers. Ranks first: a running update would take cores from the shutdown of the engines."""
        self.trainer.close()
        run_async(self.close_engines())
        self.engines.close()


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


def speculation(config: RolloutConfig, device: str) -> str | None:
    """rollout.speculation; None: no drafts. Raises ConfigError on a CPU (tests/rollout/test_speculation.py)."""
    if config.speculation != "none" and device == "cpu":
        raise ConfigError(
            f"rollout.speculation={config.speculation} needs a GPU: the rejection sampler of vLLM's CPU build (0.32) "
            "reads uninitialized temperatures, so responses would not follow the policy; leave it none"
        )
    return None if config.speculation == "none" else config.speculation


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
        with_reference=needs_reference(algorithm),
        critic_path=(critic.path or config.model.path) if algorithm.needs_critic else None,
        critic_optimizer=optimizer_settings(actor, critic.optim, critic_updates),
        cliprange_value=critic.cliprange_value,
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
        largest_pack=largest_pack(config, config.data.max_prompt_length),
        fused_kernels=fused_kernels(config.model, device),
        policy_offload=Offload.of(config.actor.offload),
        reference_offload=Offload(config.ref.offload_params),
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


def start_workers(
    config: Config,
    cluster: Cluster,
    algorithm: Algorithm,
    device: str,
    total_steps: int,
    on_phase: Callable[[str], None] = lambda _: None,
) -> Workers:
    """Trainer ranks and rollout engines, colocated or in placement groups of their own."""
    sequence_length(config)
    speculation(config.rollout, device)  # an engine would refuse this and the next only after the ranks have started
    check_engine_options(config.rollout.engine_options)
    config = abs_paths(config)
    gpus, parallel = (1.0 if device == "cuda" else 0.0), config.rollout.tensor_model_parallel_size
    colocated = config.rollout.colocated
    on_phase("ranks")
    trainer, pool, nodes = start_ranks(config, cluster, algorithm, device, total_steps)
    if config.model.enable_gradient_checkpointing == "auto":
        number = trainer.call(TrainingRank.checkpointed_layers)[0]
        _log.warning("model.enable_gradient_checkpointing=auto: updates recompute %d layers", number)
    on_gpus = device == "cuda" and config.rollout.name == "vllm"
    share = share_beside(config, trainer) if on_gpus and colocated else None
    if share is not None:
        config = with_limits(config, trainer, share)
    compiled = device == "cpu" and compiling_pays(config, total_steps)
    make = partial(start_engine, config, device, share=share, compiled=compiled)
    on_phase("engine")
    if colocated:
        shared = [range(first * parallel, (first + 1) * parallel) for first in range(config.num_engines)]
        places = [nodes[ranks[0]] for ranks in shared]
        devices = [tuple(gpu for rank in ranks for gpu in trainer.gpus[rank]) for ranks in shared]
        engines = cluster.group("rollout", make, pool, Bundle(1.0, 0.0), places, devices)
    else:
        bundle = Bundle(1.0, gpus * parallel)
        engines = cluster.group("rollout", make, cluster.pool([bundle] * config.num_engines), bundle)
    transport = gpu_transport(config, trainer) if on_gpus else cpu_transport(trainer.nodes, engines.nodes)
    return Workers(trainer, engines, transport)


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
    """Of a colocated engine: many sequences if they fit into its KV cache, else None, which is vLLM's default.

    share_bytes: what the engine gets of a GPU
    """
    rollout, itemsize = config.rollout, DTYPES[engine_dtype(config)].itemsize
    if rollout.max_num_batched_tokens is not None and rollout.max_num_batched_tokens < MANY_SEQUENCES:
        return None
    tokens = config.data.max_prompt_length / rollout.n + config.data.max_response_length  # a group shares its prompt
    parallel = rollout.tensor_model_parallel_size
    weights, per_token = shape.parameters * itemsize / parallel, cache_per_token(shape, itemsize) / parallel
    return MANY_SEQUENCES if many_fit(share_bytes - weights, per_token * tokens) else None


def start_ranks(
    config: Config, cluster: Cluster, algorithm: Algorithm, device: str, total_steps: int
) -> tuple[RayGroup, PlacementGroup, list[int]]:
    """(trainer ranks, their placement group with slots for colocated engines, each rank's bundle index in it)."""
    gpus, per_node = (1.0 if device == "cuda" else 0.0), config.trainer.n_gpus_per_node
    slots = 2.0 if config.rollout.colocated else 1.0
    node = Bundle(per_node * slots, per_node * gpus)
    pool = cluster.pool([node] * config.trainer.nnodes, "STRICT_SPREAD" if config.trainer.nnodes > 1 else "PACK")
    spec = rank_spec(abs_paths(config), algorithm, device, total_steps)
    nodes = [rank // per_node for rank in range(config.num_ranks)]
    return cluster.group("trainer", partial(build_rank, spec), pool, Bundle(1.0, gpus), nodes), pool, nodes


def cpu_transport(rank_nodes: Sequence[str], engine_nodes: Sequence[str]) -> WeightTransport:
    """Shared memory, written by the first rank of each node, if every engine has a rank on its node; else Ray's
    object store, written by rank 0. Both arguments are node names."""
    if not set(engine_nodes) <= set(rank_nodes):
        return WeightTransport([ByReference, *[None] * (len(rank_nodes) - 1)], [[0]] * len(engine_nodes))
    sources = [rank_nodes.index(node) for node in engine_nodes]
    senders: list[OpenSender] = [SharedMemory if rank in sources else None for rank in range(len(rank_nodes))]
    return WeightTransport(senders, [[rank] for rank in sources])


def gpu_transport(config: Config, trainer: RayGroup) -> WeightTransport:
    """CUDA IPC if colocated, since every rank holds the whole gathered bucket; else NCCL broadcast from rank 0."""
    ranks, parallel = config.num_ranks, config.rollout.tensor_model_parallel_size
    if config.rollout.colocated:
        sources = [range(first * parallel, (first + 1) * parallel) for first in range(config.num_engines)]
        senders = [CudaIpc if rank < config.num_engines * parallel else None for rank in range(ranks)]
        return WeightTransport(senders, sources)
    host, port = trainer.addresses()[0]
    rendezvous = Rendezvous(host, port, 1 + config.num_engines * parallel)
    sender = partial(NcclBroadcast, rendezvous)
    return WeightTransport([sender, *[None] * (ranks - 1)], [[0]] * config.num_engines, rendezvous)


def connect(config: Config, policy: Policy, workers: Workers) -> list[BucketLayout]:
    """Connect ranks and engines for weight sync; returns the bucket layouts. NCCL engines join concurrently."""
    dtype, size = DTYPES[engine_dtype(config)], BUCKET_BYTES
    rendezvous, parallel = workers.transport.rendezvous, config.rollout.tensor_model_parallel_size

    async def connect_both() -> list[BucketLayout]:
        ranks = asyncio.create_task(run_in_daemon_thread(policy.connect, workers.transport.senders, dtype, size))
        if rendezvous is not None:
            join, firsts = Method("join_broadcast"), enumerate(range(1, rendezvous.size, parallel))
            await asyncio.gather(*(workers.engines.submit(number, join, rendezvous, first) for number, first in firsts))
        return await ranks

    return run_async(connect_both())


def engine_dtype(config: Config) -> str:
    return config.model.compute_dtype if config.rollout.dtype == "auto" else config.rollout.dtype


def abs_paths(config: Config) -> Config:
    """The configuration with absolute folder paths: workers of a joined cluster have other working directories."""

    def full(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path

    model = replace(config.model, path=full(config.model.path), tokenizer_path=full(config.model.tokenizer_path))
    return replace(config, model=model, critic=replace(config.critic, path=full(config.critic.path)))


def max_positions(config: ModelConfig) -> int | None:
    """max_position_embeddings of the model, if its config has it. Raises ConfigError if there is no model."""
    assert config.path is not None
    found: int | None = getattr(read_model_config(config.path), "max_position_embeddings", None)
    return found


def sequence_length(config: Config) -> int:
    """Max tokens of prompt plus response. Raises ConfigError if the model supports fewer positions."""
    wanted = config.data.max_prompt_length + config.data.max_response_length
    if (limit := max_positions(config.model)) is not None and wanted > limit:
        lengths = "data.max_prompt_length + data.max_response_length"
        raise ConfigError(f"{lengths} is {wanted} tokens, but the model supports {limit}")
    return wanted


async def start_engine(
    config: Config, device: str, seat: WorkerContext, share: float | None = None, compiled: bool = False
) -> RolloutEngine:
    """Start a rollout engine in its worker process; its heavy imports happen only there.

    share: of a GPU that it shares with a trainer rank; None: nothing else is on its GPU
    compiled: whether vLLM compiles the model on a CPU, too, as it does on a GPU
    """
    if seat.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seat.devices)
    dtype, model = engine_dtype(config), config.model
    assert model.path is not None
    # Only multi-turn episodes stop at strings, for which the engine needs a tokenizer.
    tokenizer_path = (model.tokenizer_path or model.path) if config.env.multi_turn else None
    if config.rollout.name == "hf":
        from verl.rollout.hf_engine import MAX_BATCH, load_hf_engine

        torch.set_num_threads(threads_of(config))
        tokenizer = read_tokenizer(tokenizer_path) if tokenizer_path else None
        return load_hf_engine(model.path, DTYPES[dtype], device, config.rollout.max_num_seqs or MAX_BATCH, tokenizer)
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
            enforce_eager=eager,
            options=options,
            num_threads=threads_of(config),
            seed=config.trainer.seed + seat.rank,
            health_timeout_s=config.trainer.health_timeout_s,
        )
    )
