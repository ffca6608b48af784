"""Any data file of training as a benchmark: every row in its own words, judged by a reward of training."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from verl.data.tasks import TaskSet
from verl.errors import DataError
from verl.evaluation.base import Benchmark, Category, Play, Setting
from verl.utils.reward_score.base import LabReward, build_reward


def rows_benchmark(path: str, setting: Setting) -> Benchmark:
    """Rows of a file, each a prompt and one reply.

    The figure is the share of replies with the highest reward; the mean reward where the reward names no highest one.
    Raises ConfigError for a reward that cannot be made.
    """
    tasks = cache(partial(_read, path))
    name = Path(path).name  # with its suffix, so that its figures take no other file's place
    play = Play(setting.reward, setting.reward_options, handled=False)
    metric = "exact" if isinstance(build_reward(setting.reward, setting.reward_options), LabReward) else "total"
    return Benchmark(
        name,
        (Category(name, tasks, play, metric),),
        notes=(f"{name}: rows of {path}, scored by {setting.reward}",),
        files=lambda: (str(tasks().report),),
    )


def _read(path: str) -> TaskSet:
    try:
        return TaskSet(path)
    except DataError as error:
        raise error if error.row is None else replace(error, mend="Correct the row: none is left out here") from None
