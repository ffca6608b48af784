"""Predicts the share of zero-variance groups of one size from groups of another size.

Group-relative advantages (GRPO) are all zero if the rewards of a group are equal. For a prompt whose reward is v with
probability p_v, a group of n has that probability sum_v p_v^n; for binary rewards with success rate p, p^n + (1-p)^n.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Literal

import numpy as np
from scipy.special import betaln

_MEANS = 1 / (1 + np.exp(-np.linspace(-7, 7, 71)))
_STRENGTHS = np.geomspace(0.03, 300, 41)  # small: a prompt's rewards always or never agree; large: prompts are similar


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted share of zero-variance groups of size `n`, and the method."""

    n: int
    share: float
    how: Literal["subsets", "beta"]


def predict(groups: Sequence[Sequence[float]], n: int) -> Prediction:
    """The share of zero-variance groups of size `n`, from groups [P][G] of size G.

    n <= G, "subsets": the probability that n of a group's rewards, drawn without replacement, are equal. Unbiased.

    n > G, "beta": sum_v p_v^n is the probability that the n - 1 others agree with a rollout. The rate of agreement is
    modeled per prompt by a beta distribution, fitted to how many of the G - 1 others agree with each observed rollout;
    so a prompt whose rewards were all equal in G rollouts may have a different one in n.
    """
    size = len(groups[0])
    if n <= size:
        return Prediction(n, fmean(_subset_agreement(each, n) for each in groups), "subsets")
    agreeing = Counter(count - 1 for each in groups for count in Counter(each).values() for _ in range(count))
    a, b = fit_beta(agreeing, size - 1)
    share = sum(
        times * np.exp(betaln(a + k + n - 1, b + size - 1 - k) - betaln(a + k, b + size - 1 - k))
        for k, times in agreeing.items()
    )
    observed = fmean(_subset_agreement(each, size) for each in groups)  # an upper bound for larger groups
    return Prediction(n, min(observed, float(share) / agreeing.total()), "beta")


def _subset_agreement(rewards: Sequence[float], n: int) -> float:
    return sum(comb(count, n) for count in Counter(rewards).values()) / comb(len(rewards), n)


def fit_beta(successes: Counter[int], size: int) -> tuple[float, float]:
    """Maximum likelihood (a, b) of a beta-binomial for these counts of successes in `size` trials, on a grid."""
    a = (_MEANS[:, None] * _STRENGTHS).ravel()
    b = ((1 - _MEANS)[:, None] * _STRENGTHS).ravel()
    likelihood = sum(times * (betaln(a + k, b + size - k) - betaln(a, b)) for k, times in successes.items())
    best = int(np.argmax(likelihood))
    return float(a[best]), float(b[best])
