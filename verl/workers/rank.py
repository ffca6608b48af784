"""One training rank: a process that holds its shards of policy, reference, teacher and critic."""

import os
import random
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from verl.errors import DataError
from verl.host.free_memory import free_memory
from verl.lora import Lora, adapter_tensors, add_adapter
from verl.nf4 import num_in_four_bits
from verl.pretrained import language_weights
from verl.single_controller.group import WorkerContext
from verl.units import GIB
from verl.weight_files import WeightFiles
from verl.workers import fused
from verl.workers.critic_worker import CriticWorker
from verl.workers.delta_net import use_packages
from verl.workers.export import AdapterExport, HfExport, start_adapter_export, start_export
from verl.workers.fsdp_engine import NO_OFFLOAD, FSDPEngine, Offload, raise_any, write_state
from verl.workers.logprobs import max_kept_bytes
from verl.workers.memory import ModelShape, PackShape, RankSettings, layers_to_checkpoint, shape_of
from verl.workers.model import (
    PackedCritic,
    PackedPolicy,
    checkpoint_layers,
    decoder_layers,
    head_size,
    load_causal_lm,
    towers,
)
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import PolicyWorker
from verl.workers.pre_norm import selecting_parameters
from verl.workers.state_cost import state_cost

_MASTER = 4  # bytes of a float32 parameter
_MOMENTS = 2  # AdamW's, per parameter
# oneDNN keeps a kernel for every shape of a product, 1,024 of them by default. Those of one pack suffice, as
# the next pack has another length (bench/kernel_cache.py).
_KERNEL_CACHE = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The models that every rank builds. Picklable, because ranks live in other processes."""

    model_path: str
    compute_dtype: torch.dtype
    temperature: float
    optimizer: OptimizerSettings
    lora: Lora | None = None  # the policy's adapter, which is trained in place of its weights; a critic's is alike
    with_reference: bool = False
    tokenizer_path: str | None = None  # for exported models; default: model_path
    teacher_path: str | None = None  # None: no teacher
    critic_path: str | None = None  # None: no critic
    critic_optimizer: OptimizerSettings | None = None
    cliprange_value: float = 0.5
    gradient_checkpointing: bool | str = False  # all layers; auto: as many as the GPU's memory requires
    largest_pack: PackShape | None = None  # for auto
    fused_kernels: str = "auto"  # auto (on a GPU, those of liger-kernel where it is installed) | liger | none
    policy_offload: Offload = NO_OFFLOAD
    frozen_offload: Offload = NO_OFFLOAD  # of reference and teacher
    critic_offload: Offload = NO_OFFLOAD
    shares_device: bool = False  # whether rollout engines are colocated
    device: str = "cpu"
    ranks_per_node: int | None = None  # HSDP: shard within nodes, replicate across them; None: shard over all ranks
    num_threads: int = 1  # per CPU rank
    seed: int = 0
    timeout_s: float = 1800.0  # per collective


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A rank's device, and the policy's sizes for FLOP counts."""

    device: str
    parameters: int  # without embeddings and head
    layers: int  # with attention
    attention_width: int  # all query heads together
    head_parameters: int
    selecting_parameters: int  # the last layer's MLP, if only trained positions pass it
    state_products: int  # multiply-adds of a token with the states of layers that have one


