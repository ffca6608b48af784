"""A KL penalty in the reward: each token's reward is -beta * KL, and the last one's also the rollout's reward r.

So the estimator sees the return r - beta * sum(KL) of every rollout. Those of a group are known where all of its
rollouts are kept.

Shape legend: A trained tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.names import KLPlacement
from verl.tracking.samples import KeptSample


def is_penalized(algorithm: Algorithm, beta: float) -> bool:
    return algorithm.kl.placement is KLPlacement.REWARD and bool(beta)


def kl_of_tokens(sample: KeptSample, algorithm: Algorithm) -> npt.NDArray[np.float64]:
    """[A] by the log-probs that sampled: those before the update, or the engine's where the step had no such pass."""
    columns = sample.columns
    sampling = columns["old_logprobs"] if "old_logprobs" in columns else columns["rollout_logprobs"]
    pair = (torch.from_numpy(each.astype(np.float64)) for each in (sampling, columns["ref_logprobs"]))
    return KL_ESTIMATORS[algorithm.kl.estimator](*pair).numpy()


def penalized(
    sample: KeptSample, kept: Sequence[KeptSample], algorithm: Algorithm, beta: float
) -> list[KeptSample] | None:
    """The kept samples of the sample's group with returns r - beta * sum(KL); None if rollouts of it are not kept."""
    own = [each for each in kept if each.group == sample.group]
    sums: dict[int, float] = {}
    for each in own:
        sums[each.index] = sums.get(each.index, 0.0) + float(kl_of_tokens(each, algorithm).sum())
    if len(sums) != len(sample.group_returns) or len(own) != sum(_segments(own).values()):
        return None
    if not all(map(math.isfinite, sums.values())):  # trained tokens that the engine did not sample
        return None
    returns = [given - beta * total for given, total in zip(sample.group_returns, sums.values(), strict=True)]
    return [replace(each, reward=each.reward - beta * sums[each.index], group_returns=returns) for each in own]


def _segments(samples: Sequence[KeptSample]) -> dict[int, int]:
    """Segments that each rollout has, by its index."""
    return {each.index: each.num_segments for each in samples}
