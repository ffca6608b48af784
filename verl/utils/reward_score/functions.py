"""Functions as rewards: plain ones, and those written for veRL, TRL and verifiers, which get what these pass to them.

(response, answer)                                           the messages after the prompt, as one text
(data_source, solution_str, ground_truth, extra_info)        veRL: the decoded response, observations included
(data_sources, solution_strs, ground_truths, extra_infos)    veRL's batch manager: lists, here of one row
(completions, ..)                                            TRL: lists of one row, and any columns
(completion, ..)                                             verifiers' rubrics: messages, state, and any columns
"""

from __future__ import annotations

import asyncio
import json
import math
import pickle
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter, isawaitable, signature
from typing import Any

from verl.errors import ConfigError, DataError
from verl.formats.openai import as_openai
from verl.formats.toolrl_text import THINK, THINK_END
from verl.text import shortened
from verl.types import Message, Score, Task, ToolCall, Trajectory, Turn
from verl.utils.reward_score.rubric import rubric_arguments

_SHOWN = 200  # characters of a value that is no score
_TRL, _BATCH, _VERL, _RUBRIC = "completions", "solution_strs", "solution_str", "completion"  # each identifies a form
_LISTS = (_TRL, _BATCH)  # forms that return a list
_BESIDE_COLUMNS = {  # the arguments of forms that take the columns of rows
    _TRL: ("prompts", _TRL, "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"),
    _RUBRIC: ("prompt", _RUBRIC, "info", "state", "task"),
}


@dataclass(frozen=True, slots=True)
class TrainerState:
    """TRL's `trainer_state`, as far as a score can follow it. global_step: finished updates"""

    global_step: int


