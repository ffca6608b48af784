"""The kernels of packed attention against one matrix of scores with every pair that may see each other written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from verl.batch import Segment
from verl.workers.attention import VarlenPlan, by_flex, by_segments, by_varlen, varlen_plan

PACK = (Segment(0, 7), Segment(7, 10, 0), Segment(10, 15, 0), Segment(15, 19), Segment(19, 20, 3))
HEADS, KEY_HEADS, SIZE = 4, 2, 16


def written_out(query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float) -> Tensor:
    length = query.shape[2]
    sees = torch.zeros(length, length, dtype=torch.bool)
    for segment in segments:
        for place in range(segment.start, segment.end):
            sees[place, segment.start : place + 1] = True
            if segment.prefix is not None:
                sees[place, segments[segment.prefix].start : segments[segment.prefix].end] = True
    keys, values = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (key, value))
    scores = (query @ keys.mT * scale).masked_fill(~sees, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2)


def varlen_on_cpu(query: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan, scale: float | None) -> Tensor:
    """What variable-length flash attention computes: causal, aligned at the ends."""
    assert scale is not None
    outputs = []
    for number in range(len(plan.query_ends) - 1):
        own = slice(int(plan.query_ends[number]), int(plan.query_ends[number + 1]))
        seen = slice(int(plan.key_ends[number]), int(plan.key_ends[number + 1]))
        q, k, v = query[own].transpose(0, 1), keys[seen].transpose(0, 1), values[seen].transpose(0, 1)
        k, v = (each.repeat_interleave(HEADS // KEY_HEADS, dim=0) for each in (k, v))
        later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
        outputs.append(((q @ k.mT * scale).masked_fill(later, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def varlen(query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float | None) -> Tensor:
    return by_varlen(query, key, value, segments, scale, varlen_on_cpu)


@pytest.mark.parametrize("compute", [by_segments, varlen])
def test_values_and_gradients_are_those_of_the_written_out_mask(compute: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    shapes = [(1, heads, PACK[-1].end, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weight = torch.randn(1, PACK[-1].end, HEADS, SIZE, dtype=torch.float64)
    found = []
    for function in (compute, written_out):
        output = function(*inputs, PACK, 0.3)
        found.append([output, *torch.autograd.grad((output * weight).sum(), inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_flex_gives_the_values_of_the_written_out_mask() -> None:
    torch.manual_seed(0)
    shapes = [(1, heads, PACK[-1].end, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    inputs = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(by_flex(*inputs, PACK, 0.3), written_out(*inputs, PACK, 0.3))


def test_plan_by_hand() -> None:
    plan = varlen_plan((Segment(0, 2), Segment(2, 5, 0), Segment(5, 6)), torch.device("cpu"))
    assert plan.gathered.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert plan.query_ends.tolist() == [0, 2, 5, 6]
    assert plan.key_ends.tolist() == [0, 2, 7, 8]
    assert (plan.longest_query, plan.longest_key) == (3, 5)
