"""Evaluation without training: a model, or two that are compared, under one handler."""

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

from verl.config.schema import EnvConfig, EvalConfig, SandboxConfig
from verl.data.chat import ChatTemplate
from verl.errors import ConfigError
from verl.evaluation.base import BenchmarkContext, EpisodeConfig
from verl.evaluation.handlers import env_of, tool_call_format_of
from verl.evaluation.overlap import TrainTasks, check_overlap
from verl.evaluation.provenance import identity, short_name, versions
from verl.evaluation.records import Records
from verl.evaluation.registry import build_benchmarks
from verl.evaluation.report import Evaluated, Pending, comparison_of, result_of
from verl.evaluation.runner import Runner
from verl.evaluation.tables import Grid, comparison_grid, result_grid
from verl.files import replacing
from verl.lock import alone_in
from verl.rollout.engine import TRUNCATION
from verl.rollout.episode import EpisodeRunner
from verl.rollout.group import GroupRollout
from verl.rollout.scoring import ScoringPool
from verl.rollout.scoring_process import ScoringLimits
from verl.services import check_services
from verl.trainer.build import load_chat_template
from verl.trainer.build_env import build_episode_runner, check_tools, prompt_fn, prompt_record
from verl.trainer.rollouts import RewardFaultError
from verl.trainer.standalone_engine import response_lengths, standalone_engine
from verl.utils.reward_score.rewards import build_rewards
from verl.utils.reward_score.rlla import TOGGLES

_LIMITS = ("reward_timeout_s", "reward_memory_mib", "reward_fault_policy")  # of scoring one answer


async def evaluate(config: EvalConfig, console: Console) -> None:
    """Judges the model, and before it the one that it is compared with; writes and prints what was found."""
    players = [_Player.of(config, path) for path in (config.compare, config.model.path) if path is not None]
    if len({player.tool_call_format for player in players}) > 1:
        raise ConfigError(f"handler={config.handler} is another format for each model; name one that both understand")
    setting = BenchmarkContext(
        Path(config.data_dir),
        config.hub,
        config.search,
        config.judge,
        config.user,
        config.max_tool_calls,
        players[0].tool_call_format,
        config.reward,
        config.reward_options,
    )
    built = build_benchmarks(config.benchmarks, setting)
    asked: Pending = [
        (category, category.first(config.limit)) for benchmark in built for category in benchmark.categories
    ]
    notes = (*caveats(config), *_trained_on(config, asked))
    benchmarks = [replace(each, notes=(*notes, *each.notes)) for each in built]
    for line in (line for benchmark in benchmarks for line in benchmark.files()):
        console.print(line, markup=False, soft_wrap=True)
    *bases, model = [await _judge(player, asked, console) for player in players]
    for benchmark in benchmarks:
        for judged in {each.folder: each for each in (*bases, model)}.values():  # one, if they are the same
            found = result_of(benchmark, asked, judged, config.bootstrap)
            tell(found, result_grid(found), judged.folder / benchmark.name, console)
        for base in bases:
            found = comparison_of(benchmark, model, base, config.bootstrap)
            place = model.folder / f"{benchmark.name}-against-{base.folder.name}"
            tell(found, comparison_grid(found), place, console)


def caveats(config: EvalConfig) -> tuple[str, ...]:
    """What a reader of any figure of this evaluation must know: it is of a part, or another run gives another."""
    found = []
    if config.limit is not None:
        found.append(f"limit={config.limit}: no more than the first {config.limit} rows of each")
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    if config.temperature > 0 and config.engine == "vllm" and on_cpu:
        found.append("vLLM heeds no seeds on a CPU: whoever samples again gets other answers; engine=hf repeats")
    return tuple(found)


def _trained_on(config: EvalConfig, asked: Pending) -> list[str]:
    """What the models have seen of the tasks. Raises ConfigError unless that is allowed."""
    allow = None if config.allow_train_overlap else "allow_train_overlap=true"
    models = dict.fromkeys(path for path in (config.compare, config.model.path) if path is not None)
    return [note for path in models for note in check_overlap(TrainTasks.read(path), asked, path, allow)]


@dataclass(frozen=True)
class _Player:
    """A model and the words in which it is talked to."""

    config: EvalConfig
    chat: ChatTemplate
    tool_call_format: str

    @classmethod
    def of(cls, config: EvalConfig, path: str) -> Self:
        """The model in `path`, as `config` has it judged."""
        mine = replace(config, model=replace(config.model, path=path))
        chat = load_chat_template(mine.model)
        return cls(mine, chat, tool_call_format_of(config.handler, str(chat.tokenizer.chat_template)))


async def _judge(player: _Player, asked: Pending, console: Console) -> Evaluated:
    """Asks the model what it has not answered yet; starts nothing if that is nothing."""
    config = player.config
    settings = _settings(player)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    name = str(config.model.path)
    folder = Path(config.output) / f"{short_name(name)}-{config.handler}-{digest}"
    with alone_in(folder):
        records = {
            category.name: Records(folder / "answers", category, config.n, player.chat.tokenizer.decode)
            for category, _ in asked
        }
        left = [(category, found) for category, tasks in asked if (found := records[category.name].missing(tasks))]
        if left:
            write(folder / "settings.json", json.dumps(settings, indent=2))
            await _ask(player, left, {category.name: len(tasks) for category, tasks in asked}, records, console)
    answers = {category.name: records[category.name].of(tasks) for category, tasks in asked}
    return Evaluated(name, folder, settings, answers)