@dataclass(frozen=True, slots=True)
class FunctionReward:
    """A function, plain or async, that returns a score (`as_score`), or a list of one in the forms of lists.

    options: further arguments, by name; they replace the trainer's own, as veRL's `reward_kwargs`
    """

    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads_step(self) -> bool:
        return "trainer_state" in self._parameters

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        log = _Log()
        match self._form:
            case "completions":
                found = self._call(**self._taken(_trl_columns(trajectory, task, step, log)))
            case "solution_strs":
                arguments = _verl_arguments(trajectory, task)
                found = self._call(**{f"{name}s": [value] for name, value in arguments.items()})
            case "solution_str":
                found = self._call(**_verl_arguments(trajectory, task))
            case "completion":
                arguments = rubric_arguments(trajectory, _row_columns(task), list(_rounds(trajectory)))
                found = self._call(**self._taken(arguments))
            case _:
                found = self._call(_as_text(trajectory), task.answer)
        score = self._read(found)
        return replace(score, parts={**score.parts, **log.metrics}, details={**score.details, **log.extra})

    def check_task(self, task: Task) -> None:
        """Raises DataError if the row lacks a column that a function of TRL's or verifiers' form names."""
        if self._form not in _BESIDE_COLUMNS:
            return
        offered = (*_BESIDE_COLUMNS[self._form], *_row_columns(task))
        try:
            signature(self.function).bind(**{**self._taken(dict.fromkeys(offered)), **self.options})
        except TypeError as error:
            has = f"one of {', '.join(offered)}"
            raise DataError(f"reward {self._name}: {error}", has, "Add it to the rows") from error

    @property
    def _form(self) -> str:
        return _form_of(self._parameters)

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def _parameters(self) -> Mapping[str, Parameter]:
        return signature(self.function).parameters

    def _taken(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Those that the function takes."""
        takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in self._parameters.values())
        return {name: value for name, value in columns.items() if takes_all or name in self._parameters}

    def _call(self, *given: Any, **named: Any) -> Any:
        found = self.function(*given, **{**named, **self.options})
        return asyncio.run(_awaited(found)) if isawaitable(found) else found

    def _read(self, found: Any) -> Score:
        """The score. None or NaN in TRL's list: the reward does not apply to the response."""
        if self._form in _LISTS:
            if not isinstance(found, Iterable) or len(listed := list(found)) != 1:
                shown = shortened(repr(found), _SHOWN)
                raise TypeError(f"{self._name} returned {shown}; expected a list of one number")
            (found,) = listed
            if self._form == _TRL and (found is None or (_is_number(found) and math.isnan(found))):
                return Score(0.0, {}, counted=False)
        return as_score(found, self._name)


@dataclass(frozen=True, slots=True)
class _Log:
    """What a function of TRL's form logs of its response: `log_metric` a part, `log_extra` a detail."""

    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = _number(value)

    def column(self, column: str, values: list[Any]) -> None:
        (self.extra[column],) = map(_plain, values)


def check_function(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ConfigError for a function that `FunctionReward` cannot call; TRL's columns are those of the rows."""
    try:
        parameters = signature(function)
        named = dict.fromkeys(options)
        match _form_of(parameters.parameters):
            case "solution_strs":
                parameters.bind(**named | dict.fromkeys(("data_sources", _BATCH, "ground_truths", "extra_infos")))
            case "solution_str":
                parameters.bind(**named | dict.fromkeys(("data_source", _VERL, "ground_truth", "extra_info")))
            case "completions":
                parameters.bind_partial(**named)
            case "completion":
                parameters.bind_partial(**named)
                _check_parser(parameters.parameters, options)
            case _:
                parameters.bind("", "", **named)
    except (TypeError, ValueError) as error:
        forms = "(response, answer), (data_source, solution_str, ground_truth, extra_info), (completions, **columns)"
        other = f"is a function of other parameters than {forms} or (completion, **columns)"
        raise ConfigError(f"reward {name!r} {other}: {error}") from error


def _check_parser(parameters: Mapping[str, Parameter], options: Mapping[str, Any]) -> None:
    """A rubric's parser is of its environment: another one would give other scores without a word."""
    parser = parameters.get("parser")
    if parser is not None and parser.default is Parameter.empty and "parser" not in options:
        raise TypeError("`parser` is the rubric's own; give it a default, such as parser=vf.XMLParser(['answer'])")


def _form_of(parameters: Iterable[str]) -> str:
    """The parameter that identifies the form; empty: a plain function."""
    return next((name for name in (_TRL, _BATCH, _VERL, _RUBRIC) if name in parameters), "")


def as_score(found: Any, made_by: str) -> Score:
    """The score of a finite number, of a tuple that begins with one, or of a mapping whose "score" is one.

    The other numbers of a mapping are parts of the score; all else is kept in its details.
    made_by: the function's name, for the error. Raises TypeError for anything else.
    """
    try:
        if isinstance(found, tuple):
            given = {"score": found[0], **{f"item_{place}": each for place, each in enumerate(found[1:], 1)}}
        else:
            given = dict(found) if isinstance(found, Mapping) else {"score": found}
        total = _number(given.pop("score"))
        parts, details = {}, {}
        for name, value in given.items():
            if _is_number(value):
                parts[name] = _number(value)
            else:
                details[name] = _plain(value)
        return Score(total, parts, details=details)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:  # RuntimeError: of a tensor
        expected = "a finite number, or a dict with 'score', the total, whose numbers are finite"
        raise TypeError(f"{made_by} returned {shortened(repr(found), _SHOWN)}; expected {expected}") from error


def _verl_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    """What veRL 0.9.1's reward managers pass, with what its agent loop adds to `extra_info`."""
    own = trajectory.score
    rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
    extra = {
        **task.extra,
        "num_turns": 1 + sum(1 + bool(observed) for _, observed in _rounds(trajectory)),
        "rollout_reward_scores": {} if own is None else {**own.parts, "score": own.total},
        "turn_scores": rewards,
        "tool_rewards": [],  # tools have no rewards of their own
        "raw_prompt": [as_openai(message) for message in trajectory.prompt],
    }
    return {
        "data_source": task.data_source,
        _VERL: trajectory.decoded,
        "ground_truth": json.loads(task.answer) if task.json_answer else task.answer,
        "extra_info": extra,
    }


def _trl_columns(trajectory: Trajectory, task: Task, step: int, log: _Log) -> dict[str, Any]:
    """What TRL 1.16's trainer passes, as lists of one row."""
    messages = [as_openai(message) for message in trajectory.prompt]
    lists = {
        **_row_columns(task),
        "prompts": trajectory.prompt[-1].content if task.text_prompt else messages,
        _TRL: trajectory.decoded if task.text_prompt else _conversation(trajectory),
        "completion_ids": trajectory.response_ids,
    }
    columns: dict[str, Any] = {name: [value] for name, value in lists.items()}
    if trajectory.environment:
        columns["environments"] = [pickle.loads(trajectory.environment)]  # noqa: S301  of this run's own process
    return {
        **columns,
        "trainer_state": TrainerState(max(step - 1, 0)),
        "log_extra": log.column,
        "log_metric": log.metric,
    }


def _row_columns(task: Task) -> dict[str, Any]:
    answer = json.loads(task.answer) if task.json_answer else task.answer
    return {"data_source": task.data_source, "answer": answer, **task.extra}


def _conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The messages after the prompt. With tools, TRL takes thoughts and calls out of the policy's text."""
    turns, made = trajectory.turns, []
    has_tools = trajectory.tools or any(turn.message.tool_calls for turn in turns)
    for turn, observed in _rounds(trajectory):
        text = trajectory.decoded if len(turns) == 1 else turn.message.content
        made += [_written(turn) if has_tools else {"role": "assistant", "content": text}, *map(_observed, observed)]
    return made


def _written(turn: Turn) -> dict[str, Any]:
    """The policy's message: its text, thought and calls; its text alone if a call in it cannot be parsed."""
    text, calls = turn.message.content, turn.message.tool_calls
    if turn.parsed is not None and turn.parsed.error is not None:
        return {"role": "assistant", "content": text}
    if calls and turn.parsed is not None:
        text = turn.parsed.content
    made: dict[str, Any] = {"role": "assistant"}
    if text.lstrip().startswith(THINK):
        thought, _, text = text.lstrip().removeprefix(THINK).partition(THINK_END)
        if thought.strip():
            made["reasoning_content"] = thought.strip()
        text = text.lstrip()
    made["content"] = text.rstrip() if calls else text
    return {**made, "tool_calls": [_called(call) for call in calls]} if calls else made


def _called(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}


def _observed(message: Message) -> dict[str, Any]:
    named = {"name": message.tool or ""} if message.role == "tool" else {}
    return {"role": message.role, **named, "content": message.content}


def _as_text(trajectory: Trajectory) -> str:
    """The policy's turns, and between them what it observed."""
    rounds = _rounds(trajectory)
    return "\n".join(message.content for turn, observed in rounds for message in (turn.message, *observed))


def _rounds(trajectory: Trajectory) -> Iterator[tuple[Turn, tuple[Message, ...]]]:
    """The turns, each with the messages that the policy read after it: none after the last."""
    for place, turn in enumerate(trajectory.turns, 1):
        yield turn, turn.responses if place < len(trajectory.turns) else ()


def _is_number(value: Any) -> bool:
    """Whether it is a scalar of any library."""
    if isinstance(value, str | bytes) or value is None:
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _number(value: Any) -> float:
    """A finite number; a text is none, even if it reads as one."""
    if isinstance(value, str | bytes) or not math.isfinite(number := float(value)):
        raise ValueError(value)
    return number


def _plain(value: Any) -> Any:
    """A JSON value as it is; anything else as its `repr`."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return shortened(repr(value), _SHOWN)
    return value


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found
