"""Rows as TRL's trainers read them: a prompt alone or with its completion, and preference pairs.

A prompt is a text, which is the user's message (`source.py`), or a list of messages; so is a completion, of the
assistant.
Source: TRL 1.16, docs/source/dataset_formats.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.messages import read_list
from verl.errors import DataError

Row = Mapping[str, Any]
_MESSAGES = "a text, or a list of {role, content} messages"


def with_prompt(row: Row) -> Row:
    """{prompt} -> messages without a gold. Tasks, and prompts with turns that would be golds, stay as they are."""
    task = any(row.get(name) is not None for name in ("reward_model", "agent_name"))
    if task or any(_role(each) == "assistant" for each in row["prompt"]):
        return row
    if (messages := row.get("messages")) is None:
        return _with({"messages": row["prompt"]}, row, "prompt")
    if list(messages[: len(row["prompt"])]) != list(row["prompt"]):
        raise DataError("is no beginning of messages", "one of the two columns", field="prompt")
    return _with({}, row, "prompt")


def with_completion(row: Row) -> Row:
    """{prompt, completion} -> messages whose assistant turns are trained: those of the completion alone, as in TRL."""
    if row.get("reward_model") is not None:  # a task, whatever else it has
        return row
    if isinstance(row.get("label"), bool):
        hint = "Leave the rows with false out, and the column"
        raise DataError("marks unpaired preferences (KTO), which are not trained", hint=hint, field="label")
    if row.get("messages") is not None:
        raise DataError("is given beside messages", "one of the two", "Remove one of the columns", field="completion")
    prompt, completion = _prompt(row), _response(row, "completion")
    if any(_role(each) == "assistant" for each in prompt):
        raise DataError(
            "has turns of the assistant, of which TRL trains none",
            hint="Write prompt and completion as one column messages, and set data.split_turns=last",
            field="prompt",
        )
    return _with({"messages": [*prompt, *completion]}, row, "prompt", "completion")


def with_pair(row: Row) -> Row:
    """{prompt, chosen, rejected} -> messages for the prompt. Both sides may begin with it, also beside its text."""
    if row.get("messages") not in (None, row["chosen"]):  # else they repeat it, as in ultrafeedback_binarized
        return row
    sides = [_response(row, name) for name in ("chosen", "rejected")]
    same = [one == other for one, other in zip(*sides, strict=False)]
    number = min([*same, False].index(False), *(len(each) - 1 for each in sides))  # each keeps a response
    if row.get("prompt") is None and not number:
        raise DataError("is missing, and chosen and rejected begin differently", _MESSAGES, field="prompt")
    shared = list(sides[0][:number])
    prompt = [] if row.get("prompt") is None else list(_prompt(row))
    repeated = shared[: len(prompt)] == prompt or (row.get("text_prompt") is True and prompt[0] in shared)
    chosen, rejected = (each[number:] for each in sides)
    messages = shared if repeated else prompt + shared
    return _with({"messages": messages, "chosen": chosen, "rejected": rejected}, row, "prompt")


def _prompt(row: Row) -> Sequence[Any]:
    return read_list(row["prompt"], "prompt", _MESSAGES)


def _response(row: Row, name: str) -> Sequence[Any]:
    value = row[name]
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else value


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _with(columns: Row, row: Row, *without: str) -> Row:
    return {**{name: value for name, value in row.items() if name not in without}, **columns}
