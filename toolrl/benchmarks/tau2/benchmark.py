"""Customer service on the data of tau2-bench (arXiv 2506.07982): retail and airline, test split."""

from dataclasses import replace
from functools import partial

from toolrl.benchmarks.runner.benchmark import Benchmark, BenchmarkContext, Category, EpisodeConfig
from toolrl.benchmarks.runner.files import find_file
from toolrl.benchmarks.runner.handlers import check_several_tools
from toolrl.benchmarks.tau2.tasks import DOMAINS, Domain, tau2_tasks
from verl.types import Task

_MAX_TURNS, _MAX_TOOL_CALLS = 30, 60  # the longest list of gold actions has 19
_HINT = "it is data/tau2/domains of tau2-bench's repository (sierra-research/tau2-bench)"


def tau2(context: BenchmarkContext) -> Benchmark:
    """40 retail and 20 airline tasks; a score of 1 needs the right database state and messages."""
    check_several_tools("tau2", context.tool_call_format)
    path = find_file(context.data_dir, ("retail/tasks.json", "airline/tasks.json"), _HINT)
    data = str(path.parent.parent)
    episode = EpisodeConfig(
        "env",
        env="tau2",
        options={"data": data, **context.user},
        max_turns=_MAX_TURNS,
        max_tool_calls=_MAX_TOOL_CALLS,
    )
    categories = tuple(Category(f"tau2/{name}", partial(_tasks, context, data, name), episode) for name in DOMAINS)
    split = "the test split: training uses the other one"
    idle = "a policy that does nothing scores .05 in retail and .35 in airline, where as many tasks need no action"
    user = "the user is a script: scores are not comparable with those of tau2-bench, whose user is a language model"
    if model := context.user.get("user_model"):
        user = f"the user is {model}; tau2-bench uses another prompt for it and other tool descriptions"
    return Benchmark("tau2", categories, notes=(user, split, idle))


def _tasks(context: BenchmarkContext, data: str, domain: Domain) -> list[Task]:
    """The tasks; their data source names the kind of user, scripted by default."""
    tasks = tau2_tasks(data, domain, "test")
    if "user_model" not in context.user:
        return tasks
    return [replace(task, data_source=f"tau2_{domain}_chat_user") for task in tasks]
