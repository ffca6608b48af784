"""Preference pairs for DPO: from rows {messages, chosen, rejected, tools} to two samples each.

`messages` is the prompt; `chosen` and `rejected` are an assistant turn each, as text, as a message or as a list of one
message. Each is tokenized as a demonstration's last turn is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.config.schema import DataConfig
from verl.data.conversations import read_conversation
from verl.data.messages import check_columns, read_list, read_messages
from verl.data.report import RowReport
from verl.data.source import AS_WRITTEN
from verl.errors import DataError, file_and_row
from verl.sft.demonstrations import Demonstration, turn_sample, usable_rows
from verl.sft.objectives import Pair

_SIDES = ("chosen", "rejected")
_LAYOUT = "the columns messages (the prompt), chosen and rejected (an assistant turn each)"
_MESSAGES = "a list of {role, content} messages"
_TURN = "a text, or one assistant message"


@dataclass(frozen=True, slots=True)
class Preference:
    """The same prompt with either response, which is the last message of each."""

    chosen: Demonstration
    rejected: Demonstration


def read_preferences(
    source: str, max_bad_share: float = 0.0, report: RowReport | None = None, data: DataConfig = AS_WRITTEN
) -> list[Preference]:
    """The pairs of a file. Raises DataError if more than `max_bad_share` of its rows are unusable."""
    found = usable_rows(source, to_preference, max_bad_share, report or RowReport(source), data)
    return [Preference(replace(each.chosen, id=id), replace(each.rejected, id=id)) for id, each in found]


def to_preference(row: Any) -> Preference:
    """Validates and converts one row. Raises DataError."""
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, Mapping):
        raise DataError(f"is of type {type(row).__name__}", "an object")
    check_columns(row)
    if missing := [name for name in ("messages", *_SIDES) if row.get(name) in (None, "", [])]:
        hint = f"data.columns={{theirs: {missing[0]}}} renames a column"
        raise DataError("is missing or empty", _LAYOUT, hint, field=missing[0])
    if read_messages(row["messages"], "messages")[-1].role == "assistant":
        hint = "End it with the prompt: a user message or a tool's result; the responses follow it"
        raise DataError("ends with an assistant turn", "a prompt", hint, field="messages")
    chosen, rejected = (_side(row, name) for name in _SIDES)
    if chosen.messages[-1] == rejected.messages[-1]:
        raise DataError("is the same as chosen", "another response", "Remove the row", field="rejected")
    return Preference(chosen, rejected)


def _side(row: Mapping[str, Any], name: str) -> Demonstration:
    """The conversation with one of the responses, checked as a demonstration is."""
    messages = read_list(row["messages"], "messages", _MESSAGES)
    place, response = f"messages[{len(messages)}]", _response(row[name], name)
    try:
        conversation = read_conversation({**row, "messages": [*messages, response]}, "last")
    except DataError as error:  # what is wrong with the response is in its own column
        raise replace(error, field=error.field.replace(place, name)) from error
    if not conversation.turns:
        role = conversation.messages[-1].role
        raise DataError(f"is {role!r}", "assistant", field=f"{name}.role")
    return Demonstration(conversation.messages, len(messages), tools=conversation.tools)


def _response(value: Any, name: str) -> Any:
    """A message: the only one of a list, or an assistant's with a text."""
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    if isinstance(value, Mapping):
        return value
    turns = read_list(value, name, _TURN)
    if len(turns) != 1:
        hint = "Put what both responses begin with into messages"
        raise DataError(f"has {len(turns)} messages", _TURN, hint, field=name)
    return turns[0]


def pair_samples(
    preferences: Sequence[Preference],
    chat: ChatTemplate,
    max_length: int,
    max_bad_share: float = 0.0,
    report: RowReport | None = None,
    first_group: int = 0,
    observations: ObservationTokenizer | None = None,
) -> list[Pair]:
    """Both samples of each pair; one with a response that ends beyond `max_length` tokens is dropped.

    The arguments and errors are those of `sft_samples`.
    """
    pairs: list[Pair] = []
    report = report or RowReport("the pairs", len(preferences))
    for group, preference in enumerate(preferences, first_group):
        file, row = file_and_row(preference.chosen.id)
        sides = (preference.chosen, preference.rejected)
        try:
            chosen, rejected = (turn_sample(each, each.first, group, chat, observations) for each in sides)
        except DataError as error:
            report.add_bad(error.at(file=file, row=row), max_bad_share)
            continue
        if max(len(chosen.token_ids), len(rejected.token_ids)) > max_length:
            report.drop(f"longer than {max_length} tokens", row)
        else:
            pairs.append(Pair(chosen, rejected))
    report.check(max_bad_share)
    return pairs
