"""What was answered: one line a rollout, appended as soon as a task is done, so that nothing is asked twice.

A task is done when all its rollouts are there. It is known by a digest of what it asks, how it is played and what
counts, so that a changed file or rule is asked anew; being wrong is no reason to.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.errors import DataError
from verl.evaluation.base import Category
from verl.tracking.jsonl import read_rows, write_rows
from verl.tracking.transcripts import group_rows
from verl.types import Task, Trajectory, TrajectoryGroup

NOT_ASKED = "not_asked"


def digest_of(category: Category, task: Task) -> str:
    """What tells this task, played and judged like this, from any other."""
    told = {"task": asdict(task), "play": asdict(category.play), "metric": category.metric}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Records:
    """The answers of one category in `<folder>/<category>.jsonl`; n of them make a task.

    decode: tokens to text, for what was put before the model, word for word; left out of the records without
    """

    def __init__(
        self, folder: Path, category: Category, n: int, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        self.path = folder / f"{category.name.replace('/', '-')}.jsonl"
        self._category, self._n, self._decode = category, n, decode
        self._done: dict[str, list[dict[str, Any]]] = self._read() if self.path.exists() else {}

    def missing(self, tasks: Iterable[Task]) -> list[Task]:
        """Those of the tasks that are not done yet; of two that are the same, one."""
        by_digest = {digest_of(self._category, task): task for task in tasks}
        return [task for digest, task in by_digest.items() if digest not in self._done]

    def of(self, tasks: Iterable[Task]) -> list[list[dict[str, Any]]]:
        """[tasks done][n] records, in the order of the tasks."""
        digests = (digest_of(self._category, task) for task in tasks)
        return [self._done[digest] for digest in digests if digest in self._done]

    def add(self, group: TrajectoryGroup, figures: Sequence[float]) -> None:
        """The rollouts of a task with the figure of each. Written at once; a kill loses no task that was done."""
        digest = digest_of(self._category, group.task)
        answers = zip(group_rows(0, group), group.trajectories, figures, strict=True)
        self._append(
            digest,
            [
                {
                    **row,
                    "digest": digest,
                    "figure": figure,
                    "num_turns": len(episode.turns),
                    "malformed_calls": episode.num_malformed_calls,
                    **self._shown(episode),
                }
                for row, episode, figure in answers
            ],
        )

    def _shown(self, episode: Trajectory) -> dict[str, list[str]]:
        """What the model read before each of its turns, with what template and format made of messages and tools."""
        if self._decode is None:
            return {}
        return {"shown": [self._decode(turn.context_ids) for turn in episode.turns]}

    def add_unasked(self, task: Task, problem: str) -> None:
        """A task whose prompt is too long, or one that the chat template refuses: wrong, and told."""
        digest = digest_of(self._category, task)
        row = {"task_id": task.id, "digest": digest, "stop_reason": NOT_ASKED, "problem": problem, "figure": 0.0}
        self._append(digest, [{**row, "index": index} for index in range(self._n)])

    def _append(self, digest: str, rows: list[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, whole)  # tasks that end after this one must not go on in a torn line
            raise DataError(
                f"cannot be written ({error.strerror})",
                hint="Free some space and start again: what is done is kept",
                file=str(self.path),
            ) from error
        self._done[digest] = rows

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        """Tasks that are whole. What a kill has torn is taken out of the file, so that lines are appended to lines."""
        try:
            rows = read_rows(self.path)
            found: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for row in rows:
                found[row["digest"]].append(row)
            whole = {digest: same[: self._n] for digest, same in found.items() if _is_whole(same[: self._n], self._n)}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"is no file of answers ({type(error).__name__}: {error})",
                hint="Remove it to ask everything again",
                file=str(self.path),
            ) from error
        write_rows(self.path, [row for same in whole.values() for row in same])
        return whole


def _is_whole(rows: Sequence[Mapping[str, Any]], n: int) -> bool:
    return sorted(row["index"] for row in rows) == list(range(n))
