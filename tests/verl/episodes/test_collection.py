"""What a step draws and keeps: filters, dynamic sampling, penalties for length, greedy baselines, states of turns."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.metric_names import known
from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.advantage import gae
from verl.algorithms.estimators.dr_grpo import DR_GRPO
from verl.algorithms.estimators.gigpo import GIGPO, gigpo
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.estimators.reinforce_pp import REINFORCE_PP
from verl.algorithms.estimators.remax import REMAX
from verl.algorithms.filters import accuracy, grader_faults, length, name_of, passed, truncated, zero_variance
from verl.algorithms.losses.dapo import DAPO
from verl.algorithms.losses.ppo import PPO
from verl.algorithms.names import KLPlacement
from verl.algorithms.overlong import Overlong
from verl.batch.experience import per_episode, turns_of, with_advantages
from verl.batch.samples import Sample, batch_of, to_batch
from verl.batch.token_batch import TokenBatch
from verl.build.env import single_turn_runner
from verl.chat.template import ChatTemplate
from verl.config.schema import Config, DataConfig, RewardConfig, RolloutConfig, TrainerConfig
from verl.data.tasks import TaskCursor, TaskStream
from verl.episodes.collection import NoTrainableGroupsError, StepGroups
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RewardFaultError, RolloutManager
from verl.errors import ConfigError
from verl.rollout.engine import Sampling
from verl.trainer.learner import Learner
from verl.trainer.metrics import rollout_metrics
from verl.trainer.ppo import PPOTrainer
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    ToolStatus,
    ToolUse,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


def trajectory(task: Task, index: int, num_tokens: int = 1, stop: StopReason = StopReason.STOP) -> Trajectory:
    completion = Completion((5,) * num_tokens, (-1.0,) * num_tokens, FinishReason.STOP, 0)
    turn = Turn((1, 2), completion, Message("assistant", "x"))
    return Trajectory(task, index, (turn,), stop, Outcome.SCORED)


def group(rewards: Sequence[float], lengths: Sequence[int] = (), name: str = "t", **more: Any) -> TrajectoryGroup:
    task = Task(name, (Message("user", name),), "a", "s")
    lengths = lengths or [1] * len(rewards)
    responses = tuple(trajectory(task, index, tokens) for index, tokens in enumerate(lengths))
    scores = tuple(Score(reward, {"correct": float(reward > 0.5)}) for reward in rewards)
    return TrajectoryGroup(task, responses, scores, tuple(rewards), **more)


def test_groups_without_spread_are_dropped_whatever_their_mean() -> None:
    assert zero_variance(group([0.4, 0.4, 0.4])) == [False] * 3
    assert zero_variance(group([0.0, 1.0])) == [True] * 2
    assert zero_variance(group([0.0, 0.1]), least_spread=0.2) == [False] * 2


@pytest.mark.parametrize(
    ("rewards", "inclusive", "stays"),
    [
        ([1, 1, 1, 1], False, False),
        ([1, 1, 1, 0], False, False),  # on the bound
        ([1, 1, 1, 0], True, True),
        ([1, 0, 1, 0], False, True),
        ([0, 0, 0, 0], True, False),
    ],
)
def test_the_accuracy_window_by_hand(rewards: list[float], inclusive: bool, stays: bool) -> None:
    assert accuracy(group(rewards), 0.25, 0.75, inclusive=inclusive) == [stays] * 4


def test_the_accuracy_of_a_part() -> None:
    assert accuracy(group([0.6, 0.7]), high=0.9, part="correct") == [False] * 2  # both are correct, the totals 0.65
    assert accuracy(group([0.6, 0.7]), high=0.9) == [True] * 2


def test_rollouts_are_dropped_by_length_truncation_and_faults_of_the_grader() -> None:
    assert length(group([0, 1, 1], [3, 4, 5]), max_tokens=4) == [True, True, False]
    whole = group([0.0, 1.0])
    cut = replace(whole, trajectories=(whole.trajectories[0], trajectory(whole.task, 1, stop=StopReason.LENGTH)))
    assert truncated(cut) == [True, False]
    assert grader_faults(group([0, 1, 1], faults=("a", "b"))) == [True] * 3  # 2 of 5
    assert grader_faults(group([0, 1, 1], faults=("a", "b")), max_share=0.3) == [False] * 3


def test_filters_are_applied_in_turn_and_counted() -> None:
    groups = [group([0, 1, 1], [9, 1, 1]), group([0, 1, 1, 0], [9, 1, 1, 1]), group([1, 1], [1, 9])]

    def short(each: TrajectoryGroup) -> list[bool]:
        return length(each, max_tokens=4)

    left, dropped = passed(groups, (short, zero_variance), min_group_size=2)
    # the first loses its only other reward, the second one of four, the third falls below two
    assert [each.rewards for each in left] == [(1, 1, 0)]
    assert [len(each.scores) for each in left] == [3] and left[0].trajectories[0].index == 1
    assert dropped == Counter(short=1 + 1 + 2, zero_variance=2)
    assert name_of(zero_variance) == "zero_variance"


class Scripted:
    """Rewards of each task, in the place of rollouts; remembers what it was asked for."""

    def __init__(self, rewards: dict[str, Sequence[float]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.rewards, self.asked, self.broken = rewards, list[tuple[str, int, int, float]](), set[str]()
        script = self

        async def run(self: GroupRollout, task: Task, n: int, step: int, first_seed: int) -> TrajectoryGroup:
            script.asked.append((task.id, n, first_seed, self.sampling.temperature))
            if self.sampling.temperature == 0.0:
                return (
                    group([], faults=("down",)) if task.id in script.broken else group([0.5], [10], lost_uses=(LOST,))
                )
            rewards = script.rewards[task.id]
            faults = ("down",) * (n - len(rewards))
            return replace(group(rewards, [10] + [1] * (len(rewards) - 1)), task=task, faults=faults)

        monkeypatch.setattr(GroupRollout, "run", run)


LOST = ToolUse("search", ToolStatus.UNAVAILABLE, 1.0)
DAPO_SHORT = replace(DAPO, overlong=None)
TASKS = [Task(f"t{number}", (Message("user", "w"),), "a", "s") for number in range(6)]


def trainer(algorithm: Algorithm, prompts: int = 2, cursor: TaskCursor | None = None) -> PPOTrainer:
    rollout = GroupRollout(None, None, Sampling(16), single_turn_runner(ChatTemplate, 16))  # type: ignore[arg-type]
    config = Config(
        data=DataConfig(train_batch_size=prompts),
        rollout=RolloutConfig(name="hf", n=2),
        trainer=TrainerConfig(seed=1),
    )
    model: Any = object()
    reference = None if algorithm.kl.placement is KLPlacement.NONE else model
    stream = TaskStream([TASKS], cursor=cursor)
    learner = Learner(config=config, algorithm=algorithm, policy=model, reference=reference)
    rollouts = RolloutManager(config, algorithm, stream, rollout)
    return PPOTrainer(rollouts=rollouts, learner=learner, weight_sync=model)


def order(number: int) -> list[str]:
    stream = TaskStream([TASKS])
    return [next(stream).id for _ in range(number)]


def test_prompts_are_drawn_until_there_are_enough_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, fourth, *_ = order(6)
    script = Scripted({first: (1, 1), second: (0, 1), third: (0, 0), fourth: (1, 0)}, monkeypatch)
    learning = trainer(replace(DAPO, overlong=Overlong(16, 8)))
    collected = asyncio.run(learning.rollouts.take(learning.step))
    assert [each.task.id for each in collected.kept] == [second, fourth]
    assert [each.task.id for each in collected.drawn] == [first, second, third, fourth]
    assert collected.resample_rounds == 3
    seeds = [seed for _, _, seed, _ in script.asked]
    assert len({seed + more for seed in seeds for more in (0, 1)}) == 8  # no two rollouts share a seed
    # 10 tokens are 2 into the buffer of 8: a quarter point less, once the filters have looked
    assert [each.rewards for each in collected.kept] == [(-0.25, 1), (0.75, 0)]
    metrics = collected.metrics()
    assert metrics == {
        "filter/kept": 0.5,
        "filter/zero_variance": 0.5,
        "filter/resample_rounds": 3.0,
        "reward/overlong_penalty": pytest.approx(-0.125),
    }
    assert all(known(name) for name in metrics)


def test_the_next_step_draws_on_from_there_and_so_does_a_resumed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    names = order(6)
    rewards = dict.fromkeys(names, (0.0, 1.0)) | {names[0]: (1.0, 1.0)}
    script = Scripted(rewards, monkeypatch)
    learning = trainer(DAPO_SHORT)
    asyncio.run(learning.rollouts.take(learning.step))
    learning.step = 1
    saved = json.loads(json.dumps(learning.state()))
    asyncio.run(learning.rollouts.take(learning.step))
    straight = script.asked[3:]
    assert [name for name, *_ in straight] == names[3:5]

    script.asked.clear()
    resumed = trainer(DAPO_SHORT, cursor=TaskCursor(**saved["rollouts"]["data"]))
    resumed.restore(saved)
    asyncio.run(resumed.rollouts.take(resumed.step))
    assert script.asked == straight


def test_a_step_without_any_signal_is_an_error_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(dict.fromkeys(order(6), (1.0, 1.0)), monkeypatch)
    with pytest.raises(NoTrainableGroupsError, match=r"all 6 groups .* 3 resample rounds \(zero_variance dropped 12 "):
        asyncio.run(trainer(replace(DAPO_SHORT, max_resample_rounds=3)).rollouts.take(0))
    assert len(script.asked) == 6


def test_a_step_that_is_not_full_after_its_draws_is_trained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = order(6)
    Scripted(dict.fromkeys(names, (1.0, 1.0)) | {names[0]: (0.0, 1.0)}, monkeypatch)
    collected = asyncio.run(trainer(replace(DAPO_SHORT, max_resample_rounds=2)).rollouts.take(0))
    assert len(collected.kept) == 1 and "1 of 2 groups after 2 resample rounds" in caplog.text


def test_one_draw_drops_and_draws_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    names = order(6)
    script = Scripted(dict.fromkeys(names, (1.0, 1.0)) | {names[1]: (0.0, 1.0)}, monkeypatch)
    collected = asyncio.run(trainer(replace(DR_GRPO, filters=(zero_variance,))).rollouts.take(0))
    assert [each.task.id for each in collected.kept] == [names[1]] and len(script.asked) == 2
    assert StepGroups(DR_GRPO, 2).metrics() == {}


def test_remax_compares_with_a_greedy_response(monkeypatch: pytest.MonkeyPatch) -> None:
    names = order(6)
    script = Scripted(dict.fromkeys(names, (0.0, 1.0)), monkeypatch)
    kept = asyncio.run(trainer(replace(REMAX, overlong=Overlong(16, 8))).rollouts.take(0)).kept
    assert sorted((n, temperature) for _, n, _, temperature in script.asked) == [(1, 0.0)] * 2 + [(2, 1.0)] * 2
    assert [each.baseline for each in kept] == [0.25, 0.25]  # it is long, too
    assert [each.lost_uses for each in kept] == [(LOST,), (LOST,)]  # of the greedy episodes
    trained = to_batch([replace(each, rewards=(0.0, 1.0)) for each in kept])
    assert advantages(trained, replace(REMAX, kl=DAPO.kl)) == [[-0.25] * 10, [0.75]] * 2


def test_without_its_greedy_response_a_group_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names = order(6)
    script = Scripted(dict.fromkeys(names, (0.0, 1.0)), monkeypatch)
    script.broken.add(names[0])
    learning = trainer(REMAX)
    learning.rollouts.config = replace(learning.rollouts.config, reward=RewardConfig(max_fault_share=0.5))
    collected = asyncio.run(learning.rollouts.take(learning.step))
    assert [each.task.id for each in collected.kept] == [names[1]] and collected.drawn[0].faults == ("down",)
    learning.rollouts.config = replace(learning.rollouts.config, reward=RewardConfig(max_fault_share=0.1))
    with pytest.raises(RewardFaultError):
        script.broken.update(names)
        asyncio.run(learning.rollouts.take(learning.step))


def test_greedy_responses_count_among_those_that_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(dict.fromkeys(order(6), (1.0,)), monkeypatch)  # one of two is lost
    script.broken.update(order(6))
    learning = trainer(REMAX)
    learning.rollouts.config = replace(learning.rollouts.config, reward=RewardConfig(max_fault_share=0.5))
    with pytest.raises(RewardFaultError, match="4 of 6 responses"):
        asyncio.run(learning.rollouts.take(learning.step))


@pytest.mark.parametrize(("algorithm", "num_kept"), [(REMAX, 2), (DR_GRPO, 0)], ids=["remax", "dr_grpo"])
def test_a_lone_response_is_trained_where_nothing_is_compared(
    algorithm: Algorithm, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Scripted(dict.fromkeys(order(6), (1.0,)), monkeypatch)
    learning = trainer(algorithm)
    learning.rollouts.config = replace(learning.rollouts.config, reward=RewardConfig(max_fault_share=0.5))
    try:
        assert len(asyncio.run(learning.rollouts.take(learning.step)).kept) == num_kept
    except NoTrainableGroupsError:
        assert num_kept == 0


def test_turns_and_their_states_by_hand() -> None:
    """Prompt 1 2, turns of 5s, observations 7 or 8; a state is identified by group and observation."""
    tokens = [(1, 2, 5, 5, 7, 5), (1, 2, 5, 8, 8, 5, 7, 5), (1, 2, 5, 7, 5)]
    samples = [
        Sample(
            token_ids=np.array(ids),
            action_mask=np.array(ids) == 5,
            rollout_logprobs=np.zeros(ids.count(5)),
            group=number,
            reward=0.0,
        )
        for number, ids in zip((0, 0, 1), tokens, strict=True)
    ]
    turns = turns_of(batch_of(samples))
    assert [each.turn_L.tolist() for each in turns] == [[0, 0, 1], [0, 1, 2], [0, 1]]
    first, second, third = (each.state_N.tolist() for each in turns)
    assert first[0] == second[0] != third[0]  # one prompt, another prompt
    assert first[1] == second[2] and second[1] not in first and third[1] not in (*first, *second)
    assert turns_of(batch_of([rewarded((1, 2), 0.0)]))[0].turn_L.dtype is torch.long


def rewarded(ids: Sequence[int], reward: float) -> Sample:
    """Tokens of which the 5s are the policy's."""
    return Sample(
        token_ids=np.array(ids),
        action_mask=np.array(ids) == 5,
        rollout_logprobs=np.zeros(ids.count(5)),
        group=0,
        reward=reward,
    )


