"""Serves any environment over HTTP, to run heavy or incompatible ones elsewhere (protocol: wire.py).

    toolrl env-server --env shop [--option key=value ..] [--host 127.0.0.1] [--port 8100] [--idle-s 1800]

--protocol openenv serves the clients of OpenEnv instead (verl/kit/openenv/server.py), with tasks of the server.
Any client that can reach the port can create episodes and take steps: beyond localhost a token is required.
"""

import argparse
import asyncio
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

from verl.envs.base import Env, EnvFactory, Judge
from verl.envs.registry import TASKS, build_env_factory, build_tasks
from verl.errors import ConfigError, ServiceDownError, VerlError
from verl.kit.env_server.wire import Answer, CreateRequest, CreateResponse, EnvFault, EpisodeList, StepList, Verdict
from verl.kit.openenv import server as openenv_server
from verl.kit.serving.serving import add_serving_arguments, new_app, positive_float, positive_int, serve, serving_config
from verl.registry import option
from verl.text import utf8
from verl.types import Message, Task

Operation = Callable[[Env], Awaitable[dict[str, Any]]]
MAX_EPISODES = 65_536
CLOSE_S = 60.0  # limit for closing an environment; its resources leak after that
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Episode:
    """One environment; its requests are serialized."""

    env: Env
    used: float = field(default_factory=time.monotonic)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class FullError(Exception):
    """The maximum number of open episodes is reached."""


class Episodes:
    """The open episodes. Those without a request for `idle_s` seconds are closed."""

    def __init__(self, factory: EnvFactory, idle_s: float, max_episodes: int) -> None:
        self._factory, self._idle_s, self._max_episodes = factory, idle_s, max_episodes
        self._open: dict[str, Episode] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def create(self, task: Task, count: int) -> list[str]:
        """If the client disconnects meanwhile, they are closed as idle."""
        if len(self._open) + count > self._max_episodes:
            raise FullError(f"{len(self._open)} episodes are open; --max-episodes={self._max_episodes}")
        names = []
        for _ in range(count):
            names.append(uuid.uuid4().hex)
            self._open[names[-1]] = Episode(self._factory(task))
            await asyncio.sleep(0)  # lets other requests proceed
        return names

    async def ask(self, operations: Sequence[tuple[str, Operation]]) -> AsyncIterator[str]:
        """Answers, a line of JSON each, as they complete. A disconnect cancels the rest."""
        waiting = [asyncio.create_task(self._ask_one(place, *asked)) for place, asked in enumerate(operations)]
        try:
            for line in asyncio.as_completed(waiting):
                yield await line + "\n"
        finally:
            for each in waiting:
                each.cancel()

    async def _ask_one(self, position: int, name: str, operation: Operation) -> str:
        """One episode's answer; a fault if the episode is unknown or raises."""
        episode = self._open.get(name)
        if episode is None:
            problem = f"there is no episode {name}: it was closed, or idle for more than {self._idle_s:g} s"
            return _fault(position, problem)
        if operation is _judge and not isinstance(episode.env, Judge):  # do not wait for a hanging step
            return Answer(position=position, verdict=Verdict(score=None)).model_dump_json()
        async with episode.turn:
            try:
                return Answer(position=position, **await operation(episode.env)).model_dump_json()
            except ServiceDownError as error:
                return _fault(position, error.problem, error.service)
            except Exception as error:  # noqa: BLE001  user code may raise anything: one fault
                _log.exception("an environment raised")
                return _fault(position, f"{type(error).__name__}: {error}")
            finally:
                episode.used = time.monotonic()

    async def close(self, names: Sequence[str]) -> None:
        await asyncio.gather(*(self._close_one(found) for name in names if (found := self._open.pop(name, None))))

    async def _close_one(self, episode: Episode) -> None:
        async with episode.turn:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await episode.env.close()
            except Exception:  # noqa: BLE001  user code; the reaper and other episodes continue
                _log.exception("an environment could not be closed")

    async def close_all(self) -> None:
        await self.close(list(self._open))
        await self._factory.close()

    async def reap(self) -> None:
        """Close idle episodes forever: a client that died closes none."""
        while True:
            await asyncio.sleep(self._idle_s / 4)
            oldest = time.monotonic() - self._idle_s
            idle = [name for name, found in self._open.items() if found.used < oldest and not found.turn.locked()]
            if idle:
                _log.warning("closing %d idle episodes", len(idle))
                await self.close(idle)