@dataclass(frozen=True, slots=True)
class TrainingRank:
    """The engines of one rank."""

    spec: RankSpec
    policy: PolicyWorker
    reference: PolicyWorker | None
    critic: CriticWorker | None
    teacher: PolicyWorker | None = None
    writing: dist.ProcessGroup | None = None  # for collectives of `write`, beside those of training; None: the default
    staged: list[Callable[[], None]] = field(default_factory=list)  # what `write` has to do

    def save(self, folder: Path) -> None:
        """Everything needed to resume (actor/, critic/), and the policy as transformers and vLLM load it (hf/)."""
        self._save(folder, self._exports(folder))

    def stage(self, folder: Path) -> None:
        """Copy to host memory what `save` writes, so that training can go on while `write` writes it.

        Without room for the copies it is written at once.
        """
        exports = self._exports(folder)
        if not self._has_room(exports):
            self._save(folder, exports)
            return
        copies = [each.copied() for each in exports]
        states = {folder / name: engine.copied_state() for name, engine in self._saved.items()}
        self.staged.append(partial(_write, states, copies, self.writing))

    def write(self) -> None:
        """Write what is staged. Collective; in a thread beside other calls, as its collectives have their own group."""
        while self.staged:
            self.staged.pop()()

    @property
    def _saved(self) -> dict[str, FSDPEngine]:
        """The engines of a checkpoint, by their folders."""
        return dict(zip(("actor", "critic"), self.trained, strict=False))

    def _save(self, folder: Path, exports: Sequence[HfExport | AdapterExport]) -> None:
        for name, engine in self._saved.items():
            engine.save(folder / name)
        for export in exports:
            export.write()

    def _exports(self, folder: Path) -> list[HfExport | AdapterExport]:
        """What is to be written for other programs."""
        spec, engine = self.spec, self.policy.engine
        hf = start_export(engine, folder / "hf", spec.model_path, spec.tokenizer_path)
        if spec.lora is None:
            return [hf]
        return [hf, start_adapter_export(engine, folder / "adapter", spec.lora, spec.model_path)]

    def _has_room(self, exports: Sequence[HfExport | AdapterExport]) -> bool:
        """Whether the copies of all ranks of a node take at most half of its free memory, on every node. Collective."""
        needed = sum(each.state_bytes for each in self.trained) + sum(each.copy_bytes for each in exports)
        found: list[tuple[str, int, int]] = [("", 0, 0)] * self.policy.engine.num_ranks
        dist.all_gather_object(found, (socket.gethostname(), needed, free_memory()))
        total = Counter[str]()
        for host, part, _ in found:
            total[host] += part
        return all(total[host] <= free / 2 for host, _, free in found)

    def load(self, folder: Path) -> None:
        self.policy.engine.load(folder / "actor")
        if self.critic is not None:
            self.critic.engine.load(folder / "critic")
            self.critic.offload()
        self.policy.engine.offload_all()

    def model_info(self) -> ModelInfo:
        policy = self.policy.engine.module
        assert isinstance(policy, PackedPolicy)
        shape = policy.model.config.get_text_config()
        embeddings = {policy.model.get_input_embeddings().weight, policy.model.get_output_embeddings().weight}
        embedding = max(each.numel() for each in embeddings)
        states = state_cost(policy.model.get_decoder())
        of_text = {each for _, each in language_weights(policy.model, policy.model.named_parameters())}
        return ModelInfo(
            device=torch.cuda.get_device_name() if self.spec.device == "cuda" else "cpu",
            parameters=sum(each.numel() for each in of_text)
            + num_in_four_bits(policy.model)
            - embedding * len(embeddings),
            layers=shape.num_hidden_layers if states is None else states.attending,
            attention_width=shape.num_attention_heads * head_size(shape),
            head_parameters=embedding,
            selecting_parameters=selecting_parameters(policy.model.get_decoder()),
            state_products=0 if states is None else states.products,
        )

    def held_bytes(self, bucket_bytes: int) -> float:
        """Device memory that this rank holds while an engine on its GPU is awake: in rollouts and weight syncs.

        A weight sync needs the policy's parameters, two buckets and the largest tensor; its canary gathers parameters
        for a forward. `toolrl plan` computes the same from shapes.
        """
        spec, policy = self.spec, self.policy.engine.module
        shared = [(self.policy.engine, Offload(False, spec.policy_offload.optimizer), _MOMENTS)]
        if self.critic is not None:
            shared.append((self.critic.engine, spec.critic_offload, _MOMENTS))
        shared += [(engine, spec.frozen_offload, 0) for engine in self.frozen]
        resident = sum(
            engine.param_bytes * (not offload.params) + engine.trained_bytes * moments * (not offload.optimizer)
            for engine, offload, moments in shared
        )
        sent = (each for _, each in adapter_tensors(policy)) if self.policy.sends_adapter else policy.parameters()
        largest = _MASTER * max(each.numel() for each in sent)
        return resident + largest + 2 * bucket_bytes + spec.compute_dtype.itemsize * self._num_gathered()

    def _num_gathered(self) -> int:
        """Parameters gathered in a forward: two layers and everything outside of layers; all if nothing is sharded.

        Frozen ones are not gathered by a rank that holds them whole.
        """
        policy = self.policy.engine.module
        assert isinstance(policy, PackedPolicy)
        layers = decoder_layers(policy)
        total, layer = (
            sum(each.numel() for each in module.parameters() if isinstance(each, DTensor))
            for module in (policy, layers[0])
        )
        return total if self.policy.engine.unsharded else total - (len(layers) - 2) * layer

    @property
    def trained(self) -> list[FSDPEngine]:
        return [self.policy.engine, *([] if self.critic is None else [self.critic.engine])]

    @property
    def frozen(self) -> list[FSDPEngine]:
        """Of reference and teacher, without a reference that is the base of the policy's adapter."""
        models = (None if self.spec.lora else self.reference, self.teacher)
        return [each.engine for each in models if each is not None]

    def layers_to_checkpoint(self) -> int:
        """Layers that an update recomputes: none, all, or as many as the memory of any rank's GPU requires.

        Collective, if that is counted. On a CPU, whose memory has no limit of its own, auto is none.
        """
        spec, shapes = self.spec, [shape_of(_wrapper(each), _config(each)) for each in self.trained]
        if spec.gradient_checkpointing != "auto" or spec.device == "cpu":
            return max(each.layers for each in shapes) if spec.gradient_checkpointing is True else 0
        assert spec.largest_pack is not None
        total = self.device_bytes()
        held = sum(each.param_bytes + each.trained_bytes * _MOMENTS for each in self.trained)
        held += sum(each.param_bytes for each in self.frozen if not spec.frozen_offload.params)
        with_kernels = fused.is_wanted(spec.fused_kernels)
        settings = RankSettings(
            spec.compute_dtype.itemsize,
            self.policy.engine.num_shards,
            fused=with_kernels,
            kept_bytes=max_kept_bytes(total) if spec.fused_kernels != "none" else 0,
        )
        numbers = [layers_to_checkpoint(each, spec.largest_pack, settings, total, held) for each in shapes]
        most = torch.tensor(max(numbers))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def policy_shape(self) -> ModelShape:
        return shape_of(_wrapper(self.policy.engine), _config(self.policy.engine))

    def checkpointed_layers(self) -> int:
        """Layers of the policy that an update recomputes."""
        layers = decoder_layers(_wrapper(self.policy.engine))
        return sum(bool(getattr(each, "gradient_checkpointing", False)) for each in layers)

    def device_bytes(self) -> int:
        """Memory of this rank's GPU."""
        return int(torch.cuda.mem_get_info()[1])

    def context_bytes(self) -> int:
        """Memory of this rank's GPU that is in use beside torch's: the CUDA context, NCCL, other processes."""
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved())

    def memory_gib(self) -> float:
        """Peak device memory since the start; on CPU, the process's peak resident set size."""
        if self.spec.device == "cuda":
            return float(torch.cuda.max_memory_allocated()) / GIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT / GIB


