"""Several rewards at once: totals, parts, shaping, the configuration, and functions of all forms."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolrl.check.lab.__main__ import as_trajectory
from verl.config.load import load_config
from verl.errors import ConfigError, DataError
from verl.scoring.pool import ScoringPool
from verl.scoring.rewards import Rewards, build_rewards
from verl.types import Message, Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score import build_reward
from verl.utils.reward_score.base import GroupReward, TaskCheckingReward
from verl.utils.reward_score.weighted import WeightedSum

TASK = Task("t", (Message("user", "2 + 2?"),), "4", "own", extra={"level": 3})


def exact(response: str, answer: str) -> float:
    return float(response == answer)


async def brief(response: str, answer: str) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"score": 1 / len(response), "letters": float(len(response))}


def level(completions: list[list[dict[str, str]]], level: list[int], **columns: Any) -> list[float]:
    assert columns["answer"] == ["4"] and columns["prompts"] == [[{"role": "user", "content": "2 + 2?"}]]
    return [float(number) for number, answer in zip(level, completions, strict=True) if answer[0]["content"]]


def rising(prompts: list[Any], completions: list[Any]) -> list[float]:
    return [1.0, 2.0]


class Centered:
    """Subtracts the mean of the group, and counts the groups."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(float(len(trajectory.response)), {})

    def shape(self, group: TrajectoryGroup, state: Any) -> tuple[tuple[float, ...], Any]:
        assert group.rewards == tuple(score.total for score in group.scores)
        mean = sum(group.rewards) / len(group.rewards)
        return tuple(reward - mean for reward in group.rewards), {"groups": state.get("groups", 0) + 1}


def mine(name: str) -> str:
    return f"{__name__}:{name}"


def sum_of(*terms: Any) -> Rewards:
    return build_rewards("sum", {"terms": list(terms)})


def test_totals_are_weighted_and_parts_are_named() -> None:
    rewards = sum_of({"name": mine("exact"), "weight": 2}, {"name": mine("brief"), "weight": -0.5}, "math")
    score = rewards.score(as_trajectory(TASK, "four"), TASK, 0)
    assert score.total == pytest.approx(2 * 0.0 - 0.5 / 4 + 0.0)
    assert score.parts == {
        "exact": 0.0,
        "brief": 0.25,
        "brief/letters": 4.0,
        "math": 0.0,
        **{f"math/{name}": part for name, part in _math_parts().items()},
    }
    assert rewards.names(TASK) == (mine("exact"), mine("brief"), "math")
    assert not isinstance(rewards.default, GroupReward)


def _math_parts() -> dict[str, float]:
    return dict(build_reward("math").score(as_trajectory(TASK, "four"), TASK, 0).parts)


def test_options_reach_their_reward() -> None:
    from verl.utils.reward_score.calls import CallsReward

    built = build_reward("sum", {"terms": [{"name": "calls", "options": {"coarse": True}}, mine("exact")]})
    assert isinstance(built, WeightedSum) and isinstance(built.terms[0].reward, CallsReward)
    assert built.terms[0].reward.options.coarse
    assert built.reads_calls
    with pytest.raises(DataError, match="no assistant turn"):
        built.check_task(TASK)


