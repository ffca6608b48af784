"""SFT demonstrations: from rows to samples whose trained tokens are assistant turns.

Every assistant turn becomes its own sample with the tokens that a rollout would see: the rendered conversation so far,
the response, the end-of-turn token. A turn with tool calls or other fields than text is rendered by the template, or by
env.tool_call_format if it is set: then prompts and responses are those of the reinforcement learning that follows.
Text stays as it is written, where templates change thoughts; the empty thought of some templates is put before it.
Samples of one conversation share a group, so that packing stores their common prefix once.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from verl.batch.samples import Sample
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.config.schema import DataConfig
from verl.data.conversations import offered_tools, read_conversation
from verl.data.messages import check_columns, read_messages, read_object, read_tools
from verl.data.report import RowReport
from verl.data.source import AS_WRITTEN, notes_of, source_rows
from verl.envs.single_turn import SingleTurnEnv
from verl.errors import DataError, file_and_row
from verl.formats.history import with_calls_written
from verl.types import Message, Task, ToolSpec

Converted = TypeVar("Converted")
# Tool output quoted inside a response: never trained as if the policy had written it.
_QUOTED_OUTPUT = re.compile(
    r"<(obs|observation|information|interpreter|result|tool_response)>.*?</\1>|```output\n.*?```", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation whose assistant turns from `first` on are trained, and the tools that its prompt lists."""

    messages: tuple[Message, ...]
    first: int = 0  # index into messages
    id: str = ""  # file#row, for messages
    tools: tuple[ToolSpec, ...] = ()
    column: str = "messages"  # the source column, for messages

    @property
    def trained(self) -> list[int]:
        """Indices of the trained messages."""
        turns = enumerate(self.messages[self.first :], self.first)
        return [place for place, message in turns if message.role == "assistant"]


def read_demonstrations(
    source: str,
    max_bad_share: float = 0.0,
    report: RowReport | None = None,
    data: DataConfig = AS_WRITTEN,
) -> list[Demonstration]:
    """The demonstrations of a file. Raises DataError if more than `max_bad_share` of its rows are unusable.

    Layouts: OpenAI's {messages: [...]} and those of verl/data/layouts.py, ToolRL's SFT file {instruction, input,
    output}, or ToolRL's parquet {prompt: [...], reward_model: {ground_truth}}; each may have OpenAI's `tools`.
    """
    convert = partial(to_demonstration, split_turns=data.split_turns)
    found = usable_rows(source, convert, max_bad_share, report or RowReport(source), data)
    return [replace(demonstration, id=id) for id, demonstration in found]


def usable_rows(
    source: str, convert: Callable[[Any], Converted], max_bad_share: float, report: RowReport, data: DataConfig
) -> list[tuple[str, Converted]]:
    """(file#row, converted row) of the usable rows. Raises DataError if more than `max_bad_share` are unusable."""
    found: list[tuple[str, Converted]] = []
    for number, rows in enumerate(source_rows(source, data)):
        report.num_rows += 1
        if not rows:
            report.drop("left out by data.map", number)
            continue
        try:
            made = [convert(row) for row in rows]
        except DataError as error:
            report.add_bad(error.at(file=source, row=number), max_bad_share)
            continue
        report.num_split += len(made) - 1
        report.notes.update(notes_of(rows))
        found += [(f"{Path(source).name}#{number}", each) for each in made]
    report.check(max_bad_share)
    return found


def to_demonstration(row: Any, split_turns: str = "all") -> Demonstration:
    """Validates and converts one row. Raises DataError. split_turns: as for RL, the assistant turns that are trained"""
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, Mapping):
        raise DataError(f"is of type {type(row).__name__}", "an object")
    check_columns(row)
    if row.get("messages") is not None:
        conversation = read_conversation(row, split_turns)
        turns = [place for place, message in enumerate(conversation.messages) if message.role == "assistant"]
        if not turns:
            raise DataError(
                "has no assistant turn",
                "at least one message of role assistant",
                hint="SFT learns the assistant's turns; toolrl train needs prompts alone, and a reward (reward.name)",
                field="messages",
            )
        first = turns[-1 if split_turns == "last" else 0]
        return Demonstration(conversation.messages, first, tools=conversation.tools)
    tools = offered_tools(row, read_tools(row.get("tools")), {})
    if "output" in row:
        prompt = [Message("system", _text(row, "instruction"))] if row.get("instruction") else []
        prompt.append(Message("user", _text(row, "input")))
        return Demonstration((*prompt, Message("assistant", _text(row, "output"))), len(prompt), tools=tools)
    if row.get("prompt") is not None and row.get("reward_model") is not None:
        messages = read_messages(row["prompt"], "prompt")
        answer = Message("assistant", _text(read_object(row, "reward_model"), "ground_truth", "reward_model."))
        return Demonstration((*messages, answer), len(messages), tools=tools, column="prompt")
    raise DataError(
        f"has the columns {sorted(row)}", "messages, or instruction, input and output, or prompt and reward_model"
    )


