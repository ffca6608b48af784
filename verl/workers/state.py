"""Layers with state over packs: gated delta nets, Mamba2, short convolutions.

transformers computes such a layer over one row from its first token to its last, so a pack would carry the state of a
sequence into the next one. Here each segment is a call of the layer's own code that begins with the state in which its
prefix ended, or with none (on a GPU `delta_net.py` computes all segments at once). A prompt's state is computed once;
every response continues it, and autograd sums what they send back.

The state is what transformers would keep in its cache: the last inputs of the convolution (its tail) and the recurrent
matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from inspect import getclosurevars, signature, unwrap
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor, nn

from verl.batch.packed import Segment
from verl.errors import ConfigError
from verl.workers.functions import with_functions

_CACHES = ("cache_params", "past_key_values")  # names of the cache among a layer's arguments
_EXPERTS = "Experts"  # the end of their class's name in transformers, in every family
_WRITES_TAIL = "update_conv_state"  # the method of the cache that such layers call, and no other
# Scans of transformers that begin without a state whenever they compute several tokens: Mamba's, unlike Mamba2's.
_FORGETS = "mamba_selective_scan"
# Tokens that a scan computes together, at most: Mamba2's up to 256 by its checkpoints. The result is the same but for
# rounding. Segments are padded to whole chunks, and what a chunk takes grows with its square.
CHUNK = 64


class State:
    """The cache of one layer over one segment, by the protocol of transformers' own, which copies in place.

    Here every update is a new tensor, so the state before a segment can be continued by any number of others.
    """

    def __init__(self, before: State | None = None) -> None:
        self.conv_states: dict[int, Tensor] = {} if before is None else dict(before.conv_states)
        self.recurrent_states: dict[int, Tensor] = {} if before is None else dict(before.recurrent_states)

    @property
    def layers(self) -> Self:
        return self

    def __getitem__(self, layer: int) -> Self:
        return self

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.conv_states)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """[1, C, T] the inputs of the convolution -> those with the tail before them."""
        tail = self.conv_states.get(state_idx)
        inputs = conv_states if tail is None else torch.cat([tail, conv_states], dim=-1)
        self.conv_states[state_idx] = inputs[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class BySegments:
    """The forward of a layer with state: the layer's own, segment by segment.

    segments: of the pack; None: one sequence
    by_packages: whether transformers may take kernels of packages for it
    """

    def __init__(self, module: nn.Module, cache: str) -> None:
        self.module, self.cache, self.by_packages = module, cache, False
        self.segments: Sequence[Segment] | None = None

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        if self.segments is None:
            whole: Tensor = self._own()(hidden_states, **options)
            return whole
        return self.over_pack(hidden_states, self.segments, options)

    def over_pack(self, hidden_states: Tensor, segments: Sequence[Segment], options: Mapping[str, Any]) -> Tensor:
        own = self._own()
        parts = hidden_states.split([segment.end - segment.start for segment in segments], dim=1)
        ends: list[tuple[State, Tensor | None]] = []  # of each segment: a state, and tokens that it has not seen yet
        outputs = []
        for part, segment in zip(parts, segments, strict=True):
            before, unseen = (State(), None) if segment.prefix is None else ends[segment.prefix]
            state, tokens = State(before), part if unseen is None else torch.cat([unseen, part], dim=1)
            if tokens.shape[1] == 1 and before.has_previous_state():
                # A single token would be decoded, in place, which has no gradient: it is followed by a copy of itself,
                # and whatever continues it begins before it.
                output = own(tokens.repeat(1, 2, 1), **{**options, self.cache: state})[:, :1]
                ends.append((before, tokens))
            else:
                output = own(tokens, **{**options, self.cache: state})
                ends.append((state, None))
            outputs.append(output[:, -part.shape[1] :])
        return torch.cat(outputs, dim=1)

    def _own(self) -> Callable[..., Any]:
        forward: Any = type(self.module).forward
        return partial(forward if self.by_packages else by_formulas(forward), self.module)


@cache
def by_formulas(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward by PyTorch alone.

    Where packages of kernels can be imported, fla-core for one, transformers takes them: also for tensors on a CPU, and
    for those in float32, whose products they round.
    """
    own: Any = unwrap(forward)
    called = {name: own.__globals__.get(name) for name in own.__code__.co_names}
    formulas = {name: formula for name, each in called.items() if (formula := _formula(each)) is not None}
    return with_functions(own, formulas)


def _formula(function: Any) -> Callable[..., Any] | None:
    """What transformers has put kernels in front of; None for another function."""
    if isinstance(function, nn.Module):  # the package kernels makes a module of it
        inside = getclosurevars(type(function).forward).nonlocals.values()
        return next((formula for each in inside if (formula := _formula(each)) is not None), None)
    return unwrap(function) if isinstance(function, FunctionType) and hasattr(function, "__wrapped__") else None


def separate_states(decoder: nn.Module) -> None:
    """Let the layers with state of a decoder compute packs. They stay as they are for single sequences.

    Raises ConfigError for a layer that cannot continue a state.
    """
    for layer in getattr(decoder, "layers", []):
        found: dict[Any, str] = {module: cache for module in layer.modules() if (cache := _cache_of(module))}
        for module, cache in found.items():
            module.forward = BySegments(module, cache)
            if hasattr(module, "chunk_size"):
                module.chunk_size = min(module.chunk_size, CHUNK)
        if found:
            layer.register_forward_pre_hook(_hand_over, with_kwargs=True)


def experts_beside_state(model: nn.Module) -> str | None:
    """The class of a model's experts if it has layers with state, too; None without. Raises like `separate_states`."""
    modules = list(model.modules())
    if not any(map(has_state, modules)):
        return None
    return next((name for module in modules if (name := type(module).__name__).endswith(_EXPERTS)), None)


def has_state(module: nn.Module) -> bool:
    """Whether the module is a layer with state, set up for packs or not."""
    return isinstance(module.forward, BySegments) or _cache_of(module) is not None


def _cache_of(module: nn.Module) -> str | None:
    """The argument with the cache, if the module is a layer with state that is not set up for packs yet."""
    forward = unwrap(type(module).forward)
    names = getattr(forward, "__code__", None) and forward.__code__.co_names
    if not names or _WRITES_TAIL not in names or isinstance(module.forward, BySegments):
        return None
    if _FORGETS in names:
        raise ConfigError(
            f"{type(module).__name__} cannot continue the state of a prompt: its scan of several tokens "
            "begins without one"
        )
    return next(name for name in _CACHES if name in signature(forward).parameters)


def _hand_over(layer: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Some decoder layers do not pass the segments on. Activations that are computed again call this again, too."""
    for module in layer.modules():
        if isinstance(module.forward, BySegments):
            module.forward.segments = options.get("segments")
