"""Validates that a data row is a task of its environment, before the run starts."""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from verl.errors import DataError
from verl.host.packages import script
from verl.types import GROUND_TRUTH, Task


def check_row(env: str, task: Task, extra: Any, answer: Any) -> None:
    """Raises DataError if a task's `extra` or the JSON of its answer does not match these types."""
    field = "extra_info"
    try:
        TypeAdapter(extra).validate_python(dict(task.extra))
        field = GROUND_TRUTH
        TypeAdapter(answer).validate_json(task.answer)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"is not a task of env.name={env}: {first['msg']}",
            f"a row that {script('scripts/make_env_tasks.py')} writes for it",
            "Set env.name to the environment of the data, or use other files",
            field=".".join([field, *map(str, first["loc"])]),
        ) from error
