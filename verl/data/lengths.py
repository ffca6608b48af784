"""Overlong prompts are truncated, dropped or an error; prompts that the chat template rejects are bad rows.

The length is that of the initial observation: `prompt_ids` returns its tokens before truncation
(verl.build.env.prompt_fn). `ChatTemplate.max_prompt_tokens` truncates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from verl.config.schema import DataConfig
from verl.data.report import RowReport
from verl.data.row_names import RowNames
from verl.data.tasks import KNOWN_NAMES, TaskSet
from verl.errors import DataError, file_and_row
from verl.types import Task
from verl.verl_compat.published import AUTO, overlong_of

PromptIds = Callable[[Task], Sequence[int]]


def prompt_excess(num_tokens: int, max_prompt_length: int) -> str | None:
    """Why a prompt of this length is too long; None if it is not."""
    if num_tokens <= max_prompt_length:
        return None
    return f"the prompt has {num_tokens} tokens, more than data.max_prompt_length={max_prompt_length}"


class TaskSubset(Sequence[Task]):
    """Some tasks of a set, in its order."""

    def __init__(self, tasks: Sequence[Task], numbers: Sequence[int]) -> None:
        self._tasks, self._numbers = tasks, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self._tasks[number] for number in self._numbers[place]]
        return self._tasks[self._numbers[place]]


def split_rows(tasks: Sequence[Task], share: float, seed: int, num_rows: int) -> tuple[Sequence[Task], Sequence[Task]]:
    """(the other tasks, those of a seeded share of the rows, at least one). The tasks of a row stay together.

    num_rows: of the file, with those that give no task: which rows are held out does not depend on the others
    Raises DataError if fewer than two rows give tasks.
    """
    rows: dict[Any, list[int]] = {}
    for number, task in enumerate(tasks):
        rows.setdefault(file_and_row(task.id)[1], []).append(number)
    if len(rows) < 2:
        raise DataError("has one row, so none can be held out", "at least two", field="data.val_share")
    order = np.random.default_rng(seed).permutation(num_rows).tolist()
    drawn = sum(number in rows for number in order[: round(share * num_rows)])
    used = [number for number in order if number in rows]
    held_out = set(used[: min(max(1, drawn), len(used) - 1)])
    parts: tuple[list[int], list[int]] = ([], [])
    for row, numbers in rows.items():
        parts[row in held_out].extend(numbers)
    return TaskSubset(tasks, parts[0]), TaskSubset(tasks, parts[1])


def read_tasks(
    source: str, prompt_ids: PromptIds, config: DataConfig, names: RowNames = KNOWN_NAMES
) -> tuple[Sequence[Task], RowReport]:
    """(the usable tasks of a file, the report on its rows). Raises DataError like `TaskSet` and `fitting`."""
    tasks = TaskSet(source, config.max_bad_share, config, names)
    return fitting(tasks, prompt_ids, config, tasks.report), tasks.report


def fitting(tasks: Sequence[Task], prompt_ids: PromptIds, config: DataConfig, report: RowReport) -> Sequence[Task]:
    """The tasks whose prompts the chat template accepts and that fit; the others are counted in `report`.

    Raises DataError for an overlong prompt if `config.truncation` is "error", for more rejected prompts than
    `config.max_bad_share` allows, and if no task is left.
    """
    numbers = []
    for number, task in enumerate(tasks):
        file, row = file_and_row(task.id)
        try:
            length = len(prompt_ids(task))
        except DataError as error:
            if task.gold is not None:  # the row's messages up to the gold turn are the prompt
                error.field = error.field.replace("prompt[", "messages[")
            report.add_bad(error.at(file=file, row=row), config.max_bad_share)
            continue
        if problem := prompt_excess(length, config.max_prompt_length):
            truncation = overlong_of(task.data_source) if config.truncation == AUTO else config.truncation
            if truncation == "error":
                hint = "Raise it, or set data.truncation=left or data.truncation=drop"
                raise DataError(problem, hint=hint, file=file, row=row)
            if truncation == "drop":
                report.drop(f"longer than {config.max_prompt_length} tokens", row)
                continue
            report.notes[f"cut to the last {config.max_prompt_length} tokens"] += 1
        numbers.append(number)
    report.check(config.max_bad_share)
    return tasks if len(numbers) == len(tasks) else TaskSubset(tasks, numbers)
