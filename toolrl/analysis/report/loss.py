"""The weight of every token in the loss of a step, and the loss that follows: computed apart from the trainer.

The weights come from the recorded settings and from what the denominators count, never from the recorded losses, so a
wrong scale in the trainer is found. The denominators count the samples of a mini-batch on all ranks: neither the number
of ranks nor the split into packs enters.

Shape legend: B samples of a step, M its mini-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from toolrl.analysis.samples.sample_files import LossScale, StepSamples
from verl.text import counted

LOSSES = ("actor/loss", "actor/observation_loss")  # metrics that `sum_check` compares
TOLERANCE = 1e-5  # error of the loss; relative above 1
_SHARE = 1e-4  # relative error of a sample's share: the trainer's weights have 32 bits
_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedLoss:
    """The loss of a step by its mini-batches.

    divisors: of the aggregation, [B] each, with their names; shares: of the loss, by row; updates: of the step
    """

    aggregation: str
    divisors: Sequence[tuple[_Array, str]]
    minibatch_B: _Array
    minibatches: int
    shares: Mapping[int, float]
    updates: int

    @property
    def total(self) -> float:
        return math.fsum(self.shares.values())

    def weight(self, row: int) -> float:
        """Loss weight of each token of the sample."""
        return 1 / math.prod(max(1.0, float(counts_B[row])) for counts_B, _ in self.divisors)

    def formula(self, row: int) -> str:
        """Its arithmetic."""
        place = f" {self.minibatch_B[row] + 1} of {self.minibatches}"
        named = ((f"{counts_B[row]:g} {name}", name.endswith("mini-batch")) for counts_B, name in self.divisors)
        divided = "".join(f" / {text}{place if of_minibatch else ''}" for text, of_minibatch in named)
        return f"{self.aggregation}: 1{divided} = {self.weight(row):.6g}"


@dataclass(frozen=True, slots=True)
class Check:
    """agrees: None where the record lacks what it needs"""

    text: str
    agrees: bool | None


def computed_loss(kept: StepSamples) -> ComputedLoss | None:
    """None if the record lacks the scale."""
    if kept.scale is None:
        return None
    minibatch_B, minibatches = _minibatches(kept.scale)
    divisors = _divisors(kept.scale, minibatch_B, minibatches)
    product_B = np.ones(len(minibatch_B))
    for counts_B, _ in divisors:
        product_B *= np.maximum(1.0, counts_B)
    rows = list(kept.sums)
    sums = np.array([kept.sums[row] for row in rows], dtype=np.float64).reshape(len(rows), -1 if rows else 1)
    updates = minibatches * max(1, sums.shape[1])
    shares: list[float] = (sums.sum(axis=1) / product_B[rows] / updates).tolist() if rows else []
    return ComputedLoss(
        aggregation=kept.scale.aggregation,
        divisors=divisors,
        minibatch_B=minibatch_B,
        minibatches=minibatches,
        shares=dict(zip(rows, shares, strict=True)),
        updates=updates,
    )


def _minibatches(scale: LossScale) -> tuple[_Array, int]:
    """[B] the mini-batch of every sample, and their number: whole groups in their order, as equal as possible."""
    _, first, group_B = np.unique(scale.groups, return_index=True, return_inverse=True)
    place_B = first.argsort().argsort()[group_B]
    ends = [(part + 1) * len(first) // scale.minibatches for part in range(scale.minibatches)]
    filled, minibatch_B = np.unique(np.searchsorted(ends, place_B, side="right"), return_inverse=True)
    return minibatch_B, len(filled)


def _divisors(scale: LossScale, minibatch_B: _Array, minibatches: int) -> list[tuple[_Array, str]]:
    """Divisors of the aggregation; a name ending with mini-batch is counted per mini-batch."""
    _, first, episode_B = np.unique(scale.episodes, return_index=True, return_inverse=True)
    length_E = np.bincount(episode_B, scale.num_trained)
    tokens_M = np.bincount(minibatch_B, scale.num_trained)
    sequences_M = np.bincount(minibatch_B[first][length_E > 0], minlength=minibatches)
    tokens = (tokens_M[minibatch_B], "trained tokens of mini-batch")
    sequences = (sequences_M[minibatch_B], "sequences of mini-batch")
    own = (length_E[episode_B], "trained tokens of the sequence")
    constant = (np.full(len(minibatch_B), scale.length or 1.0), "tokens (algorithm.aggregation_length)")
    return {
        "token-mean": [tokens],
        "token-sum": [],
        "seq-mean-token-sum": [sequences],
        "seq-mean-token-mean": [own, sequences],
        "seq-mean-token-sum-norm": [constant, sequences],
    }[scale.aggregation]


def why_not_computed(kept: StepSamples) -> str:
    """Why a sample without a loss has none. In the warm-up of the critic no sample has one, whatever its advantage."""
    if not kept.loss and any(sample.columns.get("advantages", np.zeros(1)).any() for sample in kept.samples):
        return "the critic warms up (trainer.critic_warmup), and the policy is not updated yet"
    return "its advantage is zero"


def share_of(kept: StepSamples, computed: ComputedLoss | None, row: int) -> Check:
    """A sample's share of the loss by its weight and its token losses."""
    if row not in kept.loss:
        return Check(f"none: no update computed it, because {why_not_computed(kept)}", None)
    recorded = kept.loss[row]
    if computed is None:
        return Check(f"{recorded:.6g}, as recorded; the weight of its tokens is not known: {_LACKS}", None)
    share, sums = computed.shares[row], kept.sums[row]
    epochs = " + ".join(f"{each:.6g}" for each in sums)
    text = (
        f"{share:.6g} = weight * ({epochs}) / {counted(computed.updates, 'update')}, with weight = "
        f"{computed.formula(row)}; in brackets the sum of its token losses without the weight"
        f"{' in each epoch' if len(sums) > 1 else ''}"
    )
    if math.isclose(share, recorded, rel_tol=_SHARE, abs_tol=1e-9):
        return Check(text, True)
    return Check(f"{text}. It differs from the trainer's share, {recorded:.6g}", False)


_LACKS = "the step was recorded without the settings and token counts of its loss"


def sum_check(
    kept: StepSamples, computed: ComputedLoss | None, logged: float | None, observation_loss: float | None = None
) -> Check:
    """Whether the computed shares add up to the logged loss.

    logged, observation_loss: actor/loss and actor/observation_loss. Shares are those of trained tokens, and the
    cross-entropy on observations is added to them.
    """
    if computed is None:
        total = f"the recorded shares add up to {math.fsum(kept.loss.values()):.8g}"
        return Check(f"not possible: {_LACKS}, so the scale cannot be known; {total}, actor/loss is {logged}", None)
    shares = f"the computed shares of {counted(len(computed.shares), 'sample')} add up to {computed.total:.8g}"
    if logged is None and not computed.shares:
        return Check("none: no update computed a sample, and no loss is logged", None)
    if logged is None:
        return Check(f"not possible: {shares}, and no loss is logged", None)
    of_observations = 0.0
    if kept.scale is not None and kept.scale.observation_coefficient:
        coefficient, mean = kept.scale.observation_coefficient, observation_loss or 0.0
        of_observations = coefficient * mean
        shares += f", and {coefficient:g} * actor/observation_loss is {of_observations:.8g}"
    off, limit = abs(computed.total + of_observations - logged), TOLERANCE * max(1.0, abs(logged))
    verdict = f"they agree within {limit:.2g}" if off <= limit else f"they differ by {off:.3g}, over {limit:.2g}"
    return Check(f"{shares}, actor/loss is {logged:.8g}: {verdict}", off <= limit)
