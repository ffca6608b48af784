"""The token losses of a sample again: clips are named, and rounding is not an error, but everything else is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from toolrl.analysis.explain.explanation import summary
from toolrl.analysis.explain.tokens import token_lines
from toolrl.analysis.report.loss import computed_loss, share_of
from toolrl.analysis.samples.sample_files import KeptSample, LossScale, StepSamples
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.correction import Correction
from verl.algorithms.estimators.reinforce_pp_baseline import REINFORCE_PP_BASELINE
from verl.algorithms.losses.gspo import GSPO
from verl.algorithms.losses.policy_loss import LossInputs
from verl.algorithms.names import Level


def step_of(algorithm: Algorithm, log_ratios: list[torch.Tensor], advantage: float) -> StepSamples:
    """What a trainer keeps of a pack with these sequences, each with its log ratios and the advantage."""
    flat, sizes = torch.cat(log_ratios).float(), [len(each) for each in log_ratios]
    sample = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    old = -torch.rand(len(flat), generator=torch.Generator().manual_seed(1))
    token = algorithm.policy_loss(LossInputs(old + flat, old, torch.full_like(flat, advantage), sample))
    columns = {
        "rollout_logprobs": old,
        "old_logprobs": old,
        "logprobs": old + flat,
        "entropy": torch.zeros_like(flat),
        "advantages": torch.full_like(flat, advantage),
        "loss": token.loss_T / len(flat),
    }
    samples = [
        KeptSample(
            row=row,
            line=row,
            task_id="t",
            group=0,
            index=row,
            segment=0,
            num_segments=1,
            reward=1.0,
            group_returns=[1.0],
            token_ids=np.arange(size),
            mask=np.ones(size, dtype=bool),
            versions=np.zeros(size, dtype=np.int64),
            columns={name: each.split(sizes)[row].numpy() for name, each in columns.items()},
        )
        for row, size in enumerate(sizes)
    ]
    unweighted = [float(each.double().sum()) for each in token.loss_T.split(sizes)]
    scale = LossScale(
        aggregation="token-mean",
        length=None,
        minibatches=1,
        num_trained=np.array(sizes),
        groups=np.zeros(len(sizes)),
        episodes=np.arange(len(sizes)),
    )
    loss = {row: each / len(flat) for row, each in enumerate(unweighted)}
    return StepSamples(
        samples=samples, loss=loss, sums={row: [each] for row, each in enumerate(unweighted)}, scale=scale
    )


def shown(algorithm: Algorithm, kept: StepSamples, number: int) -> tuple[str, list[str]]:
    failed: list[str] = []
    lines = token_lines(kept.samples[number], kept, algorithm, computed_loss(kept), failed)
    return "\n".join(lines), failed


def test_the_dual_clip_is_named_where_it_acts() -> None:
    """Negative advantage: at a ratio of 4 the loss is 3, at 2 the ratio counts, at 0.5 the clip at 0.78 is active."""
    ratios = torch.tensor([4.0, 2.0, 0.5])
    text, failed = shown(REINFORCE_PP_BASELINE, step_of(REINFORCE_PP_BASELINE, [ratios.log()], -1.0), 0)
    assert failed == [] and "\nclipped: 1 of 3 tokens\ndual clip: 1 of 3 tokens\n" in text
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    assert [row.rpartition(", ")[2] for row in rows][::2] == ["dual clip", "clipped"] and "loss 0.6667" in rows[1]
    text, _ = shown(REINFORCE_PP_BASELINE, step_of(REINFORCE_PP_BASELINE, [ratios[2:].log()], -1.0), 0)
    assert "clipped: 1 of 1 token\n" in text and "dual clip" not in text and "1 token with the largest" in text


@pytest.mark.parametrize("size", [3, 40_000])
def test_rounding_in_a_long_sequence_is_no_error_and_a_thousandth_is(size: int) -> None:
    """Two sequences in one pack, whose means the trainer computes in another order; the sum of losses is large."""
    random = torch.Generator().manual_seed(0)
    log_ratios = [torch.randn(each, generator=random) * 0.3 for each in (777, size)]
    kept = step_of(GSPO, log_ratios, 50.0)
    _, failed = shown(GSPO, kept, 1)
    assert failed == []
    sums = {**kept.sums, 1: [kept.sums[1][0] * 1.003]}
    assert shown(GSPO, replace(kept, sums=sums), 1)[1] == ["token losses"]
    columns = kept.samples[1].columns
    scaled = replace(kept.samples[1], columns={**columns, "loss": columns["loss"] * np.float32(1.003)})
    assert shown(GSPO, replace(kept, samples=[kept.samples[0], scaled]), 1)[1] == ["token losses"]


@pytest.mark.parametrize(("level", "weights"), [(Level.TOKEN, [2.0, 0.5, 1.0]), (Level.SEQUENCE, [1.5] * 3)])
def test_importance_weights_follow_from_the_log_probs(level: Level, weights: list[float]) -> None:
    """Ratios of trainer and engine 3, 0.5 and 1: their product is 1.5, and the cap 2."""
    algorithm = replace(REINFORCE_PP_BASELINE, correction=Correction(is_level=level))
    kept = step_of(algorithm, [torch.zeros(3)], 1.0)
    old, weight_A = kept.samples[0].columns["old_logprobs"], np.array(weights, dtype=np.float32)
    engine = old - np.log(np.array([3.0, 0.5, 1.0], dtype=np.float32))

    def recorded(factor: float) -> tuple[str, list[str]]:
        """As a trainer leaves it that multiplies the weights by the factor."""
        used_A = weight_A * np.float32(factor)
        columns = {**kept.samples[0].columns, "rollout_logprobs": engine, "importance": used_A, "loss": -used_A / 3}
        total = -float(used_A.sum())
        sample = replace(kept.samples[0], columns=columns)
        return shown(algorithm, replace(kept, samples=[sample], loss={0: total / 3}, sums={0: [total]}), 0)

    text, failed = recorded(1.0)
    assert failed == [] and f"truncated: {int(level is Level.TOKEN)}, rejected (weight 0): 0 of 3 tokens" in text
    assert f", 2): from {min(weights):g} to {max(weights):g}; " in text
    assert recorded(1.5)[1] == ["importance weights", "token losses"]


def test_a_veto_and_a_rejection_are_named_with_their_limits() -> None:
    """Ratios of trainer and engine 2 and 0.25, whose geometric mean is 0.71."""
    correction = Correction(rejection_level=Level.GEOMETRIC, rejection_lower=0.5, token_veto=0.3)
    vetoed = replace(REINFORCE_PP_BASELINE, correction=correction)
    kept = step_of(REINFORCE_PP_BASELINE, [torch.zeros(2)], 1.0)
    old, none_A = kept.samples[0].columns["old_logprobs"], np.zeros(2, dtype=np.float32)
    engine = old - np.log(np.array([2.0, 0.25], dtype=np.float32))
    columns = {**kept.samples[0].columns, "rollout_logprobs": engine, "importance": none_A, "loss": none_A}
    sample = replace(kept.samples[0], columns=columns)
    text, failed = shown(vetoed, replace(kept, samples=[sample], loss={0: 0.0}, sums={0: [0.0]}), 0)
    assert failed == [] and "rejected (weight 0): 2 of 2 tokens" in text
    assert "rejection: weight 0 where the ratio as a geometric mean is not from 0.5 to 2\n" in text
    limit = "if the ratio of one is below 0.3 (algorithm.correction.token_veto); the smallest is 0.25"
    assert f"veto: weight 0 on all tokens {limit}\n" in text


def test_the_recorded_ratio_is_checked() -> None:
    kept = step_of(GSPO, [torch.full((5,), 0.01)], 1.0)
    columns = kept.samples[0].columns
    for factor, names in ((1.0, []), (1.001, ["ratios"])):
        ratio_A = np.full(5, np.exp(0.01) * factor, dtype=np.float32)
        sample = replace(kept.samples[0], columns={**columns, "ratio": ratio_A})
        assert shown(GSPO, replace(kept, samples=[sample]), 0)[1] == names


def test_a_sample_without_an_update_has_a_reason() -> None:
    """In the warm-up of the critic no sample of the step has a loss: the first one's advantage is not the reason."""
    kept = step_of(GSPO, [torch.zeros(2)] * 2, 1.0)
    zero, other = ({"rollout_logprobs": np.zeros(2), "advantages": np.full(2, value)} for value in (0.0, 0.5))
    warm_up, is_zero = "the critic warms up (trainer.critic_warmup)", "its advantage is zero"
    for second, loss, why in ((other, {}, warm_up), (other, {1: 0.5}, is_zero), (zero, {}, is_zero)):
        samples = [replace(kept.samples[row], columns=each) for row, each in enumerate((zero, second))]
        step = replace(kept, samples=samples, loss=loss, sums={row: [each] for row, each in loss.items()})
        text, failed = shown(GSPO, step, 0)
        assert failed == [] and text.startswith(f"No update computed this sample: {why}")
        assert why in summary(step)[0] and why in share_of(step, computed_loss(step), 0).text
