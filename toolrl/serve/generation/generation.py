"""Generation without training, over data files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, islice
from pathlib import Path
from typing import Any

from rich.console import Console

from verl.build.engines import standalone_engine, with_model_limits
from verl.build.env import (
    build_episode_runner,
    prompt_fn,
    services_of_rows,
    truncating,
    with_tool_call_format,
)
from verl.build.run import load_chat_template
from verl.build.scorer import build_scorer
from verl.config.schema import Config
from verl.data.lengths import read_tasks
from verl.data.row_names import RowNames
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RewardFaultError
from verl.host.services import check_services
from verl.scoring.rewards import build_rewards
from verl.tracking.jsonl import write_jsonl
from verl.tracking.transcripts import group_rows
from verl.trainer.metrics import score_means
from verl.types import Score, Task, TrajectoryGroup
from verl.utils.reward_score.base import NONE


async def generate(config: Config, console: Console) -> None:
    """Generate and score responses to all rows, write the transcripts and print mean rewards."""
    config = with_model_limits(config)
    data, output = config.data, config.eval.output
    chat = load_chat_template(config.model)
    config = with_tool_call_format(config, chat)
    episode_runner = build_episode_runner(config, chat)
    rewards = build_rewards(config.reward.name, config.reward.options)
    await check_services([episode_runner, rewards.default])
    scored, unscored = prompt_fn(episode_runner, rewards), prompt_fn(episode_runner)

    def prompt_ids(task: Task) -> Sequence[int]:
        return unscored(task) if rewards.lacks_gold(task) else scored(task)

    tasks: list[Task] = []
    for source in data.val_files:
        found, report = read_tasks(source, prompt_ids, data, RowNames.of(config))
        console.print(str(report), markup=False, soft_wrap=True)
        tasks += islice(found, config.eval.limit)
    without_gold = sum(map(rewards.lacks_gold, tasks))
    tasks = [replace(task, reward=NONE) if rewards.lacks_gold(task) else task for task in tasks]
    episode_runner = truncating(data, episode_runner)
    await check_services(services_of_rows(episode_runner, rewards, tasks))
    with build_scorer(config) as scorer:
        async with standalone_engine(config, chat) as (engine, sampling):
            rollout = GroupRollout(engine, scorer, sampling, episode_runner)
            try:
                groups = await rollout.run_all(tasks, config.rollout.n, config.trainer.seed)
            finally:
                await rollout.close()
    judged = [NONE not in rewards.names(group.task) for group in groups]
    write_jsonl(Path(output), [row for each in zip(groups, judged, strict=True) for row in _rows(*each)])
    responses = sum(len(group.scores) for group in groups)
    scores = [score for group in compress(groups, judged) for score in group.scores]
    faults = [fault for group in groups for fault in group.faults]
    for fault in faults[:3]:
        console.print(f"not scored, skipped: {fault}", markup=False)
    if len(faults) > config.reward.max_fault_share * (len(faults) + responses):
        raise RewardFaultError(f"{len(faults)} responses could not be scored, more than reward.max_fault_share allows")
    console.print(f"{responses} responses to {len(groups)} prompts, {_format_means(scores)}", markup=False)
    if without_gold:
        console.print(f"without a gold and not scored: {without_gold}", markup=False)
    console.print(f"transcripts: {output}", markup=False)


def _rows(group: TrajectoryGroup, judged: bool) -> list[dict[str, Any]]:
    """Transcripts. A response that is not scored has no score, where one that is wrong has a low one."""
    unscored = {} if judged else {"score": None, "reward": None}
    return [{**row, **unscored} for row in group_rows(0, group)]


def _format_means(scores: Sequence[Score]) -> str:
    """Mean reward and mean of every reward part, as text."""
    if not scores:
        return "none of them scored"
    means = score_means(scores)
    mean = means.pop("total")
    parts = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    return f"mean reward {mean:.3f}{f' ({parts})' if parts else ''}"
