"""The cross-entropy in the policy's loss: -log p of tokens that the policy is to hold likely, whatever their advantage.

    loss = RL + sum over kinds of tokens of coefficient * mean over these tokens of -log p

Each kind has its own mask and its own denominator, the number of its tokens in the mini-batch on all ranks; both are in
the weights of its tokens. The aggregation, the importance ratio and the off-policy correction do not apply.

    observations  what the environment returned between two turns: ECHO (Microsoft, arXiv 2605.24517)
    right tokens  of responses with a high reward: VAPO (losses/vapo.py)
"""

from collections.abc import Callable

from torch import Tensor

# [N] rewards of the tokens' episodes -> [N] weights of -log p in the loss. N: trained tokens of a mini-batch
Likelihood = Callable[[Tensor], Tensor]


def cross_entropy(logprobs_T: Tensor, weights_T: Tensor) -> Tensor:
    """[T] -log p of each token, times its weight."""
    return -logprobs_T * weights_T


def mean_weights(mask_N: Tensor, coefficient: float) -> Tensor:
    """[N] coefficient / number of tokens in the mask on those, 0 on the others: their sum of -log p is then a mean."""
    return mask_N * (coefficient / mask_N.sum().clamp(min=1))
