"""On-policy distillation: a teacher's log-probs of tokens that the policy sampled, as advantages; and the KL divergence
over the teacher's likeliest tokens, as a loss.

Shape legend: T tokens, K the teacher's likeliest ones in place of each.
"""

import torch
from torch import Tensor

_REST = 1e-8


def teacher_advantages(logprobs_T: Tensor, teacher_logprobs_T: Tensor, sampled_T: Tensor) -> Tensor:
    """[T] log p_teacher - log p: minus the one-sample estimate of the KL divergence from the policy to the teacher.

    0 where the policy did not sample the token (observations that are trained, too): there it estimates nothing.
    """
    return torch.where(sampled_T, teacher_logprobs_T - logprobs_T, 0.0)


def top_divergence(logprobs_TK: Tensor, teacher_logprobs_TK: Tensor) -> Tensor:
    """[T] KL(p, p_teacher) of K + 1 events: each of the teacher's K likeliest tokens, and "another one".

    sum over k of p_k log(p_k / q_k), plus p_rest log(p_rest / q_rest) with p_rest = 1 - sum of p_k

    It bounds that of the whole distributions from below, and is equal to it if K is the vocabulary. Without the rest,
    the policy could lower it by moving probability to tokens that the teacher does not list. 1e-8 is added to p_rest
    and q_rest within the logarithm.
    """
    rest_T, teacher_rest_T = (
        (1.0 - each_TK.exp().sum(-1)).clamp(min=0.0) for each_TK in (logprobs_TK, teacher_logprobs_TK)
    )
    listed_T = (logprobs_TK.exp() * (logprobs_TK - teacher_logprobs_TK)).sum(-1)
    return listed_T + rest_T * ((rest_T + _REST) / (teacher_rest_T + _REST)).log()
