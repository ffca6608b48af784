"""Remote environments, which run in servers (server.py) and are used like local ones.

Requests of concurrent episodes are batched: all calls within a few milliseconds form one HTTP request per server, and
the answers are streamed back as they complete. The episodes of one task are created by one request, on one server.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from verl.envs.base import Observation, StepResult
from verl.envs.wire import MAX_ITEMS, Answer, CreateRequest, CreateResponse, EpisodeList, Step, StepList, sendable
from verl.errors import ConfigError, ServiceDownError
from verl.health import HealthWatch
from verl.services import check_urls, service_headers
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
        send: Callable[[Sequence[Item]], Answers[Result]],
        window_s: float,
        size: Callable[[Item], int] = lambda _: 0,
    ) -> None:
        """`size`: the number of characters of an item, if they are limited"""
        self._send, self._window_s, self._size = send, window_s, size
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._flushes: set[asyncio.Task[None]] = set()  # the event loop holds only weak references

    async def ask(self, item: Item) -> Result:
        """The answer to one item."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._waiting) == 1:
            flush = asyncio.create_task(self._flush())
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        return await future

    async def _flush(self) -> None:
        await asyncio.sleep(self._window_s)
        batch, self._waiting = self._waiting, []
        await asyncio.gather(*(self._send_one(part) for part in self._split(batch)))

    def _split(
        self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]
    ) -> Iterator[Sequence[tuple[Item, asyncio.Future[Result]]]]:
        """Batches within the server limits, for any message length."""
        begin = chars = 0
        for at, (item, _) in enumerate(batch):
            size = self._size(item)
            if at > begin and (at - begin == MAX_ITEMS or chars + size > _MAX_CHARS):
                yield batch[begin:at]
                begin, chars = at, 0
            chars += size
        yield batch[begin:]

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
    if future.done():  # already answered, or its episode was cancelled
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _chars(step: Step) -> int:
    """The approximate size of a step."""
    return len(step.message.content) + sum(len(str(call.arguments)) for call in step.message.tool_calls)


class Server:
    """One server. Raises ServiceDownError if it does not answer or violates the protocol."""

    def __init__(self, url: str, timeout_s: float, window_s: float, health_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
            headers=service_headers(),
        )
        name, health_url = f"environment server {self.url}", f"{self.url}/health"
        self._watch = HealthWatch(name, health_url, health_timeout_s, self._client)
        self.reset: Batcher[str, Answer] = Batcher(self._reset, window_s)
        self.step: Batcher[Step, Answer] = Batcher(self._step, window_s, _chars)
        self.judge: Batcher[str, Answer] = Batcher(self._judge, window_s)
        self.close: Batcher[str, None] = Batcher(self._close, window_s)

    async def create(self, task: Task, count: int) -> list[str]:
        """Create episodes of one task."""
        async with self._post("/create", CreateRequest(task=task, count=count), self._timeout_s) as response:
            return CreateResponse.model_validate_json(await response.aread()).episodes

    async def disconnect(self) -> None:
        """Close the connections."""
        self._watch.close()
        await self._client.aclose()

    def _reset(self, episodes: Sequence[str]) -> Answers[Answer]:
        return self._ask("/reset", EpisodeList(episodes=list(episodes)))

    def _step(self, steps: Sequence[Step]) -> Answers[Answer]:
        return self._ask("/step", StepList(steps=list(steps)))

    def _judge(self, episodes: Sequence[str]) -> Answers[Answer]:
        return self._ask("/judge", EpisodeList(episodes=list(episodes)), _LONGEST_JUDGE_S)

    async def _close(self, episodes: Sequence[str]) -> Answers[None]:
        async with self._post("/close", EpisodeList(episodes=list(episodes)), self._timeout_s):
            for position in range(len(episodes)):
                yield position, None

    async def _ask(self, path: str, request: BaseModel, timeout_s: float | None = None) -> Answers[Answer]:
        async with self._post(path, request, timeout_s or self._timeout_s) as response:
            async for line in response.aiter_lines():
                answer = Answer.model_validate_json(line)
                yield answer.position, answer

    @asynccontextmanager
    async def _post(self, path: str, request: BaseModel, timeout_s: float) -> AsyncIterator[httpx2.Response]:
        """A streaming response; every failure becomes a ServiceDownError."""
        body, headers = request.model_dump_json(), {"content-type": "application/json"}
        try:
            async with (
                self._watch.guard(),
                self._client.stream("POST", path, content=body, headers=headers, timeout=timeout_s) as response,
            ):
                if response.is_error:
                    text = (await response.aread()).decode(errors="replace")
                    raise ServiceDownError(f"environment server {self.url}", f"{response.status_code} {text[:500]}")
                yield response
        except (httpx2.HTTPError, ValidationError) as error:
            raise ServiceDownError(f"environment server {self.url}", f"{type(error).__name__}: {error}") from error


