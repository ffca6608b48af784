"""Standalone evaluation: one model, or a comparison of two, with one handler."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import Progress

from verl.chat.template import ChatTemplate
from verl.config.schema import EnvConfig, EvalConfig, SandboxConfig
from verl.data.overlap import TrainTasks, check_overlap
from verl.episodes.episode import EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RewardFaultError
from verl.errors import ConfigError
from verl.kit.evaluation.benchmark import BenchmarkContext, EpisodeConfig
from verl.kit.evaluation.handlers import env_of, tool_call_format_of
from verl.kit.evaluation.provenance import identity, short_name, versions
from verl.kit.evaluation.records import Records
from verl.kit.evaluation.registry import build_benchmarks
from verl.kit.evaluation.report import Evaluated, Pending, comparison_of, result_of
from verl.kit.evaluation.runner import Runner
from verl.kit.evaluation.tables import Grid, comparison_grid, result_grid
from verl.net.services import check_services
from verl.rollout.engine import TRUNCATION
from verl.scoring.pool import ScoringPool
from verl.scoring.process import ScoringLimits
from verl.system.files import replacing
from verl.system.lock import alone_in
from verl.trainer.builders.engine import response_lengths, standalone_engine
from verl.trainer.builders.env import build_episode_runner, check_tools, prompt_fn, prompt_record
from verl.trainer.builders.run import load_chat_template
from verl.utils.reward_score.rewards import build_rewards
from verl.utils.reward_score.rlla import TOGGLES

_LIMITS = ("reward_timeout_s", "reward_memory_mib", "reward_fault_policy")  # limits on scoring one answer


async def evaluate(config: EvalConfig, console: Console) -> None:
    """Evaluate the model, after the one it is compared with, if any; write and print the results."""
    models = [EvaluatedModel.of(config, path) for path in (config.compare, config.model.path) if path is not None]
    if len({model.tool_call_format for model in models}) > 1:
        raise ConfigError(f"handler={config.handler} is a different format per model; set one that both support")
    context = BenchmarkContext(
        Path(config.data_dir),
        config.hub,
        config.search,
        config.judge,
        config.user,
        config.max_tool_calls,
        models[0].tool_call_format,
        config.reward,
        config.reward_options,
    )
    built = build_benchmarks(config.benchmarks, context)
    requested: Pending = [
        (category, category.first(config.limit)) for benchmark in built for category in benchmark.categories
    ]
    notes = (*caveats(config), *_trained_on(config, requested))
    benchmarks = [replace(each, notes=(*notes, *each.notes)) for each in built]
    for line in (line for benchmark in benchmarks for line in benchmark.files()):
        console.print(line, markup=False, soft_wrap=True)
    *bases, ours = [await _evaluate_model(model, requested, console) for model in models]
    for benchmark in benchmarks:
        for each in {each.folder: each for each in (*bases, ours)}.values():  # one if both are the same model
            result = result_of(benchmark, requested, each, config.bootstrap)
            write_report(result, result_grid(result), each.folder / benchmark.name, console)
        for base in bases:
            result = comparison_of(benchmark, ours, base, config.bootstrap)
            path = ours.folder / f"{benchmark.name}-against-{base.folder.name}"
            write_report(result, comparison_grid(result), path, console)


def caveats(config: EvalConfig) -> tuple[str, ...]:
    """Notes on all scores of this evaluation: partial data, irreproducible sampling."""
    found = []
    if config.limit is not None:
        found.append(f"limit={config.limit}: at most the first {config.limit} rows per category")
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    if config.temperature > 0 and config.engine == "vllm" and on_cpu:
        found.append("vLLM ignores sampling seeds on CPU, so results are not reproducible; use engine=hf")
    return tuple(found)


def _trained_on(config: EvalConfig, requested: Pending) -> list[str]:
    """Notes on tasks in the models' training data. Raises ConfigError for such tasks unless allowed."""
    allow = None if config.allow_train_overlap else "allow_train_overlap=true"
    models = dict.fromkeys(path for path in (config.compare, config.model.path) if path is not None)
    asked = {category.name: tasks for category, tasks in requested}
    return [note for path in models for note in check_overlap(TrainTasks.read(path), asked, path, allow)]


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with its chat template and tool-call format."""

    config: EvalConfig
    chat: ChatTemplate
    tool_call_format: str

    @classmethod
    def of(cls, config: EvalConfig, path: str) -> Self:
        """The model at `path` with the evaluation settings of `config`."""
        config = replace(config, model=replace(config.model, path=path))
        chat = load_chat_template(config.model)
        return cls(config, chat, tool_call_format_of(config.handler, str(chat.tokenizer.chat_template)))


async def _evaluate_model(model: EvaluatedModel, requested: Pending, console: Console) -> Evaluated:
    """Run the tasks without stored answers; starts no engine if there are none."""
    config = model.config
    settings = _settings(model)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    name = str(config.model.path)
    folder = Path(config.output) / f"{short_name(name)}-{config.handler}-{digest}"
    with alone_in(folder):
        records = {
            category.name: Records(folder / "answers", category, config.n, model.chat.tokenizer.decode)
            for category, _ in requested
        }
        missing = [(each, left) for each, tasks in requested if (left := records[each.name].missing(tasks))]
        if missing:
            write(folder / "settings.json", json.dumps(settings, indent=2))
            await _run_episodes(model, missing, {each.name: len(tasks) for each, tasks in requested}, records, console)
    answers = {category.name: records[category.name].of(tasks) for category, tasks in requested}
    return Evaluated(name, folder, settings, answers)


async def _run_episodes(
    model: EvaluatedModel, missing: Pending, sizes: Mapping[str, int], records: Mapping[str, Records], console: Console
) -> None:
    episodes = [category.episode for category, _ in missing]
    widest = next((each for each in episodes if each.uses_tools), episodes[0])
    async with AsyncExitStack() as stack:
        episode_runners = [_episode_runner(model, episode) for episode in episodes]
        for runner in filter(None, episode_runners):
            stack.push_async_callback(runner.close)
        rewards = [
            reward
            for category, tasks in missing
            for reward in build_rewards(category.episode.reward, category.episode.reward_options).all_of(tasks)
        ]
        await check_services([*episode_runners, *rewards])  # before the slow start of the engine
        engine, sampling = await stack.enter_async_context(
            standalone_engine(model.config, model.chat, env_of(widest, model.tool_call_format))
        )
        progress = stack.enter_context(Progress(console=console, transient=True))
        for (category, tasks), episode_runner in zip(missing, episode_runners, strict=True):
            bar = progress.add_task(category.name, total=len(tasks))
            with _scorer(model.config, category.episode) as scorer:
                rollout = GroupRollout(engine, model.chat, scorer, sampling, episode_runner)
                evaluation = _runner(model, category.episode, rollout, sizes[category.name])
                faults = await evaluation.run(category, tasks, records[category.name], partial(progress.advance, bar))
            check_faults(category.name, faults, sizes[category.name], model.config.max_fault_share, console)


def _episode_runner(model: EvaluatedModel, episode: EpisodeConfig) -> EpisodeRunner | None:
    """The episode runner of a category."""
    config, env = model.config, env_of(episode, model.tool_call_format)
    template = config.prompt_template if episode.uses_tools else None
    sandbox = config.sandbox if env.tools else SandboxConfig()
    runner = build_episode_runner(env, sandbox, model.chat, *response_lengths(config), template)
    if episode.uses_tools and runner is not None:
        check_tools(model.chat, runner.observations.tool_call_format)
    return runner


def _scorer(config: EvalConfig, episode: EpisodeConfig) -> ScoringPool:
    limits = ScoringLimits(
        config.reward_timeout_s, config.reward_memory_mib, config.reward_fault_policy, keys="reward_"
    )
    return ScoringPool(episode.reward, episode.reward_options, config.num_scorers, limits)


def _runner(model: EvaluatedModel, episode: EpisodeConfig, rollout: GroupRollout, size: int) -> Runner:
    config = model.config
    return Runner(
        rollout,
        prompt_fn(rollout.episode_runner, model.chat),
        build_rewards(episode.reward, episode.reward_options),
        response_lengths(config)[0],
        config.n,
        config.seed,
        config.max_concurrent,
        config.max_fault_share * size,
    )


def check_faults(name: str, faults: Sequence[str], size: int, max_share: float, console: Console) -> None:
    """Print the first faults. Raises RewardFaultError if more than `max_share` of all `size` tasks failed."""
    for fault in faults[:3]:
        console.print(f"not answered, skipped: {fault}", markup=False)
    if len(faults) > max_share * size:
        raise RewardFaultError(
            f"{name}: {len(faults)} of {size} tasks failed so far, more than max_fault_share={max_share:g} allows; "
            f"the first: {faults[0]}. Finished answers are kept; the same command resumes from them"
        )


def _settings(model: EvaluatedModel) -> dict[str, Any]:
    """All settings that affect a score, besides the tasks and their episode settings."""
    config, chat, tool_call_format = model.config, model.chat, model.tool_call_format
    with_tools = build_episode_runner(
        EnvConfig(tool_call_format=tool_call_format), SandboxConfig(), chat, 1, 1, config.prompt_template
    )
    prompt_length, response_length = response_lengths(config)
    return {
        "model": identity(config.model),
        "handler": config.handler,
        "tool_call_format": tool_call_format,
        **prompt_record(with_tools),
        "chat_template_sha256": hashlib.sha256(str(chat.tokenizer.chat_template).encode()).hexdigest(),
        **{name: getattr(config, name) for name in ("n", "temperature", "seed", "engine", "dtype")},
        **{name: getattr(config, name) for name in TRUNCATION},
        **{name: getattr(config, name) for name in _LIMITS},
        "sandbox": {name: getattr(config.sandbox, name) for name in ("timeout_s", "memory_mib")},
        "max_prompt_length": prompt_length,
        "max_response_length": response_length,
        **{name: os.environ[name] for name in TOGGLES if name in os.environ},  # for ToolRL's reward
        "versions": versions(),
    }


def write_report(result: Mapping[str, Any], grid: Grid, path: Path, console: Console) -> None:
    """Print a result, and write it as JSON and Markdown."""
    notes = [*(each["formula"] for each in result["aggregates"].values()), *result["notes"]]
    write(path.with_name(f"{path.name}.json"), json.dumps(result, indent=2, default=str))
    write(path.with_name(f"{path.name}.md"), grid.as_markdown() + "".join(f"\n- {note}" for note in notes))
    console.print(grid.for_terminal())
    for note in notes:
        console.print(f"  {note}", markup=False, highlight=False)
    console.print(f"written to {path}.json and .md", markup=False, highlight=False)


def write(path: Path, text: str) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")
