"""OPSM, off-policy sequence masking, with the unbiased KL estimate (DeepSeek-V3.2, arXiv 2512.02556).

    A = r - mean(group);  dropped: samples with A < 0 and mean over their tokens of log(p_old / p) > 0.5
    loss = mean over responses of the mean over their tokens of [clip(A, p / p_old), 0 where dropped,
           + 0.001 * p / p_old * k3(p, p_ref)]

Bad responses that the policy has moved away from are not pushed further. p_old is the policy that has sampled, with the
engine's log-probs, so the mismatch of engine and trainer counts, too. The ratio carries a gradient: that of k3 alone is
the gradient of another divergence. The authors name neither threshold nor coefficient: 0.5 is TRL's example.
"""

from functools import partial

from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.dr_grpo import group_centered
from verl.algorithms.losses.policy_loss import LossInputs, TokenLoss, clipped, log_ratios, sample_means, token_loss
from verl.algorithms.names import Aggregation, KLEstimate, KLPlacement, OldLogprobs


def clipped_unless_off_policy(
    inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, max_divergence: float = 0.5
) -> TokenLoss:
    """PPO's clip; a sample's tokens of negative advantage get loss 0 if its mean log(p_old / p) is above the bound."""
    token = clipped(inputs, clip_low, clip_high)
    divergence_T = sample_means(-log_ratios(inputs).detach(), inputs.sample_T)
    dropped_T = (inputs.advantages_T < 0) & (divergence_T > max_divergence)
    return token_loss(token.loss_T * ~dropped_T, token.ratio_T, **token.metrics_T, off_policy_fraction=dropped_T)


OPSM = Algorithm(
    name="opsm",
    paper="arXiv 2512.02556",
    advantage=group_centered,
    by_group=True,
    policy_loss=partial(clipped_unless_off_policy, max_divergence=0.5),
    aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
    kl=KLTerm(KLPlacement.LOSS, KLEstimate.UNBIASED_K3, 0.001),
    old_logprobs=OldLogprobs.ROLLOUT,
)
