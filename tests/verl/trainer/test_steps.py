"""One meaning of "step": rewards get the number of the update that trains, validations that of the one they follow."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.local_run import local_fit, local_trainer
from tests.support.tiny import MINI, run_overrides, save_tiny_model
from tests.verl.episodes.test_collection import group
from tests.verl.trainer.test_run import run
from tests.verl.trainer.test_train_step import AlwaysOne
from toolrl.analysis.collapse.collapse import CollapseWatch
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.estimators.remax import REMAX
from verl.algorithms.losses.dapo import DAPO
from verl.checkpoint.state import CHANGES
from verl.config.load import load_config
from verl.config.schema import Config, DataConfig, RewardConfig, RolloutConfig, TrainerConfig
from verl.data.tasks import TaskSet, TaskStream
from verl.episodes.collection import NoTrainableGroupsError, StepGroups
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RolloutManager
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer, Fault
from verl.scoring.rewards import Rewards, build_rewards
from verl.tracking.jsonl import read_jsonl
from verl.trainer.policy import Critic, Policy
from verl.trainer.validate import Validator
from verl.types import Message, Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score.base import build_reward, reads_step

TASKS = [Task(f"t{number}", (Message("user", "w"),), "a", "s") for number in range(7)]
GOLD = TaskSet(str(MINI / "test.parquet"))[0]
DYNAMIC = replace(DAPO, overlong=None, max_resample_rounds=3)
# A transcript of `fit` and `_validate` of ToolRL's ray_trainer.py, run with recording workers: 5 steps, a validation
# after every second one, critic_warmup=3. It ends before its last step.
PUBLISHED = """
validate 0
score 1, critic 1
score 2, critic 2, validate 2
score 3, critic 3, policy 3
score 4, critic 4, policy 4, validate 4
validate 5
"""


@dataclass
class TellsStep:
    """Its score depends on the step and, in two of three groups, on the response. It counts how often it is asked."""

    reads_step: bool = True
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        self.asked[trajectory.task.id, trajectory.index] += 1
        spread = trajectory.index if int(trajectory.task.id) % 6 else 0
        return Score(float(step + spread), {"step": float(step)})


@dataclass(frozen=True)
class Late(GroupRollout):
    """Rollouts that take a random number of turns of the event loop, scored by the real code."""

    chance: random.Random = field(default_factory=random.Random)

    async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int | None = None) -> TrajectoryGroup:
        for _ in range(self.chance.choice((0, 1, 3, 60))):
            await asyncio.sleep(0)
        made, task = group((0.0, 1.0)[:num_rollouts]), self.task_of(task, first_seed)
        episodes = [replace(each, index=index, task=task) for index, each in enumerate(made.trajectories)]
        return await self.rescored(replace(made, task=task, trajectories=tuple(episodes)), step)

    def task_of(self, task: Task, first_seed: int | None) -> Task:
        return replace(task, id=str(first_seed))

    async def close(self) -> None:
        """There is no engine."""


def manager(
    rewards: Rewards, algorithm: Algorithm, chance: random.Random, prompts: int = 2, **of: Any
) -> RolloutManager:
    rollout = Late(None, DirectScorer(rewards), Sampling(4), None, chance)  # type: ignore[arg-type]
    config = Config(
        data=DataConfig(train_batch_size=prompts),
        rollout=RolloutConfig(name="hf", n=2, **of),
        reward=RewardConfig(max_fault_share=1.0),
    )
    return RolloutManager(config, algorithm, TaskStream([TASKS]), rollout, rewards)


async def collected(source: RolloutManager, first: int, last: int) -> dict[int, StepGroups]:
    """What each update trains on; those without a group are left out."""
    taken = {}
    for step in range(first, last):
        with suppress(NoTrainableGroupsError):
            taken[step + 1] = await source.take(step)
        for _ in range(source.rollout.chance.choice((0, 5))):  # type: ignore[attr-defined]
            await asyncio.sleep(0)  # the update
    await source.close()
    return taken


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    staleness=st.integers(0, 4),
    prompts=st.integers(1, 4),
    first=st.integers(0, 200),
    algorithm=st.sampled_from([GRPO, DYNAMIC, REMAX]),
)
def test_a_reward_gets_the_number_of_the_update_that_trains_its_response(
    seed: int, staleness: int, prompts: int, first: int, algorithm: Algorithm
) -> None:
    """However long episodes take, at whatever step a run resumes, whatever filters drop; for greedy baselines, too."""
    source = manager(Rewards(TellsStep()), algorithm, random.Random(seed), prompts, max_staleness=staleness)
    taken = asyncio.run(collected(source, first, first + 5))
    assert algorithm is DYNAMIC or len(taken) == 5
    for update, found in taken.items():
        for each in (*found.kept, *found.drawn):
            assert {score.parts["step"] for score in each.scores} == {update}
            assert each.rewards in ((update, update), (update, update + 1))
            assert each.baseline == (update if algorithm is REMAX else None)


def test_only_rewards_that_read_the_step_are_asked_again() -> None:
    for reads in (True, False):
        reward = TellsStep(reads)
        source = manager(Rewards(reward), GRPO, random.Random(3), max_staleness=3)
        ages = [age for each in asyncio.run(collected(source, 0, 8)).values() for age in each.staleness]
        assert max(ages) > 0
        assert max(reward.asked.values()) == (2 if reads else 1)


def test_which_rewards_read_the_step() -> None:
    def constant(response: str, answer: str) -> float:
        return 1.0

    assert not reads_step(build_reward("rlla")) and not reads_step(build_reward("calls", {"coarse": True}))
    for option in ("two_stage", "schedule_reward", "schedule_length"):
        assert reads_step(build_reward("rlla", {option: True})) and reads_step(build_reward("calls", {option: True}))
    assert not any(map(reads_step, map(build_reward, ("env", "torl", "otc_ppo", "tool_n1", "qa", "math"))))
    assert reads_step(AlwaysOne())  # it does not declare that it does not
    terms = [{"name": "rlla", "options": {"two_stage": True}}, "torl"]
    assert reads_step(build_reward("sum", {"terms": terms})) and not reads_step(
        build_reward("sum", {"terms": ["torl"]})
    )
    named = Rewards(build_reward("torl"), "torl")
    assert not named.reads_step(GOLD) and not named.reads_step(replace(GOLD, reward="tool_n1"))


# By ToolRL's `compute_score` of a perfect response, at the step that its loop passes to it: {update: score}
SCHEDULES = {
    "two_stage": {1: 2.0, 29: 2.0, 30: 3.5, 31: 3.5},
    "schedule_reward": {1: 2 - 1 / 150 + 2 + 1 / 150, 75: 1.5 + 2.5, 150: 1.0 + 3.0},
}


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("option", SCHEDULES)
def test_schedules_switch_at_the_published_update(option: str, staleness: int) -> None:
    rewards = build_rewards("rlla", {option: True})

    class Perfect(Late):
        """Every response is the gold."""

        def task_of(self, task: Task, first_seed: int | None) -> Task:
            return GOLD

        async def rescored(self, group: TrajectoryGroup, step: int) -> TrajectoryGroup:
            gold_message = Message("assistant", GOLD.answer)
            episodes = [
                replace(each, turns=(replace(each.turns[0], message=gold_message),)) for each in group.trajectories
            ]
            return await super().rescored(replace(group, trajectories=tuple(episodes)), step)

    source = manager(rewards, GRPO, random.Random(7), max_staleness=staleness)
    source.rollout = Perfect(None, DirectScorer(rewards), Sampling(4), None, random.Random(7))  # type: ignore[arg-type]
    expected = SCHEDULES[option]
    taken = asyncio.run(collected(source, 0, max(expected)))
    for update, score in expected.items():
        assert [each.rewards for each in taken[update].kept] == [(pytest.approx(score),) * 2] * 2, update
    validator = Validator({"test": [GOLD]}, source.rollout, rewards, n=2)
    for update, score in expected.items():
        found = validator.metrics(asyncio.run(validator.rollouts(update)), update)
        assert found["val/test/total"] == pytest.approx(score) and found["val/test/exact"] == 1.0


@dataclass(frozen=True)
class NotedScorer:
    """A scorer that notes the steps it is asked for."""

    scorer: Any
    what: str
    events: list[str]

    async def score(self, trajectory: Trajectory, task: Task, step: int) -> Score | Fault:
        self.note(f"{self.what} {step}")
        return await self.scorer.score(trajectory, task, step)  # type: ignore[no-any-return]

    def note(self, event: str) -> None:
        if event not in self.events:  # all samples of a step
            self.events.append(event)


@pytest.mark.long
def test_a_run_has_the_transcript_of_the_published_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = run_overrides(save_tiny_model(tmp_path / "model"), tmp_path, "hf", 5)
    overrides = [each for each in overrides if not each.startswith("algorithm.name")]
    more = ["algorithm.name=ppo", "algorithm.kl_placement=none", "trainer.critic_warmup=3", "rollout.n=1"]
    config = load_config([*overrides, *more, "data.max_response_length=4"])
    events: list[str] = []
    with local_trainer(config) as trainer:
        plain = trainer.rollouts.rollout
        trainer.rollouts.rollout = replace(plain, scorer=NotedScorer(plain.scorer, "score", events))
        noted = NotedScorer(plain.scorer, "validate", events)
        fit = local_fit(trainer, config, CollapseWatch([]))
        fit.settings = replace(fit.settings, test_freq=2)
        fit.validator = Validator({"test": [GOLD]}, replace(plain, scorer=noted), build_rewards("rlla"))
        for kind, method, name in ((Critic, "update", "critic"), (Policy, "update", "policy")):
            update = getattr(kind, method)

            def noting(*given: Any, update: Any = update, name: str = name) -> Any:
                noted.note(f"{name} {trainer.step + 1}")
                return update(*given)

            monkeypatch.setattr(kind, method, noting)
        asyncio.run(fit.run())
    published = PUBLISHED.replace("\n", ", ").strip(", ").split(", ")
    assert events == [*published[:-1], "score 5", "critic 5", "policy 5", published[-1]]


REWARD = """
from verl.types import Score

