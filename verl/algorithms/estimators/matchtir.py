"""MatchTIR's advantages (arXiv 2601.10712): the mean of a rollout's and of each of its turns'.

    A = (1 - w) * A_rollout + w * A_turn;  w = 1/2
    A_rollout = (R - mean(group)) / (std(group) + 1e-6), R = sum of r_j over all turns
    A_turn = the same for R_j, among the j-th turns of the group;  R_j = sum of gamma^(k - j) r_k over turns k >= j
    loss = mean over tokens of clip(A, p / p_old)

r_j is the environment's reward for turn j (`StepResult.reward`); the last turn's includes the episode reward. gamma is
0.9 in the authors' code. A turn that no other rollout reached has A_turn = 0; there it keeps R_j. With w = 1 the
discounted returns of turns count alone, as in GTPO (arXiv 2511.14846). `algorithm.adv_estimator=matchtir` gives turn
rewards to any other algorithm. The authors' turn rewards, from a matching with gold calls, are not part of it.
"""

from functools import partial

import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import (
    AdvantageInputs,
    Advantages,
    apply_per_group,
    compared,
    grpo,
    turn_returns,
)


def by_turn_and_rollout(rollouts: AdvantageInputs, gamma: float = 0.9, turn_weight: float = 0.5) -> Advantages:
    """Advantages of turns among those with the same number in their group, and of whole rollouts."""
    assert rollouts.turns is not None
    returns = [turn_returns(*each, gamma) for each in zip(rollouts.token_rewards, rollouts.turns, strict=True)]
    counts = [len(each) for each in returns]
    number_N = torch.cat([torch.arange(count) for count in counts])
    key_N = rollouts.group_B.repeat_interleave(torch.tensor(counts)) * max(counts) + number_N
    by_turn = apply_per_group(key_N, compared, torch.cat(returns)).split(counts)
    samples = zip(grpo(rollouts).advantages, by_turn, rollouts.turns, strict=True)
    return Advantages(
        [(1.0 - turn_weight) * whole_L + turn_weight * each_N[turns.turn_L] for whole_L, each_N, turns in samples]
    )


MATCHTIR = Algorithm(
    name="matchtir",
    paper="arXiv 2601.10712",
    advantage=partial(by_turn_and_rollout, gamma=0.9, turn_weight=0.5),
    by_group=True,
    needs_turns=True,
    takes_turn_rewards=True,
)
