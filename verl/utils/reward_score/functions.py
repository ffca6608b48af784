"""Functions as rewards: plain ones, and those that are written for other trainers, which get what these pass.

A plain function takes (response, answer): the messages after the prompt, as one text, and the gold answer. Others have
a `Form`, which a parameter identifies (`verl.plugins.REWARD_FORMS`).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import Parameter, isawaitable, signature
from typing import Any

from verl.errors import ConfigError, DataError
from verl.plugins import REWARD_FORMS, Plugin
from verl.text import shortened
from verl.types import Message, Score, Task, Trajectory, Turn

_SHOWN = 200  # characters of a value that is no score


@dataclass(frozen=True, slots=True)
class Log:
    """What a function logs of its response: parts of the score, and details."""

    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = _number(value)

    def column(self, column: str, values: list[Any]) -> None:
        (self.extra[column],) = map(_plain, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Functions that are written for another trainer.

    parameter: the one that identifies them
    arguments: (trajectory, task, step, log) -> what the trainer passes, by name
    names:     of the arguments; if a function may leave some out, besides the columns of the row
    optional:  whether a function gets only what it names
    of_lists:  whether arguments and results are lists, here of one row
    abstains:  whether None or NaN in the list means that the reward does not apply to the response
    check:     (parameters, options): raises TypeError for a function that cannot be called
    """

    parameter: str
    arguments: Callable[[Trajectory, Task, int, Log], Mapping[str, Any]]
    names: tuple[str, ...]
    optional: bool = False
    of_lists: bool = False
    abstains: bool = False
    check: Callable[[Mapping[str, Parameter], Mapping[str, Any]], None] = lambda *_: None

    def __str__(self) -> str:
        return f"({self.parameter}, **columns)" if self.optional else f"({', '.join(self.names)})"


@cache
def _forms() -> tuple[Form, ...]:
    """Those that are installed; a function has the first whose parameter it has."""
    known: list[Plugin[Form]] = [Plugin(path) for path in REWARD_FORMS.values()]
    return tuple(form for each in known if (form := each.find()) is not None)


def _form_of(parameters: Iterable[str]) -> Form | None:
    """None: a plain function."""
    return next((form for form in _forms() if form.parameter in parameters), None)


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
        form, log = _form_of(self._parameters), Log()
        if form is None:
            found = self._call(_as_text(trajectory), task.answer)
        else:
            arguments = form.arguments(trajectory, task, step, log)
            found = self._call(**(self._taken(arguments) if form.optional else arguments))
        score = self._read(found, form)
        return replace(score, parts={**score.parts, **log.metrics}, details={**score.details, **log.extra})

    def check_task(self, task: Task) -> None:
        """Raises DataError if the row lacks a column that the function names."""
        form = _form_of(self._parameters)
        if form is None or not form.optional:
            return
        offered = (*form.names, *row_columns(task))
        try:
            signature(self.function).bind(**{**self._taken(dict.fromkeys(offered)), **self.options})
        except TypeError as error:
            has = f"one of {', '.join(offered)}"
            raise DataError(f"reward {self._name}: {error}", has, "Add it to the rows") from error

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

    def _read(self, found: Any, form: Form | None) -> Score:
        if form is not None and form.of_lists:
            if not isinstance(found, Iterable) or len(listed := list(found)) != 1:
                shown = shortened(repr(found), _SHOWN)
                raise TypeError(f"{self._name} returned {shown}; expected a list of one number")
            (found,) = listed
            if form.abstains and (found is None or (_is_number(found) and math.isnan(found))):
                return Score(0.0, {}, counted=False)
        return as_score(found, self._name)


def check_function(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ConfigError for a function that `FunctionReward` cannot call; columns are those of the rows."""
    try:
        parameters = signature(function)
        form = _form_of(parameters.parameters)
        if form is None:
            parameters.bind("", "", **dict.fromkeys(options))
        elif form.optional:
            parameters.bind_partial(**dict.fromkeys(options))
            form.check(parameters.parameters, options)
        else:
            parameters.bind(**dict.fromkeys((*options, *form.names)))
    except (TypeError, ValueError) as error:
        known = ", ".join(["(response, answer)", *map(str, _forms())])
        raise ConfigError(f"reward {name!r} is a function of other parameters than {known}: {error}") from error


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


def row_columns(task: Task) -> dict[str, Any]:
    """What a row has for functions that name its columns."""
    answer = json.loads(task.answer) if task.json_answer else task.answer
    return {"data_source": task.data_source, "answer": answer, **task.extra}


def _as_text(trajectory: Trajectory) -> str:
    """The policy's turns, and between them what it observed."""
    messages = ((turn.message, *observed) for turn, observed in rounds(trajectory))
    return "\n".join(each.content for together in messages for each in together)


def rounds(trajectory: Trajectory) -> Iterator[tuple[Turn, tuple[Message, ...]]]:
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
