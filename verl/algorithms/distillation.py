"""On-policy distillation: a teacher's log-probs of tokens that the policy sampled, as advantages.

Shape legend: T tokens.
"""

import torch
from torch import Tensor


def teacher_advantages(logprobs_T: Tensor, teacher_logprobs_T: Tensor, sampled_T: Tensor) -> Tensor:
    """[T] log p_teacher - log p: minus the one-sample estimate of the KL divergence from the policy to the teacher.

    0 where the policy did not sample the token (observations that are trained, too): there it estimates nothing.
    """
    return torch.where(sampled_T, teacher_logprobs_T - logprobs_T, 0.0)
