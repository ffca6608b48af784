"""The reward lab with one reward, whichever the tasks name."""

from collections.abc import Iterable
from dataclasses import replace

from toolrl.check.lab.__main__ import LabReport, try_rewards
from verl.formats.base import ToolCallFormat
from verl.formats.plain import PLAIN
from verl.scoring.rewards import Rewards
from verl.types import Task
from verl.utils.reward_score.base import LabReward


def try_reward(
    reward: LabReward, tasks: Iterable[Task], step: int = 0, tool_call_format: ToolCallFormat = PLAIN
) -> LabReport:
    """Score the gold response and every mutation of every task."""
    return try_rewards(Rewards(reward), (replace(task, reward=None) for task in tasks), step, tool_call_format)
