"""Prompts that are too long are bad rows: named or left out, never cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from verl.data.chat import ChatCodec
from verl.data.tasks import BadRowPolicy
from verl.errors import DataError
from verl.types import Task

_log = logging.getLogger(__name__)


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
    tasks: Sequence[Task], codec: ChatCodec, max_prompt_length: int, on_bad_row: BadRowPolicy = "error"
) -> Sequence[Task]:
    """The tasks whose prompts have at most `max_prompt_length` tokens.

    Raises DataError for the first that has more, or if none is left; with on_bad_row="skip" they are left out and
    counted.
    """
    numbers = []
    for number, task in enumerate(tasks):
        length = len(codec.prompt_ids(task.prompt))
        if length <= max_prompt_length:
            numbers.append(number)
        elif on_bad_row == "error":
            raise DataError(
                f"the prompt has {length} tokens, more than data.max_prompt_length={max_prompt_length}",
                mend="Raise it, or set data.on_bad_row=skip",
                file=task.id,
            )
    if len(numbers) == len(tasks):
        return tasks
    if not numbers:
        raise DataError(f"has no prompt of at most {max_prompt_length} tokens", file=tasks[0].id.partition("#")[0])
    _log.warning(
        "%s: left out %d of %d prompts, which have more than data.max_prompt_length=%d tokens",
        tasks[0].id.partition("#")[0],
        len(tasks) - len(numbers),
        len(tasks),
        max_prompt_length,
    )
    return Chosen(tasks, numbers)
