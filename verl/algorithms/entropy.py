"""Adaptive entropy control (Skywork-OR1, arXiv 2505.22312): an entropy bonus where the entropy is below a target."""

from dataclasses import dataclass


@dataclass
class AdaptiveEntropy:
    """The coefficient of the entropy bonus, controlled toward a target.

    coefficient += change if entropy <= target else -change, within [0, maximum]
    bonus = coefficient if entropy <= target else 0

    The authors apply both to the step of the entropy; here it is known after the update, so they apply to the next one,
    as in TRL, whose `change` and `maximum` these are.
    """

    target: float  # nats
    coefficient: float = 0.0
    bonus: float = 0.0  # the coefficient in the loss of the next step
    change: float = 0.005
    maximum: float = 1.0

    def observe(self, entropy: float) -> None:
        """entropy: a step's mean over tokens"""
        below = entropy <= self.target
        change = self.change if below else -self.change
        self.coefficient = min(max(self.coefficient + change, 0.0), self.maximum)
        self.bonus = self.coefficient if below else 0.0
