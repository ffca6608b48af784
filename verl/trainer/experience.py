"""From samples to what the update consumes: advantages and loss weights beside the log-probs.

Shape legend: B samples, L tokens of one sample; every list is [B] of [L] tensors aligned with token_ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantage import Rollouts
from verl.algorithms.aggregate import Aggregation, sample_weights
from verl.algorithms.algorithm import Algorithm, KLPlacement
from verl.algorithms.kl import penalised
from verl.data.packing import mask_tensor
from verl.types import Sample


@dataclass(frozen=True, slots=True)
class Experience:
    """Samples and, per token, what is known of them; values at untrained positions are zero."""

    samples: Sequence[Sample]  # [B]
    columns: Mapping[str, Sequence[Tensor]]  # each [B][L]

    def split(self, num_parts: int) -> Iterator[Experience]:
        """Mini-batches of whole groups, as even in groups as can be, in the order the groups came."""
        groups = list(dict.fromkeys(sample.group for sample in self.samples))
        for part in range(num_parts):
            chosen = set(groups[part * len(groups) // num_parts : (part + 1) * len(groups) // num_parts])
            rows = [row for row, sample in enumerate(self.samples) if sample.group in chosen]
            columns = {name: [column[row] for row in rows] for name, column in self.columns.items()}
            if rows:
                yield Experience([self.samples[row] for row in rows], columns)


def build_experience(
    samples: Sequence[Sample],
    old_logprobs: Sequence[Tensor] | None,
    algorithm: Algorithm,
    ref_logprobs: Sequence[Tensor] | None = None,
    values: Sequence[Tensor] | None = None,
) -> Experience:
    """Rewards on the last trained token, less the KL penalty if it is paid there; then the algorithm's advantages.

    The estimator sees trained tokens alone, so no mask can leak into it. Old log-probs may be left out where nothing
    needs them before the update: with one optimizer step per batch the policy's own are the old ones.
    """
    masks = [mask_tensor(sample.action_mask) for sample in samples]
    token_rewards = []
    for row, (sample, mask_L) in enumerate(zip(samples, masks, strict=True)):
        rewards = torch.zeros(int(mask_L.sum()))
        rewards[-1:] = sample.reward
        if algorithm.kl.placement is KLPlacement.REWARD:
            assert ref_logprobs is not None and old_logprobs is not None
            known = old_logprobs[row][mask_L], ref_logprobs[row][mask_L]
            rewards = penalised(rewards, *known, algorithm.kl.coefficient)
        token_rewards.append(rewards)
    groups = torch.tensor([sample.group for sample in samples])
    dense_values = None if values is None else [row[mask] for row, mask in zip(values, masks, strict=True)]
    estimate = algorithm.advantage(Rollouts(token_rewards, groups, dense_values))
    columns: dict[str, Sequence[Tensor]] = {
        "advantages": _scattered(estimate.advantages, masks),
        "rollout_logprobs": [
            torch.from_numpy(np.array(sample.rollout_logprobs, dtype=np.float32)) for sample in samples
        ],
    }
    if old_logprobs is not None:
        columns["old_logprobs"] = old_logprobs
    if ref_logprobs is not None:
        columns["ref_logprobs"] = ref_logprobs
    if estimate.returns is not None and values is not None:
        columns |= {"returns": _scattered(estimate.returns, masks), "values": values}
    return Experience(samples, columns)


def with_weights(minibatch: Experience, aggregation: Aggregation, constant_length: float | None = None) -> Experience:
    """The mini-batch with its loss weights, and with the weights of plain token means for metrics."""
    lengths_B = torch.tensor([sum(sample.action_mask) for sample in minibatch.samples])
    columns = dict(minibatch.columns)
    for name, mode in (("weight", aggregation), ("metric_weight", Aggregation.TOKEN_MEAN)):
        weights_B = sample_weights(mode, lengths_B, constant_length).float()
        columns[name] = [
            weight.expand(len(sample.token_ids)) for weight, sample in zip(weights_B, minibatch.samples, strict=True)
        ]
    return Experience(minibatch.samples, columns)


def _scattered(dense: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """[B][trained tokens] -> [B][L], zero elsewhere."""
    rows = []
    for values, mask_L in zip(dense, masks, strict=True):
        row_L = torch.zeros(len(mask_L), dtype=values.dtype)
        row_L[mask_L] = values
        rows.append(row_L)
    return rows
