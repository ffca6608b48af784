"""Sessions of OpenEnv clients in our environments: messages in, messages out (wire.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from toolrl.envs.openenv.mcp import rpc_response, tool_result
from toolrl.envs.openenv.wire import (
    Action,
    ErrorCode,
    ProtocolError,
    ResetData,
    Start,
    Started,
    Step,
    Stepped,
    Verdict,
    as_json,
    as_tool,
    observed,
    problems_of,
)
from toolrl.servers.bounds import ANY, LargeWork, TooMuchError
from toolrl.servers.messages import sendable
from verl.data.tasks import to_task
from verl.envs.base import Env, EnvFactory, Judge, Observation, TaskChecker
from verl.envs.registry import ClassFactory
from verl.errors import DataError, ServiceDownError
from verl.formats.openai import as_openai
from verl.text import utf8
from verl.types import Message, Task, ToolSpec

CLOSE_S = 60.0  # limit for closing an environment; its resources leak after that
_log = logging.getLogger(__name__)


def check_task(task: Task, factory: EnvFactory) -> None:
    """Raises DataError for a task that the environment cannot run."""
    source = factory.env_class if isinstance(factory, ClassFactory) else factory
    if isinstance(source, TaskChecker):
        source.check_task(task)


class TaskDraw:
    """The tasks of a server, which sessions draw from."""

    def __init__(self, tasks: Sequence[Task], factory: EnvFactory) -> None:
        self._tasks, self._factory, self._next = tasks, factory, count()

    def draw(self, data: ResetData) -> Task:
        """Raises ProtocolError if there is no such task."""
        if data.row is not None:
            return self._own(data.row)
        if not self._tasks:
            raise ProtocolError(
                "this server has no tasks: start it with --data FILE or --task-option, or send `row` with the reset"
            )
        if data.index is not None and data.index >= len(self._tasks):
            raise ProtocolError(f"there is no task {data.index}; indices are 0 to {len(self._tasks) - 1}")
        chosen = data.seed if data.index is None else data.index
        number = next(self._next) if chosen is None else chosen
        task: Task = self._tasks[number % len(self._tasks)]
        return task

    def _own(self, row: dict[str, Any]) -> Task:
        try:
            task = to_task(row, "row")
            check_task(task, self._factory)
        except DataError as error:
            raise ProtocolError(f"row: {error}") from error
        return task


class Session:
    """The episodes of one connection, one at a time."""

    def __init__(self, factory: EnvFactory, tasks: TaskDraw) -> None:
        self._factory, self._tasks = factory, tasks
        self._env: Env | None = None
        self._tools: dict[str, ToolSpec] = {}
        self._done = False
        self.lock = asyncio.Lock()  # one request at a time
        self.state: dict[str, Any] = {"episode_id": None, "step_count": 0}

    async def reset(self, data: ResetData) -> dict[str, Any]:
        """Starts an episode. Raises ProtocolError, and what the environment raises."""
        initial = await self._begin(self._tasks.draw(data), data.episode_id)
        self._tools = {spec.name: spec for spec in initial.tools}
        return observed(self._observation(initial))

    async def step(self, action: Action) -> dict[str, Any]:
        """Raises ProtocolError, and what the environment raises."""
        env = self._running()
        if action.type == "list_tools":
            return observed({"tools": self._listed_tools()}, done=self._done)
        if self._done:
            raise ProtocolError("the episode has ended; reset starts the next one")
        result = await env.step(sendable(action.message()))
        self._done = result.done
        self._tools |= {spec.name: spec for spec in result.tools}
        self.state["step_count"] += 1
        reward = await self._reward(env, result.reward)
        if action.type == "call_tool":
            text = "\n".join(message.content for message in result.messages)
            return observed({"tool_name": action.tool_name, "result": text, "error": None}, reward, result.done)
        added = {"tools": [as_tool(spec) for spec in result.tools]} if result.tools else {}
        return observed({"messages": _openai(result.messages), **added}, reward, result.done)

    async def answer_own(self, type: str, data: dict[str, Any]) -> dict[str, Any]:
        """To a message of env.name=remote. Raises ProtocolError, and what the environment raises."""
        match type:
            case "toolrl/start":
                observation = await self._begin(Start.model_validate(data).task)
                return as_json(Started(observation=observation, judges=isinstance(self._env, Judge)))
            case "toolrl/step":
                return as_json(Stepped(result=await self._running().step(Step.model_validate(data).message)))
            case "toolrl/judge" if isinstance(env := self._running(), Judge):
                return as_json(Verdict(score=await env.judge()))
        raise ProtocolError(f"unknown message type {type!r}", ErrorCode.UNKNOWN_TYPE)

    async def _begin(self, task: Task, id: str | None = None) -> Observation:
        await self.close()
        self.state = {"episode_id": id or uuid4().hex, "step_count": 0, "task_id": task.id}
        self._env, self._done = self._factory(task), False
        return await self._env.reset()

    def _running(self) -> Env:
        if self._env is None:
            raise ProtocolError("reset comes first: it selects the task, which determines the tools")
        return self._env

    async def close(self) -> None:
        """Ends the episode."""
        env, self._env = self._env, None
        if env is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await env.close()
        except Exception:  # noqa: BLE001  user code; the session continues
            _log.exception("an environment could not be closed")

    async def _reward(self, env: Env, turn_reward: float | None) -> float | None:
        score = await env.judge() if self._done and isinstance(env, Judge) else None
        if score is None:
            return turn_reward
        return score.total + (turn_reward or 0.0)

    def _observation(self, initial: Observation) -> dict[str, Any]:
        messages = _openai(initial.messages)
        # clients for MCP drop all of an observation with tools but these and the metadata
        return {"messages": messages, "tools": self._listed_tools(), "metadata": {"messages": messages}}

    def _listed_tools(self) -> list[dict[str, Any]]:
        return [as_tool(spec) for spec in self._tools.values()]


def _openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [as_openai(message) for message in messages]


async def answer(session: Session, text: str, large: LargeWork) -> dict[str, Any] | None:
    """The response to a message of the client; None if it ends the session."""
    try:
        message = await large.run(len(text), partial(_read, text))
        async with session.lock:
            return await _response(session, message)
    except ValidationError as error:
        return error_response(problems_of(error), ErrorCode.VALIDATION_ERROR)
    except ProtocolError as error:
        return error_response(str(error), error.code)
    except ServiceDownError as error:
        return error_response(error.problem, ErrorCode.EXECUTION_ERROR, error.service)
    except Exception as error:  # noqa: BLE001  user code may raise anything: an error of this episode
        _log.exception("an environment raised")
        return error_response(f"{type(error).__name__}: {error}", ErrorCode.EXECUTION_ERROR)


def _read(text: str) -> dict[str, Any]:
    try:
        message = ANY.read(text)
    except TooMuchError as error:
        raise ProtocolError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"invalid JSON: {error}", ErrorCode.INVALID_JSON) from error
    if not isinstance(message, dict) or not isinstance(message.get("data", {}), dict):
        raise ProtocolError("expected an object with `type` and the object `data`")
    return message


async def _response(session: Session, message: dict[str, Any]) -> dict[str, Any] | None:
    data = message.get("data", {})
    match message.get("type"):
        case "reset":
            return {"type": "observation", "data": await session.reset(ResetData.model_validate(data))}
        case "step":
            return {"type": "observation", "data": await session.step(Action.model_validate(data))}
        case "state":
            return {"type": "state", "data": session.state}
        case "mcp":
            return {"type": "mcp", "data": await rpc_response(data, partial(tool_result, session.step))}
        case "close":
            return None
        case other:
            return {"type": "toolrl", "data": await session.answer_own(str(other), data)}


def error_response(problem: str, code: ErrorCode, service: str | None = None) -> dict[str, Any]:
    """service: the one that is down, as the environment reports"""
    named = {} if service is None else {"service": service}
    return {"type": "error", "data": {"message": utf8(problem), "code": code, **named}}
