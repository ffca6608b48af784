"""Rows to tasks: every row is validated once on loading, then drawn in a seeded, shuffled, resumable order.

files --read_rows--> rows --to_task--> TaskSet (on disk) --TaskStream--> endless stream of tasks
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from verl.config.schema import DataConfig
from verl.data.conversations import Conversation, offered_tools, read_conversation, violates_schema
from verl.data.messages import check_columns, has_blank_arguments, read_messages, read_object, read_text, read_tools
from verl.data.report import RowReport
from verl.data.row_names import RowNames
from verl.data.rows import RowStore, encoded
from verl.data.source import AS_WRITTEN, notes_of, source_name, source_rows
from verl.errors import ConfigError, DataError
from verl.formats.toolrl_text import listed_tools, parse_gold
from verl.types import GROUND_TRUTH, Message, Task, ToolCall, ToolSpec
from verl.utils.reward_score.base import named_reward

DATA_SOURCE = "rlla"  # ToolRL's rows
_AGENT_LOOPS = {"single_turn_agent": "single_turn", "tool_agent": "tool"}  # veRL's: the environment
KNOWN_NAMES = RowNames()  # rows name no code
_OTHER_GOLDS = ("answer", "solution", "gold", "target", "expected_answer", "final_answer", "reference_answer")


def to_tasks(
    row: Any, id: str, split_turns: str = "all", data_source: str = "", names: RowNames = KNOWN_NAMES
) -> list[Task]:
    """Validates a row in OpenAI's layout, or of a task, and converts it. Raises DataError with the field.

    A row with `messages` is one task per trained assistant turn, which is its gold (verl/data/conversations.py), or a
    prompt without gold.

    data_source: of rows that name none; names: that the row may use
    """
    if isinstance(row, DataError):
        raise row  # an unreadable row
    if row.get("prompt") is not None or row.get("messages") is None:
        named = data_source and isinstance(row, Mapping) and row.get("data_source") is None
        return [to_task({**row, "data_source": data_source} if named else row, id, names)]
    check_columns(row)
    conversation = read_conversation(row, split_turns)
    shared = _shared({"data_source": data_source, **row}, names)
    if row.get("reward_model") is not None:
        shared |= _answer(row)
    if row.get("id") is not None:
        shared["extra"] = {"id": row["id"], **shared["extra"]}
    turns = conversation.turns or (None,)
    return [
        _turn_task(conversation, turn, id=id if len(turns) == 1 else f"{id}.{number}", **shared)
        for number, turn in enumerate(turns)
    ]


def _turn_task(conversation: Conversation, turn: int | None, **shared: Any) -> Task:
    """turn: None: the whole conversation is the prompt"""
    gold = None if turn is None else conversation.messages[turn]
    given = {"answer": "" if gold is None else _gold_text(gold), **shared}
    return Task(prompt=conversation.messages[:turn], tools=conversation.tools, gold=gold, **given)


def _gold_text(gold: Message) -> str:
    """The gold for rewards of texts: the content, or the calls as JSON."""
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in gold.tool_calls]
    return json.dumps(calls, ensure_ascii=False) if calls else gold.content


def to_task(row: Any, id: str, names: RowNames = KNOWN_NAMES) -> Task:
    """Validates a task row and converts it. Raises DataError with the field and the expected value.

    names: that the row may use

    Columns: data_source, prompt [OpenAI's messages], reward_model {ground_truth}; optional tools, env, reward and
    extra_info. A ground truth that is not a text is converted to JSON. That of a ToolRL row must parse.
    """
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, Mapping):
        raise DataError(f"is of type {type(row).__name__}", "an object with data_source, prompt and reward_model")
    check_columns(row)
    prompt = _prompt(row)
    tools = offered_tools(row, read_tools(row.get("tools")), {})
    task = Task(id=id, prompt=prompt, tools=tools, **_answer(row), **_shared(row, names))
    if task.data_source == DATA_SOURCE or listed_tools(prompt) is not None:
        _gold_calls(task)
    return task


def _shared(row: Mapping[str, Any], names: RowNames) -> dict[str, Any]:
    """The fields of all tasks of a row."""
    return {
        "data_source": read_text(row.get("data_source"), "data_source"),
        "env": _env(row, names),
        "reward": _reward(row, names),
        "text_prompt": row.get("text_prompt") is True,
        "extra": dict(read_object(row, "extra_info")) if row.get("extra_info") is not None else {},
    }


def _env(row: Mapping[str, Any], names: RowNames) -> str | None:
    """The row's environment, also by the name of veRL's agent loop, which veRL takes from the row, too."""
    if row.get("env") is not None:
        return names.env(read_text(row["env"], "env"))
    if row.get("agent_name") is None or row.get("prompt") is None:
        return None
    loop = read_text(row["agent_name"], "agent_name")
    if loop not in _AGENT_LOOPS:
        known = " or ".join(_AGENT_LOOPS)
        raise DataError(
            f"is {loop!r}, an agent loop of veRL", known, "Name an environment in `env`", field="agent_name"
        )
    return _AGENT_LOOPS[loop]


def unlisted_call(task: Task) -> DataError | None:
    """An error for the first gold call of a tool that a ToolRL prompt does not list; None if there is none.

    The policy cannot know such a tool. ToolRL trains on these rows nevertheless.
    """
    if task.gold is not None or (tools := listed_tools(task.prompt)) is None:
        return None
    for call in _gold_calls(task):
        if call["name"].strip() not in tools:
            listed = ", ".join(map(repr, tools)) or "none"
            problem = f"calls {call['name']!r}, which the prompt does not list"
            return DataError(problem, f"one of {listed}", field=GROUND_TRUTH)
    return None


def _prompt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if row.get("prompt") is None:
        raise DataError("is missing", "a list of {role, content} messages", field="prompt")
    prompt = read_messages(row["prompt"], "prompt")
    if not prompt[-1].content.strip() and prompt[-1].role != "tool":  # tool output may be empty
        raise DataError("is empty", "the text that the policy responds to", field=f"prompt[{len(prompt) - 1}].content")
    return prompt


def _reward(row: Mapping[str, Any], names: RowNames) -> str | None:
    if row.get("reward") is None:
        return None
    name = names.reward(read_text(row["reward"], "reward"))
    if name in names.rewards:
        return name  # the command builds it, with its options
    try:
        named_reward(name)
    except ConfigError as error:
        raise DataError(str(error), "a reward of docs/reward.md", field="reward") from error
    return name


def _unread(row: Mapping[str, Any], tasks: Sequence[Task]) -> Iterator[str]:
    """Notes on columns from which a reader would expect something to be learned."""
    if not any(task.gold or task.answer for task in tasks) and (column := _other_gold(row)) is not None:
        yield f"with {column}"
    if row.get("chosen") is not None and row.get("rejected") is not None:
        yield "with chosen and rejected responses, which toolrl sft sft.loss=dpo reads"


def _other_gold(row: Mapping[str, Any]) -> str | None:
    """Of a row without a gold: the column that others call so, and what makes it the gold."""
    name = next((name for name in _OTHER_GOLDS if row.get(name) not in (None, "")), None)
    if name is None:
        return None
    return f"a column {name!r} that is not read: 'data.columns={{{name}: ground_truth}}' makes it the gold"


def _answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the answer."""
    truth = read_object(row, "reward_model").get("ground_truth")
    if truth is None:
        hint = "Where the environment scores, any text will do"
        raise DataError("is missing", "a text, or another JSON value", hint, field=GROUND_TRUTH)
    if isinstance(truth, str):
        return {"answer": read_text(truth, GROUND_TRUTH)}
    try:
        return {"answer": json.dumps(truth, ensure_ascii=False, allow_nan=False), "json_answer": True}
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"cannot be written as JSON ({error})"
        raise DataError(problem, "a text, or another JSON value", field=GROUND_TRUTH) from error


def _gold_calls(task: Task) -> list[dict[str, Any]]:
    try:
        return parse_gold(task.answer).calls or []
    except DataError as error:
        raise error.at(field=GROUND_TRUTH) from error


def _from_stored(stored: dict[str, Any]) -> Task:
    prompt = tuple(map(_stored_message, stored.pop("prompt")))
    gold = stored.pop("gold")
    tools = tuple(ToolSpec(**tool) for tool in stored.pop("tools"))
    return Task(prompt=prompt, tools=tools, gold=gold and _stored_message(gold), **stored)


def _stored_message(message: dict[str, Any]) -> Message:
    return Message(**{**message, "tool_calls": tuple(ToolCall(**call) for call in message["tool_calls"])})


class TaskSet(Sequence[Task]):
    """The usable rows of one file, in file order, on disk; `report` counts the others, with the reason."""

    def __init__(
        self,
        source: str,
        max_bad_share: float = 0.0,
        data: DataConfig = AS_WRITTEN,
        names: RowNames = KNOWN_NAMES,
    ) -> None:
        """Read and validate the whole file once.

        source: a data file or data set, as for `read_rows`
        max_bad_share: maximum share of unusable rows; 0: the first one raises its own DataError. Above the maximum a
            DataError names the first ones.
        names: that the rows may use, as for `to_tasks`
        """
        self.source = source
        self.report = RowReport(source)
        self._store = RowStore(self._usable_tasks(max_bad_share, data, names))
        self.report.check(max_bad_share)

    def _usable_tasks(self, max_bad_share: float, data: DataConfig, names: RowNames) -> Iterator[bytes]:
        """The tasks as they are stored."""
        file, name, turns = Path(self.source).name, source_name(self.source), data.split_turns
        for number, rows in enumerate(source_rows(self.source, data)):
            self.report.num_rows += 1
            ids = [f"{file}#{number}"] if len(rows) == 1 else [f"{file}#{number}.{each}" for each in range(len(rows))]
            try:
                made = [to_tasks(row, id, turns, name, names) for row, id in zip(rows, ids, strict=True)]
                tasks = [task for each in made for task in each]
                stored = [encoded(task) for task in tasks]
            except DataError as error:
                self.report.add_bad(error.at(file=self.source, row=number), max_bad_share)
                continue
            if not tasks:
                self.report.drop("left out by data.map", number)
                continue
            self.report.num_split += len(tasks) - 1
            self.report.notes.update(notes_of(rows))
            self.report.notes.update(note for row, each in zip(rows, made, strict=True) for note in _unread(row, each))
            if any(map(has_blank_arguments, rows)):
                self.report.notes["with calls of blank arguments, read as {}"] += 1
            for task in tasks:
                if (unlisted := unlisted_call(task)) is not None:
                    self.report.unlisted.append(unlisted.at(file=self.source, row=number))
                if violates_schema(task):
                    self.report.notes["with gold calls that violate their tool's schema"] += 1
            yield from stored

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        return _from_stored(self._store[number if number >= 0 else len(self) + number])


@dataclass(frozen=True, slots=True)
class TaskCursor:
    """Position of a stream; `asdict` of it can be stored as JSON."""

    drawn: Sequence[int]  # tasks drawn from each file
    made_of: str  # hash of files, rows, weights and seed


class TaskStream:
    """An endless, seeded, shuffled stream over several task sets.

    Files are interleaved evenly by weight (the file whose next draw is due first comes next), so any section of the
    stream has the mix given by the weights. Each file is exhausted before it repeats, in a new order each time. The
    default weights are the numbers of rows; then len(stream) draws are one epoch: every task once.
    """

    def __init__(
        self,
        sets: Sequence[Sequence[Task]],
        weights: Sequence[float] | None = None,
        seed: int = 0,
        cursor: TaskCursor | None = None,
        shuffle: bool = True,
    ) -> None:
        """`cursor` resumes a stream; raises DataError if files, weights or seed differ from the cursor's.

        shuffle: False: file order in every epoch
        """
        if not sets:
            raise ConfigError("data.train_files names no file")
        self._sets, self._seed, self._shuffle = sets, seed, shuffle
        self._rows = tuple(len(tasks) for tasks in sets)
        self._weights = tuple(weights or self._rows)
        self._orders: dict[int, tuple[int, Any]] = {}  # file -> (epoch, permutation)
        names = [tasks[0].id for tasks in sets]
        self._made_of = hashlib.sha256(repr((names, self._rows, self._weights, seed)).encode()).hexdigest()[:16]
        if cursor and cursor.made_of != self._made_of:
            raise DataError(
                "differ from those of the saved run in files, rows, data.weights or trainer.seed",
                hint="Resume with the same, or start a new run",
                file="the training data",
            )
        self._drawn = list(cursor.drawn) if cursor else [0] * len(sets)

    def __len__(self) -> int:
        """Total number of tasks: the length of an epoch with the default weights."""
        return sum(self._rows)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Task:
        task = self.at(self._drawn)
        self._drawn[self._due(self._drawn)] += 1
        return task

    def at(self, drawn: Sequence[int]) -> Task:
        """The next task after this number of draws from each file."""
        file = self._due(drawn)
        epoch, position = divmod(drawn[file], self._rows[file])
        return self._sets[file][int(self._order(file, epoch)[position])]

    def _due(self, drawn: Sequence[int]) -> int:
        due = [(count + 1) / weight for count, weight in zip(drawn, self._weights, strict=True)]
        return due.index(min(due))

    def _order(self, file: int, epoch: int) -> Any:
        if file not in self._orders or self._orders[file][0] != epoch:
            order = np.arange(self._rows[file])
            if self._shuffle:
                order = np.random.default_rng((self._seed, file, epoch)).permutation(order)
            self._orders[file] = (epoch, order)
        return self._orders[file][1]

    @property
    def cursor(self) -> TaskCursor:
        """The state from which a new stream resumes exactly here."""
        return TaskCursor(list(self._drawn), self._made_of)
