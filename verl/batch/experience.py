"""From samples to the input of the update: log-probs, advantages and loss weights.

Shape legend: B samples, L tokens of one sample; every list is [B] of [L] tensors aligned with token_ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.aggregate import sample_weights
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Turns
from verl.algorithms.kl import apply_kl_penalty
from verl.algorithms.names import Aggregation, KLPlacement, OldLogprobs
from verl.batch.packing import mask_tensor
from verl.types import Sample


@dataclass(frozen=True, slots=True)
class Experience:
    """Samples with per-token columns; values at untrained positions are zero."""

    samples: Sequence[Sample]  # [B]
    columns: Mapping[str, Sequence[Tensor]]  # each [B][L]

    def split(self, num_parts: int) -> Iterator[Experience]:
        """Mini-batches of whole groups, as equal in groups as possible, in the order of the groups."""
        groups = list(dict.fromkeys(sample.group for sample in self.samples))
        for part in range(num_parts):
            chosen = set(groups[part * len(groups) // num_parts : (part + 1) * len(groups) // num_parts])
            rows = [row for row, sample in enumerate(self.samples) if sample.group in chosen]
            if rows:
                yield self.rows(rows)

    def rows(self, rows: Sequence[int]) -> Experience:
        """The given rows only."""
        columns = {name: [column[row] for row in rows] for name, column in self.columns.items()}
        return Experience([self.samples[row] for row in rows], columns)

    def with_column(self, name: str, column: Sequence[Tensor]) -> Experience:
        """A copy with an additional column."""
        return Experience(self.samples, {**self.columns, name: column})


def build_experience(
    samples: Sequence[Sample],
    old_logprobs: Sequence[Tensor] | None,
    algorithm: Algorithm,
    ref_logprobs: Sequence[Tensor] | None = None,
    values: Sequence[Tensor] | None = None,
    baselines: Sequence[float | None] = (),
) -> Experience:
    """Token-level rewards, then the advantages of the algorithm.

    The reward is on the last trained token, turn rewards on the last token of each turn, minus the KL penalty if
    configured. The estimator sees trained tokens only, so no mask can leak into it. old_logprobs may be None if not
    needed before the update; a KL penalty in the reward then uses the engine's log-probs.
    baselines: [B] reward of the greedy response to each sample's prompt, if the algorithm needs it
    """
    masks = [mask_tensor(sample.action_mask) for sample in samples]
    token_rewards = []
    for row, (sample, mask_L) in enumerate(zip(samples, masks, strict=True)):
        rewards_L = torch.zeros(len(mask_L))
        for position, reward in sample.turn_rewards:
            rewards_L[position] += reward
        rewards = rewards_L[mask_L]
        rewards[-1:] += sample.reward
        if algorithm.kl.placement is KLPlacement.REWARD:
            assert ref_logprobs is not None
            policy_L = torch.tensor(sample.rollout_logprobs) if old_logprobs is None else old_logprobs[row]
            kl, ref_L = algorithm.kl, ref_logprobs[row]
            rewards = apply_kl_penalty(rewards, policy_L[mask_L], ref_L[mask_L], kl.coefficient, kl.estimator)
        token_rewards.append(rewards)
    groups = torch.tensor([sample.group for sample in samples])
    dense_values = None if values is None else [row[mask] for row, mask in zip(values, masks, strict=True)]
    baseline_B = torch.tensor(baselines) if algorithm.greedy_baseline else None
    turns = turns_of(samples) if algorithm.needs_turns else None
    estimate = algorithm.advantage(AdvantageInputs(token_rewards, groups, dense_values, baseline_B, turns))
    columns: dict[str, Sequence[Tensor]] = {
        "advantages": _scatter_to_tokens(estimate.advantages, masks),
        "rollout_logprobs": [
            torch.from_numpy(np.array(sample.rollout_logprobs, dtype=np.float32)) for sample in samples
        ],
    }
    if old_logprobs is not None:
        columns["old_logprobs"] = old_logprobs
    if ref_logprobs is not None:
        columns["ref_logprobs"] = ref_logprobs
    if estimate.returns is not None and values is not None:
        columns |= {"returns": _scatter_to_tokens(estimate.returns, masks), "values": values}
    return Experience(samples, columns)


def turns_of(samples: Sequence[Sample]) -> list[Turns]:
    """The assistant turns of every sample: contiguous trained tokens, and the state in which each was sampled.

    A state is the prompt group and the observation tokens between a turn and the previous one.
    """
    states: dict[tuple[int, tuple[int, ...]], int] = {}
    turns = []  # [B]
    for sample in samples:
        numbers: list[int] = []
        found: list[int] = []
        ended, place = 0, 0
        for written, stretch in groupby(sample.action_mask):
            length = len(list(stretch))
            if written:
                state = (sample.group, sample.token_ids[ended:place])
                numbers += [len(found)] * length
                found.append(states.setdefault(state, len(states)))
                ended = place + length
            place += length
        turns.append(Turns(torch.tensor(numbers, dtype=torch.long), torch.tensor(found, dtype=torch.long)))
    return turns


def with_selected(minibatch: Experience, algorithm: Algorithm, seed: int) -> Experience:
    """The mini-batch with the column "selected" (clip_cov, kl_cov); unchanged if the algorithm selects no tokens.

    Tokens are selected among all trained ones, by the log-probs in the denominator of the ratio.
    """
    if algorithm.selection is None:
        return minibatch
    masks = [mask_tensor(sample.action_mask) for sample in minibatch.samples]
    denominator = "rollout_logprobs" if algorithm.old_logprobs is OldLogprobs.ROLLOUT else "old_logprobs"
    logprobs_N, advantages_N = (
        torch.cat([row[mask] for row, mask in zip(minibatch.columns[name], masks, strict=True)])
        for name in (denominator, "advantages")
    )
    chosen_N = algorithm.selection(logprobs_N, advantages_N, torch.Generator().manual_seed(seed))
    return minibatch.with_column(
        "selected", _scatter_to_tokens(chosen_N.float().split([int(m.sum()) for m in masks]), masks)
    )


def with_weights(minibatch: Experience, aggregation: Aggregation, constant_length: float | None = None) -> Experience:
    """The mini-batch with loss weights. constant_length: see `sample_weights`."""
    return _weighted(minibatch, "weight", aggregation, constant_length)


def with_metric_weights(minibatch: Experience) -> Experience:
    """The mini-batch with the weights of plain token means: over all trained tokens, and over the sampled ones.

    Observations may be trained but are not sampled by the engine, whose log-probs are NaN there.
    """
    engine = minibatch.columns["rollout_logprobs"]
    num_trained = sum(sum(sample.action_mask) for sample in minibatch.samples)
    num_sampled = num_trained - sum(int(row_L.isnan().sum()) for row_L in engine)
    weight = torch.tensor(1 / max(1, num_sampled))
    weighted = _weighted(minibatch, "metric_weight", Aggregation.TOKEN_MEAN)
    return weighted.with_column("gap_weight", [weight.expand(len(row_L)) for row_L in engine])


def drop_zero_advantage(minibatch: Experience, algorithm: Algorithm) -> Experience:
    """Drop samples without gradient: those with zero advantages, unless the loss has a KL or entropy term.

    Groups of equal rewards have zero advantages and contribute exactly zero to the loss. Call this after
    `with_weights`, whose denominators count all samples.
    """
    return minibatch.rows(nonzero_advantage_rows(minibatch, algorithm))


def nonzero_advantage_rows(minibatch: Experience, algorithm: Algorithm) -> list[int]:
    """Rows that `drop_zero_advantage` keeps; all if tokens are selected among all of the mini-batch."""
    in_loss = algorithm.kl.placement is KLPlacement.LOSS or algorithm.entropy_coefficient != 0.0
    keep_all = in_loss or algorithm.selection is not None
    return [row for row, each in enumerate(minibatch.columns["advantages"]) if keep_all or bool(each.any())]


def _weighted(
    minibatch: Experience, name: str, aggregation: Aggregation, constant_length: float | None = None
) -> Experience:
    lengths_B = torch.tensor([sum(sample.action_mask) for sample in minibatch.samples])
    weights_B = sample_weights(aggregation, lengths_B, constant_length).float()
    column = [weight.expand(len(sample.token_ids)) for weight, sample in zip(weights_B, minibatch.samples, strict=True)]
    return minibatch.with_column(name, column)


def _scatter_to_tokens(dense: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """[B][trained tokens] -> [B][L], zero elsewhere."""
    rows = []
    for values, mask_L in zip(dense, masks, strict=True):
        row_L = torch.zeros(len(mask_L), dtype=values.dtype)
        row_L[mask_L] = values
        rows.append(row_L)
    return rows
