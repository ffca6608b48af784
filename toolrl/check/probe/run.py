"""Probe: would training learn from a data file? Rolls it out as training would, and reports statistics and advice."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from toolrl.benchmarks.runner.benchmark import Category, EpisodeConfig
from toolrl.benchmarks.runner.evaluate import check_faults, write, write_report
from toolrl.benchmarks.runner.provenance import model_record, short_digest, short_name
from toolrl.benchmarks.runner.records import NOT_ASKED, Records
from toolrl.benchmarks.runner.runner import Runner
from toolrl.benchmarks.runner.stats import RESAMPLES
from toolrl.benchmarks.runner.tables import probe_grids
from toolrl.check.probe.advice import advice
from toolrl.check.probe.statistics import Cost, Criteria, Rollout, row_of, summary
from toolrl.commands import PROBE
from verl.build.engines import standalone_engine, with_model_limits
from verl.build.env import build_episode_runner, prompt_fn, truncating, with_tool_call_format
from verl.build.run import load_chat_template
from verl.build.scorer import build_scorer
from verl.config.load import flattened
from verl.config.schema import Config
from verl.data.lengths import fitting
from verl.data.row_names import RowNames
from verl.data.tasks import TaskSet
from verl.episodes.episode import EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.episodes.start_check import check_golds
from verl.episodes.written import as_trajectory
from verl.errors import DataError
from verl.formats.base import ToolCallFormat
from verl.formats.plain import PLAIN
from verl.host.lock import alone_in
from verl.host.services import check_services
from verl.scoring.rewards import Rewards, build_rewards
from verl.tracking.jsonl import read_jsonl, write_jsonl
from verl.types import Task, TrajectoryGroup
from verl.utils.reward_score.base import LabReward
from verl.utils.reward_score.rlla import TOGGLES

_COSTS = "cost.jsonl"  # one line per completed start
_STEP = 1  # rewards with a schedule are at the first training step
_TOLERANCE = 1e-9
_FREE = {  # settings that do not affect rollouts
    *("model.path", "model.tokenizer_path", "data.train_files", "data.max_bad_share", "eval.limit", "eval.output"),
    *("trainer.device", "trainer.num_threads", "trainer.health_timeout_s"),
    *("rollout.kv_cache_gib", "rollout.gpu_memory_utilization", "rollout.tensor_model_parallel_size"),
    *("rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.speculation"),
    "rollout.engine_options.enforce_eager",
    *("reward.num_workers", "reward.timeout_s", "reward.memory_mib", "reward.fault_policy", "reward.max_fault_share"),
}


async def probe(config: Config, console: Console) -> dict[str, Any]:
    """Roll out the remaining rows; print, write and return statistics and advice, and write a line per row."""
    config = with_model_limits(config)
    data, (source,) = config.data, config.data.train_files
    chat, rewards = load_chat_template(config.model), build_rewards(config.reward.name, config.reward.options)
    config = with_tool_call_format(config, chat)
    episode_runner = build_episode_runner(config, chat)
    rows = TaskSet(source, data.max_bad_share, data, RowNames.of(config))
    any_length = replace(data, max_prompt_length=sys.maxsize, truncation="error")  # overlong prompts are counted
    prompt_ids = prompt_fn(episode_runner, rewards)
    tasks = fitting(_draw(rows, config), prompt_ids, any_length, rows.report)
    console.print(str(rows.report), markup=False, soft_wrap=True)
    episode_runner = truncating(data, episode_runner)
    settings = _settings(config, episode_runner)
    name = str(config.model.path)
    folder = Path(config.eval.output) / f"{short_name(name)}-{Path(source).stem}-{short_digest(settings)}"
    category = Category("answers", lambda: tasks, EpisodeConfig(config.reward.name, config.reward.options))
    with alone_in(folder):
        records = Records(folder, category, config.rollout.n, chat.tokenizer.decode)
        if missing := records.missing(tasks):
            write(folder / "settings.json", json.dumps(settings, indent=2))
            faults = await _roll_out(config, category, missing, records, episode_runner, rewards, console)
            check_faults("the probe", faults, len(tasks), config.reward.max_fault_share, console)
        else:
            await episode_runner.close()
    costs = _costs(folder)  # one per start
    cost = Cost(sum(each["tasks"] for each in costs), sum(each["seconds"] for each in costs))
    criteria = criteria_of(rewards, tasks, episode_runner.observations.tool_call_format)
    statistics, lines = _summarize(tasks, records, criteria, cost, config)
    statistics |= {"model": name, "data": source, "settings": settings}
    statistics["advice"] = advice(statistics, with_tools=config.env.multi_turn)
    write_jsonl(folder / "probe.jsonl", lines)
    write_report(statistics, probe_grids(statistics), statistics["advice"], folder / "probe", console)
    console.print(f"one line per row: {folder}/probe.jsonl", markup=False, highlight=False)
    return statistics


def _draw(tasks: Sequence[Task], config: Config) -> list[Task]:
    """eval.limit rows of a seeded shuffle, in file order; a larger limit keeps the rows of a smaller one."""
    order = np.random.default_rng(config.trainer.seed).permutation(len(tasks))[: config.eval.limit]
    return [tasks[int(number)] for number in sorted(order)]


@dataclass(frozen=True)
class Shaped(GroupRollout):
    """Groups after reward shaping, as training would see them with an empty shaping state."""

    rewards: Rewards | None = None

    async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int | None = None) -> TrajectoryGroup:
        group = await GroupRollout.run(self, task, num_rollouts, step, first_seed)
        return group if self.rewards is None else self.rewards.shaped(group, {})[0]


async def _roll_out(
    config: Config,
    category: Category,
    tasks: Sequence[Task],
    records: Records,
    episode_runner: EpisodeRunner,
    rewards: Rewards,
    console: Console,
) -> list[str]:
    """Roll out the tasks. Returns one reason per row that failed."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(episode_runner.close)
        await check_services([episode_runner, *rewards.for_tasks(tasks)])  # before the slow start of the engine
        check_golds(episode_runner, rewards, tasks)
        scorer = stack.enter_context(build_scorer(config))
        engine, sampling = await stack.enter_async_context(standalone_engine(config, episode_runner.chat))
        rollout = Shaped(engine, scorer, sampling, episode_runner, rewards)
        prompt_ids, longest = prompt_fn(episode_runner), config.data.max_prompt_length
        max_faults = config.reward.max_fault_share * len(tasks)
        runner = Runner(rollout, prompt_ids, rewards, longest, config.rollout.n, config.trainer.seed, max_faults)
        progress = stack.enter_context(Progress(console=console, transient=True, disable=not console.is_interactive))
        bar, started = progress.add_task("probe", total=len(tasks)), time.perf_counter()
        faults = await runner.run(category, tasks, records, lambda: progress.advance(bar))
        seconds = time.perf_counter() - started
    costs = [*_costs(records.path.parent), asdict(Cost(len(tasks), seconds))]
    write_jsonl(records.path.parent / _COSTS, costs)
    return faults


