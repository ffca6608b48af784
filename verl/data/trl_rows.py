"""Rows as TRL's trainers read them: a prompt with its completion, and preference pairs.

A prompt is a text, which is the user's message, or a list of messages; so is a completion, of the assistant.
Source: TRL 1.16, docs/source/dataset_formats.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import DataError

Row = Mapping[str, Any]
_MESSAGES = "a text, or a list of {role, content} messages"


def with_completion(row: Row) -> Row:
    """{prompt, completion} -> messages whose assistant turns are trained: those of the completion alone, as in TRL."""
    if isinstance(row.get("label"), bool):
        raise DataError(
            "marks unpaired preferences (KTO), which are not trained", hint="Leave such rows out", field="label"
        )
    prompt, completion = (
        _messages(row["prompt"], "prompt", "user"),
        _messages(row["completion"], "completion", "assistant"),
    )
    if any(_role(each) == "assistant" for each in prompt):
        raise DataError(
            "has turns of the assistant, of which TRL trains none",
            hint="Write prompt and completion as one column messages, and set data.split_turns=last",
            field="prompt",
        )
    return _with({"messages": [*prompt, *completion]}, row, "prompt", "completion")


def with_pair(row: Row) -> Row:
    """{prompt, chosen, rejected} -> messages for the prompt. Without one, both sides begin with it."""
    if row.get("messages") is not None:
        return row
    sides = [_messages(row[name], name, "assistant") for name in ("chosen", "rejected")]
    if row.get("prompt") is not None:
        shared = _messages(row["prompt"], "prompt", "user")
    else:
        same = [one == other for one, other in zip(*sides, strict=False)]
        number = [*same, False].index(False)
        shared, sides = sides[0][:number], [each[number:] for each in sides]
        if not shared:
            raise DataError("is missing, and chosen and rejected begin differently", _MESSAGES, field="prompt")
    return _with({"messages": shared, "chosen": sides[0], "rejected": sides[1]}, row, "prompt")


def _messages(value: Any, field: str, role: str) -> Sequence[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list | tuple):
        raise DataError(f"is of type {type(value).__name__}", _MESSAGES, field=field)
    return value


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _with(columns: Row, row: Row, *without: str) -> Row:
    return {**{name: value for name, value in row.items() if name not in without}, **columns}
