"""GDPO, group reward-decoupled normalization (NVIDIA, arXiv 2601.05242): each part of the reward has its own scale.

    A_k = (r_k - mean(group)) / (std(group) + 1e-6) for each part k of the reward
    A = sum over parts of weight_k * A_k, whitened over all trained tokens of the batch
    loss = mean over tokens of clip(A, p / p_old)

In GRPO the part with the largest spread decides: ToolRL's correctness (-3 to 3) hides its format (0 or 1). The authors
train ToolRL's reward with it. `options.parts` names the parts of the score, all by default; `options.weights` has a
number for each. What else is in the reward (shaping, penalties, KL, per-turn rewards) is not seen. A reward without
parts is one part. veRL whitens over tokens, too; TRL over responses, with 1e-4 in both divisions.
"""

import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import (
    AdvantageInputs,
    Advantages,
    apply_per_group,
    group_normalized,
    whitened,
)
from verl.errors import ConfigError
from verl.registry import nearest


def gdpo(rollouts: AdvantageInputs, parts: list[str] | None = None, weights: list[float] | None = None) -> Advantages:
    """Raises ConfigError for a part that no score has, and for another number of weights."""
    found = dict(rollouts.parts) or {"total": rollouts.rewards}
    names = list(found) if parts is None else parts
    if unknown := [name for name in names if name not in found]:
        raise ConfigError(
            f"algorithm.options.parts: no score has the part {unknown[0]!r}; {nearest(unknown[0], list(found))}"
        )
    if weights is not None and len(weights) != len(names):
        raise ConfigError(f"algorithm.options.weights must have a number for each of {', '.join(names)}; got {weights}")
    weights_K = torch.tensor([1.0] * len(names) if weights is None else weights)
    parts_KB = torch.stack([apply_per_group(rollouts.group_B, group_normalized, found[name]) for name in names])
    return whitened(rollouts.broadcast_to_tokens(weights_K.to(parts_KB) @ parts_KB))


GDPO = Algorithm(name="gdpo", paper="arXiv 2601.05242", advantage=gdpo)