def criteria_of(rewards: Rewards, tasks: Sequence[Task], tool_call_format: ToolCallFormat = PLAIN) -> Criteria:
    """A response is correct if the reward's part "correct" is positive, or, without that part, if it has the maximum
    score (1 if unknown).

    tasks: the golden response to the first defines the format score of a correct format; with several rewards formats
    are not compared
    """
    best_format, (reward, *others) = None, {id(each): each for each in map(rewards.of, tasks)}.values()
    if isinstance(reward, LabReward) and not others:
        task = tasks[0]
        gold = reward.score(as_trajectory(task, reward.gold(task, _STEP), tool_call_format), task, _STEP)
        best_format = gold.parts.get("format")

    def right(task: Task, rollout: Rollout) -> bool:
        score = rollout["score"]
        if "correct" in score["parts"]:
            return bool(score["parts"]["correct"] > 0)
        maximum = rewards.maximum(task, _STEP)
        return bool(score["total"] >= (1.0 if maximum is None else maximum) - _TOLERANCE)

    return Criteria(right, best_format)


def _summarize(
    tasks: Sequence[Task], records: Records, criteria: Criteria, cost: Cost, config: Config
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(statistics, a line per row). Raises DataError if no row could be rolled out."""
    answered = [(task, group) for task in tasks for group in records.of([task])]
    rolled_out = [(task, group) for task, group in answered if group[0]["stop_reason"] != NOT_ASKED]
    if not rolled_out:
        raise DataError(
            f"has no prompt of at most {config.data.max_prompt_length} tokens among the {len(tasks)} probed",
            hint="Raise data.max_prompt_length",
            file=config.data.train_files[0],
        )
    rows = [row_of(task, group, criteria) for task, group in rolled_out]
    statistics = summary(rows, [group for _, group in rolled_out], criteria, cost, RESAMPLES)
    return statistics | {"rows_too_long": len(answered) - len(rolled_out), "missing": len(tasks) - len(answered)}, rows


def _settings(config: Config, episode_runner: EpisodeRunner) -> dict[str, Any]:
    """All settings that affect the rollouts, except the rows."""
    values = flattened(asdict(config))
    return {
        **{key: value for key, value in values.items() if PROBE.has(key) and key not in _FREE and value != {}},
        "data": str(Path(config.data.train_files[0]).resolve()),  # file names need not be unique
        **model_record(config.model, episode_runner.chat, episode_runner.observations.tool_call_format),
        "environment": {name: os.environ[name] for name in TOGGLES if name in os.environ},
    }


def _costs(folder: Path) -> list[dict[str, Any]]:
    path = folder / _COSTS
    return read_jsonl(path) if path.exists() else []
