"""How many groups of a given size would teach nothing, told from groups of another size.

GRPO and its kin learn from differences within a group of rollouts: one whose rewards are all equal has no signal. Of a
prompt whose rewards take the value v with probability p_v that is the chance sum_v p_v^n; where a response is right
with probability p, or else wrong, p^n + (1-p)^n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Literal

import numpy as np
from scipy.special import betaln

_MEANS = 1 / (1 + np.exp(-np.linspace(-7, 7, 71)))
_STRENGTHS = np.geomspace(0.03, 300, 41)  # small: a prompt's rewards always agree, or never; large: prompts are alike


@dataclass(frozen=True, slots=True)
class Prediction:
    """The share of groups of `n` whose rewards would all be equal, and how that is known."""

    n: int
    share: float
    how: Literal["subsets", "beta"]


def predict(groups: Sequence[Sequence[float]], n: int) -> Prediction:
    """What share of groups of `n` would have no signal, from groups [P][G] of one size G.

    n <= G, "subsets": the chance that n of a group's rewards, drawn without putting back, are equal. Unbiased.

    n > G, "beta": sum_v p_v^n is the chance that the n - 1 others agree with a rollout. How often others agree differs
    from prompt to prompt like a beta distribution, fitted to how many of the G - 1 others agree with each rollout that
    was seen; so a prompt whose rewards were all equal in G rollouts may have another in n.
    """
    size = len(groups[0])
    if n <= size:
        return Prediction(n, fmean(_of_subsets(each, n) for each in groups), "subsets")
    agreeing = Counter(count - 1 for each in groups for count in Counter(each).values() for _ in range(count))
    a, b = fit_beta(agreeing, size - 1)
    share = sum(
        times * np.exp(betaln(a + k + n - 1, b + size - 1 - k) - betaln(a + k, b + size - 1 - k))
        for k, times in agreeing.items()
    )
    observed = fmean(_of_subsets(each, size) for each in groups)  # a larger group cannot have a signal less often
    return Prediction(n, min(observed, float(share) / agreeing.total()), "beta")


def _of_subsets(rewards: Sequence[float], n: int) -> float:
    return sum(comb(count, n) for count in Counter(rewards).values()) / comb(len(rewards), n)


def fit_beta(successes: Counter[int], size: int) -> tuple[float, float]:
    """(a, b) of the beta-binomial under which these counts of successes in `size` trials are likeliest, on a grid."""
    a = (_MEANS[:, None] * _STRENGTHS).ravel()
    b = ((1 - _MEANS)[:, None] * _STRENGTHS).ravel()
    likelihood = sum(times * (betaln(a + k, b + size - k) - betaln(a, b)) for k, times in successes.items())
    best = int(np.argmax(likelihood))
    return float(a[best]), float(b[best])
