"""The weights of a step's tokens by hand: what each mode divides by, in which mini-batch, and the check of the sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from toolrl.analysis.report.loss import Check, computed_loss, share_of, sum_check
from toolrl.analysis.samples.sample_files import LossScale, StepSamples
from verl.algorithms.aggregate import episode_weights
from verl.algorithms.names import Aggregation

# Three groups in two mini-batches: group 7 alone, then groups 2 and 5. Samples 3 and 4 are segments of one episode, and
# sample 5 has no trained token.
SCALE = LossScale(
    aggregation="token-mean",
    length=None,
    minibatches=2,
    num_trained=np.array([4, 6, 10, 3, 5, 0]),
    groups=np.array([7, 7, 2, 5, 5, 5]),
    episodes=np.array([0, 1, 2, 3, 3, 4]),
)
WEIGHTS = {
    "token-mean": [1 / 10, 1 / 10, 1 / 18, 1 / 18, 1 / 18],
    "token-sum": [1.0] * 5,
    "seq-mean-token-sum": [1 / 2, 1 / 2, 1 / 2, 1 / 2, 1 / 2],
    "seq-mean-token-mean": [1 / 8, 1 / 12, 1 / 20, 1 / 16, 1 / 16],
    "seq-mean-token-sum-norm": [1 / 40] * 5,
}


@pytest.mark.parametrize("mode", WEIGHTS)
def test_weights_by_hand(mode: str) -> None:
    length = 20.0 if mode.endswith("norm") else None
    scale = replace(SCALE, aggregation=mode, length=length)
    computed = computed_loss(StepSamples(samples=[], sums={0: [1.0], 3: [2.0]}, scale=scale))
    assert computed is not None and [computed.weight(row) for row in range(5)] == pytest.approx(WEIGHTS[mode])
    assert computed.updates == 2 and computed.total == pytest.approx((WEIGHTS[mode][0] + 2 * WEIGHTS[mode][3]) / 2)
    for places, episodes in ((slice(0, 2), [4, 6]), (slice(2, 4), [10, 8, 0])):  # the trainer's own computation
        own = episode_weights(Aggregation(mode), torch.tensor(episodes), length)[:2]
        assert own.tolist() == pytest.approx(WEIGHTS[mode][places])


def test_a_weight_is_shown_with_its_numbers() -> None:
    kept = StepSamples(samples=[], loss={3: 0.2, 0: 0.1}, sums={3: [2.0, 4.4], 0: [1.0, 3.0]}, scale=SCALE)
    computed = computed_loss(kept)
    assert computed is not None and computed.updates == 4
    shares = {3: 6.4 / 18 / 4, 0: 4 / 10 / 4}
    assert computed.shares == pytest.approx(shares)
    assert computed.formula(3) == "token-mean: 1 / 18 trained tokens of mini-batch 2 of 2 = 0.0555556"
    wrong, right = share_of(kept, computed, 3), share_of(kept, computed, 0)
    assert wrong.agrees is False and "differs from the trainer's share, 0.2" in wrong.text
    assert right.agrees is True and right.text.startswith("0.1 = weight * (1 + 3) / 4 updates, with weight = ")
    assert share_of(kept, computed, 1).agrees is None
    total = sum(shares.values())
    assert [sum_check(kept, computed, total + off).agrees for off in (9e-6, 1.1e-5)] == [True, False]
    assert "they differ by 1.1e-05, over 1e-05" in sum_check(kept, computed, total + 1.1e-5).text
    assert sum_check(kept, computed, None).agrees is None


def test_a_sequence_has_its_length_in_the_formula() -> None:
    scale = replace(SCALE, aggregation="seq-mean-token-mean")
    computed = computed_loss(StepSamples(samples=[], sums={3: [1.0]}, scale=scale))
    assert computed is not None and computed.formula(3) == (
        "seq-mean-token-mean: 1 / 8 trained tokens of the sequence / 2 sequences of mini-batch 2 of 2 = 0.0625"
    )


def test_a_record_without_the_scale_is_not_fitted() -> None:
    kept = StepSamples(samples=[], loss={0: 0.5, 1: 0.25})
    assert computed_loss(kept) is None
    share, total = share_of(kept, None, 0), sum_check(kept, None, 0.75)
    assert share.agrees is total.agrees is None
    assert "the weight of its tokens is not known" in share.text and "the scale cannot be known" in total.text


def test_a_step_that_computes_no_sample_has_a_loss_of_zero() -> None:
    kept = StepSamples(samples=[], scale=SCALE)
    computed = computed_loss(kept)
    assert computed is not None and (computed.shares, computed.total) == ({}, 0.0)
    assert sum_check(kept, computed, 0.0).agrees is True
    assert sum_check(kept, computed, None) == Check("none: no update computed a sample, and no loss is logged", None)