async def _ask(
    player: _Player, left: Pending, sizes: Mapping[str, int], records: Mapping[str, Records], console: Console
) -> None:
    plays = [category.play for category, _ in left]
    widest = next((play for play in plays if play.uses_tools), plays[0])
    async with AsyncExitStack() as stack:
        episode_runners = [_episode_runner(player, play) for play in plays]
        for opened in filter(None, episode_runners):
            stack.push_async_callback(opened.close)
        rewards = [
            reward
            for category, tasks in left
            for reward in build_rewards(category.play.reward, category.play.reward_options).all_of(tasks)
        ]
        await check_services([*episode_runners, *rewards])  # before anything that takes long
        engine, sampling = await stack.enter_async_context(
            standalone_engine(player.config, player.chat, env_of(widest, player.tool_call_format))
        )
        progress = stack.enter_context(Progress(console=console, transient=True))
        for (category, tasks), episode_runner in zip(left, episode_runners, strict=True):
            bar = progress.add_task(category.name, total=len(tasks))
            with _scorer(player.config, category.play) as scorer:
                rollout = GroupRollout(engine, player.chat, scorer, sampling, episode_runner)
                runner = _runner(player, category.play, rollout, sizes[category.name])
                faults = await runner.run(category, tasks, records[category.name], partial(progress.advance, bar))
            check_faults(category.name, faults, sizes[category.name], player.config.max_fault_share, console)


def _episode_runner(player: _Player, play: EpisodeConfig) -> EpisodeRunner | None:
    """What the episodes of a category act in."""
    config, env = player.config, env_of(play, player.tool_call_format)
    template = config.prompt_template if play.uses_tools else None
    sandbox = config.sandbox if env.tools else SandboxConfig()
    made = build_episode_runner(env, sandbox, player.chat, *response_lengths(config), template)
    if play.uses_tools and made is not None:
        check_tools(player.chat, made.observations.tool_call_format)
    return made


def _scorer(config: EvalConfig, play: EpisodeConfig) -> ScoringPool:
    limits = ScoringLimits(
        config.reward_timeout_s, config.reward_memory_mib, config.reward_fault_policy, keys="reward_"
    )
    return ScoringPool(play.reward, play.reward_options, config.num_scorers, limits)


def _runner(player: _Player, play: EpisodeConfig, rollout: GroupRollout, size: int) -> Runner:
    config = player.config
    return Runner(
        rollout,
        prompt_fn(rollout.episode_runner, player.chat),
        build_rewards(play.reward, play.reward_options),
        response_lengths(config)[0],
        config.n,
        config.seed,
        config.max_concurrent,
        config.max_fault_share * size,
    )


def check_faults(name: str, faults: Sequence[str], size: int, most: float, console: Console) -> None:
    """Tells of the first. Raises RewardFaultError where more than the share `most` of all `size` tasks has failed."""
    for fault in faults[:3]:
        console.print(f"not answered, left out: {fault}", markup=False)
    if len(faults) > most * size:
        raise RewardFaultError(
            f"{name}: {len(faults)} of {size} could not be judged so far, more than max_fault_share={most:g} "
            f"allows; the first: {faults[0]}. What was answered is kept; the same command goes on from there"
        )


def _settings(player: _Player) -> dict[str, Any]:
    """All that a figure depends on beside the tasks and how they are played."""
    config, chat, tool_call_format = player.config, player.chat, player.tool_call_format
    uses_tools = build_episode_runner(
        EnvConfig(tool_call_format=tool_call_format), SandboxConfig(), chat, 1, 1, config.prompt_template
    )
    prompt_length, response_length = response_lengths(config)
    return {
        "model": identity(config.model),
        "handler": config.handler,
        "codec": tool_call_format,
        **prompt_record(uses_tools),
        "chat_template_sha256": hashlib.sha256(str(chat.tokenizer.chat_template).encode()).hexdigest(),
        **{name: getattr(config, name) for name in ("n", "temperature", "seed", "engine", "dtype")},
        **{name: getattr(config, name) for name in TRUNCATION},
        **{name: getattr(config, name) for name in _LIMITS},
        "sandbox": {name: getattr(config.sandbox, name) for name in ("timeout_s", "memory_mib")},
        "max_prompt_length": prompt_length,
        "max_response_length": response_length,
        **{name: os.environ[name] for name in TOGGLES if name in os.environ},  # of ToolRL's reward
        "versions": versions(),
    }


def tell(found: Mapping[str, Any], grid: Grid, path: Path, console: Console) -> None:
    """On the console, and beside the answers as JSON and Markdown."""
    told = [*(made["formula"] for made in found["aggregates"].values()), *found["notes"]]
    write(path.with_name(f"{path.name}.json"), json.dumps(found, indent=2, default=str))
    write(path.with_name(f"{path.name}.md"), grid.as_markdown() + "".join(f"\n- {each}" for each in told))
    console.print(grid.for_terminal())
    for each in told:
        console.print(f"  {each}", markup=False, highlight=False)
    console.print(f"written to {path}.json and .md", markup=False, highlight=False)


def write(path: Path, text: str) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")
