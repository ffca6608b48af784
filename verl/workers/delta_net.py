"""Gated delta nets over packs by the kernels of fla-core, on a GPU: no call per segment (`state.py`).

    convolution   one call over all segments, each behind the last inputs of its prefix, or behind zeros
    delta rule    one call per level: prompts, then responses, which begin with the states in which their prompts ended

All else of the layer sees the tokens one by one. The kernels are called here and not by transformers, whose layers take
them wherever they can be imported, and drop the arguments that the formula in PyTorch lacks.

Shape legend: T packed tokens, in the order of the levels inside a layer, U those and the inputs before segments, E
hidden size, C channels of the convolution, W its width, H value heads, K and V sizes of their keys and values, S
segments.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from verl.batch.packed import Segment, moved
from verl.errors import ConfigError
from verl.workers.attention import Gathering, gather
from verl.workers.state import BySegments

_TESTED = SpecifierSet(">=0.6,<0.7")
_log = logging.getLogger(__name__)


class DeltaRule(Protocol):
    """fla's `chunk_gated_delta_rule`, as far as it is used."""

    def __call__(
        self,
        q: Tensor,  # [1, T, key heads, K] this and `k` are normalized within
        k: Tensor,
        v: Tensor,  # [1, T, H, V]
        g: Tensor,  # [1, T, H] logarithms of decays
        beta: Tensor,  # [1, T, H]
        *,
        initial_state: Tensor | None,  # [S, H, K, V]
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor,  # [S + 1]
        cu_seqlens_cpu: Tensor,  # the same on the host: reading it from the device would wait
    ) -> tuple[Tensor, Tensor | None]: ...


class DeltaKernels(NamedTuple):
    """convolve: [1, U, C] inputs, weight=[C, W], bias=, activation= -> [1, U, C] causal, and something else"""

    convolve: Callable[..., tuple[Tensor, Any]]
    rule: DeltaRule


class Inputs(NamedTuple):
    """What a layer computes of each token."""

    mixed_TC: Tensor  # queries, keys and values before the convolution
    gate_TV: Tensor  # of all heads
    beta_TH: Tensor
    decay_TH: Tensor  # before its bias


def _of_qwen(module: Any, hidden_TE: Tensor) -> Inputs:
    mixed_TC, gate_TV = module.in_proj_qkv(hidden_TE), module.in_proj_z(hidden_TE)
    return Inputs(mixed_TC, gate_TV, module.in_proj_b(hidden_TE).sigmoid(), module.in_proj_a(hidden_TE))


