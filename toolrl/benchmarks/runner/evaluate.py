"""Standalone evaluation: one model, or a comparison of two, with one handler."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import Progress

from toolrl.benchmarks.runner.benchmark import BenchmarkContext
from toolrl.benchmarks.runner.handlers import env_of, tool_call_format_of
from toolrl.benchmarks.runner.provenance import model_record, short_digest, short_name
from toolrl.benchmarks.runner.records import Records
from toolrl.benchmarks.runner.registry import build_benchmarks
from toolrl.benchmarks.runner.report import Evaluated, Pending, comparison_of, result_of
from toolrl.benchmarks.runner.runner import Runner
from toolrl.benchmarks.runner.stats import RESAMPLES
from toolrl.benchmarks.runner.tables import Grid, comparison_grid, result_grid
from verl.build.engines import standalone_engine, with_model_limits
from verl.build.env import build_format, category_runner, prompt_fn
from verl.build.run import load_chat_template
from verl.build.scorer import scoring_limits
from verl.chat.template import ChatTemplate
from verl.config.load import flattened
from verl.config.schema import Config
from verl.data.overlap import TrainTasks, check_overlap
from verl.data.row_names import RowNames
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RewardFaultError
from verl.episodes.start_check import check_golds
from verl.errors import ConfigError
from verl.host.files import replacing
from verl.host.lock import alone_in
from verl.host.services import check_services
from verl.scoring.pool import ScoringPool
from verl.scoring.rewards import build_rewards
from verl.utils.reward_score.rlla import TOGGLES

_SETTINGS = (  # engine, sampling and scoring settings that affect a score
    *("model.compute_dtype", "rollout.name", "rollout.dtype", "rollout.n", "rollout.temperature", "trainer.seed"),
    *("rollout.top_p", "rollout.top_k", "rollout.repetition_penalty"),
    *("data.max_prompt_length", "data.max_response_length"),
    *("reward.timeout_s", "reward.memory_mib", "reward.fault_policy", "sandbox.timeout_s", "sandbox.memory_mib"),
)


async def evaluate(config: Config, console: Console) -> list[dict[str, Any]]:
    """Evaluate the model, after the one it is compared with, if any; write, print and return the results."""
    if config.env.multi_turn:
        config = replace(config, eval=replace(config.eval, handler=str(config.env.tool_call_format)))
    models = [EvaluatedModel.of(config, path) for path in (config.eval.compare, config.model.path) if path is not None]
    if len({model.tool_call_format for model in models}) > 1:
        raise ConfigError(
            f"eval.handler={config.eval.handler} is a different format per model; set one that both support"
        )
    settings = config.eval
    context = BenchmarkContext(
        data_dir=Path(settings.data_dir),
        **settings.options,
        max_tool_calls=config.env.max_tool_calls,
        tool_call_format=models[0].tool_call_format,
        reward=config.reward.name,
        reward_options=config.reward.options,
        data=config.data,
        env=config.env if config.env.multi_turn else None,
        names=RowNames.of(config),
    )
    built = build_benchmarks(settings.benchmarks, context)
    requested: Pending = [
        (category, category.first(settings.limit)) for benchmark in built for category in benchmark.categories
    ]
    notes = (*caveats(config), *_trained_on(config, requested))
    benchmarks = [replace(each, notes=(*notes, *each.notes)) for each in built]
    for line in (line for benchmark in benchmarks for line in benchmark.files()):
        console.print(line, markup=False, soft_wrap=True)
    *bases, ours = [await _evaluate_model(model, requested, console) for model in models]
    results = []
    for benchmark in benchmarks:
        for each in {each.folder: each for each in (*bases, ours)}.values():  # one if both are the same model
            result = result_of(benchmark, requested, each, RESAMPLES)
            results.append(result)
            write_report(result, [result_grid(result)], _notes(result), each.folder / benchmark.name, console)
        for base in bases:
            result = comparison_of(benchmark, ours, base, RESAMPLES)
            results.append(result)
            path = ours.folder / f"{benchmark.name}-against-{base.folder.name}"
            write_report(result, [comparison_grid(result)], _notes(result), path, console)
    return results


def caveats(config: Config) -> tuple[str, ...]:
    """Notes on all scores of this evaluation: partial data, irreproducible sampling."""
    notes = []
    limit, rollout = config.eval.limit, config.rollout
    if limit is not None:
        notes.append(f"eval.limit={limit}: at most the first {limit} rows per category")
    on_cpu = config.trainer.device == "cpu" or not torch.cuda.is_available()
    if rollout.temperature > 0 and rollout.name == "vllm" and on_cpu:
        notes.append("vLLM ignores sampling seeds on CPU, so results are not reproducible; use rollout.name=hf")
    return tuple(notes)


def _trained_on(config: Config, requested: Pending) -> list[str]:
    """Notes on tasks in the models' training data. Raises ConfigError for such tasks unless allowed."""
    allow = None if config.eval.allow_train_overlap else "eval.allow_train_overlap=true"
    models = dict.fromkeys(path for path in (config.eval.compare, config.model.path) if path is not None)
    asked = {category.name: tasks for category, tasks in requested}
    return [note for path in models for note in check_overlap(TrainTasks.read(path), asked, path, allow)]


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with its chat template and tool-call format. config: with the model's own limits"""

    config: Config
    chat: ChatTemplate
    tool_call_format: str

    @classmethod
    def of(cls, config: Config, path: str) -> Self:
        config = with_model_limits(replace(config, model=replace(config.model, path=path)))
        chat = load_chat_template(config.model)
        return cls(config, chat, tool_call_format_of(config.eval.handler, str(chat.tokenizer.chat_template)))


