"""The samples that every step keeps: which ones, their tokens, and the shares that add up to the loss."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.verl.trainer.test_train_step import PLAIN, one_rank, trainer, with_epochs
from toolrl.analysis.samples.keeper import build_keeper
from toolrl.analysis.samples.kept import choose_rollouts, loss_scale, step_samples
from toolrl.analysis.samples.sample_files import (
    COLUMNS,
    MAX_BYTES,
    SampleFiles,
    StepSamples,
    kept_steps,
    read_samples,
    samples_path,
)
from verl.algorithms.correction import Correction
from verl.algorithms.names import Level
from verl.batch.samples import to_batch
from verl.batch.trace import Trace
from verl.config.load import load_config
from verl.errors import DataError
from verl.trainer.learner import Learned
from verl.trainer.ppo import PPOTrainer, TrainStepResult
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

__all__ = ["one_rank"]


def turn(context: int, written: int, segment: int = 0) -> Turn:
    tokens, logprobs = array("i", range(1, written + 1)), array("f", [-0.5] * written)
    completion = Completion(tokens, logprobs, FinishReason.STOP, 3)
    return Turn(array("i", [7] * context), completion, Message("assistant", "text"), segment=segment)


def group(rewards: Sequence[float], *turns: Turn) -> TrajectoryGroup:
    task = Task("a", (Message("user", "hello"),), "", "source")
    rollouts = [
        Trajectory(task, index, turns or (turn(3, 2),), StopReason.STOP, Outcome.SCORED)
        for index in range(len(rewards))
    ]
    scores = tuple(Score(reward, {}) for reward in rewards)
    return TrajectoryGroup(task, tuple(rollouts), scores, tuple(rewards))


def test_chosen_are_the_lowest_to_the_highest_of_the_lowest_to_the_highest_groups() -> None:
    groups = [group([0.0, 5.0, 1.0]), group([9.0, 9.0, 9.0]), group([0.0, 0.0, 0.0]), group([4.0, 4.0, 4.0])]
    chosen = choose_rollouts(groups, 4)
    assert [(each.group, each.rollout) for each in chosen] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert [each.row for each in chosen] == [3, 5, 6, 8]
    first_and_last = choose_rollouts(groups[:1], 2)
    assert [each.rollout for each in first_and_last] == [0, 1]
    assert len(choose_rollouts(groups, 100)) == 12 and choose_rollouts(groups, 0) == []


def test_all_segments_of_a_chosen_rollout_are_kept_at_their_rows() -> None:
    """A sub-agent's segment, between two turns of the main one."""
    turns = (turn(3, 2), turn(4, 1, segment=1), turn(1, 3))
    groups = [group([0.0, 1.0], *turns), group([2.0, 3.0])]
    batch = to_batch(groups)
    chosen = choose_rollouts(groups, 4)
    assert [each.row for each in chosen] == [0, 1, 2, 3, 4, 5]
    kept = step_samples(groups, groups[1:], chosen, Learned({}, np.arange(6), batch), Trace()).samples
    assert [(each.segment, each.num_segments, each.line) for each in kept] == [
        *((0, 2, None), (1, 2, None)) * 2,
        *((0, 1, 0), (0, 1, 1)),
    ]
    assert kept[0].versions.tolist() == [-1] * 4 + [3]
    assert kept[1].versions.tolist() == [-1, -1, -1, 3, 3, -1, 3, 3, 3] and kept[1].mask.sum() == 5
    assert kept[1].columns["rollout_logprobs"].tolist() == [-0.5] * 5