def _of_olmo(module: Any, hidden_TE: Tensor) -> Inputs:
    mixed_TC = torch.cat([each(hidden_TE) for each in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
    beta_TH = module.b_proj(hidden_TE).sigmoid() * (2 if module.allow_neg_eigval else 1)
    return Inputs(mixed_TC, module.g_proj(hidden_TE), beta_TH, module.a_proj(hidden_TE))


class Family(NamedTuple):
    """How a class of transformers names its parts."""

    inputs: Callable[[Any, Tensor], Inputs]
    norm: str
    output: str


FAMILIES = {
    "Qwen3_5GatedDeltaNet": Family(_of_qwen, "norm", "out_proj"),
    "OlmoHybridGatedDeltaNet": Family(_of_olmo, "o_norm", "o_proj"),
}


class Level(NamedTuple):
    """Segments whose prefixes are in earlier levels.

    prefixes: [S] of their states among those of all earlier levels; None in the first
    continued: whether others begin with their states
    """

    tokens: int
    ends: Tensor  # [S + 1]
    ends_on_host: Tensor
    prefixes: Tensor | None
    continued: bool


class DeltaPlan(NamedTuple):
    """Where the tokens of a pack are in a layer."""

    order: Gathering  # packed tokens, level by level
    back: Gathering
    behind_prefixes: Gathering  # of the convolution's inputs, those in order and a zero as number T
    own: Gathering  # of the U outputs, those of the segments' own tokens
    levels: tuple[Level, ...]


@lru_cache(maxsize=2)  # shared by all layers of a pass
def delta_plan(segments: tuple[Segment, ...], width: int, device: torch.device) -> DeltaPlan:
    """The plan of a pack, whose segments stand behind their prefixes. width: W"""
    depths: list[int] = []
    for each in segments:
        depths.append(0 if each.prefix is None else depths[each.prefix] + 1)
    levels = [[n for n, each in enumerate(depths) if each == depth] for depth in range(max(depths) + 1)]
    numbers = [number for level in levels for number in level]
    places = {number: place for place, number in enumerate(numbers)}
    lengths = [segments[number].end - segments[number].start for number in numbers]
    order = torch.cat([torch.arange(segments[number].start, segments[number].end) for number in numbers])
    tokens = dict(zip(numbers, torch.arange(len(order)).split(lengths), strict=True))
    inputs = _behind_prefixes(segments, numbers, tokens, torch.full((width - 1,), len(order)))
    tails = (width - 1) * torch.arange(1, len(numbers) + 1)  # inputs before segments, up to each one's own tokens
    own = torch.arange(len(order)) + tails.repeat_interleave(torch.tensor(lengths))
    return DeltaPlan(
        order=Gathering.of(order, device),
        back=Gathering.of(order.argsort(), device),
        behind_prefixes=Gathering.of(torch.cat(inputs), device),
        own=Gathering.of(own, device),
        levels=tuple(_level(segments, each, places, each is not levels[-1], device) for each in levels),
    )


def _behind_prefixes(
    segments: Sequence[Segment], numbers: Sequence[int], tokens: dict[int, Tensor], zeros: Tensor
) -> list[Tensor]:
    """The inputs of the convolution for each segment: the last W - 1 before it, which begin with zeros, and its own."""
    inputs: dict[int | None, Tensor] = {None: zeros}
    for number in numbers:
        before = inputs[segments[number].prefix]
        inputs[number] = torch.cat([before[len(before) - len(zeros) :], tokens[number]])
    return [inputs[number] for number in numbers]


def _level(
    segments: Sequence[Segment], level: Sequence[int], places: Mapping[int, int], continued: bool, device: torch.device
) -> Level:
    ends = pad(torch.tensor([segments[number].end - segments[number].start for number in level]).cumsum(0), (1, 0))
    before = [places[prefix] for number in level if (prefix := segments[number].prefix) is not None]
    prefixes = moved(torch.tensor(before), device) if before else None
    return Level(int(ends[-1]), moved(ends, device), ends, prefixes, continued)


class ByLevels(BySegments):
    """The forward of a gated delta net over packs, by kernels."""

    def __init__(self, module: nn.Module, cache: str, kernels: DeltaKernels) -> None:
        super().__init__(module, cache)
        self.family, self.kernels = FAMILIES[type(module).__name__], kernels

    def over_pack(self, hidden_states: Tensor, segments: Sequence[Segment], options: Any) -> Tensor:
        module: Any = self.module
        plan = delta_plan(tuple(segments), module.conv_kernel_size, hidden_states.device)
        each = self.family.inputs(module, gather(hidden_states.squeeze(0), plan.order))
        qkv_TC = self._convolved(each.mixed_TC, plan)
        sizes = module.key_dim, module.key_dim, module.value_dim
        heads = module.head_k_dim, module.head_k_dim, module.head_v_dim
        decay_TH = -module.A_log.float().exp() * softplus(each.decay_TH.float() + module.dt_bias)
        parts = [part.unflatten(-1, (-1, size)) for part, size in zip(qkv_TC.split(sizes, -1), heads, strict=True)]
        read_THV = self._read([*parts, decay_TH, each.beta_TH], plan.levels)
        gated = module.get_submodule(self.family.norm)(read_THV.flatten(0, 1), each.gate_TV.reshape(-1, heads[-1]))
        output_TE = module.get_submodule(self.family.output)(gated.reshape(len(read_THV), -1))
        return gather(output_TE, plan.back)[None]

    def _convolved(self, mixed_TC: Tensor, plan: DeltaPlan) -> Tensor:
        module: Any = self.module
        inputs_UC = gather(pad(mixed_TC, (0, 0, 0, 1)), plan.behind_prefixes)
        weights = {"weight": module.conv1d.weight.squeeze(1), "bias": module.conv1d.bias}
        outputs, _ = self.kernels.convolve(inputs_UC[None], **weights, activation=module.activation)
        return gather(outputs.squeeze(0), plan.own)

    def _read(self, parts: Sequence[Tensor], levels: Sequence[Level]) -> Tensor:
        """[T, H, V] what the delta rule reads from the states. parts: its queries, keys, values, decays and betas"""
        states: list[Tensor] = []
        read = []
        by_level = zip(*(each.split([level.tokens for level in levels]) for each in parts), strict=True)
        for level, of_level in zip(levels, by_level, strict=True):
            before = None if level.prefixes is None else torch.cat(states).index_select(0, level.prefixes)
            output, after = self.kernels.rule(
                *(each[None] for each in of_level),
                initial_state=before,
                output_final_state=level.continued,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=level.ends,
                cu_seqlens_cpu=level.ends_on_host,
            )
            read.append(output.squeeze(0))
            states += [] if after is None else [after]
        return torch.cat(read)


def use_kernels(model: nn.Module, kernels: DeltaKernels) -> None:
    """Let the gated delta nets of a model that is set up for packs use them."""
    for module in model.modules():
        if isinstance(before := module.forward, BySegments) and _is_known(module):
            module.forward = ByLevels(module, before.cache, kernels)


def _is_known(module: Any) -> bool:
    """fla's convolution knows one activation, and leaves any other out; one over a single token has no tails."""
    return type(module).__name__ in FAMILIES and module.activation in ("silu", "swish") and module.conv_kernel_size > 1


def use_packages(model: nn.Module) -> None:
    """Let the layers with state use kernels, and log which. Raises ConfigError for packages that cannot be imported."""
    layers: list[Any] = [each for each in model.modules() if isinstance(each.forward, BySegments)]
    known = sorted({type(each).__name__ for each in layers if _is_known(each)})
    if known and (version := fla_release()):
        use_kernels(model, fla_kernels())
        _log.warning("%s: all sequences of a pack at once, by fla-core %s", ", ".join(known), version)
    elif known:
        hint = f"pip install 'fla-core{_TESTED}' computes all at once"
        _log.warning("%s: one sequence of a pack after the other; %s", ", ".join(known), hint)
    for each in layers:
        if not _is_known(each):
            each.forward.by_packages = True
    if others := sorted({type(each).__name__ for each in layers if not _is_known(each)}):
        _log.warning(
            "%s: one sequence of a pack after the other, by the kernels that transformers finds", ", ".join(others)
        )


def fla_release() -> str | None:
    """The release of fla-core; None if it is not a tested one."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if Version(version) in _TESTED else None


def fla_kernels() -> DeltaKernels:
    try:
        convolve = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
        return DeltaKernels(convolve, importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule)
    except ImportError as error:
        raise ConfigError(
            f"fla-core is installed but cannot be imported ({error}). Install what it lacks, or uninstall it, or set "
            "model.fused_kernels=none"
        ) from error