def _fault(position: int, problem: str, service: str = "environment server") -> str:
    return Answer(position=position, fault=EnvFault(service=service, problem=utf8(problem))).model_dump_json()


async def _reset(env: Env) -> dict[str, Any]:
    return {"observation": await env.reset()}


async def _step(message: Message, env: Env) -> dict[str, Any]:
    return {"result": await env.step(message)}


async def _judge(env: Env) -> dict[str, Any]:
    assert isinstance(env, Judge)
    return {"verdict": Verdict(score=await env.judge())}


def build_app(name: str, factory: EnvFactory, idle_s: float, max_episodes: int = MAX_EPISODES) -> FastAPI:
    episodes = Episodes(factory, idle_s, max_episodes)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(episodes.reap())
        yield
        reaper.cancel()
        await episodes.close_all()

    app = new_app(f"environment {name}", lifespan)

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"env": name, "episodes": len(episodes)}

    @app.post("/create")
    async def create(request: CreateRequest) -> CreateResponse:
        try:
            return CreateResponse(episodes=await episodes.create(request.task, request.count))
        except FullError as error:
            raise HTTPException(429, str(error)) from error
        except Exception as error:
            _log.exception("task %s makes no environment", request.task.id)
            raise HTTPException(500, f"task {request.task.id!r}: {type(error).__name__}: {error}") from error

    def answer(operations: Sequence[tuple[str, Operation]]) -> StreamingResponse:
        return StreamingResponse(episodes.ask(operations), media_type="application/x-ndjson")

    @app.post("/reset")
    async def reset(request: EpisodeList) -> StreamingResponse:
        return answer([(name, _reset) for name in request.episodes])

    @app.post("/step")
    async def step(request: StepList) -> StreamingResponse:
        return answer([(step.episode, partial(_step, step.message)) for step in request.steps])

    @app.post("/judge")
    async def judge(request: EpisodeList) -> StreamingResponse:
        return answer([(name, _judge) for name in request.episodes])

    @app.post("/close")
    async def close(request: EpisodeList) -> dict[str, str]:
        await episodes.close(request.episodes)
        return {}

    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Returns 2 if it cannot start."""
    parser = argparse.ArgumentParser(prog="toolrl env-server", description="Serve an environment over HTTP.")
    parser.add_argument("--env", required=True, help="a known name, package.module:Class or path/to/file.py:Class")
    parser.add_argument("--option", type=option, action="append", default=[], metavar="KEY=VALUE")
    add_serving_arguments(parser, port=8100, max_body_mib=64)
    parser.add_argument("--protocol", choices=["toolrl", "openenv"], default="toolrl")
    parser.add_argument("--data", help="openenv: data file of the tasks; default: those bundled with the environment")
    parser.add_argument("--task-option", type=option, action="append", default=[], help="openenv: of bundled tasks")
    parser.add_argument("--idle-s", type=positive_float, default=1800.0, help="close episodes idle for this long")
    parser.add_argument("--max-episodes", type=positive_int, default=MAX_EPISODES, help="max open episodes")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        factory = build_env_factory(arguments.env, dict(arguments.option))
        tasks = _tasks(arguments, factory)
    except VerlError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if tasks is None:
        app = build_app(arguments.env, factory, arguments.idle_s, arguments.max_episodes)
        return serve(app, serving_config(arguments))
    app = openenv_server.build_app(arguments.env, factory, tasks, arguments.idle_s, arguments.max_episodes)
    return serve(app, serving_config(arguments), websockets=True)


def _tasks(arguments: argparse.Namespace, factory: EnvFactory) -> Sequence[Task] | None:
    """The tasks of an OpenEnv server; None for our own protocol, whose clients send them."""
    if arguments.protocol != "openenv":
        if arguments.data or arguments.task_option:
            raise ConfigError("--data and --task-option are for --protocol openenv; other clients send their tasks")
        return None
    if arguments.data:
        return openenv_server.read_tasks(arguments.data, factory)
    if arguments.env in TASKS:
        return build_tasks(arguments.env, dict(arguments.task_option))
    if arguments.task_option:
        raise ConfigError(f"--task-option: environment {arguments.env!r} has no bundled tasks")
    return ()


if __name__ == "__main__":
    sys.exit(main())