def build_rank(spec: RankSpec, context: WorkerContext) -> TrainingRank:
    """Join the process group and load the models. Raises ConfigError if there is no model at the path."""
    mesh = join(spec, context)
    engine = _engine(spec, spec.model_path, PackedPolicy, mesh, spec.optimizer, spec.policy_offload, spec.lora)
    sends_adapter = spec.lora is not None and not spec.lora.merged
    policy = PolicyWorker(engine, spec.temperature, sends_adapter, host=context.own_host)
    reference = teacher = critic = None
    if spec.with_reference and spec.lora is not None:
        reference = PolicyWorker(engine, spec.temperature, without_adapter=True)
    elif spec.with_reference:
        engine = _engine(spec, spec.model_path, PackedPolicy, mesh, None, spec.frozen_offload)
        reference = PolicyWorker(engine, spec.temperature)
    if spec.teacher_path is not None:
        engine = _engine(spec, spec.teacher_path, PackedPolicy, mesh, None, spec.frozen_offload)
        teacher = PolicyWorker(engine, spec.temperature, num_ids=_config(policy.engine).vocab_size)
    if spec.critic_path is not None:
        settings, offload = spec.critic_optimizer, spec.critic_offload
        lora = spec.lora and replace(spec.lora, path=None)  # the path is that of the policy's
        engine = _engine(spec, spec.critic_path, PackedCritic, mesh, settings, offload, lora)
        critic = CriticWorker(engine, spec.cliprange_value)
    writing = dist.new_group(backend="gloo", timeout=timedelta(seconds=spec.timeout_s))
    rank = TrainingRank(spec, policy, reference, critic, teacher, writing)
    if number := rank.layers_to_checkpoint():
        for engine in rank.trained:
            checkpoint_layers(_wrapper(engine), number)
    return rank