Place = tuple[Server, str]  # the server of an episode, and the name of the episode there


class RemoteEnv:
    """One episode on a server."""

    def __init__(self, task: Task, factory: RemoteFactory) -> None:
        self._task, self._factory = task, factory
        self._place: Place | None = None

    async def reset(self) -> Observation:
        """Create the episode and return its initial observation."""
        server, episode = self._place = await self._factory.creations.ask(self._task)
        observation = _unpacked(server, await server.reset.ask(episode)).observation
        assert observation is not None
        return observation

    async def step(self, message: Message) -> StepResult:
        """One step on the server. Never retried: a step whose response was lost may have been applied."""
        assert self._place is not None, "reset comes first"
        server, episode = self._place
        result = _unpacked(server, await server.step.ask(Step(episode=episode, message=sendable(message)))).result
        assert result is not None
        return result

    async def judge(self) -> Score | None:
        """The remote verdict; None if the environment does not judge or the episode was never created."""
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


class RemoteFactory:
    """Environments on servers at these URLs (one, or several that share the tasks).

    timeout_s:        limit per request, and so for the slowest step; verdicts are limited by env.turn_timeout_s
    window_s:         batching window
    health_timeout_s: time without any response, to /health too, after which requests to a server fail
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        timeout_s: float = 60.0,
        window_s: float = 0.003,
        health_timeout_s: float = 30.0,
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ConfigError(f"environment 'remote': urls={urls} names no server; expected e.g. http://host:8100")
        self._servers = [Server(url, timeout_s, window_s, health_timeout_s) for url in urls]
        self._down: set[str] = set()  # URLs of servers whose last /create failed
        self.creations: Batcher[Task, Place] = Batcher(self._create, window_s)

    def __call__(self, task: Task) -> RemoteEnv:
        return RemoteEnv(task, self)

    async def check_services(self) -> None:
        """Raises ServiceDownError if no server answers."""
        urls = [f"{server.url}/health" for server in self._servers]
        hint = "Start one with python -m verl.envs.server, or correct the environment's urls"
        await check_urls("environment servers", urls, hint, trust_env=False, headers=service_headers())

    async def close(self) -> None:
        """Close the connections; the servers keep running."""
        for server in self._servers:
            await server.disconnect()

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
        first = zlib.crc32(task.id.encode())
        problems = []
        for offset in range(len(self._servers)):
            server = self._servers[(first + offset) % len(self._servers)]
            try:
                made = [(server, episode) for episode in await server.create(task, count)]
            except ServiceDownError as error:
                problems.append(str(error))
                if server.url not in self._down:
                    self._down.add(server.url)
                    _log.warning("%s; new episodes go to the other servers until it answers", error)
            else:
                self._down.discard(server.url)
                return made
        return [ServiceDownError("environment servers", "; ".join(problems)) for _ in range(count)]


def _unpacked(server: Server, answer: Answer) -> Answer:
    if answer.fault is not None:
        raise ServiceDownError(f"{answer.fault.service} at {server.url}", answer.fault.problem)
    return answer
