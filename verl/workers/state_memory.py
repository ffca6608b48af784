"""What autograd keeps of a layer with state, in bytes: counted in the layer's own code, over tensors without data.

transformers computes tokens in chunks, keeps the intermediates of every chunk, and pads a sequence's last chunk.
Kernels in Triton do not run without data: what those of fla-core keep is stated here. Where transformers finds other
packages of kernels, less is kept than is counted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from verl.batch.packed import Segment
from verl.workers.delta_net import ByLevels, DeltaKernels
from verl.workers.state import CHUNK, has_state

_COMPUTED = (torch.bfloat16, torch.float32)
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class SavedState:
    """Bytes that one layer keeps for the backward. chunk: tokens that it computes together"""

    per_token: float
    per_segment: float
    chunk: int = 1

    def num_bytes(self, tokens: float, segments: float) -> float:
        """At most: the last chunk of each segment may be one token and padding."""
        return self.per_token * (tokens + segments * (self.chunk - 1)) + self.per_segment * segments


def saved_by_state(decoder: Any) -> dict[int, SavedState]:
    """Of a decoder that is set up for packs, by bytes of the compute dtype; {} if no layer has a state."""
    layers = getattr(decoder, "layers", [])
    first = next((each for layer in layers for each in layer.modules() if has_state(each)), None)
    if first is None:
        return {}
    return {each.itemsize: _of_layer(first, decoder.config.hidden_size, each) for each in _COMPUTED}


def _of_layer(mixer: Any, width: int, dtype: torch.dtype) -> SavedState:
    mixer = _without_data(mixer, dtype)
    mixer.forward.by_packages, chunk = False, _chunk(mixer)
    if isinstance(mixer.forward, ByLevels):
        mixer.forward.kernels, chunk = KEEPING, 1
    length = chunk * math.ceil(CHUNK / chunk)

    def counted(*responses: int) -> int:
        """Of a prompt and responses; lengths in multiples of `length`."""
        mixer.forward.segments = _group([length, *(length * each for each in responses)])
        hidden = torch.empty(1, mixer.forward.segments[-1].end, width, dtype=dtype, device=_META)
        return _saved_bytes(mixer, hidden.requires_grad_())

    shorter, longer, more = counted(1), counted(2), counted(1, 1)
    return SavedState((longer - shorter) / length, max(0, more - longer), chunk)


def _chunk(mixer: Any) -> int:
    """Tokens that transformers computes together, the delta rule by its default; 1 where nothing is padded."""
    chunk: int = getattr(mixer, "chunk_size", CHUNK if hasattr(mixer, "A_log") else 1)
    return chunk


def _without_data(mixer: nn.Module, dtype: torch.dtype) -> Any:
    """A copy whose tensors have shapes alone. Parameters get this dtype; buffers, such as weights in four bits, keep
    theirs."""
    own: dict[int, Tensor] = {}
    for each in mixer.parameters():
        own[id(each)] = nn.Parameter(torch.empty(each.shape, dtype=dtype, device=_META), each.requires_grad)
    for buffer in mixer.buffers():
        own[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=_META)
    return copy.deepcopy(mixer, own)


def _group(lengths: Sequence[int]) -> tuple[Segment, ...]:
    """A prompt, and responses that begin with its state."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    prefixes = [None, *[0] * (len(lengths) - 1)]
    return tuple(Segment(end - own, end, prefix) for own, end, prefix in zip(lengths, ends, prefixes, strict=True))


def _saved_bytes(module: nn.Module, hidden: Tensor) -> int:
    """Each storage once, those of parameters never."""
    owned = {_key(each) for each in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _key(tensor) not in owned:
            kept[_key(tensor)] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(hidden)
    return sum(each.nbytes() for each in kept.values()) if output.requires_grad else 0


def _key(tensor: Tensor) -> int:
    """Of its storage: without data all have the address 0."""
    return int(tensor.untyped_storage()._cdata)


def keeping_convolution(inputs: Tensor, **_: Any) -> tuple[Tensor, None]:
    """As fla's, it keeps its inputs alone, and computes its activation again."""
    return inputs.square(), None


def keeping_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Keeps as much as fla's does, and computes nothing."""
    apply: Any = _Rule.apply
    output, state = apply(q, k, v, g, beta, options["initial_state"], options["cu_seqlens"])
    return output, state if options["output_final_state"] else None


class _Rule(torch.autograd.Function):
    """As fla-core 0.6's `ChunkGatedDeltaRuleFunction`, it keeps normalized queries and keys with their norms, values,
    betas, sums of decays, an inverse of [chunk, chunk] per chunk and head, and the states that sequences begin with. It
    has no backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, before: Tensor | None, ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        norms = [each.new_empty(each.shape[:-1], dtype=torch.float32) for each in (q, k)]
        inverse = k.new_empty(*v.shape[:-1], CHUNK)
        ctx.save_for_backward(torch.empty_like(q), torch.empty_like(k), *norms, v, g.clone(), beta, inverse, before)
        return torch.empty_like(v), v.new_empty(len(ends) - 1, v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)


KEEPING = DeltaKernels(keeping_convolution, keeping_rule)
