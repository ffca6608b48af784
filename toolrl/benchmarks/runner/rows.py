"""Any training data file as a benchmark, scored by a training reward."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from toolrl.benchmarks.runner.benchmark import Benchmark, BenchmarkContext, Category, EpisodeConfig
from toolrl.benchmarks.runner.runner import EXACT
from verl.data.report import CHOICES
from verl.data.source import source_rows
from verl.data.tasks import TaskSet, to_tasks
from verl.errors import DataError
from verl.scoring.rewards import build_rewards
from verl.utils.reward_score.base import LabReward, build_reward


def rows_benchmark(path: str, context: BenchmarkContext) -> Benchmark:
    """Rows of a file, each a prompt and one response, scored by the context's reward or the row's own.

    Prompts are used as they are. If the first row has a gold turn, the handler's format lists tools and reads calls.
    With an environment each row is an episode of it, as in training.
    The score is the share with the maximum reward, or the mean if that is unknown. Raises ConfigError for the reward.
    """
    name = Path(path).name  # with its suffix, so that files with the same stem have separate results
    uses_tools = context.env is not None or _has_gold(path, context)
    episode = EpisodeConfig(context.reward, context.reward_options, uses_tools, own_env=context.env)
    metric = EXACT if isinstance(build_reward(context.reward, context.reward_options), LabReward) else "total"
    tasks = cache(partial(_read, path, metric, context))
    note = f"{name}: rows of {path}, scored by {context.reward}"
    if context.env is not None:
        note += f", in the environment {context.env.agent or context.env.command or context.env.name}"
    category = Category(name, tasks, episode, metric)
    return Benchmark(name, (category,), notes=(note,), files=lambda: (str(tasks().report),))


def _has_gold(path: str, context: BenchmarkContext) -> bool:
    """True if the first row has a gold answer. An unreadable file is reported later, by `_read`."""
    try:
        first = next(source_rows(path, context.data), [])
        parsed = (to_tasks(row, path, data_source=path, names=context.names) for row in first)
        return any(task.gold is not None for tasks in parsed for task in tasks)
    except DataError:
        return False


def _read(path: str, metric: str, context: BenchmarkContext) -> TaskSet:
    envs = () if context.env is None else (context.env.name,)  # whose tasks can be evaluated, besides single turns
    rewards = build_rewards(context.reward, context.reward_options)
    try:
        tasks = TaskSet(path, data=context.data, names=context.names)
    except DataError as error:
        whole = error.row is None or error.field in CHOICES
        raise error if whole else replace(error, hint="Correct the row: no row is skipped here") from None
    for task in tasks:
        if task.env not in (None, "single_turn", *envs):
            expected = " or ".join(("single_turn", *envs))
            hint = f"Set env.name={task.env}"
            raise DataError(f"{task.env!r} is not supported here", expected, hint, field="env").of_row(task.id)
        if metric == EXACT and task.reward is not None and not isinstance(rewards.of(task), LabReward):
            problem = f"{task.reward!r} has no known maximum, which the metric of the other rows needs"
            raise DataError(problem, hint="Put the rows into a separate file", field="reward").of_row(task.id)
    return tasks
