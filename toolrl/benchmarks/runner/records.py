"""Evaluation records: one line per rollout, appended as soon as a task is done, so that a rerun resumes.

A task is done when all its rollouts are recorded. Its key is a digest of task, episode settings and metric, so a
changed file or setting is evaluated again; a wrong answer is not.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolrl.benchmarks.runner.benchmark import Category
from verl.errors import DataError
from verl.host.files import unwritable
from verl.tracking.jsonl import read_jsonl, write_jsonl
from verl.tracking.transcripts import group_rows
from verl.types import Task, TrajectoryGroup

NOT_ASKED = "not_asked"


def digest_of(category: Category, task: Task) -> str:
    """Digest of the task, its episode settings and its metric."""
    content = {"task": asdict(task), "episode": asdict(category.episode), "metric": category.metric}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Records:
    """The records of one category in `<folder>/<category>.jsonl`, n per task.

    decode: tokens to text, to record the model's exact inputs; None: they are not recorded
    """

    def __init__(
        self, folder: Path, category: Category, n: int, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        self.path = folder / f"{category.name.replace('/', '-')}.jsonl"
        self._category, self._n, self._decode = category, n, decode
        self._done: dict[str, list[dict[str, Any]]] = self._read() if self.path.exists() else {}

    def missing(self, tasks: Iterable[Task]) -> list[Task]:
        by_digest = {digest_of(self._category, task): task for task in tasks}
        return [task for digest, task in by_digest.items() if digest not in self._done]

    def of(self, tasks: Iterable[Task]) -> list[list[dict[str, Any]]]:
        """[tasks done][n] records, in the order of the tasks."""
        digests = (digest_of(self._category, task) for task in tasks)
        return [self._done[digest] for digest in digests if digest in self._done]

    def add(self, group: TrajectoryGroup, values: Sequence[float]) -> None:
        """Record the rollouts of a task with the metric of each. Written immediately, so a kill loses no done task."""
        digest = digest_of(self._category, group.task)
        rows = []
        for row, trajectory, value in zip(group_rows(0, group), group.trajectories, values, strict=True):
            row |= {"digest": digest, "metric_value": value, "num_turns": len(trajectory.turns)}
            row["malformed_calls"] = trajectory.num_malformed_calls
            if self._decode is not None:  # the context before each turn, with messages and tools as rendered
                row["shown"] = [self._decode(turn.context_ids) for turn in trajectory.turns]
            rows.append(row)
        self._append(digest, rows)

    def add_unasked(self, task: Task, problem: str) -> None:
        """Record a task whose prompt is too long or rejected by the chat template: it counts as wrong."""
        digest = digest_of(self._category, task)
        row = {"task_id": task.id, "digest": digest, "stop_reason": NOT_ASKED, "problem": problem, "metric_value": 0.0}
        self._append(digest, [{**row, "index": index} for index in range(self._n)])

    def _append(self, digest: str, rows: list[dict[str, Any]]) -> None:
        whole = self.path.stat().st_size if self.path.exists() else 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, whole)  # later tasks must not be appended to a partial line
            full = unwritable(self.path, error)
            full.hint += " and start again: finished tasks are kept"
            raise full from error
        self._done[digest] = rows

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        """The complete tasks. Partial lines and tasks, left by a kill, are removed from the file."""
        try:
            rows = read_jsonl(self.path)
            records: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for row in rows:
                records[row["digest"]].append(row)
            firsts = {digest: same[: self._n] for digest, same in records.items()}
            numbers = list(range(self._n))
            whole = {key: same for key, same in firsts.items() if sorted(row["index"] for row in same) == numbers}
        except (ValueError, KeyError, TypeError) as error:
            problem = f"is not a file of evaluation records ({type(error).__name__}: {error})"
            raise DataError(problem, hint="Remove it to evaluate everything again", file=str(self.path)) from error
        write_jsonl(self.path, [row for same in whole.values() for row in same])
        return whole