def stepped(learning: PPOTrainer) -> TrainStepResult:
    """A step whose samples are kept as configured."""
    learning.keeper = build_keeper(learning.learner.config, learning.learner.algorithm, Path(), str)
    return asyncio.run(learning.train_step())


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_shares_of_all_samples_add_up_to_the_loss(minibatches: int) -> None:
    learning = trainer(replace(PLAIN, correction=Correction(Level.TOKEN, is_cap=2.0)), minibatches=minibatches)
    learning.learner.config = with_epochs(learning.learner.config, 2)
    result = stepped(learning)
    kept = result.samples
    assert sum(kept.loss.values()) == pytest.approx(result.metrics["actor/loss"], abs=1e-7)
    assert len(kept.samples) == 16 and kept.left_out == 0
    assert len(kept.loss) == round(result.metrics["actor/computed_share"] * len(result.batch))
    rollouts = [trajectory for group in result.groups for trajectory in group.trajectories]
    for sample in kept.samples:
        assert sample.line is not None
        (only,) = rollouts[sample.line].turns
        assert sample.token_ids.tolist() == [*only.context_ids, *only.completion.token_ids]
        assert sample.mask.tolist() == [version == 0 for version in sample.versions.tolist()]
        assert sample.mask.sum() == len(only.completion.token_ids)
        if sample.row not in kept.loss:
            assert set(sample.group_returns) == {sample.reward} and "logprobs" not in sample.columns
            continue
        returns = np.array(sample.group_returns)
        advantage = (sample.reward - returns.mean()) / (returns.std(ddof=1) + 1e-6)
        assert sample.columns["advantages"] == pytest.approx(advantage, abs=1e-4)
        assert sample.columns["old_logprobs"] == pytest.approx(sample.columns["rollout_logprobs"], abs=1e-4)
        assert sample.columns["importance"] == pytest.approx(1.0, abs=1e-3)
        assert (sample.columns["entropy"] > 0).all()


def test_a_step_with_one_update_traces_the_policy_that_sampled() -> None:
    result = stepped(trainer(PLAIN, minibatches=1))
    traced = [sample for sample in result.samples.samples if "logprobs" in sample.columns]
    assert traced and all("old_logprobs" not in sample.columns for sample in traced)
    for sample in traced:
        assert sample.columns["logprobs"] == pytest.approx(sample.columns["rollout_logprobs"], abs=1e-4)
        assert sample.columns["loss"].sum() == pytest.approx(result.samples.loss[sample.row], abs=1e-7)
        assert set(sample.columns["ratio"]) == {1.0} and set(sample.columns["clipped"]) == {0.0}


def test_the_shares_follow_from_what_the_denominators_count() -> None:
    """Two mini-batches of half of the groups: a token weighs 1 over its response's tokens and the responses there."""
    learning = trainer(PLAIN, minibatches=2)
    learning.learner.config = with_epochs(learning.learner.config, 2)
    kept = stepped(learning).samples
    assert kept.scale is not None and (kept.scale.aggregation, kept.scale.minibatches) == ("seq-mean-token-mean", 2)
    half = kept.scale.groups < np.median(np.unique(kept.scale.groups))
    assert half.sum() == len(half) / 2
    for row, sums in kept.sums.items():
        weight = 1 / kept.scale.num_trained[row] / half.sum()
        assert len(sums) == 2 and kept.loss[row] == pytest.approx(sum(sums) * weight / 4, abs=1e-8)


def test_nothing_is_kept_on_request() -> None:
    learning = trainer(PLAIN)
    settings = load_config(["trainer.samples_kept=0"]).trainer
    learning.learner.config = replace(learning.learner.config, trainer=settings)
    assert stepped(learning).samples is None


def long_step(lengths: Sequence[int]) -> StepSamples:
    """Samples of random tokens and values, in all columns that there are."""
    random = np.random.default_rng(0)
    groups = [group([float(number)], turn(9, length)) for number, length in enumerate(lengths)]
    chosen, batch = choose_rollouts(groups, len(groups)), to_batch(groups)
    batch = replace(batch, token_ids=random.integers(0, 150_000, len(batch.token_ids)), advantages=batch.rewards)
    tokens = {row: {name: random.normal(size=length) for name in COLUMNS} for row, length in enumerate(lengths)}
    batch = replace(batch, rollout_logprobs=random.normal(size=sum(lengths)), whitening=(0.25, 2.0))
    rows = range(len(lengths))
    trace = Trace(dict.fromkeys(rows, 0.25), {row: [0.5, -0.5] for row in rows}, tokens)
    scale = loss_scale(batch, replace(PLAIN, aggregation_length=7.0), 2)
    return step_samples(groups, groups, chosen, Learned({}, np.arange(len(lengths)), batch), trace, scale)