def _write(
    states: Mapping[Path, Future[dict[str, Any]] | None],
    exports: Sequence[HfExport | AdapterExport],
    group: dist.ProcessGroup | None,
) -> None:
    """Raises DataError, on all ranks, if any of them cannot write."""
    for export in exports:
        export.write(group)
    errors = (each.exception() for each in states.values() if each is not None)
    failed = next(filter(None, errors), None)
    raise_any(None if failed is None else DataError(f"cannot be copied to host memory ({failed})"), group)
    for folder, state in states.items():
        if state is not None:
            write_state(state.result(), folder, group)


def _wrapper(engine: FSDPEngine) -> PackedPolicy | PackedCritic:
    assert isinstance(engine.module, PackedPolicy | PackedCritic)
    return engine.module


def _store(context: WorkerContext, timeout: timedelta) -> TCPStore:
    """The rendezvous store. On one machine rank 0 listens on loopback only; torch would listen on every address."""
    listening = None
    if context.rank == 0 and context.host in ("127.0.0.1", "::1"):
        family = socket.AF_INET6 if ":" in context.host else socket.AF_INET
        try:
            listening = socket.create_server((context.host, context.port), family=family).detach()
        except OSError as error:
            message = f"rendezvous port {context.port} of {context.host} was taken by another program"
            raise OSError(error.errno, f"{message} ({error.strerror}); start the run again") from error
    address = (context.host, context.port, context.size, context.rank == 0, timeout)
    return TCPStore(*address, wait_for_workers=False, master_listen_fd=listening)


def join(spec: RankSpec, context: WorkerContext) -> DeviceMesh:
    """Set threads and seeds, join the process group, build the device mesh."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(spec.seed + context.rank)
    if spec.device == "cpu":
        torch.set_num_threads(spec.num_threads)
        os.environ.setdefault(*_KERNEL_CACHE)
    else:
        torch.cuda.set_device(0)  # Ray makes only its own device visible to each rank
    timeout = timedelta(seconds=spec.timeout_s)
    dist.init_process_group(
        "gloo" if spec.device == "cpu" else "cpu:gloo,cuda:nccl",
        store=_store(context, timeout),
        rank=context.rank,
        world_size=context.size,
        timeout=timeout,
    )
    if (per_node := spec.ranks_per_node) is None or per_node >= context.size:
        return init_device_mesh(spec.device, (context.size,))
    names = ("replicate", "shard")
    return init_device_mesh(spec.device, (context.size // per_node, per_node), mesh_dim_names=names)


def _config(engine: FSDPEngine) -> PretrainedConfig:
    module = _wrapper(engine)
    config = module.model.config if isinstance(module, PackedPolicy) else module.decoder.config
    return config.get_text_config()


def _engine(
    spec: RankSpec,
    path: str,
    wrapper: Callable[..., PackedPolicy | PackedCritic],
    mesh: DeviceMesh,
    optimizer: OptimizerSettings | None,
    offload: Offload = NO_OFFLOAD,
    lora: Lora | None = None,
) -> FSDPEngine:
    """A sharded model; frozen weights are held in their compute dtype."""
    keys = {spec.critic_path: "critic.path", spec.teacher_path: "teacher.path", spec.model_path: "model.path"}
    frozen = optimizer is None or lora is not None
    model = load_causal_lm(path, spec.compute_dtype if frozen else torch.float32, keys[path], empty=True)
    weights = WeightFiles(path, model, keys[path])
    if spec.device == "cuda" and fused.is_wanted(spec.fused_kernels):
        fused.fuse(model)
    if lora is not None:
        add_adapter(model, lora, spec.seed)  # after the kernels, which look for plain linear layers
    module = wrapper(model)
    if spec.device == "cuda" and spec.fused_kernels != "none" and spec.compute_dtype != torch.float32:
        use_packages(module)
    if lora is not None and isinstance(module, PackedCritic):
        module.value_head.float()  # which is trained like the adapter
    if isinstance(module, PackedPolicy):
        module.fused = spec.fused_kernels != "none"
        if spec.device == "cuda":
            module.kept_bytes = max_kept_bytes(torch.cuda.mem_get_info()[1])
    layers = [*decoder_layers(module), *towers(module)]
    return FSDPEngine(module, layers, mesh, optimizer, spec.compute_dtype, offload, spec.shares_device, weights)
