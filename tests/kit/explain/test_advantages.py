"""The advantage of every estimator again from the record of a step, and that a trainer with another scale is found."""

from __future__ import annotations

import re
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.algorithms import ADV_ESTIMATORS
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.names import KLPlacement
from verl.batch.experience import with_advantages
from verl.batch.samples import to_batch
from verl.batch.token_batch import TokenBatch
from verl.batch.trace import Trace
from verl.config.load import load_config
from verl.kit.explain.explanation import Explainer
from verl.kit.explain.formulas import Formula, advantage_formula
from verl.kit.explain.known import Known
from verl.kit.kept_samples.kept import choose_rollouts, loss_scale, step_rewards, step_samples
from verl.kit.kept_samples.sample_files import COLUMNS, SampleFiles, StepSamples, read_samples, samples_path
from verl.kit.report.folder import RunFolder
from verl.kit.report.loss import computed_loss
from verl.trainer.builders.algorithm import build_algorithm
from verl.trainer.learner import Learned
from verl.types import Completion, FinishReason, Message, Outcome, StopReason, Task, Trajectory, TrajectoryGroup, Turn

BETA = 0.3
REWARDS = (0.0, 0.5, 0.75, 1.0, 2.25, 3.0)


def group(random: np.random.Generator, number: int, size: int, algorithm: Algorithm) -> TrajectoryGroup:
    """Of two turns each, in two segments or with rewards of turns; those of group 0 have equal rewards."""
    task = Task(f"t{number}", (Message("user", "hello"),), "", "source")
    rollouts = []
    for index in range(size):
        turns = []
        for place in range(2):
            length = int(random.integers(1, 9))
            completion = Completion(
                array("i", random.integers(9, 99, length).tolist()),
                array("f", (-random.random(length)).tolist()),
                FinishReason.STOP,
                0,
            )
            paid = float(random.integers(0, 3)) if algorithm.takes_turn_rewards and number else None
            segment = place if index == 1 else 0
            turns.append(
                Turn(array("i", [7] * 3), completion, Message("assistant", "text"), reward=paid, segment=segment)
            )
        rollouts.append(Trajectory(task, index, tuple(turns), StopReason.STOP, Outcome.SCORED))
    rewards = random.permutation(REWARDS)[:size] if number else np.ones(size)
    baseline = 0.75 if algorithm.greedy_baseline else None
    return TrajectoryGroup(task, tuple(rollouts), (), tuple(rewards.tolist()), baseline=baseline)


def algorithm_of(estimator: str, case: str) -> Algorithm:
    placement = "reward" if case == "KL in the reward" else "none"
    words = [f"algorithm.name={ADV_ESTIMATORS[estimator]}", f"algorithm.kl_placement={placement}"]
    if placement == "reward":
        words += [f"algorithm.kl_coefficient={BETA}", "algorithm.kl_estimator=k1"]
    words += ["algorithm.gamma=0.9", "algorithm.lam=0.8"] if estimator == "gae" else []
    return build_algorithm(load_config(words).algorithm, 64, 0)


def scored_batch(algorithm: Algorithm, groups: list[TrajectoryGroup]) -> TokenBatch:
    batch, random = to_batch(groups), np.random.default_rng(1)
    assert batch.rollout_logprobs is not None
    count = len(batch.rollout_logprobs)
    noise = random.normal(size=(3, count)).astype(np.float32)
    has_reference = algorithm.kl.placement is not KLPlacement.NONE
    return replace(
        batch,
        old_logprobs=batch.rollout_logprobs + noise[0] / 100,
        ref_logprobs=batch.rollout_logprobs + noise[1] if has_reference else None,
        values=noise[2] if algorithm.needs_critic else None,
    )


