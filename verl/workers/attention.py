"""Attention over packs: one function, registered with transformers' attention interface.

A segment attends to itself causally and to all of its prefix segment (shared-prompt attention), in a layer with a
sliding window of W tokens to the last W positions of both. Positions of a segment continue those of its prefix,
wherever the two lie in the pack. Any other attention option is rejected by name. Two kernels compute this:

    by_segments   a call of scaled-dot-product attention per segment: CPU, and GPU in full precision
    by_varlen     variable-length flash attention, the prefix's keys and values gathered in front of each segment's own:
                  GPU in half precision (flash-attn where it is installed, else torch's own)

On the CPU the tests run by_varlen with a plain kernel in place of its own.
Shape legend: H query heads, K key heads, T packed tokens, U gathered keys, D head size, S segments.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from verl.batch.packed import Segment, moved
from verl.errors import ConfigError

PACKED = "verl_packed"

_HAS_FLASH_ATTN = importlib.util.find_spec("flash_attn") is not None
_UNLIMITED = -1  # flash attention: no window bound on this side
# Options of transformers' layers that do not change the attention of a pack.
_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache", "output_attentions", "source"})
_PLAIN = (bool, int, float, str)  # values that an error shows

VarlenKernel = Callable[[Tensor, Tensor, Tensor, "VarlenPlan", float | None, tuple[int, int]], Tensor]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    *,
    segments: Sequence[Segment],
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within segments and their prefixes, limited to the last `sliding_window` positions if given.

    query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]. Masks are not used: segments and window define them.

    Raises ConfigError for any other option that is set: soft caps, sinks, dropout, bidirectional attention.
    """
    assert attention_mask is None, "packs carry no mask"
    refused = {name: value for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT}
    refused |= {"dropout": dropout} if dropout else {}
    refused |= {"is_causal": False} if not getattr(module, "is_causal", True) else {}
    if refused:
        shown = (f"{name}={each}" if isinstance(each, _PLAIN) else name for name, each in refused.items())
        raise ConfigError(
            f"{_kind(module)} needs {', '.join(shown)}: training supports only causal attention, with or "
            "without a sliding window (docs/training.md)"
        )
    half = query.dtype in (torch.bfloat16, torch.float16)
    compute = by_varlen if query.device.type != "cpu" and half else by_segments
    return compute(query, key, value, tuple(segments), scaling, sliding_window), None


def _kind(module: Any) -> str:
    """The class of the model's own module, also of one whose parts are replaced (`fused.py`)."""
    return type(getattr(module, "wrapped", module)).__name__


def register() -> None:
    AttentionInterface.register(PACKED, packed_attention)


