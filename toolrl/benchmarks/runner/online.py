"""Online evaluation: benchmarks during training, with the run's engines, greedy, in the run's tool-call format."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolrl.benchmarks.runner.benchmark import Benchmark, BenchmarkContext, Category, EpisodeConfig
from toolrl.benchmarks.runner.handlers import env_of
from toolrl.benchmarks.runner.registry import build_benchmarks
from toolrl.benchmarks.runner.report import Answers, scores_of
from toolrl.benchmarks.runner.runner import Runner
from toolrl.benchmarks.runner.stats import RESAMPLES
from verl.build.env import category_runner, prompt_fn
from verl.build.scorer import scoring_limits
from verl.chat.template import ChatTemplate
from verl.config.schema import Config, EnvConfig
from verl.data.row_names import RowNames
from verl.episodes.episode import EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.scoring.pool import ScoringPool
from verl.scoring.process import ScoringLimits
from verl.scoring.rewards import Rewards, build_rewards
from verl.tracking.names import STDERR
from verl.types import Task, TrajectoryGroup

_log = logging.getLogger(__name__)
HANDLER = "toolrl"  # if the run's episodes have no format: the format of ToolRL's rows


@dataclass(frozen=True)
class EvalTask:
    """One benchmark category. `episode_runner`: must be closed in the event loop that uses it"""

    category: Category
    tasks: Sequence[Task]
    rewards: Rewards
    episode_runner: EpisodeRunner


@dataclass
class _Scores:
    """Answers in memory: the part of `toolrl.benchmarks.runner.records.Records` that scores need."""

    rows: list[list[dict[str, Any]]] = field(default_factory=list)  # [tasks][1]

    def add(self, group: TrajectoryGroup, values: Sequence[float]) -> None:
        self.rows.append([{"metric_value": value} for value in values])

    def add_unasked(self, task: Task, problem: str) -> None:
        self.rows.append([{"metric_value": 0.0}])


@dataclass(frozen=True)
class OnlineEvaluator:
    benchmarks: Sequence[Benchmark] = ()
    eval_tasks: Sequence[EvalTask] = ()
    max_prompt_length: int = 1
    num_scorers: int = 1
    limits: ScoringLimits = field(default_factory=ScoringLimits)  # per response

    def files(self) -> Iterable[str]:
        return (line for benchmark in self.benchmarks for line in benchmark.files())

    def tasks(self) -> Mapping[str, Sequence[Task]]:
        return {each.category.name: each.tasks for each in self.eval_tasks}

    async def run(self, rollout: GroupRollout) -> dict[str, float]:
        """eval/<category>/score and its standard error, also for aggregates; /missing if tasks failed.

        rollout: greedy; its scorer and episode_runner are replaced for each category
        """
        metrics: dict[str, float] = {}
        answers: dict[str, Answers] = {}
        with ExitStack() as stack:
            scorers: dict[str, ScoringPool] = {}
            for task in self.eval_tasks:
                episode, name = task.category.episode, task.category.name
                reward = json.dumps([episode.reward, dict(episode.reward_options)])
                if reward not in scorers:
                    pool = ScoringPool(episode.reward, episode.reward_options, self.num_scorers, self.limits)
                    scorers[reward] = stack.enter_context(pool)
                answers[name] = await self._evaluate(task, replace(rollout, scorer=scorers[reward]))
                if len(answers[name]) < len(task.tasks):
                    metrics[f"eval/{name}/missing"] = len(task.tasks) - len(answers[name])
        for benchmark in self.benchmarks:
            own = {each.name: answers[each.name] for each in benchmark.categories}
            has_errors = all(len(rows) > 1 for rows in own.values())
            for name, score in scores_of(benchmark, own, RESAMPLES).items():
                metrics[f"eval/{name}/score"] = score.mean
                if has_errors:
                    metrics[f"eval/{name}/score{STDERR}"] = float(score.resampled.std())
        return metrics

    async def _evaluate(self, task: EvalTask, rollout: GroupRollout) -> Answers:
        kept = _Scores()
        rollout = replace(rollout, episode_runner=task.episode_runner)
        runner = Runner(rollout, prompt_fn(task.episode_runner), task.rewards, self.max_prompt_length)
        faults = await runner.run(task.category, task.tasks, kept, lambda: None)
        if faults:
            name, size = task.category.name, len(task.tasks)
            _log.warning("%s: %d of %d could not be judged; the first: %s", name, len(faults), size, faults[0])
        return kept.rows

    async def close(self) -> None:
        for task in self.eval_tasks:
            await task.episode_runner.close()


def build_online_eval(config: Config, chat: ChatTemplate) -> OnlineEvaluator:
    """Load benchmarks and build their environments. Raises ConfigError or DataError for unusable ones."""
    context = BenchmarkContext(
        Path(config.eval.data_dir),
        max_tool_calls=config.env.call_limit if config.env.tools else None,
        tool_call_format=config.env.tool_call_format or HANDLER,
        data=config.data,
        names=RowNames(user_code=config.data.user_code),  # rows are scored by name, without the run's options
    )
    benchmarks = build_benchmarks(config.eval.benchmarks, context)
    eval_tasks = [
        EvalTask(
            category,
            category.first(config.eval.limit),
            build_rewards(category.episode.reward, category.episode.reward_options),
            category_runner(config, eval_env(category.episode, config.env), chat),
        )
        for benchmark in benchmarks
        for category in benchmark.categories
    ]
    workers, limits = config.reward.num_workers, scoring_limits(config)
    return OnlineEvaluator(benchmarks, eval_tasks, config.data.max_prompt_length, workers, limits)


def eval_env(episode: EpisodeConfig, trained: EnvConfig) -> EnvConfig:
    """The environment of a category in the run's tool-call format, with its options."""
    env = env_of(episode, trained.tool_call_format or HANDLER)
    return replace(env, tool_call_format_options=trained.tool_call_format_options) if episode.uses_tools else env