def step_of(algorithm: Algorithm, size: int, folder: Path, scale: float = 1.0) -> StepSamples:
    """What a step keeps whose trainer scales its advantages."""
    random = np.random.default_rng(0)
    groups = [group(random, number, size, algorithm) for number in range(12 // size)]
    batch = with_advantages(scored_batch(algorithm, groups), algorithm)
    assert batch.advantages is not None
    batch = replace(batch, advantages=np.float32(scale) * batch.advantages)
    chosen = choose_rollouts(groups, 8)
    outcome = Learned({}, np.arange(len(batch)), batch, Trace())
    rewards = step_rewards(batch, algorithm)
    SampleFiles(folder, str).write(
        1, step_samples(groups, groups, chosen, outcome, loss_scale(batch, algorithm, 1), rewards)
    )
    return read_samples(samples_path(folder, 1))


def formulas(algorithm: Algorithm, kept: StepSamples) -> list[Formula]:
    found = [advantage_formula(Known(sample, kept, algorithm, BETA)) for sample in kept.samples]
    return [each for each in found if each is not None and each.values_A is not None]


@pytest.mark.parametrize("case", ["plain", "KL in the reward", "groups of one"])
@pytest.mark.parametrize("estimator", sorted(ADV_ESTIMATORS))
def test_a_trainer_that_scales_its_advantages_is_found(estimator: str, case: str, tmp_path: Path) -> None:
    algorithm, size = algorithm_of(estimator, case), 1 if case == "groups of one" else 4
    right = step_of(algorithm, size, tmp_path)
    assert len(formulas(algorithm, right)) == len(right.samples) >= 8
    for formula, sample in zip(formulas(algorithm, right), right.samples, strict=True):
        assert formula.agrees(sample.columns["advantages"]), formula.text
        assert "nan" not in formula.text and Known(sample, right, algorithm, BETA).differing() == []
    for scale in (2.0, 0.5, -1.0):
        wrong = step_of(algorithm, size, tmp_path, scale)
        agreed = [
            formula.agrees(sample.columns["advantages"])
            for formula, sample in zip(formulas(algorithm, wrong), wrong.samples, strict=True)
            if sample.columns["advantages"].any()
        ]
        assert agreed and not any(agreed)


def test_a_wrong_mean_or_deviation_of_the_trainer_is_found(tmp_path: Path) -> None:
    """Advantages whitened by a wrong deviation that the trainer records, too: their variance is not 1."""
    algorithm = algorithm_of("gae", "plain")
    kept = step_of(algorithm, 4, tmp_path, 2.0)
    assert kept.rewards is not None and kept.rewards.whitening is not None
    mean, std = kept.rewards.whitening
    wrong = replace(kept, rewards=replace(kept.rewards, whitening=(mean, std / 2)))
    (formula, *_), sample = formulas(algorithm, wrong), wrong.samples[0]
    assert np.allclose(formula.values_A, sample.columns["advantages"], rtol=1e-4)
    assert not formula.agrees(sample.columns["advantages"]) and "variance 4" in formula.checks[0][0]


def test_the_critics_targets_and_the_rewards_of_the_step_are_checked(tmp_path: Path) -> None:
    algorithm = algorithm_of("gae", "KL in the reward")
    kept = step_of(algorithm, 4, tmp_path)
    for name, shown in (
        ("returns", "the critic's targets are GAE_t + V_t: that does not hold"),
        ("rewards", "rewards of"),
    ):
        sample = kept.samples[0]
        changed = replace(sample, columns={**sample.columns, name: sample.columns[name] + 1})
        step = replace(kept, samples=[changed, *kept.samples[1:]])
        run = RunFolder(folder=tmp_path, name="", settings={}, rows=[], alarms=[], code={}, data={})
        run = replace(run, rows=[{"step": 1, "kl/coefficient": BETA}])
        explainer = replace(Explainer.of(run), algorithm=algorithm)
        explanation = explainer.explanation(1, step, computed_loss(step), 0, None)
        assert "advantage" in explanation.failed
        assert shown in "\n".join(dict(explanation.sections)["Group and advantage"])


@pytest.mark.parametrize("name", [*COLUMNS, "row", "group_returns"])
def test_a_record_that_lacks_something_is_still_explained(name: str, tmp_path: Path) -> None:
    """A damaged or older file: what cannot be computed is named, and the rest is explained."""
    for algorithm in (algorithm_of("gae", "KL in the reward"), replace(algorithm_of("grpo", "plain"), kl=GRPO.kl)):
        kept = step_of(algorithm, 4, tmp_path)
        values = kept.samples[0].columns["rollout_logprobs"]
        columns = {**dict.fromkeys(COLUMNS, values), **kept.samples[0].columns}
        columns.pop(name, None)
        changes = {"row": 99} if name == "row" else {"group_returns": []} if name == "group_returns" else {}
        sample = replace(kept.samples[0], columns=columns, **changes)
        step = replace(kept, samples=[sample, *kept.samples[1:]], loss={0: 0.1}, sums={0: [0.1]})
        run = RunFolder(folder=tmp_path, name="", settings={}, rows=[], alarms=[], code={}, data={})
        explainer = replace(Explainer.of(replace(run, rows=[{"step": 1, "kl/coefficient": BETA}])), algorithm=algorithm)
        sections = dict(explainer.explanation(1, step, computed_loss(step), 0, None).sections)
        assert [*sections][:5] == ["Texts", "Reward", "Group and advantage", "Tokens", "Share of the loss"]
        if name in ("logprobs", "entropy", "rollout_logprobs"):
            assert f"lacks {name}" in sections["Tokens"][0]


def test_gae_by_hand(tmp_path: Path) -> None:
    """gamma 0.9, lambda 0.8: the last token has r - V, the one before 0.9 V' - V + 0.72 of that."""
    algorithm = algorithm_of("gae", "plain")
    kept = step_of(algorithm, 4, tmp_path)
    sample = next(each for each in kept.samples if each.num_segments == 1 and len(each.columns["values"]) > 2)
    columns = {name: values.astype(np.float64) for name, values in sample.columns.items()}
    last = columns["rewards"][-1] - columns["values"][-1]
    before = columns["rewards"][-2] + 0.9 * columns["values"][-1] - columns["values"][-2] + 0.72 * last
    assert columns["returns"][-2:] - columns["values"][-2:] == pytest.approx([before, last], abs=1e-5)
    formula = advantage_formula(Known(sample, kept, algorithm, None))
    assert formula is not None and kept.rewards is not None and kept.rewards.whitening is not None
    mean, std = kept.rewards.whitening
    assert torch.tensor(formula.values_A)[-2:].tolist() == pytest.approx([(before - mean) / std, (last - mean) / std])


def test_gpg_by_hand(tmp_path: Path) -> None:
    """4 of 12 responses are in the group of equal rewards: alpha = 12 / 8."""
    algorithm = algorithm_of("gpg", "plain")
    kept = step_of(algorithm, 4, tmp_path)
    for formula, sample in zip(formulas(algorithm, kept), kept.samples, strict=True):
        found = re.search(r"alpha = B / \(B - M\) = (\d+) / (\d+), .*: (\S+) \* \((\S+) - (\S+)\)", formula.text)
        assert found is not None and found.groups()[:2] == ("12", "8") and float(found[3]) == 1.5
        assert float(found[4]) == sample.reward and float(found[5]) == pytest.approx(np.mean(sample.group_returns))


def test_an_old_record_has_no_check_of_the_advantage(tmp_path: Path) -> None:
    algorithm = algorithm_of("grpo", "plain")
    kept = replace(step_of(algorithm, 4, tmp_path), rewards=None)
    formula = advantage_formula(Known(kept.samples[0], kept, algorithm, None))
    assert formula is not None and formula.values_A is None
    assert formula.text == "not computed: the step was recorded without the rewards of all its samples"
