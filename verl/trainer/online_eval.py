"""Benchmarks during training: played by the run's own engines, greedily, under the handler that the run trains."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.config.schema import Config, EnvConfig, SandboxConfig
from verl.data.chat import ChatTemplate
from verl.evaluation.base import Benchmark, BenchmarkContext, Category, EpisodeConfig
from verl.evaluation.handlers import env_of
from verl.evaluation.registry import build_benchmarks
from verl.evaluation.report import Answers, scores_of
from verl.evaluation.runner import Runner
from verl.rollout.episode import EpisodeRunner
from verl.rollout.group import GroupRollout
from verl.rollout.scoring import ScoringPool
from verl.rollout.scoring_process import ScoringLimits
from verl.trainer.build_env import build_episode_runner, check_tools, prompt_fn
from verl.trainer.build_scorer import scoring_limits
from verl.types import Task, TrajectoryGroup
from verl.utils.reward_score.rewards import build_rewards

_log = logging.getLogger(__name__)
HANDLER = "toolrl"  # of a run whose episodes have no format: ToolRL's rows are in its words
_RESAMPLES = 1  # no intervals here


@dataclass(frozen=True)
class EvalTask:
    """One category, ready to be played. `episode_runner`: to be closed in the event loop that uses it"""

    category: Category
    tasks: Sequence[Task]
    episode_runner: EpisodeRunner | None


@dataclass
class _Scores:
    """Answers in memory: what `verl.evaluation.records.Records` keeps on disk, as far as scores need it."""

    rows: list[list[dict[str, Any]]] = field(default_factory=list)  # [tasks][1]

    def add(self, group: TrajectoryGroup, values: Sequence[float]) -> None:
        self.rows.append([{"metric_value": value} for value in values])

    def add_unasked(self, task: Task, problem: str) -> None:
        self.rows.append([{"metric_value": 0.0}])


@dataclass(frozen=True)
class OnlineEvaluator:
    """All categories of trainer.eval_benchmarks, and how to answer them."""

    benchmarks: Sequence[Benchmark] = ()
    exams: Sequence[EvalTask] = ()
    max_prompt_length: int = 1
    num_scorers: int = 1
    limits: ScoringLimits = field(default_factory=ScoringLimits)  # of scoring one response

    async def run(self, rollout: GroupRollout) -> dict[str, float]:
        """eval/<category>/score, and of aggregates; eval/<category>/missing where something broke.

        rollout: a greedy one, whose scorer and episode_runner are replaced by those of each category
        """
        metrics: dict[str, float] = {}
        answers: dict[str, Answers] = {}
        with ExitStack() as stack:
            scorers: dict[str, ScoringPool] = {}
            for exam in self.exams:
                play, name = exam.category.episode, exam.category.name
                reward = json.dumps([play.reward, dict(play.reward_options)])
                if reward not in scorers:
                    pool = ScoringPool(play.reward, play.reward_options, self.num_scorers, self.limits)
                    scorers[reward] = stack.enter_context(pool)
                answers[name] = await self._play(exam, replace(rollout, scorer=scorers[reward]))
                if len(answers[name]) < len(exam.tasks):
                    metrics[f"eval/{name}/missing"] = len(exam.tasks) - len(answers[name])
        for benchmark in self.benchmarks:
            own = {each.name: answers[each.name] for each in benchmark.categories}
            scores = scores_of(benchmark, own, _RESAMPLES)
            metrics |= {f"eval/{name}/score": score.mean for name, score in scores.items()}
        return metrics

    async def _play(self, exam: EvalTask, rollout: GroupRollout) -> Answers:
        play, kept = exam.category.episode, _Scores()
        rollout = replace(rollout, chat=replace(rollout.chat, max_prompt_tokens=None))  # benchmarks are never cut
        rewards = build_rewards(play.reward, play.reward_options)
        prompt_ids = prompt_fn(exam.episode_runner, rollout.chat)
        playing = Runner(
            replace(rollout, episode_runner=exam.episode_runner), prompt_ids, rewards, self.max_prompt_length
        )
        faults = await playing.run(exam.category, exam.tasks, kept, lambda: None)
        if faults:
            name, size = exam.category.name, len(exam.tasks)
            _log.warning("%s: %d of %d could not be judged; the first: %s", name, len(faults), size, faults[0])
        return kept.rows

    async def close(self) -> None:
        """Ends what the episodes of the categories share."""
        for exam in self.exams:
            if exam.episode_runner is not None:
                await exam.episode_runner.close()


def build_online_eval(config: Config, chat: ChatTemplate) -> OnlineEvaluator:
    """With tasks read and environments made. Raises ConfigError or DataError for what cannot be."""
    setting = BenchmarkContext(
        Path(config.trainer.eval_data_dir),
        config.trainer.eval_hub,
        max_tool_calls=config.env.max_tool_calls if config.env.tools else None,
        tool_call_format=config.env.tool_call_format or HANDLER,
    )
    benchmarks = build_benchmarks(config.trainer.eval_benchmarks, setting)
    exams = [
        EvalTask(
            category,
            category.first(config.trainer.eval_limit),
            _episode_runner(category.episode, config, chat),
        )
        for benchmark in benchmarks
        for category in benchmark.categories
    ]
    reward, limits = config.reward, scoring_limits(config.reward, config.trainer.health_timeout_s)
    return OnlineEvaluator(benchmarks, exams, config.data.max_prompt_length, reward.num_workers, limits)


def _episode_runner(play: EpisodeConfig, config: Config, chat: ChatTemplate) -> EpisodeRunner | None:
    env, lengths = eval_env(play, config.env), (config.data.max_prompt_length, config.data.max_response_length)
    template = config.data.prompt_template if play.uses_tools else None
    sandbox, silent_s = config.sandbox if env.tools else SandboxConfig(), config.trainer.health_timeout_s
    made = build_episode_runner(env, sandbox, chat, *lengths, template, silent_s)
    if play.uses_tools and made is not None:
        check_tools(chat, made.observations.tool_call_format)
    return made


def eval_env(play: EpisodeConfig, trained: EnvConfig) -> EnvConfig:
    """How a category is played under the format that a run trains, with its options."""
    env = env_of(play, trained.tool_call_format or HANDLER)
    return replace(env, tool_call_format_options=trained.tool_call_format_options) if play.uses_tools else env
