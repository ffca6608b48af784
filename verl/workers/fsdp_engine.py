"""The training engine: FSDP2 around a policy or a critic. The only file that uses FSDP.

Parameters are DTensors on every device, one rank included: float32 masters, sharded one unit per decoder layer,
computed in `compute_dtype`, gradients reduced in float32. Losses arrive as sums whose weights already hold the global
denominators (algorithms/aggregate.py), so gradients are summed over ranks, not averaged. A pack is what others call a
micro-batch: gradient accumulation is the loop over packs, before gradient clipping and the optimizer step.
"""

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.batch.packed import PackedBatch
from verl.batch.packing import Shard
from verl.batch.token_batch import Floats
from verl.errors import ConfigError, DataError, VerlError
from verl.nf4 import Nf4Linear, nf4_layers
from verl.tracking.metric import Max, Mean, Metric
from verl.weight_files import WeightFiles
from verl.workers.checkpoint_reader import TensorPlanner, TensorReader
from verl.workers.optim import OptimizerSettings, build_optimizer

_HOST = torch.device("cpu")
_INDEX = ".metadata"  # torch's index of a checkpoint
_LOSS = "loss"
_PARTS = 3  # a weight and AdamW's two moments

# One entry per parameter rather than one for the whole optimizer: needed for resharding.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True)
class PackMetric:
    """One pack's part of a metric. The sums of all packs and ranks are added up; of maxima the largest is taken.

    finish: maps the reduced parts to the metric's value
    """

    parts: tuple[Tensor, ...]
    maximum: bool = False
    finish: Callable[..., float] = float

    def detached(self) -> Self:
        """Without the graph, and at the precision of sums over many packs."""
        return replace(self, parts=tuple(part.detach().double() for part in self.parts))

    def combined(self, other: Self) -> Self:
        reduce = torch.maximum if self.maximum else torch.add
        return replace(self, parts=tuple(map(reduce, self.parts, other.parts)))

    def value(self) -> Metric:
        """The value over all packs. Sums, which are means over tokens, are averaged over several updates."""
        value = self.finish(*map(float, self.parts))
        return Max(value) if self.maximum else Mean(value)