async def _evaluate_model(model: EvaluatedModel, requested: Pending, console: Console) -> Evaluated:
    """Run the tasks without stored answers; starts no engine if there are none."""
    config = model.config
    settings = _settings(model)
    name = str(config.model.path)
    folder = Path(config.eval.output) / f"{short_name(name)}-{config.eval.handler}-{short_digest(settings)}"
    with alone_in(folder):
        records = {
            category.name: Records(folder / "answers", category, config.rollout.n, model.chat.tokenizer.decode)
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
        episode_runners = [
            category_runner(model.config, env_of(episode, model.tool_call_format), model.chat) for episode in episodes
        ]
        for runner in episode_runners:
            stack.push_async_callback(runner.close)
        rewards = [build_rewards(episode.reward, episode.reward_options) for episode in episodes]
        needed = [each for own, (_, tasks) in zip(rewards, missing, strict=True) for each in own.for_tasks(tasks)]
        await check_services([*episode_runners, *needed])  # before the slow start of the engine
        for runner, own, (_, tasks) in zip(episode_runners, rewards, missing, strict=True):
            check_golds(runner, own, tasks)
        config = replace(model.config, env=env_of(widest, model.tool_call_format))
        engine, sampling = await stack.enter_async_context(standalone_engine(config, model.chat))
        progress = stack.enter_context(Progress(console=console, transient=True, disable=not console.is_interactive))
        for (category, tasks), episode_runner, own in zip(missing, episode_runners, rewards, strict=True):
            bar = progress.add_task(category.name, total=len(tasks))
            episode, workers = category.episode, config.reward.num_workers
            with ScoringPool(episode.reward, episode.reward_options, workers, scoring_limits(config)) as scorer:
                evaluation = Runner(
                    GroupRollout(engine, scorer, sampling, episode_runner),
                    prompt_fn(episode_runner, own),
                    own,
                    config.data.max_prompt_length,
                    config.rollout.n,
                    config.trainer.seed,
                    config.reward.max_fault_share * sizes[category.name],
                )
                faults = await evaluation.run(category, tasks, records[category.name], partial(progress.advance, bar))
            check_faults(category.name, faults, sizes[category.name], model.config.reward.max_fault_share, console)


def check_faults(name: str, faults: Sequence[str], size: int, max_share: float, console: Console) -> None:
    """Print the first faults. Raises RewardFaultError if more than `max_share` of all `size` tasks failed."""
    for fault in faults[:3]:
        console.print(f"not answered, skipped: {fault}", markup=False)
    if len(faults) > max_share * size:
        raise RewardFaultError(
            f"{name}: {len(faults)} of {size} tasks failed so far, more than reward.max_fault_share={max_share:g} "
            f"allows; the first: {faults[0]}. Finished answers are kept; the same command resumes from them"
        )


def _settings(model: EvaluatedModel) -> dict[str, Any]:
    """All settings that affect a score, besides the tasks and their episode settings."""
    config = model.config
    values = flattened(asdict(config))
    tool_call_format = build_format(model.tool_call_format, {}, config.data.prompt_template)
    return {
        "eval.handler": config.eval.handler,
        "tool_call_format": model.tool_call_format,
        **model_record(config.model, model.chat, tool_call_format),
        **{key: values[key] for key in _SETTINGS},
        **{name: os.environ[name] for name in TOGGLES if name in os.environ},  # switches of ToolRL's reward
    }


def _notes(result: Mapping[str, Any]) -> list[str]:
    return [*(each["formula"] for each in result["aggregates"].values()), *result["notes"]]


def write_report(
    result: Mapping[str, Any], grids: Sequence[Grid], notes: Sequence[str], path: Path, console: Console
) -> None:
    """Print a result, and write it as JSON and Markdown."""
    tables = "\n".join(grid.as_markdown() for grid in grids)
    write(path.with_name(f"{path.name}.json"), json.dumps(result, indent=2, default=str))
    write(path.with_name(f"{path.name}.md"), tables + "".join(f"\n- {note}" for note in notes))
    for grid in grids:
        console.print(grid.for_terminal())
    for note in notes:
        console.print(f"- {note}", markup=False, highlight=False)
    console.print(f"written to {path}.json and .md", markup=False, highlight=False)


def write(path: Path, text: str) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")
