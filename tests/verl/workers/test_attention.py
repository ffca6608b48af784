"""The kernels of packed attention against one matrix of scores with every pair that may see each other written out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from verl.batch.packed import Segment
from verl.errors import ConfigError
from verl.workers import attention
from verl.workers.attention import (
    Gathering,
    VarlenPlan,
    by_segments,
    by_varlen,
    causal_sequences,
    packed_attention,
    varlen_plan,
    window_mask,
    window_size,
)
from verl.workers.fused import _WithParts

PACK = (Segment(0, 7), Segment(7, 10, 0), Segment(10, 15, 0), Segment(15, 19), Segment(19, 20, 3))
HEADS, KEY_HEADS, SIZE = 4, 2, 16
UNUSED = Gathering(*[torch.empty(0)] * 3)


WINDOWS = (None, 1, 3, 8, 100)  # the longest sequence has 12 tokens
Compute = Callable[..., Tensor]


def written_out(
    query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float, window: int | None = None
) -> Tensor:
    """Every pair of tokens by itself, positions counted along a segment and its prefix."""
    length = query.shape[2]
    sees = torch.zeros(length, length, dtype=torch.bool)
    for segment in segments:
        before = [] if segment.prefix is None else [segments[segment.prefix]]
        sequence = [place for part in (*before, segment) for place in range(part.start, part.end)]
        for position, place in enumerate(sequence):
            first = 0 if window is None else max(0, position + 1 - window)
            if place >= segment.start:
                sees[place, sequence[first : position + 1]] = True
    keys, values = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (key, value))
    scores = (query @ keys.mT * scale).masked_fill(~sees, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2)


def varlen_on_cpu(
    query: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan, scale: float | None, sees: tuple[int, int]
) -> Tensor:
    """What variable-length flash attention computes by its documentation: with i of q queries at position i + k - q of
    k keys, query i sees keys from i + k - q - sees[0] (from the first, where that is -1) to i + k - q + sees[1]."""
    assert scale is not None
    outputs = []
    for number in range(len(plan.query_ends) - 1):
        own = slice(int(plan.query_ends[number]), int(plan.query_ends[number + 1]))
        seen = slice(int(plan.key_ends[number]), int(plan.key_ends[number + 1]))
        q, k, v = query[own].transpose(0, 1), keys[seen].transpose(0, 1), values[seen].transpose(0, 1)
        k, v = (each.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for each in (k, v))
        behind = k.shape[1] - q.shape[1]
        every = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        hidden = every.triu(behind + sees[1] + 1)
        if sees[0] >= 0:
            hidden |= every.tril(behind - sees[0] - 1)
        outputs.append(((q @ k.mT * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


varlen = partial(by_varlen, kernel=varlen_on_cpu)


def random_inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, PACK[-1].end, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("compute", [by_segments, varlen])
def test_values_and_gradients_are_those_of_the_written_out_mask(compute: Compute, window: int | None) -> None:
    inputs = random_inputs(torch.float64)
    weight = torch.randn(1, PACK[-1].end, HEADS, SIZE, dtype=torch.float64)
    found = []
    for function in (compute, written_out):
        output = function(*inputs, PACK, 0.3, window)
        found.append([output, *torch.autograd.grad((output * weight).sum(), inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, *plan: Any, **options: Any) -> Tensor:
    """The signature of the flash-attn package, as far as it is used."""
    assert options["causal"]
    ends = VarlenPlan(UNUSED, *plan)
    return varlen_on_cpu(q, k, v, ends, options["softmax_scale"], options["window_size"])


def varlen_attn(q: Tensor, k: Tensor, v: Tensor, *plan: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    """The signature of torch 2.11's own, as far as it is used."""
    assert k.shape[1] == v.shape[1] == KEY_HEADS
    return varlen_on_cpu(q, k, v, VarlenPlan(UNUSED, *plan), scale, window_size)


