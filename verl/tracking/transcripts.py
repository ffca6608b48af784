"""Transcripts of the rollouts: one file per step, and rows for the tables of trackers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.host.files import step_files
from verl.tracking.jsonl import write_jsonl
from verl.types import Message, Score, Task, Trajectory, TrajectoryGroup

_SAMPLES = 8  # rows per step in tables of trackers


class Transcripts:
    """`transcripts/step-000012.jsonl` in the run folder, one line per rollout; read with `jsonl.read_jsonl`."""

    def __init__(self, run_folder: Path) -> None:
        self.folder, self.validation = run_folder / "transcripts", run_folder / "validation"

    def write(self, step: int, groups: Sequence[TrajectoryGroup]) -> Path:
        """Write the file of a step atomically. Returns its path."""
        path = self.folder / f"step-{step:06d}.jsonl"
        rows = ({**row, "group": place} for place, group in enumerate(groups) for row in group_rows(step, group))
        write_jsonl(path, rows)
        return path

    def write_validation(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write `validation/step-000012.jsonl` atomically."""
        write_jsonl(self.validation / f"step-{step:06d}.jsonl", rows)

    def truncate_after(self, step: int) -> None:
        """Remove the files of later steps, which a resumed run writes again."""
        for folder in (self.folder, self.validation):
            for later, path in step_files(folder, ".jsonl").items():
                if later > step:
                    path.unlink()


def group_rows(step: int, group: TrajectoryGroup) -> Iterable[dict[str, Any]]:
    """One JSON object per rollout; `num_tokens` is the response length over all turns.

    `segments`, of an episode that has several, is the segment of each assistant turn.
    """
    for trajectory, score, reward in zip(group.trajectories, group.scores, group.rewards, strict=True):
        yield {
            "step": step,
            "task_id": group.task.id,
            "data_source": group.task.data_source,
            "index": trajectory.index,
            "prompt": _messages(trajectory.prompt),
            **({"tools": tools} if (tools := _tools(group.task, trajectory)) else {}),
            "responses": _messages(_responses(trajectory)),
            "answer": group.task.answer,
            "score": {"total": score.total, "parts": dict(score.parts), **_details(score)},
            **({"exceeded": score.exceeded} if score.exceeded else {}),
            "reward": reward,
            "turn_rewards": [turn.reward for turn in trajectory.turns],
            **({"segments": [turn.segment for turn in trajectory.turns]} if len(trajectory.segments) > 1 else {}),
            "stop_reason": trajectory.stop_reason,
            "outcome": trajectory.outcome,
            "num_tokens": sum(len(turn.completion.token_ids) for turn in trajectory.turns),
            "tool_uses": [asdict(use) for use in trajectory.tool_uses],
        }


def _details(score: Score) -> dict[str, Any]:
    return {"details": dict(score.details)} if score.details else {}


def _tools(task: Task, trajectory: Trajectory) -> list[str]:
    """Their names, as offered to the policy beside the text of the prompt."""
    return list(trajectory.tools) or [tool.name for tool in task.tools]


def sample_rows(groups: Iterable[TrajectoryGroup]) -> list[dict[str, Any]]:
    """The first rollout of some prompts, in a form that tables of trackers take: texts and numbers."""
    chosen = [(group, group.trajectories[0]) for group in groups if group.trajectories][:_SAMPLES]
    return [
        {
            "task": _plain(group.task.id),
            "prompt": _dialogue(trajectory.prompt),
            "response": _dialogue(_responses(trajectory)),
            "answer": _plain(group.task.answer),
            "score": group.scores[0].total,
        }
        for group, trajectory in chosen
    ]


def _dialogue(messages: Iterable[Message]) -> str:
    parts = []
    for row in _messages(messages):
        calls = json.dumps(row["tool_calls"]) if "tool_calls" in row else ""
        parts.append(f"{row['role']}: {row['content']}{calls}")
    return _plain("\n\n".join(parts))


def _plain(text: str) -> str:
    """Without lone surrogates, which no file or connection takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _responses(trajectory: Trajectory) -> list[Message]:
    return [message for turn in trajectory.turns for message in (turn.message, *turn.responses)]


def _messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Role, content, and the calls that are not part of the content."""
    rows = []
    for message in messages:
        calls = () if message.calls_in_content else message.tool_calls
        called = {"tool_calls": [asdict(call) for call in calls]} if calls else {}
        rows.append({"role": message.role, "content": message.content, **called})
    return rows
