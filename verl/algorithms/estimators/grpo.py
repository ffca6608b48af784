"""GRPO, group relative policy optimization (DeepSeekMath, arXiv 2402.03300).

    A = (r - mean(group)) / (std(group) + 1e-6), the same on every token of a response
    loss = mean over responses of the mean over their tokens of [clip(A, p / p_old) + 0.04 * k3(p, p_ref)]

The authors use 64 responses per prompt, one update per batch, and KL in the loss at 0.04. Other implementations: veRL
and, by default, TRL take the mean over all tokens instead of responses first; all use the unbiased std, but add 1e-4
(TRL) or 1e-9 (OpenRLHF) to it. The aggregation here is the paper's.
"""

from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.names import Aggregation, KLPlacement

GRPO = Algorithm(
    name="grpo",
    paper="arXiv 2402.03300",
    advantage=grpo,
    by_group=True,
    aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
    kl=KLTerm(KLPlacement.LOSS, "k3", 0.04),
)
