"""Any data file of training as a benchmark: every row in its own words, judged by a reward of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from verl.data.tasks import TaskSet
from verl.errors import DataError
from verl.evaluation.base import Benchmark, Category, Play, Setting
from verl.types import Task
from verl.utils.reward_score.base import LabReward, build_reward


def rows_benchmark(path: str, setting: Setting) -> Benchmark:
    """Rows of a file, each a prompt and one reply.

    The figure is the share of replies with the highest reward; the mean reward where the reward names no highest one.
    Raises ConfigError for a reward that cannot be made.
    """
    name = Path(path).name  # with its suffix, so that its figures take no other file's place
    play = Play(setting.reward, setting.reward_options, handled=False)
    metric = "exact" if isinstance(build_reward(setting.reward, setting.reward_options), LabReward) else "total"
    return Benchmark(
        name,
        (Category(name, partial(_tasks, path), play, metric),),
        notes=(f"{name}: rows of {path}, scored by {setting.reward}",),
    )


def _tasks(path: str) -> Sequence[Task]:
    try:
        return TaskSet(path)
    except DataError as error:
        raise error if error.row is None else replace(error, mend="Correct the row: none is left out here") from None
