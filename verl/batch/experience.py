"""Completes a batch for the update: advantages, token selection, loss weights.

An episode of several segments has several samples, but one reward and one advantage estimate: estimators and loss
weights see its trained tokens as one sequence, in the order of its samples. What lies between two segments (a summary,
an edited context) is a transition of the environment, as an observation between two turns is: SUPO (arXiv 2510.06727)
derives the policy gradient of such episodes, with one group-relative advantage for all samples of an episode. So GAE
continues from the last token of a segment to the value of the next one's first state, and an episode does not gain
weight in a group's statistics or in the loss by its number of segments.

Importance ratios of whole sequences (GSPO, GMPO, the sequence levels of the correction) are those of a sample, the
sequence that the engine sampled from one context.

Shape legend: B samples, E episodes, A trained tokens of all samples, L trained tokens of one episode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl.algorithms.aggregate import episode_weights
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.cross_entropy import mean_weights
from verl.algorithms.distillation import teacher_advantages
from verl.algorithms.estimators.advantage import AdvantageInputs, Turns
from verl.algorithms.kl import apply_kl_penalty
from verl.algorithms.losses.policy_loss import SelectionInputs
from verl.algorithms.names import Aggregation, KLPlacement, OldLogprobs
from verl.batch.token_batch import Bools, Floats, Ints, TokenBatch


def with_advantages(batch: TokenBatch, algorithm: Algorithm) -> TokenBatch:
    """The batch with the advantages of the algorithm, and the critic's targets if there is a critic.

    The estimator sees the rewards of trained tokens only, so no mask can leak into it, minus the KL penalty if it is in
    the reward. A teacher's advantages are added to the estimator's. Without old log-probs, which may not be needed
    before the update, penalty and teacher's advantages use the engine's.
    """
    assert batch.rewards is not None
    rewards_A = torch.from_numpy(batch.rewards)
    if algorithm.kl.placement is KLPlacement.REWARD:
        assert batch.ref_logprobs is not None
        policy_A, ref_A = torch.from_numpy(sampling_logprobs(batch)), torch.from_numpy(batch.ref_logprobs)
        rewards_A = apply_kl_penalty(rewards_A, policy_A, ref_A, algorithm.kl.coefficient, algorithm.kl.estimator)
    baselines = batch.baselines if algorithm.greedy_baseline else None
    first = batch.episode_bounds[:-1]
    inputs = AdvantageInputs(
        per_episode(rewards_A, batch),
        torch.from_numpy(batch.groups[first]),
        None if batch.values is None else per_episode(torch.from_numpy(batch.values), batch),
        None if baselines is None else torch.from_numpy(baselines[first]),
        turns_of(batch) if algorithm.needs_turns else None,
        {} if batch.parts is None else _by_name(batch.parts[first]),
    )
    estimate = algorithm.advantage(inputs)
    advantages = _flat(estimate.advantages)
    if algorithm.teacher_in_advantages:
        advantages = advantages + algorithm.teacher_weight * distilled(batch)
    returns = None if batch.values is None or estimate.returns is None else _flat(estimate.returns)
    whitening = None if estimate.whitening is None else (estimate.whitening.mean, estimate.whitening.std)
    return replace(batch, advantages=advantages, returns=returns, whitening=whitening)


def distilled(batch: TokenBatch) -> Floats:
    """[A] the teacher's advantages, by the log-probs of the policy that sampled."""
    assert batch.teacher_logprobs is not None and batch.rollout_logprobs is not None
    columns = (sampling_logprobs(batch), batch.teacher_logprobs, ~np.isnan(batch.rollout_logprobs))
    advantages: Floats = teacher_advantages(*map(torch.from_numpy, columns)).numpy()
    return advantages


def _by_name(parts: npt.NDArray[np.void]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(parts[name].copy()) for name in parts.dtype.names or ()}


def sampling_logprobs(batch: TokenBatch) -> Floats:
    """[A] log-probs of the policy that sampled the tokens: the old ones if known, else the engine's."""
    logprobs = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    assert logprobs is not None
    return logprobs


def per_episode(values_A: Tensor, batch: TokenBatch) -> list[Tensor]:
    """[A] -> [E][L], as views."""
    return list(values_A.split(_num_trained(batch).tolist()))


def _num_trained(batch: TokenBatch) -> Ints:
    """[E] trained tokens of each episode."""
    return np.add.reduceat(batch.num_trained, batch.episode_bounds[:-1])


def _flat(by_episode: list[Tensor]) -> Floats:
    """[E][L] -> [A]"""
    return torch.cat(by_episode).numpy()


def turns_of(batch: TokenBatch) -> list[Turns]:
    """[E] the assistant turns of every episode: contiguous trained tokens, and the state in which each was sampled.

    A state is the prompt group and the observation tokens between a turn and the previous one of its segment; in a
    segment's first turn, its whole context.
    """
    states: dict[tuple[int, bytes], int] = {}
    ranges = [slice(low, high) for low, high in pairwise(batch.bounds.tokens.tolist())]
    samples = zip(ranges, batch.groups.tolist(), strict=True)
    turns = [_turns(batch.token_ids[each], batch.action_mask[each], group, states) for each, group in samples]
    return [_joined_turns(turns[low:high]) for low, high in pairwise(batch.episode_bounds.tolist())]


def _joined_turns(samples: list[Turns]) -> Turns:
    """The turns of an episode's samples, numbered through."""
    if len(samples) == 1:
        return samples[0]
    first = np.cumsum([0, *(len(each.state_N) for each in samples)]).tolist()
    turn_L = torch.cat([each.turn_L + offset for each, offset in zip(samples, first, strict=False)])
    return Turns(turn_L, torch.cat([each.state_N for each in samples]))


