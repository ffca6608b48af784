"""The optimizer and its learning-rate schedule."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW with decoupled weight decay; linear warm-up, then a constant or cosine learning rate."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    total_steps: int = 0  # end of the cosine; unused by "constant"
    min_lr_ratio: float = 0.0  # final LR as a fraction of lr (cosine)


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> tuple[AdamW, LambdaLR]:
    optimizer = AdamW(parameters, settings.lr, settings.betas, weight_decay=settings.weight_decay, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate_factor(settings, step))


def learning_rate_factor(settings: OptimizerSettings, step: int) -> float:
    """Multiplier of lr for the update after `step` updates; the first warm-up step is not zero."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    span = max(1, settings.total_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / span)
    return settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
