"""Checks that a reward pays for the task: the gold response must score above an empty one and above a bare thought.

A reward of other data may do the opposite. ToolRL's gives a row whose gold is `#### 72` one point for a thought without
any answer, and none for the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from verl.errors import ConfigError, VerlError
from verl.formats.toolrl_text import THINK, THINK_END
from verl.scoring.rewards import Rewards
from verl.types import Message, Task
from verl.utils.reward_score.base import FIRST_STEP, LabReward

BARE_THOUGHT = f"{THINK}I know what to do.{THINK_END}"
_ROWS = 8  # per reward and data source
_LOOKED_AT = 1000  # rows, to find these


@dataclass(frozen=True, slots=True)
class GoldScores:
    """What the reward of one row gives to three responses."""

    task_id: str
    reward: str
    gold: float
    empty: float
    thought: float

    @property
    def margin(self) -> float:
        """Lead of the gold response over the better one of the others."""
        return self.gold - max(self.empty, self.thought)

    def __str__(self) -> str:
        scores = f"{self.gold:g}, an empty one {self.empty:g}, a thought alone {self.thought:g}"
        return f"{self.task_id}: reward {self.reward!r} gives the gold response {scores}"


def gold_scores(
    rewards: Rewards, task: Task, score: Callable[[Task, str | Message], float], step: int = FIRST_STEP
) -> GoldScores | None:
    """score: the total of a response, which is a text or a message with calls

    None if the task's reward defines no gold response: judges, services and users' functions are not called. Raises
    ConfigError for a reward that fails.
    """
    reward = rewards.of(task)
    if not isinstance(reward, LabReward):
        return None
    try:
        responses = (reward.gold(task, step), "", BARE_THOUGHT)
        return GoldScores(task.id, rewards.names(task)[0], *(score(task, each) for each in responses))
    except VerlError:
        raise
    except Exception as error:
        raise ConfigError(f"the reward fails on {task.id} ({type(error).__name__}: {error})") from error


def check_gold_wins(found: Iterable[GoldScores]) -> None:
    """Raises ConfigError if a gold response scores below an empty one or a bare thought, or if none of a reward's is
    above both. Single rows may tie: for Tool-N1's `llama`, an empty response is right if the gold makes no call."""
    by_reward: dict[str, list[GoldScores]] = {}
    for scores in found:
        by_reward.setdefault(scores.reward, []).append(scores)
    for each in by_reward.values():
        worst = min(each, key=lambda scores: scores.margin)
        if worst.margin < 0 or all(scores.margin <= 0 for scores in each):
            raise ConfigError(
                f"{worst}, so training would not pay for the task; set reward.name to the reward of these rows "
                "(docs/reward.md), and look at them with `toolrl lab`"
            )


def sample_rows(rewards: Rewards, tasks: Iterable[Task]) -> list[Task]:
    """Some of the first rows of each reward and data source."""
    found: dict[tuple[str, str], list[Task]] = {}
    for _, task in zip(range(_LOOKED_AT), tasks, strict=False):
        rows = found.setdefault((rewards.names(task)[0], task.data_source), [])
        if len(rows) < _ROWS:
            rows.append(task)
    return [task for rows in found.values() for task in rows]
