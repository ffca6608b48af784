"""What an algorithm is: a value made of an advantage, a policy loss, an aggregation and the place of the KL term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from verl.algorithms.advantage import AdvantageEstimator
from verl.algorithms.aggregate import Aggregation
from verl.algorithms.correction import Correction
from verl.algorithms.filters import Filter
from verl.algorithms.overlong import Overlong
from verl.algorithms.policy_loss import PolicyLoss


class KLPlacement(StrEnum):
    """The one place where divergence from the reference is paid for. No reference model is built for NONE."""

    NONE = "none"
    REWARD = "reward"
    LOSS = "loss"


class OldLogprobs(StrEnum):
    """Whose log-probs of the sampled tokens the policy's ratio is measured from.

    TRAINER: the training engine's before the step's first update; another pass over the batch, unless the step has one
    update alone. ROLLOUT: those the engine sampled with; no pass, and the ratio corrects for the difference of the two.
    """

    TRAINER = "trainer"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True)
class KLTerm:
    """Where, how and how strongly the policy is held to the reference."""

    placement: KLPlacement = KLPlacement.NONE
    estimator: str = "k1"  # of KL_ESTIMATORS
    coefficient: float = 0.0

    def __post_init__(self) -> None:
        assert (self.placement is KLPlacement.NONE) == (self.coefficient == 0.0)


# (log-probs [N] before the update, advantages [N], generator) -> [N] bool: which of all trained tokens of a mini-batch
# the policy loss treats apart. Chosen before the cut into packs, so that the cut cannot change it.
TokenSelection = Callable[[Tensor, Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm. A preset file holds one such value; overrides replace its fields."""

    name: str
    paper: str
    advantage: AdvantageEstimator
    policy_loss: PolicyLoss
    aggregation: Aggregation
    aggregation_length: float | None = None  # tokens; the divisor of seq-mean-token-sum-norm, needed by it alone
    old_logprobs: OldLogprobs = OldLogprobs.TRAINER
    correction: Correction | None = None  # for the engine's difference from the trainer
    kl: KLTerm = KLTerm()
    entropy_coefficient: float = 0.0
    needs_critic: bool = False
    needs_group: bool = True  # whether a prompt's only response teaches nothing
    greedy_baseline: bool = False  # one more response to each prompt, greedy and not trained on, as Rollouts.baseline_B
    needs_turns: bool = False  # Rollouts.turns
    takes_turn_rewards: bool = False  # whether its advantage uses rewards of single turns
    selection: TokenSelection | None = None  # makes LossInputs.selected_T
    filters: tuple[Filter, ...] = ()  # which rollouts are trained on
    max_resample_rounds: int = 1  # times that a step may draw prompts until the filters have left it enough
    overlong: Overlong | None = None  # what long responses are penalised by, after the filters

    def __post_init__(self) -> None:
        assert self.correction is None or self.old_logprobs is OldLogprobs.TRAINER, "the ratio would correct twice"
