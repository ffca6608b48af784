"""The named choices of algorithms, without torch: the configuration validates its values by them."""

from enum import StrEnum


class Aggregation(StrEnum):
    """The aggregation modes (names as in veRL)."""

    TOKEN_MEAN = "token-mean"  # every trained token has the same weight (DAPO, ToolRL)
    TOKEN_SUM = "token-sum"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"  # episodes weigh in proportion to their length
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"  # every episode has the same weight (GRPO's paper)
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"  # token sums divided by a constant length (Dr.GRPO)


class KLPlacement(StrEnum):
    """Where the KL penalty to the reference applies. NONE builds no reference model."""

    NONE = "none"
    REWARD = "reward"
    LOSS = "loss"


class KLEstimate(StrEnum):
    """The KL estimators; verl.algorithms.kl has their formulas."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    ABS = "abs"
    UNBIASED_K3 = "unbiased_k3"


class OldLogprobs(StrEnum):
    """Source of the old log-probs in the policy ratio.

    TRAINER: recomputed by the trainer before the step's first update; one more forward pass over the batch, unless the
    step has a single update. ROLLOUT: the rollout engine's; no extra pass, and the ratio corrects for the mismatch.
    """

    TRAINER = "trainer"
    ROLLOUT = "rollout"


class Level(StrEnum):
    """The unit that a ratio refers to.

    For rejection only: GEOMETRIC, the geometric mean of a sample's ratios, and BINARY_KL, e to the power of the token's
    KL divergence, which is 1 for equal policies, too.
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"
    BINARY_KL = "binary_kl"