def by_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[Segment, ...],
    scaling: float | None,
    window: int | None = None,
) -> Tensor:
    """One call per segment; the keys of its prefix are concatenated in front of its own.

    The pack is split once: slicing would allocate a gradient as long as the pack for every segment. On a GPU keys and
    values are repeated for all query heads: no fused kernel for full precision takes fewer, and scores would be kept.
    """
    if query.device.type != "cpu" and query.shape[1] != key.shape[1]:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    lengths = [segment.end - segment.start for segment in segments]
    queries, own_keys, own_values = (each.split(lengths, dim=2) for each in (query, key, value))
    outputs = []
    for number, segment in enumerate(segments):
        keys, values = own_keys[number], own_values[number]
        bias: Tensor | None = None
        if segment.prefix is not None:
            keys = torch.cat([own_keys[segment.prefix], keys], dim=2)
            values = torch.cat([own_values[segment.prefix], values], dim=2)
            bias = causal_lower_right(lengths[number], keys.shape[2])
        if window is not None and window < keys.shape[2]:
            bias = window_mask(lengths[number], keys.shape[2], window, query.device)
        outputs.append(
            scaled_dot_product_attention(
                queries[number], keys, values, attn_mask=bias, is_causal=bias is None, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """[queries, keys] whether a query attends to a key; the last query is at the position of the last key."""
    of_key = torch.arange(keys, device=device)
    of_query = of_key[keys - queries :, None]
    return (of_key <= of_query) & (of_key > of_query - window)


def window_size(window: int | None) -> tuple[int, int]:
    """(keys visible before the query's position, keys visible after it), in flash attention's format."""
    return (_UNLIMITED if window is None else window - 1), 0


class Gathering(NamedTuple):
    """Rows in another order, some of them several times: as the keys of each sequence, its prefix's before its own."""

    keys: Tensor  # [U] index of every gathered row
    copies: Tensor  # [U] indices of gathered rows, those of a row together, row by row
    starts: Tensor  # [T] of each row in `copies`

    @classmethod
    def of(cls, keys: Tensor, device: torch.device) -> Self:
        numbers = keys.bincount()
        return cls(*(moved(each, device) for each in (keys, keys.argsort(stable=True), numbers.cumsum(0) - numbers)))


class VarlenPlan(NamedTuple):
    """Offsets of each sequence's queries in the pack and of its keys among the gathered keys."""

    gathering: Gathering
    query_ends: Tensor  # [sequences + 1] int32, cumulative
    key_ends: Tensor  # [sequences + 1] int32, cumulative
    longest_query: int
    longest_key: int


def causal_sequences(segments: Sequence[Segment]) -> list[tuple[tuple[Segment, ...], Segment]]:
    """(prefix or nothing, tokens after it) of each sequence. A prompt and the response next to it are one sequence, so
    that the prompt's keys are gathered for the other responses only."""
    sequences: list[tuple[tuple[Segment, ...], Segment]] = []
    for number, segment in enumerate(segments):
        prefix = None if segment.prefix is None else segments[segment.prefix]
        if prefix is not None and prefix.prefix is None and segment.prefix == number - 1:
            sequences[-1] = ((), Segment(prefix.start, segment.end))
        else:
            sequences.append((() if prefix is None else (prefix,), segment))
    return sequences


@lru_cache(maxsize=2)  # shared by all layers of a pass
def varlen_plan(segments: tuple[Segment, ...], device: torch.device) -> VarlenPlan:
    """The plan of a pack, whose segments are contiguous."""
    sequences = causal_sequences(segments)
    keys = [torch.cat([torch.arange(part.start, part.end) for part in (*before, own)]) for before, own in sequences]
    key_lengths = torch.tensor([len(each) for each in keys])
    query_lengths = torch.tensor([own.end - own.start for _, own in sequences])

    def ends(lengths: Tensor) -> Tensor:
        return moved(nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), device)

    longest = int(query_lengths.max()), int(key_lengths.max())
    return VarlenPlan(Gathering.of(torch.cat(keys), device), ends(query_lengths), ends(key_lengths), *longest)


class _Gather(torch.autograd.Function):
    """In the backward the gradients of a row's copies are read once, summed in float32 and written once; that of
    indexing sorts them and adds them to zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gathering: Gathering) -> Tensor:
        ctx.gathering = gathering
        return rows[gathering.keys]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        _, copies, starts = ctx.gathering
        summed = nn.functional.embedding_bag(copies, grad.flatten(1), starts, mode="sum")
        return summed.unflatten(1, grad.shape[1:]), None


def gather(rows: Tensor, gathering: Gathering) -> Tensor:
    """[T, ..] -> [U, ..]; the last row is among the gathered ones."""
    gathered: Tensor = _Gather.apply(rows, gathering)  # type: ignore[no-untyped-call]
    return gathered


def flash_attention(
    query_THD: Tensor,
    keys_UKD: Tensor,
    values_UKD: Tensor,
    plan: VarlenPlan,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    """All segments by the package flash-attn where it is installed, else by torch's own kernel.

    Raises ConfigError if the package cannot be imported, as a build for another torch.
    """
    options: dict[str, Any]
    if _HAS_FLASH_ATTN:
        try:
            attend = importlib.import_module("flash_attn").flash_attn_varlen_func
        except ImportError as error:
            raise ConfigError(
                f"flash-attn is installed but cannot be imported ({error}). Build it against torch "
                f"{torch.__version__}, or uninstall it: training then uses torch's own kernel"
            ) from error
        options = {"softmax_scale": scale, "causal": True}
    else:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        options = {"scale": scale, **_grouped(attend)}  # the second number of the window makes it causal
    output: Tensor = attend(query_THD, keys_UKD, values_UKD, *plan[1:], window_size=window, **options)
    return output


@lru_cache(maxsize=1)
def _grouped(attend: Callable[..., Tensor]) -> dict[str, bool]:
    """The argument that allows fewer key heads than query heads, where torch's kernel does not take them without."""
    return {"enable_gqa": True} if "enable_gqa" in signature(attend).parameters else {}


def by_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[Segment, ...],
    scaling: float | None,
    window: int | None = None,
    kernel: VarlenKernel = flash_attention,
) -> Tensor:
    """All segments in one kernel call; causal mask and window are aligned with the ends of queries and keys."""
    plan = varlen_plan(segments, query.device)
    # squeeze, not [0], whose backward would copy the gradient into a tensor of zeros
    query_HTD, key_KTD, value_KTD = (each.squeeze(0) for each in (query, key, value))
    keys_UKD, values_UKD = (gather(each.transpose(0, 1), plan.gathering) for each in (key_KTD, value_KTD))
    query_THD = query_HTD.transpose(0, 1).contiguous()
    return kernel(query_THD, keys_UKD, values_UKD, plan, scaling, window_size(window))[None]
