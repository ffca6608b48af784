"""Rewards in processes of their own: users' code that raises, hangs or dies costs one reply and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.errors import ConfigError
from verl.rollout.scoring import Fault, ScoringPool
from verl.types import Message, Outcome, Score, StopReason, Task, Trajectory
from verl.utils.reward_score.base import build_reward
from verl.utils.reward_score.lab import as_trajectory

REWARD = """
import os, time

def judge(reply, answer):
    if reply == "raise":
        raise ValueError("no service")
    if reply == "nan":
        return float("nan")
    if reply == "hang":
        time.sleep(600)
    if reply == "die":
        os._exit(7)
    return float(reply == answer) + float(os.environ.get("BONUS", 0))

def veRLs(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "source": float(data_source == "rlla")}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "mine.py"
    path.write_text(REWARD)
    return path


@pytest.fixture(scope="module")
def pool(file: Path) -> Iterator[ScoringPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BONUS", "2")
        with ScoringPool(f"{file}:judge", {}, num_workers=2, timeout_s=2.0) as made:
            yield made


def scores(pool: ScoringPool, *replies: str) -> list[Score | Fault]:
    task = Task("t", (Message("user", "?"),), "yes", "rlla")

    async def together() -> list[Score | Fault]:
        return await asyncio.gather(*(pool.score(as_trajectory(task, reply), task, 0) for reply in replies))

    return asyncio.run(together())


def test_scores_come_back_and_workers_know_the_environment(pool: ScoringPool) -> None:
    good, bad = scores(pool, "yes", "no")
    assert good == Score(3.0, {"score": 3.0}) and bad == Score(2.0, {"score": 2.0})


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("raise", "the reward raised ValueError: no service"),
        ("nan", "is no Score of finite numbers"),
        ("hang", "did not end within 2 s"),
        ("die", "process died (exit code 7)"),
    ],
)
def test_what_fails_is_a_fault_with_its_task_and_the_others_are_scored(
    pool: ScoringPool, reply: str, problem: str
) -> None:
    one, fault, two = scores(pool, "yes", reply, "no")
    assert isinstance(fault, Fault) and problem in str(fault) and str(fault).startswith("t, reply 0: ")
    assert isinstance(one, Score) and isinstance(two, Score)


def test_verls_signature_is_understood(file: Path) -> None:
    with ScoringPool(f"{file}:veRLs", {}, num_workers=1, timeout_s=5.0) as pool:
        assert scores(pool, "yes") == [Score(1.0, {"score": 1.0, "source": 1.0})]


def test_a_reward_that_cannot_be_made_is_heard_at_once(file: Path) -> None:
    with pytest.raises(ConfigError, match="has no 'judges'"):
        ScoringPool(f"{file}:judges", {}, num_workers=1, timeout_s=1.0)


def test_an_environments_own_verdict_is_a_reward() -> None:
    task = Task("t#0", (Message("user", "go"),), "", "shop")
    judged = Trajectory(task, 0, (), StopReason.STOP, Outcome.SCORED, score=Score(0.5, {"state": 0.5}))
    never_judged = Trajectory(task, 0, (), StopReason.LENGTH, Outcome.MODEL_FAULT)
    reward = build_reward("env")
    assert reward.score(judged, task, 0) == Score(0.5, {"state": 0.5})
    with pytest.raises(ConfigError, match="needs an environment that judges"):
        reward.score(never_judged, task, 0)
