"""Scoring in worker processes, each reply with a deadline: a reward that hangs or dies must not stop a run."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from functools import cache
from numbers import Real
from typing import Any, Protocol, Self

from pebble import ProcessExpired, ProcessPool

from verl.types import Score, Task, ToolUse, Trajectory
from verl.utils.reward_score.base import Reward
from verl.utils.reward_score.rewards import Rewards, build_rewards


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a reply has no score: a failure of a service or of the reward, not of the policy."""

    task_id: str
    index: int
    problem: str
    lost_uses: tuple[ToolUse, ...] = ()  # of the attempts

    def __str__(self) -> str:
        return f"{self.task_id}, reply {self.index}: {self.problem}"


class Scorer(Protocol):
    """Scores trajectories side by side."""

    async def score(self, trajectory: Trajectory, task: Task, step: int) -> Score | Fault:
        """The score, or why there is none. Never raises for what a reward does."""

    def close(self) -> None:
        """End the workers."""


@dataclass(frozen=True, slots=True)
class DirectScorer:
    """Scores in this process, without a deadline: for tests and for rewards that are known."""

    reward: Reward

    async def score(self, trajectory: Trajectory, task: Task, step: int) -> Score | Fault:
        try:
            return finite_score(self.reward.score(trajectory, task, step))
        except Exception as error:  # noqa: BLE001  users' code may raise anything
            return Fault(task.id, trajectory.index, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Nothing to end."""


class ScoringPool:
    """Scores in processes of their own; one that runs past the deadline is killed and replaced.

    Workers inherit this process's environment, so the reward's variables reach them whatever cluster is used.
    """

    def __init__(self, name: str, options: Mapping[str, Any], num_workers: int, timeout_s: float) -> None:
        """name, options: of the reward of tasks that name none. Raises ConfigError if it cannot be made."""
        build_rewards(name, options)
        self._made_of = (name, json.dumps(dict(options)))
        self._timeout_s = timeout_s
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        self._pool = ProcessPool(max_workers=num_workers, context=context)

    async def score(self, trajectory: Trajectory, task: Task, step: int) -> Score | Fault:
        future = self._pool.schedule(_score, args=(*self._made_of, trajectory, task, step), timeout=self._timeout_s)
        try:
            score: Score = await asyncio.wrap_future(future)
        except (TimeoutError, FutureTimeoutError):
            problem = f"the reward did not end within {self._timeout_s:g} s (reward.timeout_s)"
        except ProcessExpired as error:
            problem = f"the reward's process died (exit code {error.exitcode})"
        except Exception as error:  # noqa: BLE001  users' code may raise anything
            problem = f"the reward raised {type(error).__name__}: {error}"
        else:
            return score
        return Fault(task.id, trajectory.index, problem)

    def close(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join(timeout=self._timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def _rewards(name: str, options: str) -> Rewards:
    return build_rewards(name, json.loads(options))


def _score(name: str, options: str, trajectory: Trajectory, task: Task, step: int) -> Score:
    return finite_score(_rewards(name, options).score(trajectory, task, step))


def finite_number(value: object) -> float:
    """The number as a float, whichever library's it is. Raises ValueError for what is none, or is not finite."""
    try:
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"{value!r} is no finite number")


def finite_score(score: object) -> Score:
    """The score in floats. Raises ValueError for one without: it could be neither averaged nor kept as JSON."""
    problem = f"{score!r} is no Score of finite numbers"
    if not isinstance(score, Score) or not isinstance(score.parts, Mapping):
        raise ValueError(problem)
    try:
        parts = {name: finite_number(value) for name, value in score.parts.items()}
        return replace(score, total=finite_number(score.total), parts=parts)
    except ValueError as error:
        raise ValueError(problem) from error
