"""Demonstrations: from rows to samples whose trained tokens are an assistant's own words.

Every assistant turn becomes a sample of its own, in the very tokens that a rollout would see: the template up to the
turn, then the reply, then the token that ends it. Samples of one conversation share a group, so that packing holds
their common beginning once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.data.chat import ChatCodec
from verl.data.report import RowReport
from verl.data.rows import read_rows
from verl.errors import DataError
from verl.types import Message, Sample

# What a tool said, where a reply quotes it: never to be learned as if the policy had written it.
_QUOTED_OUTPUT = re.compile(
    r"<(obs|observation|information|interpreter|result|tool_response)>.*?</\1>|```output\n.*?```", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation whose assistant turns from `first` on are to be imitated."""

    messages: tuple[Message, ...]
    first: int = 0  # index into messages
    id: str = ""  # file#row, for messages


def read_samples(
    source: str, codec: ChatCodec, max_length: int, max_bad_share: float = 0.0, first_group: int = 0
) -> tuple[list[Sample], RowReport]:
    """The samples of a file, and what became of its rows. Raises DataError as the two functions below.

    first_group: the group of the first row's samples
    """
    report = RowReport(source)
    demonstrations = read_demonstrations(source, max_bad_share, report)
    return to_samples(demonstrations, codec, max_length, max_bad_share, report, first_group), report


def read_demonstrations(
    source: str, max_bad_share: float = 0.0, report: RowReport | None = None
) -> list[Demonstration]:
    """The demonstrations of a file. Raises DataError if more than `max_bad_share` of its rows cannot be used.

    Rows are of one of three kinds: {messages: [{role, content}]}, ToolRL's SFT file {instruction, input, output}, or
    ToolRL's parquet {prompt: [...], reward_model: {ground_truth}}.
    """
    found, report = [], report or RowReport(source)
    for number, row in enumerate(read_rows(source)):
        report.num_rows += 1
        try:
            found.append(replace(to_demonstration(row), id=f"{Path(source).name}#{number}"))
        except DataError as error:
            report.add_bad(error.at(file=source, row=number), max_bad_share)
    report.check(max_bad_share)
    return found


def to_demonstration(row: Any) -> Demonstration:
    """One row, checked. Raises DataError."""
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, Mapping):
        raise DataError(f"is of type {type(row).__name__}", "an object")
    if "messages" in row:
        messages = _messages(row["messages"], "messages")
        if not any(message.role == "assistant" for message in messages):
            raise DataError("has no assistant turn", "at least one message of role assistant", field="messages")
        return Demonstration(messages)
    if "output" in row:
        asked = [Message("system", _text(row, "instruction"))] if row.get("instruction") else []
        asked.append(Message("user", _text(row, "input")))
        return Demonstration((*asked, Message("assistant", _text(row, "output"))), len(asked))
    if "prompt" in row and isinstance(row.get("reward_model"), Mapping):
        prompt = _messages(row["prompt"], "prompt")
        answer = _text(row["reward_model"], "ground_truth")
        return Demonstration((*prompt, Message("assistant", answer)), len(prompt))
    raise DataError(
        f"has the columns {sorted(row)}", "messages, or instruction, input and output, or prompt and reward_model"
    )


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise DataError("is missing or empty", "a text", field=name)
    return value


def _messages(value: Any, field: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"is no JSON ({error})", "[{role, content}]", field=field) from error
    if not isinstance(value, Sequence) or not value:
        raise DataError("is no list of messages", "[{role, content}]", field=field)
    messages = []
    for number, each in enumerate(value):
        if not isinstance(each, Mapping):
            raise DataError(f"is of type {type(each).__name__}", "{role, content}", field=f"{field}[{number}]")
        messages.append(Message(_text(each, "role"), _text(each, "content")))
    return tuple(messages)


def to_samples(
    demonstrations: Sequence[Demonstration],
    codec: ChatCodec,
    max_length: int,
    max_bad_share: float = 0.0,
    report: RowReport | None = None,
    first_group: int = 0,
) -> list[Sample]:
    """One sample per assistant turn; turns that end beyond `max_length` tokens are left out, never cut.

    Raises DataError if the chat template refuses more demonstrations than `max_bad_share` allows.
    """
    samples: list[Sample] = []
    report = report or RowReport("the demonstrations", len(demonstrations))
    for number, demonstration in enumerate(demonstrations):
        file, _, digits = demonstration.id.rpartition("#")
        row = int(digits) if digits.isdecimal() else None
        try:
            turns = _turns(demonstration, first_group + number, codec)
        except DataError as error:
            report.add_bad(error.at(file=file, row=row), max_bad_share)
            continue
        fitting = [turn for turn in turns if len(turn.token_ids) <= max_length]
        samples += fitting
        too_long = f"longer than {max_length} tokens"
        if not fitting and turns:
            report.drop(too_long, row)
        elif len(fitting) < len(turns):
            report.notes[f"with replies that are left out, as they are {too_long}"] += 1
    report.check(max_bad_share)
    return samples


def _turns(demonstration: Demonstration, group: int, codec: ChatCodec) -> list[Sample]:
    messages = demonstration.messages
    return [
        _turn(messages[:place], message.content, group, codec)
        for place, message in enumerate(messages)
        if message.role == "assistant" and place >= demonstration.first
    ]


def _turn(before: Sequence[Message], reply: str, group: int, codec: ChatCodec) -> Sample:
    prompt = codec.prompt_ids(before)
    ids, spans = codec.reply_ids(reply)
    own = [not any(start < b and a < end for a, b in _quoted(reply)) for start, end in spans]
    token_ids = (*prompt, *ids, codec.end_token_id)
    mask = (*(False,) * len(prompt), *own, True)
    return Sample(token_ids, mask, (0.0,) * len(token_ids), group, 0.0)


def _quoted(reply: str) -> Iterator[tuple[int, int]]:
    return (match.span() for match in _QUOTED_OUTPUT.finditer(reply))