class TellsStep:
    def score(self, trajectory, task, step):
        return Score(float(trajectory.index), {"step": float(step)})
"""


@pytest.mark.long
def test_a_run_in_two_parts_with_two_scorers_and_stale_rollouts(tmp_path: Path) -> None:
    """Through the command: the steps that rewards get, the refusal of other inputs, and the records of both parts."""
    (tmp_path / "mine.py").write_text(REWARD)
    rows, few = tmp_path / "train.parquet", tmp_path / "few.parquet"
    shutil.copy(MINI / "train.parquet", rows)
    pq.write_table(pq.read_table(MINI / "test.parquet").slice(0, 4), few)
    overrides = [*run_overrides(save_tiny_model(tmp_path / "model"), tmp_path, "hf", 2), "trainer.test_freq=1"]
    overrides += [f"data.train_files=[{rows}]", f"data.val_files=[{few}]", "data.max_response_length=4"]
    overrides += [f"reward.name={tmp_path / 'mine.py'}:TellsStep", "reward.num_workers=2", "rollout.max_staleness=1"]
    overrides.append("algorithm.kl_placement=none")  # the reference would read the weights of the model's folder again
    run(overrides, WITHLENGTH="1")
    (tmp_path / "mine.py").write_text(REWARD + "# another")
    (tmp_path / "model/model.safetensors").touch()
    more = [*overrides, "trainer.total_training_steps=4"]
    output = " ".join(run(more, 2, COARSEREWARD="1").split())
    assert "COARSEREWARD=1 (originally None); WITHLENGTH=None (originally 1); reward.name=sha256" in output
    run([*more, "trainer.allow_changed=[WITHLENGTH,COARSEREWARD,reward.name]"], COARSEREWARD="1")
    folder = tmp_path / "run"
    for step in range(1, 5):
        rolled = read_jsonl(folder / "transcripts" / f"step-{step:06d}.jsonl")
        assert {row["score"]["parts"]["step"] for row in rolled} == {float(step)}
    for step in range(5):
        rolled = read_jsonl(folder / "validation" / f"step-{step:06d}.jsonl")
        assert {row["score"]["parts"]["step"] for row in rolled} == {float(step)}
    ages = [row["staleness/max"] for row in read_jsonl(folder / "metrics.jsonl") if "staleness/max" in row]
    assert ages == [0, 1, 0, 1]
    code = read_jsonl(folder / "code_version.json")
    assert [(row["step"], "WITHLENGTH" in row, "COARSEREWARD" in row) for row in code] == [
        (0, True, False),
        (2, False, True),
    ]
    (change,) = read_jsonl(folder / CHANGES)
    assert change["step"] == 2 and [*change["changed"]] == ["COARSEREWARD", "WITHLENGTH", "reward.name"]
    assert [row["step"] for row in read_jsonl(folder / "data_versions.jsonl")] == [0, 0]


def test_the_warm_up_of_the_critic_is_that_of_the_published_loop() -> None:
    """`critic_warmup <= global_steps`, which counts from 1: ReTool's 20 leaves 85 of its first 104 steps to both."""

    def policy_updates(warmup: int, steps: Sequence[int]) -> list[int]:
        return [step for step in steps if step - 1 >= TrainerConfig(critic_warmup=warmup).critic_only_updates]

    assert len(policy_updates(20, range(1, 105))) == 85
    for warmup in range(5):
        assert policy_updates(warmup, range(1, 9)) == [step for step in range(1, 9) if warmup <= step]