def _turns(token_ids: Ints, mask: Bools, group: int, states: dict[tuple[int, bytes], int]) -> Turns:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]  # bounds of the turns
    observed = zip((0, *ends.tolist()), starts.tolist(), strict=False)
    states_N = [states.setdefault((group, token_ids[low:high].tobytes()), len(states)) for low, high in observed]
    turn_L = np.repeat(np.arange(len(starts)), ends - starts)
    return Turns(torch.from_numpy(turn_L), torch.tensor(states_N, dtype=torch.long))


def policy_minibatch(
    minibatch: TokenBatch,
    algorithm: Algorithm,
    seed: int = 0,
    entropies: Callable[[TokenBatch], Floats] | None = None,
) -> TokenBatch:
    """What the policy's update computes: samples with gradient, with the weights of loss and metrics.

    Tokens are selected (clip_cov, high_entropy ..) among all trained ones, before samples without gradient are
    left out, and the denominators of the loss count all samples of the mini-batch. Metrics are means over the tokens of
    the computed samples: the trained ones, or those that the engine sampled. Others (observations) have NaN for its
    log-probs.

    seed: of the selection; entropies: [A] those of the policy, for a selection by them
    """
    if algorithm.selection is not None:
        from_engine = algorithm.old_logprobs is OldLogprobs.ROLLOUT
        logprobs = minibatch.rollout_logprobs if from_engine else minibatch.old_logprobs
        assert logprobs is not None and minibatch.advantages is not None and minibatch.rewards is not None
        inputs = SelectionInputs(
            torch.from_numpy(logprobs),
            torch.from_numpy(minibatch.advantages),
            _episode_rewards(minibatch),
            torch.Generator().manual_seed(seed),
            partial(_entropies, minibatch, entropies),
        )
        minibatch = replace(minibatch, selected=algorithm.selection(inputs).numpy())
    weighted = with_loss_weights(minibatch, algorithm.aggregation, algorithm.aggregation_length)
    weighted = with_nll_weights(weighted, algorithm)
    computed = weighted.rows(nonzero_advantage_rows(weighted, algorithm))
    assert computed.rollout_logprobs is not None
    num_trained, num_observed = len(computed.rollout_logprobs), int(np.isnan(computed.rollout_logprobs).sum())
    return replace(computed, metric_weight=_weight(num_trained), sampled_weight=_weight(num_trained - num_observed))


def _episode_rewards(minibatch: TokenBatch) -> Tensor:
    """[A] the reward of the token's episode."""
    assert minibatch.rewards is not None
    rewards = per_episode(torch.from_numpy(minibatch.rewards), minibatch)
    return torch.cat([each_L.sum().expand(len(each_L)) for each_L in rewards])


def _entropies(minibatch: TokenBatch, entropies: Callable[[TokenBatch], Floats] | None) -> Tensor:
    assert entropies is not None
    return torch.from_numpy(entropies(minibatch))


def nonzero_advantage_rows(minibatch: TokenBatch, algorithm: Algorithm) -> Ints:
    """Rows of samples with gradient: without those with zero advantages, unless the loss has a term of KL, entropy or a
    teacher. Observations have one if their cross-entropy is in the loss.

    Groups of equal rewards have zero advantages and contribute exactly zero to the loss. All rows, if tokens are
    selected among them, or advantages are deferred.
    """
    in_loss = algorithm.kl.placement is KLPlacement.LOSS or algorithm.entropy_coefficient != 0.0
    in_loss = in_loss or algorithm.teacher_top_k > 0
    in_loss = in_loss or algorithm.learns_without_advantage or algorithm.likelihood is not None
    if in_loss or algorithm.selection is not None or minibatch.advantages is None:
        return np.arange(len(minibatch))
    some = np.flatnonzero(minibatch.num_trained)  # the others take no room, so that each range ends at the next start
    nonzero: Bools = np.logical_or.reduceat(minibatch.advantages != 0.0, minibatch.bounds.trained[some])
    if algorithm.observation_coefficient:
        nonzero |= np.logical_or.reduceat(minibatch.observed, minibatch.bounds.tokens[some])
    return some[nonzero]


def with_loss_weights(
    minibatch: TokenBatch, aggregation: Aggregation, constant_length: float | None = None
) -> TokenBatch:
    """The mini-batch with loss weights, equal for all samples of an episode. constant_length: see `episode_weights`"""
    weights_E = episode_weights(aggregation, torch.from_numpy(_num_trained(minibatch)), constant_length)
    return replace(minibatch, loss_weights=weights_E.float().numpy().repeat(np.diff(minibatch.episode_bounds)))


def with_nll_weights(minibatch: TokenBatch, algorithm: Algorithm) -> TokenBatch:
    """The mini-batch with the weights of its cross-entropy, if the loss has one. The denominators count the tokens of
    all its samples."""
    if algorithm.likelihood is None and not algorithm.observation_coefficient:
        return minibatch
    observed_N = torch.from_numpy(minibatch.observed)
    weights_N = mean_weights(observed_N, algorithm.observation_coefficient)
    if algorithm.likelihood is not None:
        weights_N[torch.from_numpy(minibatch.action_mask)] = algorithm.likelihood(_episode_rewards(minibatch))
    return replace(minibatch, nll_weights=weights_N.float().numpy())


def _weight(count: int) -> float:
    """1 / count, at the precision of the losses."""
    return float(np.float32(1 / max(1, count)))
