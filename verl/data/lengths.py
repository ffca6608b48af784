"""Prompts that are too long, or that the chat template refuses, are bad rows: named or left out, never cut.

What counts is what is put before the policy: `prompt_ids` gives its tokens (verl.trainer.build_env.opening_of).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from verl.data.tasks import BadRowPolicy
from verl.errors import DataError
from verl.types import Task

_log = logging.getLogger(__name__)
PromptIds = Callable[[Task], Sequence[int]]


class Chosen(Sequence[Task]):
    """Some tasks of a set, in its order."""

    def __init__(self, tasks: Sequence[Task], numbers: Sequence[int]) -> None:
        self._tasks, self._numbers = tasks, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self._tasks[number] for number in self._numbers[place]]
        return self._tasks[self._numbers[place]]


def fitting(
    tasks: Sequence[Task], prompt_ids: PromptIds, max_prompt_length: int, on_bad_row: BadRowPolicy = "error"
) -> Sequence[Task]:
    """The tasks whose prompts have at most `max_prompt_length` tokens, and that the chat template takes.

    Raises DataError for the first other one, or if none is left; with on_bad_row="skip" they are left out and counted.
    """
    numbers, bad = [], []
    for number, task in enumerate(tasks):
        try:
            _check(task, prompt_ids, max_prompt_length)
        except DataError as error:
            if on_bad_row == "error":
                raise
            bad.append(error)
        else:
            numbers.append(number)
    if not bad:
        return tasks
    source = tasks[0].id.partition("#")[0]
    if not numbers:
        raise DataError(f"has no prompt of at most {max_prompt_length} tokens; the first: {bad[0]}", file=source)
    _log.warning("%s: left out %d of %d prompts, the first: %s", source, len(bad), len(tasks), bad[0])
    return Chosen(tasks, numbers)


def _check(task: Task, prompt_ids: PromptIds, max_prompt_length: int) -> None:
    try:
        length = len(prompt_ids(task))
        if length > max_prompt_length:
            raise DataError(
                f"the prompt has {length} tokens, more than data.max_prompt_length={max_prompt_length}",
                mend="Raise it, or set data.on_bad_row=skip",
            )
    except DataError as error:
        raise error.of_row(task.id) from error
