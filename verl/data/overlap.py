"""Train-test overlap: the benchmark tasks that a model was trained on. Scores on those measure memorization.

A training run writes its tasks to `train_tasks.jsonl` in its folder and in every exported model, one line per task:
{"env", "task": its name, "digest": of the user messages}. An evaluation compares its tasks with the model's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

from verl.errors import ConfigError, DataError
from verl.tracking.jsonl import read_jsonl, write_jsonl
from verl.types import Message, Task

TRAIN_TASKS = "train_tasks.jsonl"
_SINGLE_TURN = "single_turn"
_SHOWN = 3


class Trace(NamedTuple):
    """Identity of a task: its name within an environment, and a digest of the user messages."""

    env: str
    task: str
    digest: str


def trace_of(task: Task) -> Trace:
    """User messages are compared ignoring case and white space; system prompts differ between files and are ignored
    unless there is no user text. A prompt without text has the digest "", which matches no other.

    The name is the environment's own, independent of the task's file.
    """
    env, own = task.env or _SINGLE_TURN, task.extra.get("id")
    name = own if env != _SINGLE_TURN and isinstance(own, str) else task.id
    text = _text(each for each in task.prompt if each.role == "user") or _text(task.prompt)
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16] if text else ""
    return Trace(env, name, digest)


def _text(messages: Iterable[Message]) -> str:
    """The contents in lower case, with white space collapsed."""
    return "\n".join(" ".join(each.content.lower().split()) for each in messages).strip()


@dataclass(frozen=True)
class TrainTasks:
    """The tasks that a model was trained on."""

    traces: tuple[Trace, ...] = ()

    @classmethod
    def of(cls, tasks: Iterable[Task], before: TrainTasks) -> Self:
        """before: the training tasks of the initial model"""
        return cls(tuple(dict.fromkeys((*before.traces, *map(trace_of, tasks)))))

    @cached_property
    def _known(self) -> frozenset[str | tuple[str, str]]:
        """Digests, and names in environments."""
        names = {(each.env, each.task) for each in self.traces if each.env != _SINGLE_TURN}
        return frozenset(each.digest for each in self.traces if each.digest) | names

    def has(self, task: Task) -> bool:
        """Whether the task, or one with the same user messages, was trained on."""
        trace = trace_of(task)
        return trace.digest in self._known or (trace.env, trace.task) in self._known

    def write(self, path: Path) -> None:
        write_jsonl(path, (each._asdict() for each in self.traces))

    @classmethod
    def read(cls, model: str | None) -> Self:
        """The training tasks of a model's folder, if it has the file. Raises DataError for an invalid file."""
        path = Path(str(model)) / TRAIN_TASKS
        if not path.is_file():
            return cls()
        try:
            return cls(tuple(Trace(row["env"], row["task"], row["digest"]) for row in read_jsonl(path)))
        except (ValueError, KeyError, TypeError) as error:
            expected = ", ".join(Trace._fields)
            raise DataError(f"is not a list of training tasks ({error!r})", expected, file=str(path)) from error


def check_overlap(trained: TrainTasks, asked: Mapping[str, Sequence[Task]], model: str, allow: str | None) -> list[str]:
    """Compares tasks, by category, with the training tasks of `model`. Returns one line per overlapping category.

    allow: name of the setting that permits overlap; None if it is set. Raises ConfigError for overlap unless permitted
    """
    found = []
    for category, tasks in asked.items():
        known = [task.id for task in tasks if trained.has(task)]
        if known:
            shown = ", ".join(known[:_SHOWN]) + (", .." if len(known) > _SHOWN else "")
            counted = f"{category}: {len(known)} of {len(tasks)} tasks are in the training data of {model}"
            found.append(f"{counted} ({shown})")
    if found and allow is not None:
        raise ConfigError(
            f"{'; '.join(found)}. Evaluate on held-out tasks (of BFCL's multi-turn scenarios bfcl_multi_turn has those "
            f"that are not in the train split), or set {allow} to report scores on them anyway"
        )
    return found
