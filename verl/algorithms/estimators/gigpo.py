"""GiGPO, group-in-group policy optimization (arXiv 2505.10978): adds advantages among turns in the same state.

    A = A_episode + w * A_turn,  A_episode = (R - mean(group)) / (std(group) + 1e-6)
    A_turn = the same for R_t, among all turns of the group's episodes with the same observation
    R = sum of r_j over all turns;  R_t = sum of gamma^(j - t) r_j over turns j >= t
    loss = mean over tokens of [clip(A, p / p_old) + 0.01 * k3(p, p_ref)]

r_j is the environment's reward for turn j (`StepResult.reward`); the last turn's includes the episode reward. The
authors use w = 1, gamma = 0.95, 8 episodes per task, clip 0.2; std or 1 as divisor (`options.divide_by_std`). A state
is the observation before a turn: a group's first turns share one, and a turn with a unique state has A_turn = 0. They
rebuild the prompt for each turn with a short memory and also group similar states; here an episode is one growing
transcript, a state the observation appended to it, and only equal states form a group.
"""

from functools import partial

import torch

from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.advantage import (
    AdvantageInputs,
    Advantages,
    apply_per_group,
    compared,
    group_advantage,
    group_normalized,
    turn_returns,
)
from verl.algorithms.names import KLPlacement


def gigpo(
    rollouts: AdvantageInputs, gamma: float = 0.95, turn_weight: float = 1.0, divide_by_std: bool = True
) -> Advantages:
    """Episode-level advantages plus turn-level advantages among turns in the same state."""
    assert rollouts.turns is not None, "GiGPO needs the turns of episodes"
    returns = [turn_returns(*each, gamma) for each in zip(rollouts.token_rewards, rollouts.turns, strict=True)]
    by_state = partial(compared, divide_by_std=divide_by_std)
    state_N = torch.cat([turns.state_N for turns in rollouts.turns])
    turn_advantages = apply_per_group(state_N, by_state, torch.cat(returns)).split([len(each) for each in returns])
    episodes = group_advantage(rollouts, partial(group_normalized, divide_by_std=divide_by_std)).advantages
    samples = zip(episodes, turn_advantages, rollouts.turns, strict=True)
    return Advantages([episode_L + turn_weight * turn_N[turns.turn_L] for episode_L, turn_N, turns in samples])


GIGPO = Algorithm(
    name="gigpo",
    paper="arXiv 2505.10978",
    advantage=partial(gigpo, gamma=0.95, turn_weight=1.0, divide_by_std=True),
    by_group=True,
    kl=KLTerm(KLPlacement.LOSS, "k3", 0.01),
    needs_turns=True,
    takes_turn_rewards=True,
)
