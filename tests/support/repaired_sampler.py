"""vLLM's CPU build samples wrongly with drafts; as the extension of its worker, this module repairs that for tests."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler

from verl.rollout.vllm_extension import WeightReceiver


def expanded(x: Tensor, ends: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """Each row's value for each of its tokens, as vLLM documents it. ends: of the rows, in tokens"""
    counts = ends.diff(prepend=torch.zeros_like(ends[:1]))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts)


rejection_sampler.expand_batch_to_tokens = expanded


class Repaired(WeightReceiver):
    """vLLM imports this module to find it."""
