"""ReMax (arXiv 2310.10505): REINFORCE with the reward of the greedy response to the same prompt as baseline.

    A_t = sum of the rewards from token t on - r(greedy response)
    loss = mean over responses of the sum over their tokens of -A log p

The greedy response is generated in addition and not trained on; its reward includes no KL. The authors use one sampled
response per prompt and KL in the reward; 0.001 is ToolRL's coefficient. veRL combines the same advantage with PPO's
clip and a token mean, unlike the paper.
"""

from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, returns_to_go
from verl.algorithms.losses.policy_loss import policy_gradient
from verl.algorithms.names import Aggregation, KLPlacement


def remax(rollouts: AdvantageInputs) -> Advantages:
    """Undiscounted return from each token on, minus the reward of the greedy response."""
    assert rollouts.baseline_B is not None, "ReMax needs a greedy response to each prompt"
    pairs = zip(rollouts.token_rewards, rollouts.baseline_B, strict=True)
    return Advantages([returns_to_go(rewards_L, 1.0) - baseline for rewards_L, baseline in pairs])


REMAX = Algorithm(
    name="remax",
    paper="arXiv 2310.10505",
    advantage=remax,
    by_group=True,
    policy_loss=policy_gradient,
    aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM,
    kl=KLTerm(KLPlacement.REWARD, "k1", 0.001),
    needs_group=False,
    greedy_baseline=True,
)