Packs = Shard | Sequence[PackedBatch]
PackLoss = Callable[[Any, PackedBatch], tuple[Tensor, Mapping[str, PackMetric]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    loss: float
    grad_norm: float  # before clipping
    lr: float
    metrics: Mapping[str, Metric]  # the loss's, by full name
    logprobs: Floats | None = None  # [A] of this rank's shard before the update, if it estimated the advantages

    def of(self, model: str) -> dict[str, Metric]:
        """All metrics; `model` is the group of the first three."""
        own = {"loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr}
        return {**{f"{model}/{name}": Mean(value) for name, value in own.items()}, **self.metrics}


@dataclass(frozen=True, slots=True)
class Offload:
    """Tensors that are offloaded to host memory between uses."""

    params: bool = False
    optimizer: bool = False

    @classmethod
    def of(cls, setting: str) -> Self:
        """setting: none, params, optimizer or all"""
        return cls(setting in ("params", "all"), setting in ("optimizer", "all"))


NO_OFFLOAD = Offload()


class Offloadable:
    """A group of tensors that is on the device or in host memory. On a CPU nothing moves."""

    def __init__(self, move: Callable[[torch.device], None], device: torch.device, enabled: bool) -> None:
        self._move = move
        self._device = device
        self._enabled = enabled and device != _HOST
        self._offloaded = False

    def load(self) -> None:
        """Move to the device, unless already there."""
        if self._offloaded:
            self._move(self._device)
            self._offloaded = False

    def offload(self) -> None:
        """Move to host memory, if enabled."""
        if self._enabled and not self._offloaded:
            self._move(_HOST)
            self._offloaded = True


class FSDPEngine:
    """One rank's share of a sharded module and its optimizer."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        mesh: DeviceMesh,
        optimizer: OptimizerSettings | None = None,
        compute_dtype: torch.dtype = torch.float32,
        offload: Offload = NO_OFFLOAD,
        shares_device: bool = True,
        weights: WeightFiles | None = None,
    ) -> None:
        """Shard `module` in place over the mesh, each layer as a unit. Without `optimizer` the model is frozen.

        weights: of what the module has on the meta device; each rank reads its own rows. Raises ConfigError on all
            ranks, if any of them cannot read them.
        shares_device: whether a rollout engine on the same device needs the memory that is offloaded or freed
        """
        self.compute_dtype = compute_dtype
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        if all(parameter.dtype == compute_dtype for parameter in module.parameters()):
            precision = MixedPrecisionPolicy()
        self.num_shards = mesh.shape[-1]
        whole = all(parameter.requires_grad for parameter in module.parameters())
        # Then resharding would only cost another copy. One of frozen weights is more than all states of an adapter.
        self.unsharded = self.num_shards == 1 and whole
        # FSDP would copy frozen weights for each pass, even where there is nothing to gather.
        frozen = {each for each in module.parameters() if not each.requires_grad} if self.num_shards == 1 else set()
        for layer in layers:
            keep = self.unsharded
            fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=not keep, ignored_params=frozen)
        self.module = module
        fully_shard(module, mesh=mesh, mp_policy=precision, ignored_params=frozen)
        self._mesh = mesh
        self._device = torch.device(mesh.device_type)
        self._shares_device = shares_device
        if weights is not None:
            self._read(weights)
        self._settings = optimizer
        self._copier = ThreadPoolExecutor(1, "copy")
        self._copying: Future[dict[str, Any]] | None = None
        self._optimizer, self._scheduler = None, None
        if optimizer is not None:
            trained = (each for each in module.parameters() if each.requires_grad)
            self._optimizer, self._scheduler = build_optimizer(trained, optimizer)
        self._params = Offloadable(self._move_params, self._device, offload.params)
        self._states = Offloadable(self._move_states, self._device, offload.optimizer)
        self.offload_all()

    def _read(self, weights: WeightFiles) -> None:
        self._make_room()
        problem = None
        try:
            weights.read(self.module, self._part)
        except ConfigError as error:
            problem = error
        raise_any(problem)

    def _make_room(self) -> None:
        """Move weights, without values, from the meta device. Tied ones stay so, which torch would part."""
        first: dict[Tensor, str] = {}
        aliases = [
            (name, first.setdefault(each, name)) for name, each in self.module.named_parameters(remove_duplicate=False)
        ]
        self.module._apply(lambda each: torch.empty_like(each, device=self._device) if each.is_meta else each)
        for name, other in aliases:
            if name != other:
                owner, _, attribute = name.rpartition(".")
                setattr(self.module.get_submodule(owner), attribute, self.module.get_parameter(other))

    def _part(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """This rank's rows of a parameter, and which of the full tensor's they are. FSDP splits as `torch.chunk`."""
        if not isinstance(tensor, DTensor):
            return tensor, ...
        held, most = tensor.to_local(), math.ceil(len(tensor) / self.num_shards)
        start = min(most * self._mesh.get_local_rank(self._mesh.ndim - 1), len(tensor))
        return held, slice(start, start + len(held))

    @torch.no_grad()
    def score(self, packs: Packs, forward: Callable[[Any, PackedBatch], Tensor]) -> list[Tensor]:
        """`forward(module, pack)` of every pack, without gradients, on the CPU."""
        self._params.load()
        self.module.eval()
        scores = [forward(self.module, packed.to(self._device)) for packed in packs]
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # frees the full parameters that a pass without gradients leaves gathered
        if self._optimizer is None:  # a frozen model is used by `score` only
            self._params.offload()
        return [each.cpu() for each in scores]  # waits for the device once, after the last pack

    def update(self, packs: Packs, loss: PackLoss) -> UpdateResult:
        """One optimizer step over the packs of all ranks; every rank brings the same number of packs.

        A loss or gradient that is not finite is not applied: weights and schedule stay as they are.

        loss: (module, pack) -> (the pack's share of the global loss, its parts of further metrics)
        """
        assert self._optimizer is not None and self._scheduler is not None and self._settings is not None
        self._states.load()
        totals = self.backward(packs, loss)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._settings.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        lr = self._scheduler.get_last_lr()[0]
        values = {name: total.value() for name, total in _over_ranks(totals).items()}
        total_loss = values.pop(_LOSS).value
        if math.isfinite(grad_norm) and math.isfinite(total_loss):
            self._await_copy()
            self._optimizer.step()
            self._scheduler.step()
        self._optimizer.zero_grad()
        return UpdateResult(loss=total_loss, grad_norm=grad_norm, lr=float(lr), metrics=values)

    def backward(self, packs: Packs, loss: PackLoss) -> dict[str, PackMetric]:
        """Add the gradients of the packs of all ranks to those of the parameters. Returns this rank's metrics."""
        self._params.load()
        self.module.train()
        totals: dict[str, PackMetric] = {}
        for number, packed in enumerate(packs, 1):
            self._keep_gathered(self.unsharded and number < len(packs))
            value, metrics = loss(self.module, packed.to(self._device))
            (value * self._mesh.size()).backward()  # FSDP averages over ranks; the global denominator is in the loss
            for name, metric in {_LOSS: PackMetric((value,)), **metrics}.items():
                part = metric.detached()
                totals[name] = totals[name].combined(part) if name in totals else part
        return totals

    def _keep_gathered(self, keep: bool) -> None:
        """Whether the next backward leaves parameters gathered, and their gradients, summed in float32, unreduced.

        Where nothing is sharded this costs no memory, and parameters are cast and gradients reduced once an update.
        """
        assert isinstance(self.module, FSDPModule)
        self.module.set_reshard_after_backward(not keep)
        self.module.set_requires_gradient_sync(not keep)

    def offload_optimizer(self) -> None:
        """Offload the optimizer state, which `update` loads again, and free cached memory for a colocated engine."""
        self._states.offload()
        if self._shares_device and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def offload_all(self) -> None:
        """Offload parameters and optimizer state; each method loads what it needs."""
        self._params.offload()
        self.offload_optimizer()

    def _move_params(self, device: torch.device) -> None:
        self._await_copy()
        self.module.to(device, non_blocking=True)
        self._wait_for_host(device)

    def _move_states(self, device: torch.device) -> None:
        assert self._optimizer is not None
        self._await_copy()
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if value.ndim > 0:  # not the number of steps
                    state[name] = value.to(device, non_blocking=True)
        self._wait_for_host(device)

    def _wait_for_host(self, target: torch.device) -> None:
        """Copies without blocking use pinned memory. The device orders those to itself; the host has to wait."""
        if target == _HOST and self._device != _HOST:
            torch.cuda.synchronize()

    def export_weights(self, named: Iterable[tuple[str, Tensor | Nf4Linear]]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors, one at a time, in the order given. Collective: every rank must exhaust the iterator.

        A tensor that is not sharded is not copied.
        """
        self._params.load()
        for name, tensor in named:
            weight = tensor.detach()
            if isinstance(weight, DTensor):
                weight = weight.to_local() if self._mesh.size() == 1 else weight.full_tensor()
            yield name, weight

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size()

    @property
    def param_bytes(self) -> int:
        """Size of this rank's shard, and of what each rank holds in four bits."""
        shards = sum(_local(each).nbytes for each in self.module.parameters())
        return shards + sum(each.nbytes for _, each in nf4_layers(self.module))

    @property
    def trained_bytes(self) -> int:
        """Size of what is trained of it."""
        return sum(_local(each).nbytes for each in self.module.parameters() if each.requires_grad)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and every rank's random state into `folder`, which all ranks share.

        Collective; offloaded tensors are written from host memory. Frozen weights are not written: they come from the
        model's own files.
        Raises DataError, on all ranks, if any of them cannot write.
        """
        if (state := self._state()) is not None:
            write_state(state, folder)

    def copied_state(self) -> Future[dict[str, Any]] | None:
        """What `save` would write now, in host memory: for `write_state` while training goes on. Collective.

        It is copied in a thread, for whose end the next change of the state waits.
        """
        if (state := self._state()) is None:
            return None
        self._copying = self._copier.submit(_copied, state)
        return self._copying

    def _await_copy(self) -> None:
        if self._copying is not None:
            wait([self._copying])  # its error is for the one who writes
            self._copying = None

    @property
    def state_bytes(self) -> int:
        """Size of this rank's part of what `save` writes."""
        return 0 if self._optimizer is None else self.trained_bytes * _PARTS

    def _state(self) -> dict[str, Any] | None:
        """None of an engine that is not trained."""
        if self._optimizer is None or self._scheduler is None:
            return None
        random_states: list[Any] = [None] * self._mesh.size()
        dist.all_gather_object(random_states, _random_state())
        host = (self._scheduler.state_dict(), random_states)  # a tuple is written as one object
        return {**self._sharded_state(), "host": host}

    def load(self, folder: Path) -> None:
        """Resume from the checkpoint in `folder`, bit-exact on the same number of ranks.

        Collective. On another number of ranks weights and optimizer are resharded, and an additional rank keeps its
        random state. Learning rate, betas and weight decay are the saved ones; the shape of the schedule is this
        engine's own. Raises DataError, on all ranks, if `folder` does not hold such an engine; this one is then
        partially loaded and unusable.
        """
        if self._optimizer is None or self._scheduler is None:
            return
        self._check_visible(folder)
        self._await_copy()
        self._params.load()
        self._states.load()
        state = {**self._sharded_state(), "host": None}
        with _data_errors("cannot be loaded", "Use another checkpoint, or the model it was saved with", folder):
            load(state, storage_reader=TensorReader(folder), planner=TensorPlanner())
        set_state_dict(
            self.module,
            self._optimizer,
            model_state_dict=self._with_aliases(state["module"]),
            optim_state_dict=state["optimizer"],
            options=_FLAT,
        )
        for group in self._optimizer.param_groups:
            group["fused"] = True  # not as saved: the kernel is no part of the training state
        schedule, random_states = state["host"]
        self._scheduler.load_state_dict(schedule)
        _set_random_state(random_states, self.rank)

    def _check_visible(self, folder: Path) -> None:
        """Check for the index of the checkpoint: if it is missing, some releases of torch fail with an assertion."""
        visible: list[Any] = [None] * self._mesh.size()
        dist.all_gather_object(visible, (folder / _INDEX).is_file())
        if not all(visible):
            raise DataError(
                f"cannot be loaded: {_INDEX} not found on rank {visible.index(False)}",
                hint="Use another checkpoint, in a folder that all ranks share",
                file=str(folder),
            )

    def _sharded_state(self) -> dict[str, Any]:
        """Trained weights, tied ones once, and optimizer state by name; in-place writes change the engine."""
        assert self._optimizer is not None
        untouched = not self._optimizer.state
        module, optimizer = get_state_dict(self.module, self._optimizer, options=_FLAT)
        if untouched:  # torch initializes the state by a step without gradients, which it counts
            for state in self._optimizer.state.values():
                state["step"].zero_()
        names = {name for name, each in self.module.named_parameters() if each.requires_grad}
        names |= {name for name, _ in self.module.named_buffers()}
        return {"module": {name: module[name] for name in module if name in names}, "optimizer": optimizer}

    def _with_aliases(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state under every name of a weight, and frozen weights as they are."""
        first = {parameter: name for name, parameter in self.module.named_parameters()}
        every = self.module.named_parameters(remove_duplicate=False)
        return {**state, **{name: state.get(first[parameter], parameter) for name, parameter in every}}


def write_state(state: Mapping[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the result of `FSDPEngine.copied_state`. Collective of the group, default all ranks.

    Raises DataError, on all ranks, if any of them cannot write.
    """
    with _data_errors("cannot be written", "Free some space or choose another folder", folder):
        save({**state}, checkpoint_id=folder, process_group=group)


def _copied(part: Any) -> Any:
    """A part of the state that training does not change."""
    if isinstance(part, dict):
        return {name: _copied(each) for name, each in part.items()}
    if not isinstance(part, Tensor):
        return copy.deepcopy(part)
    copied = torch.empty_like(part.detach(), device=_HOST)
    _local(copied).copy_(_local(part.detach()))  # an operation of a DTensor would let no other thread run
    return copied


def raise_any(problem: VerlError | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise the first rank's problem on all ranks, so that none of them waits for another. Collective of the group."""
    problems: list[VerlError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group)
    for each in problems:
        if each is not None:
            raise each


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def _data_errors(problem: str, hint: str, folder: Path) -> Iterator[None]:
    """Convert a failure of any rank, which torch raises as a bare BaseException on all, into a DataError."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = f"rank {rank}: {type(cause).__name__}: {cause}"
        raise DataError(f"{problem} ({reason})", hint=hint, file=str(folder)) from error


def _over_ranks(totals: Mapping[str, PackMetric]) -> dict[str, PackMetric]:
    reduced = dict(totals)
    for operation, maximum in ((dist.ReduceOp.SUM, False), (dist.ReduceOp.MAX, True)):
        names = [name for name in sorted(totals) if totals[name].maximum is maximum]
        if names:
            stacked = torch.stack([part for name in names for part in totals[name].parts])
            dist.all_reduce(stacked, op=operation)
            parts = iter(stacked)
            for name in names:
                reduced[name] = replace(totals[name], parts=tuple(islice(parts, len(totals[name].parts))))
    return reduced


def _random_state() -> dict[str, Any]:
    """The state of every global generator: torch (all its devices), numpy and Python."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _set_random_state(states: Sequence[dict[str, Any]], rank: int) -> None:
    """Restore this rank's state; a rank beyond the saved ones keeps its own."""
    if rank >= len(states):
        return
    state = states[rank]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
