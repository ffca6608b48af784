"""Remote environments, which run in servers (server.py) and are used like local ones."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

import httpx2
from pydantic import BaseModel

from verl.envs.base import Observation, StepResult
from verl.errors import ServiceDownError
from verl.kit.env_server import wire
from verl.kit.env_server.wire import Answer, Step
from verl.kit.serving.endpoints import Endpoint, EndpointPool
from verl.types import Message, Score, Task

_log = logging.getLogger(__name__)
_MAX_CHARS = 1_000_000  # total message length per request; a longer message is sent alone
_LONGEST_JUDGE_S = 86_400.0  # above env.turn_timeout_s; catches connections that are lost silently
Item = TypeVar("Item")
Result = TypeVar("Result")
Answers = AsyncIterator[tuple[int, Result | Exception]]


class Batcher(Generic[Item, Result]):
    """Batches the requests of `window_s` seconds into as few batches as the server limits allow.

    `send` yields (position, answer) in any order, as answers arrive. An answer that is an exception is raised for its
    request; an exception of `send` itself is raised for all unanswered requests.
    """

    def __init__(
        self,
        send: Callable[[list[Item]], Answers[Result]],
        window_s: float,
        size: Callable[[Item], int] = lambda _: 0,
    ) -> None:
        """`size`: the number of characters of an item, if they are limited"""
        self._send, self._window_s, self._size = send, window_s, size
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._flushes: set[asyncio.Task[None]] = set()  # the event loop holds only weak references

    async def ask(self, item: Item) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._waiting) == 1:
            flush = asyncio.create_task(self._flush())
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        return await future

    async def _flush(self) -> None:
        await asyncio.sleep(self._window_s)
        waiting, self._waiting = self._waiting, []
        batches, chars = [waiting[:1]], self._size(waiting[0][0])
        for entry in waiting[1:]:
            chars += (size := self._size(entry[0]))
            if len(batches[-1]) == wire.MAX_ITEMS or chars > _MAX_CHARS:
                batches.append([])
                chars = size
            batches[-1].append(entry)
        await asyncio.gather(*map(self._send_one, batches))

    async def _send_one(self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            async for position, answer in self._send([item for item, _ in batch]):
                _resolve(batch[position][1], answer)
        except Exception as error:  # noqa: BLE001  re-raised in every waiting caller
            problem = error
        else:
            problem = ServiceDownError("environment server", "truncated response")
        for _, future in batch:
            _resolve(future, problem)


def _resolve(future: asyncio.Future[Result], answer: Result | Exception) -> None:
    if not future.done():  # else already answered, or its episode was cancelled
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)


def _chars(step: Step) -> int:
    return len(step.message.content) + sum(len(str(call.arguments)) for call in step.message.tool_calls)


class EnvServer:
    """The requests to one server. Raises ServiceDownError for a lost or invalid answer."""

    def __init__(self, endpoint: Endpoint, pool: EndpointPool, timeout_s: float, window_s: float) -> None:
        self.url = endpoint.url
        self._endpoint, self._pool, self._timeout_s = endpoint, pool, timeout_s
        reset, judge = partial(self._ask, "/reset", timeout_s), partial(self._ask, "/judge", _LONGEST_JUDGE_S)
        self.reset: Batcher[str, Answer] = Batcher(lambda names: reset(wire.EpisodeList(episodes=names)), window_s)
        self.step: Batcher[Step, Answer] = Batcher(
            lambda steps: self._ask("/step", timeout_s, wire.StepList(steps=steps)), window_s, _chars
        )
        self.judge: Batcher[str, Answer] = Batcher(lambda names: judge(wire.EpisodeList(episodes=names)), window_s)
        self.close: Batcher[str, None] = Batcher(self._close, window_s)

    async def create(self, task: Task, count: int) -> list[str]:
        async with self._post("/create", wire.CreateRequest(task=task, count=count), self._timeout_s) as response:
            return wire.CreateResponse.model_validate_json(await response.aread()).episodes

    async def _close(self, episodes: list[str]) -> Answers[None]:
        async with self._post("/close", wire.EpisodeList(episodes=episodes), self._timeout_s):
            for position in range(len(episodes)):
                yield position, None

    async def _ask(self, path: str, timeout_s: float, request: BaseModel) -> Answers[Answer]:
        async with self._post(path, request, timeout_s) as response:
            async for line in response.aiter_lines():
                answer = Answer.model_validate_json(line)
                yield answer.position, answer

    @asynccontextmanager
    async def _post(self, path: str, request: BaseModel, timeout_s: float) -> AsyncIterator[httpx2.Response]:
        """A streaming response; every failure becomes a ServiceDownError."""
        body, headers = request.model_dump_json(), {"content-type": "application/json"}
        stream = self._pool.client.stream("POST", self.url + path, content=body, headers=headers, timeout=timeout_s)
        async with self._endpoint.asked(), stream as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise ServiceDownError(self._endpoint.name, f"{response.status_code} {text[:500]}")
            yield response


Place = tuple[EnvServer, str]  # the server of an episode, and the name of the episode there


class RemoteEnv:
    def __init__(self, task: Task, factory: RemoteFactory) -> None:
        self._task, self._factory = task, factory
        self._place: Place | None = None

    async def reset(self) -> Observation:
        server, episode = self._place = await self._factory.creations.ask(self._task)
        observation = _unpacked(server, await server.reset.ask(episode)).observation
        assert observation is not None
        return observation

    async def step(self, message: Message) -> StepResult:
        """Never retried: a step whose response was lost may have been applied."""
        assert self._place is not None, "reset comes first"
        server, episode = self._place
        result = _unpacked(server, await server.step.ask(Step(episode=episode, message=wire.sendable(message)))).result
        assert result is not None
        return result

    async def judge(self) -> Score | None:
        """None if the environment does not judge or the episode was never created."""
        if self._place is None:
            return None
        server, episode = self._place
        verdict = _unpacked(server, await server.judge.ask(episode)).verdict
        assert verdict is not None
        return verdict.score

    async def close(self) -> None:
        """Close the remote episode. If the request is lost, the server closes it when idle."""
        if self._place is None:
            return
        server, episode = self._place
        try:
            await server.close.ask(episode)
        except ServiceDownError as error:
            _log.warning("failed to close an episode: %s", error)


class RemoteFactory(EndpointPool):
    """Environments on servers at these URLs (one, or several that share the tasks).

    timeout_s: limit per request, and so for the slowest step; verdicts are limited by env.turn_timeout_s
    window_s:  batching window
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        timeout_s: float = 60.0,
        window_s: float = 0.003,
        health_timeout_s: float = 30.0,
    ) -> None:
        hint = "Start one with toolrl env-server, or correct the environment's urls"
        unlimited = httpx2.Limits(max_connections=None)
        super().__init__("environment server", urls, hint, health_timeout_s, limits=unlimited)
        self._servers = {each: EnvServer(each, self, timeout_s, window_s) for each in self.endpoints}
        self.creations: Batcher[Task, Place] = Batcher(self._create, window_s)

    def __call__(self, task: Task) -> RemoteEnv:
        return RemoteEnv(task, self)

    async def _create(self, tasks: Sequence[Task]) -> Answers[Place]:
        """One request per distinct task object, whose episodes share a server."""
        groups: dict[int, list[int]] = {}
        for position, task in enumerate(tasks):
            groups.setdefault(id(task), []).append(position)
        made = (self._create_group(tasks[positions[0]], len(positions)) for positions in groups.values())
        for positions, places in zip(groups.values(), await asyncio.gather(*made), strict=True):
            for position, place in zip(positions, places, strict=True):
                yield position, place

    async def _create_group(self, task: Task, count: int) -> Sequence[Place | Exception]:
        """On the server selected by a hash of the task's id or, if that is down, on the next."""

        async def create(endpoint: Endpoint) -> list[Place]:
            server = self._servers[endpoint]
            return [(server, episode) for episode in await server.create(task, count)]

        try:
            return await self.first_answer(zlib.crc32(task.id.encode()), create)
        except ServiceDownError as error:
            return [error] * count


def _unpacked(server: EnvServer, answer: Answer) -> Answer:
    if answer.fault is not None:
        raise ServiceDownError(f"{answer.fault.service} at {server.url}", answer.fault.problem)
    return answer
