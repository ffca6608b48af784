"""Environments of ours on other machines (server.py), used like local ones: `env.name=remote env.options.urls=..`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel

from toolrl.envs.openenv.sessions import Connection, SessionPool
from toolrl.envs.openenv.wire import ProtocolError, Start, Started, Step, Stepped, Verdict, as_json
from toolrl.servers.messages import sendable
from verl.envs.base import Observation, StepResult
from verl.errors import ServiceDownError
from verl.types import Message, Score, Task

Answer = TypeVar("Answer", bound=BaseModel)


class RemoteFactory(SessionPool):
    """Environments on servers at these URLs (one, or several that share the tasks).

    max_sessions: open at a time; further episodes wait
    timeout_s:    limit per request, and so for the slowest step; verdicts are limited by env.turn_timeout_s
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        max_sessions: int = 512,
        timeout_s: float = 60.0,
        health_timeout_s: float = 30.0,
    ) -> None:
        hint = "Start one with toolrl env-server, or correct the environment's urls"
        super().__init__("environment server", urls, hint, max_sessions, timeout_s, health_timeout_s)

    def __call__(self, task: Task) -> RemoteEnv:
        return RemoteEnv(task, self)


class RemoteEnv:
    def __init__(self, task: Task, factory: RemoteFactory) -> None:
        self._task, self._factory = task, factory
        self._connection: Connection | None = None
        self._judges = False

    async def reset(self) -> Observation:
        start = partial(_ask, "start", Start(task=self._task), Started)
        self._connection, started = await self._factory.begin(self._task.id, start)
        self._judges = started.judges
        return started.observation

    async def step(self, message: Message) -> StepResult:
        """Never retried: a step whose answer was lost may have been applied."""
        assert self._connection is not None, "reset comes first"
        return (await _ask("step", Step(message=sendable(message)), Stepped, self._connection)).result

    async def judge(self) -> Score | None:
        """None if the environment does not judge, or the episode never started."""
        if self._connection is None or not self._judges:
            return None
        return (await _ask("judge", None, Verdict, self._connection)).score

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._factory.end(connection)


async def _ask(name: str, message: BaseModel | None, kind: type[Answer], connection: Connection) -> Answer:
    """Raises ServiceDownError."""
    data: dict[str, Any] = {} if message is None else as_json(message)
    try:
        return kind.model_validate(await connection.ask(f"toolrl/{name}", data, limited=name != "judge"))
    except (ProtocolError, ValueError) as error:
        raise ServiceDownError(connection.endpoint.name, f"{name}: {error}") from error