def test_a_file_has_what_was_kept(tmp_path: Path) -> None:
    files, lengths = SampleFiles(tmp_path, lambda ids: f"<{ids[0]}>\ud800"), [5, 0, 3]
    kept = long_step(lengths)
    files.write(1, kept)
    found = read_samples(samples_path(tmp_path, 1))
    assert (found.left_out, found.loss, len(found.samples)) == (0, kept.loss, 3)
    assert found.sums == kept.sums and kept.scale and found.scale
    assert (found.scale.aggregation, found.scale.length, found.scale.minibatches) == ("seq-mean-token-mean", 7.0, 2)
    counted = (found.scale.num_trained.tolist(), found.scale.groups.tolist(), found.scale.episodes.tolist())
    assert counted == (lengths, list(range(len(lengths))), list(range(len(lengths))))
    assert found.whitening == [0.25, 2.0]
    for one, two in zip(kept.samples, found.samples, strict=True):
        assert (one.task_id, one.index, list(one.group_returns)) == (two.task_id, two.index, two.group_returns)
        for name in ("token_ids", "mask", "versions"):
            assert np.array_equal(getattr(one, name), getattr(two, name))
        assert one.columns.keys() == two.columns.keys() == set(COLUMNS)
        assert all(np.allclose(one.columns[name], two.columns[name], atol=1e-6) for name in one.columns)
    assert {found.texts[token] for token in found.samples[0].token_ids.tolist()} <= set(found.texts.values())
    files.write(2, kept)
    files.truncate_after(1)
    assert kept_steps(tmp_path) == [1]


@pytest.mark.parametrize("lengths", [[4000] * 16, [30_000, 1, 30_000], [200_000]], ids=["equal", "unequal", "one"])
def test_a_file_has_less_than_a_megabyte_with_all_columns(lengths: Sequence[int], tmp_path: Path) -> None:
    """Twelve columns and more, of values and texts that do not compress."""
    assert len(COLUMNS) >= 12
    random = np.random.default_rng(0)
    files = SampleFiles(tmp_path, lambda ids: random.bytes(20).hex())
    files.write(1, long_step(lengths))
    found = read_samples(samples_path(tmp_path, 1))
    assert samples_path(tmp_path, 1).stat().st_size <= MAX_BYTES
    assert found.left_out == len(lengths) - len(found.samples) > 0
    assert [each.row for each in found.samples] == {16: [0, 1], 3: [1], 1: []}[len(lengths)]
    assert found.scale is not None and len(found.loss) == len(lengths)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = samples_path(tmp_path, 1)
    with pytest.raises(DataError, match=r"step-000001\.npz.*is missing"):
        read_samples(path)
    SampleFiles(tmp_path, str).write(1, long_step([3]))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"step-000001\.npz.*is damaged"):
        read_samples(path)


def test_the_longest_are_left_out_before_a_file_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the batch, whatever comes first."""
    monkeypatch.setattr("toolrl.analysis.samples.kept._MAX_RAW_BYTES", 250)
    groups = [group([0.0], turn(3, 2)), group([1.0], turn(30, 20)), group([2.0], turn(4, 2)), group([3.0], turn(2, 2))]
    batch = to_batch(groups)
    kept = step_samples(groups, groups, choose_rollouts(groups, 4), Learned({}, np.arange(4), batch), Trace())
    assert [each.row for each in kept.samples] == [0, 2, 3] and kept.left_out == 1