def varlen_attn_that_asks(*args: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    """That of torch 2.12 and later, which refuses fewer key heads unless asked."""
    assert enable_gqa
    return varlen_attn(*args, **options)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("of_torch", [None, varlen_attn, varlen_attn_that_asks])
def test_kernels_of_a_gpu_are_given_the_window_and_the_key_heads_as_they_are(
    of_torch: Callable[..., Tensor] | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_HAS_FLASH_ATTN", of_torch is None)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", of_torch)
    inputs = random_inputs(torch.float64)
    weight = torch.randn(1, PACK[-1].end, HEADS, SIZE, dtype=torch.float64)
    found = []
    for function in (by_varlen, written_out):
        output = function(*inputs, PACK, 0.3, window)
        found.append([output, *torch.autograd.grad((output * weight).sum(), inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_flash_attn_that_does_not_match_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('flash_attn_2_cuda.so: undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(attention, "_HAS_FLASH_ATTN", True)
    with pytest.raises(ConfigError, match=r"cannot be imported .*undefined symbol.* Build it against torch 2\."):
        by_varlen(*random_inputs(torch.float32), PACK, 0.3)


def test_the_installed_torch_takes_fewer_key_heads() -> None:
    """Shapes and the checks in Python of torch's own kernel, forward and backward: all that runs without a GPU."""
    plan = varlen_plan(PACK, torch.device("cpu"))
    gathered = len(plan.gathering.keys)
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, *others = (
            torch.empty(length, heads, SIZE, dtype=torch.bfloat16, requires_grad=True)
            for length, heads in ((20, HEADS), (gathered, KEY_HEADS), (gathered, KEY_HEADS))
        )
        output = attention.flash_attention(query, *others, plan, 0.3, (-1, 0))
        grads = torch.autograd.grad(output, (query, *others), torch.empty_like(output))
    assert output.shape == query.shape
    assert [each.shape for each in grads] == [query.shape, *(each.shape for each in others)]


def test_full_precision_on_a_gpu_has_as_many_key_heads_as_query_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fused kernel for it takes fewer; on a CPU they stay as they are."""
    heads: list[tuple[int, ...]] = []

    def recorded(*qkv: Tensor, attn_mask: Any, **_: Any) -> Tensor:
        heads.append(tuple(each.shape[1] for each in qkv))
        return qkv[0]

    monkeypatch.setattr(attention, "scaled_dot_product_attention", recorded)
    for device, expected in (("meta", HEADS), ("cpu", KEY_HEADS)):
        by_segments(*(each.to(device) for each in random_inputs(torch.float32)), PACK, 0.3)
        assert heads == [(HEADS, expected, expected)] * len(PACK)
        heads.clear()


def test_windows_by_hand() -> None:
    assert (window_size(None), window_size(1), window_size(4096)) == ((-1, 0), (0, 0), (4095, 0))
    seen = window_mask(2, 4, 3, torch.device("cpu"))
    assert seen.tolist() == [[True, True, True, False], [False, True, True, True]]


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"softcap": 50.0}, "softcap=50.0"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"head_mask": torch.zeros(4), "position_bias": torch.zeros(4)}, "head_mask, position_bias"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(option: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"Module needs {named}: training supports only causal attention"):
        packed_attention(nn.Module(), *random_inputs(torch.float32), None, 0.3, segments=PACK, **option)


def test_a_refusal_names_the_models_own_module() -> None:
    """Also if its parts are replaced."""
    with pytest.raises(ConfigError, match=r"^Linear needs softcap=50\.0"):
        packed_attention(
            _WithParts(nn.Linear(1, 1), {}),  # type: ignore[arg-type]
            *random_inputs(torch.float32),
            None,
            0.3,
            segments=PACK,
            softcap=50.0,
        )


def test_plans_move_to_a_gpu_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As packs do: the host does not wait for the device."""
    calls: list[str] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: (calls.append("pinned"), tensor)[1])
    monkeypatch.setattr(Tensor, "to", lambda tensor, device, non_blocking: (calls.append(f"{non_blocking}"), tensor)[1])
    varlen_plan.__wrapped__(PACK, torch.device("cuda"))
    assert calls == ["pinned", "True"] * 5


def test_attention_to_later_tokens_is_refused() -> None:
    module = nn.Module()
    module.is_causal = False
    with pytest.raises(ConfigError, match="is_causal=False"):
        packed_attention(module, *random_inputs(torch.float32), None, 0.3, segments=PACK)


def test_options_without_a_value_or_effect_are_none() -> None:
    inputs = [each.detach() for each in random_inputs(torch.float32)]
    options = {"softcap": None, "dropout": 0.0, "position_ids": torch.zeros(1, 20), "use_cache": False}
    output, _ = packed_attention(nn.Module(), *inputs, None, 0.3, sliding_window=3, segments=PACK, **options)
    torch.testing.assert_close(output, written_out(*inputs, PACK, 0.3, 3))


def test_plan_by_hand() -> None:
    """The first response continues its prompt; the second has a copy of the prompt's keys."""
    plan = varlen_plan((Segment(0, 2), Segment(2, 5, 0), Segment(5, 7, 0), Segment(7, 8)), torch.device("cpu"))
    assert plan.gathering.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7]
    assert plan.gathering.copies.tolist() == [0, 5, 1, 6, 2, 3, 4, 7, 8, 9]
    assert plan.gathering.starts.tolist() == [0, 2, 4, 5, 6, 7, 8, 9]
    assert plan.query_ends.tolist() == [0, 5, 7, 8]
    assert plan.key_ends.tolist() == [0, 5, 9, 10]
    assert (plan.longest_query, plan.longest_key) == (5, 5)


def test_only_a_prompt_without_a_prefix_is_continued() -> None:
    """A segment sees its prefix, not the prefix of that one, nor segments between them."""
    chain = (Segment(0, 2), Segment(2, 5), Segment(5, 7, 0), Segment(7, 8, 2), Segment(8, 9, 2))
    assert causal_sequences(chain) == [
        ((), chain[0]),
        ((), chain[1]),
        ((chain[0],), chain[2]),
        ((chain[2],), chain[3]),
        ((chain[2],), chain[4]),
    ]
