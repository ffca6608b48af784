"""Evaluation without training: a model, or two that are compared, under one handler."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from verl.config.schema import EnvConfig, EvalConfig, SandboxConfig
from verl.data.chat import ChatCodec
from verl.data.files import replacing
from verl.evaluation.base import Benchmark, Category
from verl.evaluation.handlers import codec_of, env_of
from verl.evaluation.provenance import identity, short_name, versions
from verl.evaluation.records import Records
from verl.evaluation.report import Asked, Evaluated, comparison_of, result_of
from verl.evaluation.runner import Runner
from verl.evaluation.tables import Grid, comparison_grid, result_grid
from verl.rollout.engine import RolloutEngine, Sampling
from verl.rollout.group import GroupRollout
from verl.rollout.scoring import ScoringPool
from verl.trainer.build import load_codec
from verl.trainer.build_env import build_interaction, opening_of, prompt_record
from verl.trainer.lone_engine import lone_engine, reply_lengths
from verl.trainer.ppo import RewardFaultError
from verl.types import Task
from verl.utils.reward_score.base import build_reward

_SCORE_TIMEOUT_S = 120.0


async def evaluate(config: EvalConfig, benchmarks: Sequence[Benchmark], console: Console) -> None:
    """Judges the model, and before it the one that it is compared with; writes and prints what was found."""
    asked: Asked = [
        (category, list(islice(category.tasks(), config.limit)))
        for benchmark in benchmarks
        for category in benchmark.categories
    ]
    base = None
    if config.compare is not None:
        base = await _judge(replace(config, model=replace(config.model, path=config.compare)), asked, console)
    model = await _judge(config, asked, console)
    for benchmark in benchmarks:
        found = result_of(benchmark, asked, model, config.bootstrap)
        tell(found, result_grid(found), model.folder / benchmark.name, console)
        if base is not None:
            found = comparison_of(benchmark, asked, model, base, config.bootstrap)
            place = model.folder / f"{benchmark.name}-against-{base.folder.name}"
            tell(found, comparison_grid(found), place, console)


async def _judge(config: EvalConfig, asked: Asked, console: Console) -> Evaluated:
    """Asks the model what it has not answered yet; starts nothing if that is nothing."""
    chat = load_codec(config.model)
    codec = codec_of(config.handler, str(chat.tokenizer.chat_template))
    settings = _settings(config, codec, chat)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    name = str(config.model.path)
    folder = Path(config.output) / f"{short_name(name)}-{config.handler}-{digest}"
    records = {category.name: Records(folder / "answers", category, config.n) for category, _ in asked}
    left = [(category, found) for category, tasks in asked if (found := records[category.name].missing(tasks))]
    if left:
        write(folder / "settings.json", json.dumps(settings, indent=2))
        await _ask(config, left, records, chat, codec, console)
    answers = {category.name: records[category.name].of(tasks) for category, tasks in asked}
    return Evaluated(name, folder, settings, answers)


async def _ask(
    config: EvalConfig, left: Asked, records: Mapping[str, Records], chat: ChatCodec, codec: str, console: Console
) -> None:
    plays = [category.play for category, _ in left]
    widest = next((play for play in plays if play.handled), plays[0])
    with Progress(console=console, transient=True) as progress:
        async with lone_engine(config, chat, env_of(widest, codec)) as (engine, sampling):
            for category, tasks in left:
                bar = progress.add_task(category.name, total=len(tasks))
                table = _Table(config, category, chat, codec, engine, sampling)
                faults = await table.run(tasks, records[category.name], partial(progress.advance, bar))
                check_faults(category.name, faults, len(tasks), config.max_fault_share, console)


@dataclass(frozen=True)
class _Table:
    """What a model and a category need to play."""

    config: EvalConfig
    category: Category
    chat: ChatCodec
    codec: str
    engine: RolloutEngine
    sampling: Sampling

    async def run(self, tasks: Sequence[Task], records: Records, done: Callable[[], None]) -> list[str]:
        config, play = self.config, self.category.play
        env = env_of(play, self.codec)
        lengths = reply_lengths(config)
        template = config.prompt_template if play.handled else None
        sandbox = config.sandbox if env.tools else SandboxConfig()
        interaction = build_interaction(env, sandbox, self.chat, *lengths, template)
        with ScoringPool(play.reward, play.reward_options, config.num_scorers, _SCORE_TIMEOUT_S) as scorer:
            runner = Runner(
                GroupRollout(self.engine, self.chat, scorer, self.sampling, interaction),
                opening_of(interaction, self.chat),
                build_reward(play.reward, play.reward_options),
                lengths[0],
                config.n,
                config.seed,
                config.max_concurrent,
            )
            try:
                return await runner.run(self.category, tasks, records, done)
            finally:
                await runner.rollout.close()


def check_faults(name: str, faults: Sequence[str], asked: int, most: float, console: Console) -> None:
    """Tells of the first. Raises RewardFaultError where more than the share `most` of what was asked has failed."""
    for fault in faults[:3]:
        console.print(f"not answered, left out: {fault}", markup=False)
    if len(faults) > most * asked:
        raise RewardFaultError(
            f"{name}: {len(faults)} of {asked} could not be judged, more than max_fault_share={most:g} "
            f"allows; the first: {faults[0]}. What was answered is kept; the same command goes on from there"
        )


def _settings(config: EvalConfig, codec: str, chat: ChatCodec) -> dict[str, Any]:
    """All that a figure depends on beside the tasks and how they are played."""
    handled = build_interaction(EnvConfig(codec=codec), SandboxConfig(), chat, 1, 1, config.prompt_template)
    prompt_length, reply_length = reply_lengths(config)
    return {
        "model": identity(config.model),
        "handler": config.handler,
        "codec": codec,
        **prompt_record(handled),
        "chat_template_sha256": hashlib.sha256(str(chat.tokenizer.chat_template).encode()).hexdigest(),
        **{name: getattr(config, name) for name in ("n", "temperature", "seed", "engine", "dtype")},
        "max_prompt_length": prompt_length,
        "max_response_length": reply_length,
        "versions": versions(),
    }


def tell(found: Mapping[str, Any], grid: Grid, path: Path, console: Console) -> None:
    """On the console, and beside the answers as JSON and Markdown."""
    told = [*(made["formula"] for made in found.get("aggregates", {}).values()), *found.get("notes", ())]
    write(path.with_name(f"{path.name}.json"), json.dumps(found, indent=2))
    write(path.with_name(f"{path.name}.md"), grid.as_markdown() + "".join(f"\n- {each}" for each in told))
    console.print(grid.for_terminal())
    for each in told:
        console.print(f"  {each}", markup=False, highlight=False)
    console.print(f"written to {path}.json and .md", markup=False, highlight=False)


def write(path: Path, text: str) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")
