"""The `Algorithm` value: advantage estimator, policy loss, loss aggregation, KL term and rollout requirements."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from verl.algorithms.aggregate import Aggregation
from verl.algorithms.correction import Correction
from verl.algorithms.estimators.advantage import AdvantageEstimator
from verl.algorithms.filters import Filter
from verl.algorithms.losses.policy_loss import PolicyLoss
from verl.algorithms.overlong import Overlong


class KLPlacement(StrEnum):
    """Where the KL penalty to the reference applies. NONE builds no reference model."""

    NONE = "none"
    REWARD = "reward"
    LOSS = "loss"


class OldLogprobs(StrEnum):
    """Source of the old log-probs in the policy ratio.

    TRAINER: recomputed by the trainer before the step's first update; one more forward pass over the batch, unless the
    step has a single update. ROLLOUT: the rollout engine's; no extra pass, and the ratio corrects for the mismatch.
    """

    TRAINER = "trainer"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True)
class KLTerm:
    """The KL penalty to the reference policy: placement, estimator and coefficient."""

    placement: KLPlacement = KLPlacement.NONE
    estimator: str = "k1"  # a key of KL_ESTIMATORS
    coefficient: float = 0.0

    def __post_init__(self) -> None:
        assert (self.placement is KLPlacement.NONE) == (self.coefficient == 0.0)


# (log-probs [N] before the update, advantages [N], generator) -> [N] bool: the trained tokens of a mini-batch that the
# policy loss treats differently. Selected before the split into packs, so that the split cannot change it.
TokenSelection = Callable[[Tensor, Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm. A preset file holds one such value; overrides replace its fields."""

    name: str
    paper: str
    advantage: AdvantageEstimator
    policy_loss: PolicyLoss
    aggregation: Aggregation
    aggregation_length: float | None = None  # tokens; the divisor of seq-mean-token-sum-norm, needed by it only
    old_logprobs: OldLogprobs = OldLogprobs.TRAINER
    correction: Correction | None = None  # off-policy correction of the engine-trainer mismatch
    kl: KLTerm = KLTerm()
    entropy_coefficient: float = 0.0
    needs_critic: bool = False
    needs_group: bool = True  # whether advantages need two or more responses to a prompt
    greedy_baseline: bool = False  # one extra greedy response per prompt, not trained on: AdvantageInputs.baseline_B
    needs_turns: bool = False  # AdvantageInputs.turns
    takes_turn_rewards: bool = False  # whether its advantage uses per-turn rewards
    selection: TokenSelection | None = None  # sets LossInputs.selected_T
    filters: tuple[Filter, ...] = ()  # rejection sampling: which rollouts are trained on
    max_resample_rounds: int = 1  # rounds of prompts that a step may draw until enough groups pass the filters
    overlong: Overlong | None = None  # length penalty, applied after the filters

    def __post_init__(self) -> None:
        assert self.correction is None or self.old_logprobs is OldLogprobs.TRAINER, "rollout ratio corrects already"
