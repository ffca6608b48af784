"""The `Algorithm` value: advantage estimator, policy loss, loss aggregation, KL term and rollout requirements."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from verl.algorithms import ALGORITHMS
from verl.algorithms.correction import Correction
from verl.algorithms.cross_entropy import Likelihood
from verl.algorithms.estimators.advantage import AdvantageEstimator
from verl.algorithms.filters import Filter
from verl.algorithms.losses.policy_loss import PolicyLoss, SelectionInputs, clipped
from verl.algorithms.names import Aggregation, KLPlacement, OldLogprobs
from verl.algorithms.overlong import Overlong
from verl.errors import ConfigError
from verl.registry import resolve

PPO_CLIP = partial(clipped, clip_low=0.2, clip_high=0.2)


@dataclass(frozen=True, slots=True)
class KLTerm:
    """The KL penalty to the reference policy: placement, estimator and coefficient."""

    placement: KLPlacement = KLPlacement.NONE
    estimator: str = "k1"  # a key of KL_ESTIMATORS
    coefficient: float = 0.0

    def __post_init__(self) -> None:
        assert (self.placement is KLPlacement.NONE) == (self.coefficient == 0.0)


# -> [N] the trained tokens of a mini-batch that the policy loss treats differently: True, or a weight that is not 0.
# Selected before the split into packs, so that the split cannot change it.
TokenSelection = Callable[[SelectionInputs], Tensor]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm. A preset file holds one such value; overrides replace its fields."""

    name: str
    paper: str
    advantage: AdvantageEstimator
    policy_loss: PolicyLoss = PPO_CLIP
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    aggregation_length: float | None = None  # tokens; the divisor of seq-mean-token-sum-norm, needed by it only
    old_logprobs: OldLogprobs = OldLogprobs.TRAINER
    correction: Correction | None = None  # off-policy correction of the engine-trainer mismatch
    kl: KLTerm = KLTerm()
    teacher_weight: float = 0.0  # of a teacher's advantages or loss (distillation.py); 0: there is no teacher
    teacher_top_k: int = 0  # the teacher's likeliest tokens in its loss; 0: it has advantages
    likelihood: Likelihood | None = None  # cross-entropy on trained tokens (cross_entropy.py)
    observation_coefficient: float = 0.0  # of the cross-entropy on observation tokens; 0: there is none
    entropy_coefficient: float = 0.0
    entropy_target: float | None = None  # nats; toward it the coefficient adapts (entropy.py). None: it is fixed
    needs_critic: bool = False
    needs_group: bool = True  # whether advantages need two or more responses to a prompt
    greedy_baseline: bool = False  # one extra greedy response per prompt, not trained on: AdvantageInputs.baseline_B
    needs_turns: bool = False  # AdvantageInputs.turns
    takes_turn_rewards: bool = False  # whether its advantage uses per-turn rewards
    learns_without_advantage: bool = False  # whether its loss has a gradient on samples without advantages
    by_group: bool = False  # whether the advantages of a group depend on that group alone
    selection: TokenSelection | None = None  # sets LossInputs.selected_T
    filters: tuple[Filter, ...] = ()  # rejection sampling: which rollouts are trained on
    max_resample_rounds: int = 1  # rounds of prompts that a step may draw until enough groups pass the filters
    overlong: Overlong | None = None  # length penalty, applied after the filters

    @property
    def logprobs_in_advantages(self) -> bool:
        """Whether advantages need log-probs of the policy: with KL in the reward, and with those of a teacher."""
        return self.kl.placement is KLPlacement.REWARD or self.teacher_in_advantages

    @property
    def teacher_in_advantages(self) -> bool:
        return self.teacher_weight != 0.0 and not self.teacher_top_k

    def old_pass_share(self, minibatches: int, epochs: int) -> float:
        """Share of a step's samples whose old log-probs the trainer computes in a pass of its own.

        Those of the first mini-batch are the log-probs of its update, unless a later epoch needs them again, or token
        selection or the advantages need them before. If these need log-probs, those by group are estimated in the
        update, too. With ROLLOUT all are the engine's.
        """
        if self.old_logprobs is OldLogprobs.ROLLOUT:
            return 0.0
        before_update = (self.logprobs_in_advantages and not self.by_group) or self.selection is not None
        return 1.0 if before_update or epochs > 1 else 1.0 - 1.0 / minibatches

    def __post_init__(self) -> None:
        assert self.correction is None or self.old_logprobs is OldLogprobs.TRAINER, "rollout ratio corrects already"


def load_preset(name: str) -> Algorithm:
    """The preset `name`, or an own one: module:attribute or file.py:attribute. Raises ConfigError if there is none."""
    found = resolve("algorithm", name, ALGORITHMS)
    if not isinstance(found, Algorithm):
        raise ConfigError(f"algorithm.name={name!r} is not an Algorithm but a {type(found).__name__}")
    return found
