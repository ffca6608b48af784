"""Direct preference optimization (DPO, arXiv 2305.18290), the loss that TRL calls `sigmoid`.

    margin = beta * ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected)))
    loss = mean over pairs of -log sigmoid(margin)

Its gradient is that of a weighted sum of log-probs, whose weights do not carry a gradient:

    -(beta / P) * sum over pairs of sigmoid(-margin) * (log p(chosen) - log p(rejected))

So an update is one of supervised fine-tuning, with a weight per response, which is negative for rejected ones. The
weights are computed before the split into packs and ranks, which therefore cannot change the loss.

Shape legend: P pairs, B = 2 P responses: the chosen one of each pair, then the rejected one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, slots=True)
class Preferences:
    """DPO's view of some pairs. Implicit rewards are beta * (log p - log p_ref), sums over a response's tokens."""

    chosen_P: Tensor  # implicit rewards of the chosen responses
    rejected_P: Tensor
    beta: float

    def margins(self) -> Tensor:
        """[P]"""
        return self.chosen_P - self.rejected_P

    @property
    def loss(self) -> float:
        return float(-logsigmoid(self.margins()).mean())

    def weights(self) -> Tensor:
        """[B] of each response's tokens in the sum of -log p whose gradient is that of the loss."""
        weight_P = self.beta * torch.sigmoid(-self.margins()) / len(self.chosen_P)
        return torch.stack([weight_P, -weight_P], dim=1).flatten()

    def metrics(self) -> dict[str, float]:
        """Means over the pairs; accuracy: the share with a positive margin."""
        return {
            "loss": self.loss,
            "margin": float(self.margins().mean()),
            "accuracy": float((self.margins() > 0).double().mean()),
            "chosen": float(self.chosen_P.mean()),
            "rejected": float(self.rejected_P.mean()),
        }


def preferences(logprobs_B: Tensor, ref_logprobs_B: Tensor, beta: float) -> Preferences:
    """logprobs_B, ref_logprobs_B: of whole responses, by the policy and by the reference"""
    chosen_P, rejected_P = (beta * (logprobs_B - ref_logprobs_B)).view(-1, 2).unbind(1)
    return Preferences(chosen_P, rejected_P, beta)
