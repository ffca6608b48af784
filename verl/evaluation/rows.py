"""Any data file of training as a benchmark: every row in its own words, judged by a reward of training."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from verl.data.tasks import TaskSet
from verl.errors import DataError
from verl.evaluation.base import Benchmark, BenchmarkContext, Category, EpisodeConfig
from verl.evaluation.runner import EXACT
from verl.utils.reward_score.base import LabReward, build_reward
from verl.utils.reward_score.rewards import named_reward


def rows_benchmark(path: str, setting: BenchmarkContext) -> Benchmark:
    """Rows of a file, each a prompt and one response, judged by the reward of the setting or the row's own.

    The figure is the share of responses with the highest reward, or the mean reward where the setting's names no
    highest one. Raises ConfigError for a reward that cannot be made.
    """
    name = Path(path).name  # with its suffix, so that its figures take no other file's place
    play = EpisodeConfig(setting.reward, setting.reward_options, uses_tools=False)
    metric = EXACT if isinstance(build_reward(setting.reward, setting.reward_options), LabReward) else "total"
    tasks = cache(partial(_read, path, metric))
    return Benchmark(
        name,
        (Category(name, tasks, play, metric),),
        notes=(f"{name}: rows of {path}, scored by {setting.reward}",),
        files=lambda: (str(tasks().report),),
    )


def _read(path: str, metric: str) -> TaskSet:
    try:
        tasks = TaskSet(path)
    except DataError as error:
        raise error if error.row is None else replace(error, hint="Correct the row: none is left out here") from None
    for task in tasks:
        if task.env not in (None, "single_turn"):
            raise DataError(f"{task.env!r} is not played here", "single_turn", field="env").of_row(task.id)
        if metric == EXACT and task.reward is not None and not isinstance(named_reward(task.reward), LabReward):
            raise DataError(
                f"{task.reward!r} names no highest reward, by which the figure of the other rows goes",
                hint="Put the rows into a file of their own",
                field="reward",
            ).of_row(task.id)
    return tasks
