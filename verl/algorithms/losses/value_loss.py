"""The critic's loss per token. Shape legend: T tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """([T] loss, [T] 1.0 where the clip was active).

    Half the maximum of two squared errors: that of the value, and that of the value clipped to within `clip` of the old
    one, as in PPO's reference code.
    """
    clipped_T = values_T.clamp(old_values_T - clip, old_values_T + clip)
    plain_T, bounded_T = (values_T - returns_T).square(), (clipped_T - returns_T).square()
    return 0.5 * torch.maximum(plain_T, bounded_T), (bounded_T > plain_T).to(values_T.dtype).detach()
