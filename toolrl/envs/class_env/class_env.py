"""A plain Python class as an environment: `reset` starts an episode, the other public methods are the tools. It imports
nothing of ours.

    class Counter:
        def reset(self, **row):           # the row's prompt, answer, data_source and extra_info; a text that it
            self.value = 0                # returns is appended to the last message of the prompt
        def add(self, number: int) -> int:
            '''Add a number.'''           # a tool: described by type hints and docstring
            self.value += number
            return self.value
        def get_reward(self) -> float:    # optional: reward.name=env trains on it
            return float(self.value == 5)

This is the contract of TRL's `environment_factory`. Every episode has an object of its own. Methods may be `async def`;
others run in threads, one at a time per episode. The policy sees what a tool raises; ServiceDownError and what `reset`
or `get_reward` raise are infrastructure faults. `close`, if there is one, releases resources and is no tool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import Parameter, getattr_static, getmembers, iscoroutinefunction, isfunction, signature
from threading import Lock
from time import perf_counter
from typing import Any, ClassVar

import cloudpickle

from verl.envs.base import Env, Observation, StepResult
from verl.envs.tools.function import FunctionTool
from verl.envs.tools.functions import Toolbox
from verl.envs.tools.runner import MAX_CHARS
from verl.errors import DataError, VerlError
from verl.formats.openai import as_openai
from verl.host.daemon import run_in_daemon_thread
from verl.registry import USER_MODULE
from verl.text import shortened
from verl.types import Message, Score, Task, ToolCall, ToolSpec, ToolStatus, ToolUse
from verl.utils.reward_score.functions import as_score

_NO_TOOLS = ("reset", "get_reward", "close")
_TASK_COLUMNS = ("prompt", "tools", "env", "reward", "data_source")


class ClassEnv(Env):
    """One episode: an object of the class `made_of`. It ends with the policy's first message without a call."""

    made_of: ClassVar[type]
    tools: ClassVar[Mapping[str, FunctionTool]]
    specs: ClassVar[tuple[ToolSpec, ...]]
    toolbox: ClassVar[Toolbox]

    def __init__(self, task: Task, **options: Any) -> None:
        self._task, self._options = task, options
        self._object: Any = None
        self._turn = Lock()

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Raises DataError if `reset` needs a parameter that the row does not have."""
        arguments = _arguments(cls.made_of, task)
        try:
            signature(cls.made_of.reset).bind(None, **arguments)  # type: ignore[attr-defined]  # every plain class has it
        except TypeError as error:
            has = f"a row with it; this one has {', '.join(row_of(task))}"
            raise DataError(f"{cls.made_of.__name__}.reset: {error}", has, "Add it to extra_info") from error

    async def reset(self) -> Observation:
        self._object = await run_in_daemon_thread(self.made_of, **self._options)  # it may connect to a service
        text = await self._run(self._object.reset, **_arguments(self.made_of, self._task))
        if text is not None and not isinstance(text, str):
            raise TypeError(f"it returned an object of {type(text).__name__}, neither a text nor None")
        *before, last = self._task.prompt
        return Observation((*before, replace(last, content=last.content + (text or ""))), self.specs)

    async def step(self, message: Message) -> StepResult:
        answers = [await self._answer(call) for call in message.tool_calls]
        uses = tuple(use for _, use in answers)
        return StepResult(tuple(answer for answer, _ in answers), done=not answers, tool_uses=uses)

    def snapshot(self) -> bytes:
        try:
            return bytes(cloudpickle.dumps(self._object))
        except Exception:  # noqa: BLE001  it may hold anything: a connection, a lock
            return b""

    async def close(self) -> None:
        if hasattr(self._object, "close"):
            await self._run(self._object.close)

    async def _answer(self, call: ToolCall) -> tuple[Message, ToolUse]:
        start, status = perf_counter(), ToolStatus.SUCCESS
        try:
            self.toolbox.check(call)
            text = await self.tools[call.name].call(call.arguments, self._bind(call.name))
        except VerlError:
            raise
        except Exception as error:  # noqa: BLE001  for the policy, as in TRL: "Game over."
            text, status = f"Error: {error}" if str(error) else f"Error: {type(error).__name__}", ToolStatus.USER_ERROR
        answer = Message("tool", shortened(text, MAX_CHARS), tool=call.name)
        return answer, ToolUse(call.name, status, perf_counter() - start)

    def _bind(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._object, name)
        return method if iscoroutinefunction(method) else partial(self._alone, method)

    async def _run(self, method: Callable[..., Any], **arguments: Any) -> Any:
        if iscoroutinefunction(method):
            return await method(**arguments)
        return await run_in_daemon_thread(self._alone, method, **arguments)

    def _alone(self, method: Callable[..., Any], /, **arguments: Any) -> Any:
        """In a thread, after a method whose call has timed out: Python cannot stop it."""
        with self._turn:
            return method(**arguments)


class JudgingClassEnv(ClassEnv):
    """Environment of a class with `get_reward`."""

    async def judge(self) -> Score | None:
        reward = await self._run(self._object.get_reward)
        return None if reward is None else as_score(reward, f"{self.made_of.__name__}.get_reward")


def as_env_class(made_of: type) -> type[ClassEnv]:
    """The environment class of a plain class. Raises ConfigError for a method without docstring or type hints."""
    tools = {name: FunctionTool(method, name) for name, method in _tool_methods(made_of)}
    specs = tuple(tool.spec for tool in tools.values())
    base = JudgingClassEnv if hasattr(made_of, "get_reward") else ClassEnv
    if made_of.__module__.startswith(USER_MODULE):  # loaded from a file that other processes have not imported
        cloudpickle.register_pickle_by_value(sys.modules[made_of.__module__])
    of_class = {"made_of": made_of, "tools": tools, "specs": specs, "toolbox": Toolbox(specs)}
    return type(made_of.__name__, (base,), of_class)


def row_of(task: Task) -> dict[str, Any]:
    """The argument of `reset`."""
    messages = [as_openai(message) for message in task.prompt]
    return {"prompt": messages, "answer": task.answer, "data_source": task.data_source, **task.extra}


def as_task_row(row: Any) -> Any:
    """For `data.map`: a row without a gold answer as a task row; `reset` gets all its columns but `tools`.

    prompt: messages, or the text of the user's
    """
    if not isinstance(row, Mapping) or "reward_model" in row or "prompt" not in row:
        return row
    prompt = row["prompt"]
    answer = row["answer"] if row.get("answer") is not None else "none"
    return {
        **{name: row[name] for name in ("tools", "env", "reward") if name in row},
        "data_source": row.get("data_source", "environment"),
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "text_prompt": isinstance(prompt, str),
        "reward_model": {"ground_truth": answer},
        "extra_info": {name: value for name, value in row.items() if name not in _TASK_COLUMNS},
    }


def as_answered_row(row: Any) -> Any:
    """For `data.map`: a row of `prompt` and `answer` as a task row, for a reward of your own."""
    return as_task_row(row) if isinstance(row, Mapping) and row.get("answer") is not None else row


def _arguments(made_of: Any, task: Task) -> dict[str, Any]:
    """The row, or the columns that `reset` names if it does not take all."""
    parameters, row = signature(made_of.reset).parameters, row_of(task)
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def _tool_methods(made_of: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, method in getmembers(made_of, isfunction):
        is_static = isinstance(getattr_static(made_of, name), staticmethod)
        if not (name.startswith("_") or name in _NO_TOOLS or is_static):
            yield name, method