def with_turn_reward(batch: TokenBatch, place: int) -> TokenBatch:
    """A reward of 0.5 for the turn that ends with this trained token."""
    assert batch.rewards is not None
    rewards = batch.rewards.copy()
    rewards[place] += 0.5
    return replace(batch, rewards=rewards)


def advantages(batch: TokenBatch, algorithm: Algorithm) -> list[list[float]]:
    """[B][trained tokens]"""
    found = with_advantages(batch, algorithm).advantages
    assert found is not None
    return [each.tolist() for each in per_episode(torch.from_numpy(found), batch)]


def test_gae_pays_for_a_turn_at_its_last_token_by_hand() -> None:
    """Rewards 0, 0.5, 1 and values 0.2, 0.4, 0.6 at gamma 0.5: deltas 0, 0.4, 0.4, advantages 0.3, 0.6, 0.4."""
    algorithm = replace(PPO, advantage=partial(gae, gamma=0.5, lam=1.0), kl=KLTerm())
    batch = with_turn_reward(batch_of([rewarded((1, 5, 5, 7, 5), 1.0)]), 1)
    found = with_advantages(replace(batch, values=np.array([0.2, 0.4, 0.6], dtype=np.float32)), algorithm)
    np.testing.assert_allclose(found.returns, [0.5, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(found.advantages, [-0.87287, 1.09109, -0.21822], atol=1e-4)


def test_gigpo_compares_what_turns_were_given_by_hand() -> None:
    """R = 1.5 and 0; in the first turn, whose state both met, R_1 = 0.5 + 0.95 * 1 and 0; the second met no other."""
    batch = with_turn_reward(batch_of([rewarded((1, 2, 5, 7, 5), 1.0), rewarded((1, 2, 5, 8, 5), 0.0)]), 0)
    algorithm = replace(GIGPO, advantage=partial(gigpo, gamma=0.95, turn_weight=1.0, divide_by_std=False), kl=KLTerm())
    first, second = advantages(batch, algorithm)
    assert first == pytest.approx([0.75 + 0.725, 0.75]) and second == [-each for each in first]


@pytest.mark.parametrize("algorithm", [GIGPO, PPO], ids=["gigpo", "ppo"])
def test_the_last_turns_reward_and_the_episodes_are_paid_at_one_place(algorithm: Algorithm) -> None:
    ids, plain = (1, 2, 5, 7, 5, 5), replace(algorithm, kl=KLTerm())
    values = np.tile(np.array([2.0, 4.0, 5.0], dtype=np.float32), 2)
    at_the_end, of_episode = (batch_of([rewarded(ids, reward), rewarded(ids, 0.0)]) for reward in (1.5, 1.0))
    batches = (at_the_end, with_turn_reward(of_episode, 2))
    together, apart = (advantages(replace(batch, values=values), plain) for batch in batches)
    assert together == apart


def with_turn_rewards(whole: TrajectoryGroup, *rewards: float | None) -> TrajectoryGroup:
    pairs = zip(whole.trajectories, rewards, strict=True)
    paid = tuple(replace(each, turns=(replace(each.turns[0], reward=reward),)) for each, reward in pairs)
    return replace(whole, trajectories=paid)


@pytest.mark.parametrize("algorithm", [GRPO, REINFORCE_PP, DR_GRPO, REMAX], ids=lambda each: each.name)
def test_rewards_of_turns_are_refused_where_an_episode_has_one(
    algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(self: GroupRollout, task: Task, n: int, step: int, first_seed: int) -> TrajectoryGroup:
        return with_turn_rewards(group([0.0, 1.0][:n], name=task.id), *[0.25, None][:n])

    monkeypatch.setattr(GroupRollout, "run", run)
    with pytest.raises(
        ConfigError, match=rf"turn-level rewards .*, but algorithm.name={algorithm.name} supports only one"
    ):
        asyncio.run(trainer(algorithm).rollouts.take(0))
    assert len(asyncio.run(trainer(GIGPO).rollouts.take(0)).kept) == 2


def test_a_group_that_differs_in_rewards_of_turns_has_a_spread() -> None:
    equal = group([0.5, 0.5])
    assert zero_variance(equal) == zero_variance(with_turn_rewards(equal, 0.25, 0.25)) == [False] * 2
    differing = with_turn_rewards(equal, 0.25, None)
    assert differing.returns == (0.75, 0.5) and zero_variance(differing) == [True] * 2
    metrics = rollout_metrics([differing])
    assert (metrics["reward/turns"], metrics["reward/zero_variance_groups"]) == (0.125, 0.0)
    assert "reward/turns" not in rollout_metrics([equal]) and known("reward/turns")
