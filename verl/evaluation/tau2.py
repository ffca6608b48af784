"""Customer service over the data of tau2-bench (arXiv 2506.07982): retail and airline, the tasks of the test split."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from verl.envs.tau2.tasks import tau2_tasks
from verl.evaluation.base import Benchmark, BenchmarkContext, Category, EpisodeConfig
from verl.evaluation.files import find_file
from verl.evaluation.handlers import check_several_tools
from verl.types import Task

_MAX_TURNS, _MAX_TOOL_CALLS = 30, 60  # the longest list of gold actions has 19
_MEND = "it is data/tau2/domains of tau2-bench's repository (sierra-research/tau2-bench)"


def tau2(setting: BenchmarkContext) -> Benchmark:
    """40 tasks of retail and 20 of airline; 1 where the database and what was said are as they should be."""
    check_several_tools("tau2", setting.tool_call_format)
    found = find_file(setting.data_dir, ("retail/tasks.json", "airline/tasks.json"), _MEND)
    data = str(found.parent.parent)
    play = EpisodeConfig(
        "env",
        env="tau2",
        options={"data": data, **setting.user},
        max_turns=_MAX_TURNS,
        max_tool_calls=_MAX_TOOL_CALLS,
    )
    domains: tuple[Literal["retail", "airline"], ...] = ("retail", "airline")
    categories = tuple(Category(f"tau2/{name}", partial(_tasks, setting, data, name), play) for name in domains)
    split = "the test split: training takes the other one"
    idle = "whoever does nothing scores .05 in retail and .35 in airline, where nothing is to be done as often"
    return Benchmark("tau2", categories, notes=(_user_note(setting), split, idle))


def _tasks(setting: BenchmarkContext, data: str, domain: Literal["retail", "airline"]) -> list[Task]:
    """The rows' own source says that the user is scripted."""
    tasks = tau2_tasks(data, domain, "test")
    if "user_model" not in setting.user:
        return tasks
    return [replace(task, data_source=f"tau2_{domain}_chat_user") for task in tasks]


def _user_note(setting: BenchmarkContext) -> str:
    model = setting.user.get("user_model")
    if model:
        return f"the user is {model}; tau2-bench's figures have another prompt for it and other tools' words"
    return "the user is a script: figures are not comparable with those of tau2-bench, whose user is a language model"