def _text(row: Mapping[str, Any], name: str, place: str = "") -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise DataError("is missing or empty", "a text", field=f"{place}{name}")
    return value


def sft_samples(
    demonstrations: Sequence[Demonstration],
    chat: ChatTemplate,
    max_length: int,
    max_bad_share: float = 0.0,
    report: RowReport | None = None,
    first_group: int = 0,
    observations: ObservationTokenizer | None = None,
) -> list[Sample]:
    """One sample per assistant turn; turns that end beyond `max_length` tokens are dropped, never truncated.

    observations: of the tool-call format; None: the chat template renders tools and calls
    Raises DataError if the chat template rejects, or drops parts of, more demonstrations than `max_bad_share` allows,
    ConfigError if it drops the tools.
    """
    samples: list[Sample] = []
    report = report or RowReport("the demonstrations", len(demonstrations))
    for number, demonstration in enumerate(demonstrations):
        file, row = file_and_row(demonstration.id)
        try:
            group, places = first_group + number, demonstration.trained
            turns = [turn_sample(demonstration, place, group, chat, observations) for place in places]
        except DataError as error:
            report.add_bad(error.at(file=file, row=row), max_bad_share)
            continue
        fitting = [turn for turn in turns if len(turn.token_ids) <= max_length]
        samples += fitting
        too_long = f"longer than {max_length} tokens"
        if not fitting and turns:
            report.drop(too_long, row)
        elif len(fitting) < len(turns):
            report.notes[f"with responses dropped for being {too_long}"] += 1
    report.check(max_bad_share)
    return samples


def turn_sample(
    demonstration: Demonstration, place: int, group: int, chat: ChatTemplate, observations: ObservationTokenizer | None
) -> Sample:
    before, message = demonstration.messages[:place], demonstration.messages[place]
    if observations is not None:
        prompt, message = _in_format(demonstration, place, observations)
    else:
        prompt = chat.initial_ids(before, demonstration.tools, demonstration.column)
    if observations is None and (message.tool_calls or message.template_fields):
        text, ids, spans = _rendered_turn(demonstration, place, chat)
        start = max(text.find(message.content), 0)
    else:
        raw = observations is not None and observations.raw
        text, (ids, spans) = chat.response(prompt, message.content, raw)
        start = len(text.rstrip()) - len(message.content.rstrip())  # negative if the prompt has its beginning
    quoted = [(start + found.start(), start + found.end()) for found in _QUOTED_OUTPUT.finditer(message.content)]
    own = (not any(begin < b and a < end for a, b in quoted) for begin, end in spans)
    token_ids = (*prompt, *ids)
    mask = (*(False,) * len(prompt), *own)
    return Sample(
        token_ids=np.array(token_ids, dtype=np.int32),
        action_mask=np.array(mask, dtype=np.bool_),
        rollout_logprobs=np.zeros(sum(mask), dtype=np.float32),
        group=group,
        reward=0.0,
    )


def _in_format(
    demonstration: Demonstration, place: int, observations: ObservationTokenizer
) -> tuple[Sequence[int], Message]:
    """(tokens of the prompt, the turn with its calls in the content), as an episode of one turn has them."""
    task = Task("", demonstration.messages[:place], "", "", tools=demonstration.tools)
    (message,) = with_calls_written(observations.tool_call_format, demonstration.messages[place : place + 1])
    if unused := [key for key in message.template_fields if key != "content"]:
        field = f"{demonstration.column}[{place}].{unused[0]}"
        raise DataError("is dropped by this env.tool_call_format", hint="Move it into the content", field=field)
    return observations.prompt_ids(SingleTurnEnv.initial_observation(task)), message


def _rendered_turn(
    demonstration: Demonstration, place: int, chat: ChatTemplate
) -> tuple[str, tuple[int, ...], list[tuple[int, int]]]:
    """(the assistant turn as rendered by the template, its tokens, the character span of each).

    The text from the end of the generation prompt, where a rollout starts, to the end-of-turn token, inclusive.
    Raises DataError if the template renders the conversation before the turn differently once the turn is added.
    """
    messages, tools, column = demonstration.messages, demonstration.tools, demonstration.column
    field = f"{column}[{place}]"
    chat.check_messages(messages[: place + 1], tools, column)
    head = chat.rendered(messages[:place], tools)
    whole = chat.rendered(messages[: place + 1], tools, add_generation_prompt=False)
    if not whole.startswith(head):
        raise DataError(
            "the chat template does not continue its own prompt with this turn",
            hint="Write the turn as plain text, as the policy should write it, or set model.tokenizer_path to another "
            "tokenizer",
            field=field,
        )
    text = whole[len(head) :]
    ids, spans = chat.response_ids(text)
    ends = [number for number, token in enumerate(ids) if token in chat.stop_token_ids]
    if not ends or text[spans[ends[-1]][1] :].strip():
        raise DataError(
            f"the chat template ends this turn with {text[-20:]!r} rather than with a stop token",
            hint="Set model.tokenizer_path to another tokenizer",
            field=field,
        )
    return text, ids[: ends[-1] + 1], spans[: ends[-1] + 1]
