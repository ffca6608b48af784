"""Environments of verifiers 0.4 by their id: `env.name=verifiers env.options={id: my_taskset, python: PATH}`.

verifiers plays the episodes with its own programs, in a process of its own (inside/worker.py). The messages of a first
request are the initial observation; the policy's message answers it; the next request has the observations of that
step. Tools are run there. The task's rewards, weighted and summed by verifiers, are the score.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from toolrl.envs.verifiers.process import worker_process
from toolrl.servers.line_process import Line, LineProcess
from toolrl.servers.messages import sendable
from verl.data.messages import read_messages, read_tools
from verl.envs.base import Observation, StepResult
from verl.errors import DataError, ServiceDownError
from verl.types import Message, Score, Task, ToolSpec, ToolStatus, ToolUse

FIELD = "verifiers_task"  # field of extra_info with the task's data
_LAST_ANSWERS = 3  # empty answers to a program whose episode has reached a limit


class VerifiersFactory:
    """Episodes in a worker process.

    id:      of the environment: an installed module that exports a taskset
    python:  interpreter with verifiers and that module (scripts/verifiers/prepare.sh)
    taskset: settings of the taskset
    env:     settings of the environment, such as {agent: {max_turns: 4}}
    start_s: limit for starting the process
    """

    def __init__(
        self,
        id: str,
        python: str,
        taskset: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        start_s: float = 120.0,
    ) -> None:
        options = {"id": id, "taskset": dict(taskset or {}), "env": dict(env or {})}
        self.worker = worker_process(python, options, start_s)

    @staticmethod
    def check_task(task: Task) -> None:
        if not isinstance(task.extra.get(FIELD), Mapping):
            expected = "the data of a task: a row that scripts/verifiers/make_tasks.py writes"
            raise DataError("is missing", expected, field=f"extra_info.{FIELD}")

    def __call__(self, task: Task) -> VerifiersEnv:
        return VerifiersEnv(task, self.worker)

    async def close(self) -> None:
        await self.worker.close()


class VerifiersEnv:
    """One episode."""

    def __init__(self, task: Task, worker: LineProcess) -> None:
        self._task, self._worker = task, worker
        self._name = uuid4().hex
        self._inbox: asyncio.Queue[Line] | None = None
        self._seen: list[Any] = []  # the messages of the last request
        self._tools: tuple[ToolSpec, ...] = ()
        self._end: Line | None = None

    async def reset(self) -> Observation:
        data = dict(self._task.extra[FIELD])
        self._inbox = await self._worker.open(self._name, start=self._name, task=data)
        line = await self._next()
        if line is None:
            raise ServiceDownError(self._worker.name, "the episode ended before the policy was asked")
        messages = self._read(line, line["messages"])
        return Observation(messages, self._tools)

    async def step(self, message: Message) -> StepResult:
        self._worker.send(answer=self._name, message=as_answer(message))
        line = await self._next()
        if line is None:
            return StepResult(done=True, tool_uses=_uses(message, ()))
        known, messages = self._seen, line["messages"]
        if messages[: len(known)] != known or [each["role"] for each in messages[len(known) :][:1]] != ["assistant"]:
            problem = "its program replaced the context (compaction, or another agent), which is not supported"
            raise ServiceDownError(self._worker.name, problem)
        before = {tool.name for tool in self._tools}
        new = self._read(line, messages[len(known) + 1 :])
        added = tuple(tool for tool in self._tools if tool.name not in before)
        return StepResult(new, tool_uses=_uses(message, new), tools=added)

    async def judge(self) -> Score | None:
        """Also judges an episode at a limit: its program gets an empty answer, and the task's rewards judge that."""
        for _ in range(_LAST_ANSWERS):
            if self._end is not None:
                break
            self._worker.send(answer=self._name, message={"role": "assistant", "content": ""})
            await self._next()
        if self._end is None:
            raise ServiceDownError(self._worker.name, "its program does not end after empty answers")
        return Score(float(self._end["reward"]), dict(self._end["parts"]))

    async def close(self) -> None:
        self._worker.forget(self._name)
        if self._inbox is not None and self._end is None:
            with suppress(ServiceDownError):  # what has ended need not be stopped
                self._worker.send(stop=self._name)

    async def _next(self) -> Line | None:
        """The next request; None at the end of the episode. Raises ServiceDownError if that is a fault."""
        assert self._inbox is not None, "reset comes first"
        line = await self._worker.next(self._inbox)
        if "messages" in line:
            return line
        if line["error"] is not None or line["reward"] is None:
            raise ServiceDownError(self._worker.name, str(line["error"])[:2000])
        self._end = line
        return None

    def _read(self, line: Line, new: Sequence[Any]) -> tuple[Message, ...]:
        self._seen = line["messages"]
        try:
            self._tools = read_tools(line["tools"])
            return read_messages(new, "messages") if new else ()
        except DataError as error:
            raise ServiceDownError(self._worker.name, f"its request is unreadable: {error}") from error


def as_answer(message: Message) -> dict[str, Any]:
    """The policy's message in OpenAI's layout. The content keeps the calls as written."""
    message = sendable(message)
    calls = [
        {
            "id": f"call_{uuid4().hex[:12]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in message.tool_calls
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": message.content}
    return {**answer, "tool_calls": calls} if calls else answer


def _uses(message: Message, results: Sequence[Message]) -> tuple[ToolUse, ...]:
    """verifiers reports no outcome of a call: its result is what the policy reads."""
    return tuple(ToolUse(call.name, ToolStatus.SUCCESS, 0.0) for call in message.tool_calls[: len(results)])