def test_shaping_rewards_see_their_own_scores_and_keep_their_own_state() -> None:
    rewards = sum_of({"name": mine("exact"), "weight": 10.0}, {"name": mine("Centered"), "weight": 0.5})
    trajectories = [as_trajectory(TASK, text) for text in ("4", "four!")]
    scores = tuple(rewards.score(each, TASK, 0) for each in trajectories)
    group = TrajectoryGroup(TASK, tuple(trajectories), scores, tuple(score.total for score in scores))
    shaped, states = rewards.shaped(group, {})
    assert shaped.rewards == pytest.approx((10.0 + 0.5 * (1 - 3), 0.5 * (5 - 3)))
    assert states == {"sum": {"Centered": {"groups": 1}}}
    assert rewards.shaped(group, states)[1] == {"sum": {"Centered": {"groups": 2}}}


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        ([], "names no reward"),
        ([3], "must be a name or"),
        ([{"weight": 1.0}], "must be a name or"),
        ([{"name": "math", "weigh": 1.0}], "no key 'weigh'; did you mean 'weight'"),
        ([{"name": "math", "weight": "much"}], "must be a finite number, got 'much'"),
        ([{"name": "math", "weight": True}], "must be a finite number"),
        ([{"name": "math", "weight": float("nan")}], "must be a finite number"),
        ([{"name": "math", "options": 3}], "options of reward 'math'"),
        ([{"name": "math", "options": {"nothing": 3}}], "no option 'nothing'"),
        (["math", "math"], "two entries 'math'"),
        (["auto"], "cannot be auto; name calls"),
        (["maths"], "did you mean 'math'"),
    ],
)
def test_unusable_entries_are_errors(terms: list[Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_rewards("sum", {"terms": terms})


def test_functions_in_trls_form_are_called_with_one_row() -> None:
    assert build_reward(mine("level")).score(as_trajectory(TASK, "4"), TASK, 0).total == 3.0
    with pytest.raises(TypeError, match=r"rising returned \[1.0, 2.0\]; expected a list of one number"):
        build_reward(mine("rising")).score(as_trajectory(TASK, "4"), TASK, 0)


def test_a_column_that_a_function_names_is_in_every_row() -> None:
    both = build_rewards("sum", {"terms": [mine("rising"), mine("level")]}).default
    assert isinstance(both, TaskCheckingReward)
    both.check_task(TASK)
    with pytest.raises(DataError, match=r"reward level: missing a required argument: 'level'; expected .*, a"):
        both.check_task(replace(TASK, extra={"a": 1}))


async def test_async_functions_score_in_the_scoring_processes() -> None:
    terms = [{"name": mine("brief"), "weight": 4.0}, mine("exact")]
    with ScoringPool("sum", {"terms": terms}, 1) as pool:
        score = await pool.score(as_trajectory(TASK, "4"), TASK, 0)
    assert score.total == 5.0 and score.parts["brief/letters"] == 1.0


def settings_of(*overrides: str) -> Any:
    return load_config(["model.path=m", "data.train_files=[t]", "data.val_files=[v]", *overrides]).reward


def test_the_list_on_the_command_line_and_in_a_recipe() -> None:
    overrides = "reward=[{name: calls, options: {coarse: true}}, {name: mine.py:f, weight: 0.2}, math]"
    reward = settings_of(overrides, "reward.num_workers=2")
    terms = [{"name": "calls", "options": {"coarse": True}}, {"name": "mine.py:f", "weight": 0.2}, "math"]
    assert (reward.name, reward.options, reward.num_workers) == ("sum", {"terms": terms}, 2)
    assert reward.terms == {"calls": {"coarse": True}, "mine.py:f": {}, "math": {}}
    assert settings_of("recipe=tool_n1", overrides).options == {"terms": terms}  # instead of the recipe's reward
    assert settings_of("reward.name=math").terms == {"math": {}}
    assert settings_of("reward=[math, 3]").terms == {"math": {}}  # `build_reward` refuses the other


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["reward=math"], "must be a list of"),
        (["reward=[math]", "reward.name=qa"], r"reward.name contradicts reward=\[..\]"),
        (["reward=[math]", "reward.options.x=1"], "reward.options.x contradicts"),
        (["reward=[math, env]"], "needs an environment that judges"),
        (["reward=[math, otc_grpo]", "env.tool_call_format=hermes"], "max_calls must be env.max_tool_calls"),
    ],
)
def test_contradictions_are_errors(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings_of(*overrides)


def test_a_row_may_still_name_its_own_reward(tmp_path: Path) -> None:
    rewards = sum_of("math", mine("exact"))
    task = Task("t", TASK.prompt, "4", "own", reward=mine("exact"))
    assert rewards.score(as_trajectory(task, "4"), task, 0) == Score(1.0, {})
    assert rewards.names(task) == (mine("exact"),)


def test_one_reward_replaces_the_list_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "both.yaml").write_text("reward:\n- {name: math, weight: 2}\n- qa\n")
    monkeypatch.setattr("verl.config.load.RECIPES", tmp_path)
    assert settings_of("recipe=both").terms == {"math": {}, "qa": {}}
    assert settings_of("recipe=both", "reward.name=qa").terms == {"qa": {}}
