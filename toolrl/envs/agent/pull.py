"""Agents elsewhere pull their tasks: each gets one as a lease, which heartbeats keep, and reports its end."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toolrl.envs.agent.launcher import REWARD, TASK, ProgramFailedError, Waiting
from toolrl.envs.agent.rewards import read_reward
from toolrl.servers.bounds import ANY, LargeWork
from toolrl.servers.serving import given_token
from verl.errors import ConfigError

_WAIT_S = 20.0  # a request for a task waits this long before it gets none
NO_PROXY = ("NO_PROXY", "no_proxy")
_LOCAL = ("REWARD_FILE", *NO_PROXY)  # variables that mean nothing elsewhere


@dataclass(eq=False)
class Lease:
    """A task that an agent holds. ended: the agent's problem, if any"""

    folder: Path
    content: Mapping[str, Any]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Future[str | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    due: float = 0.0  # the time of the loop by which a heartbeat has to arrive


class PullLauncher:
    """A launcher that starts nothing: its tasks wait for agents.

    lease_s: time without a heartbeat after which a task is given back
    """

    def __init__(self, lease_s: float) -> None:
        """Raises ConfigError."""
        if lease_s <= 0:
            raise ConfigError(f"env.options.lease_s must be positive, got {lease_s}")
        self._lease_s = lease_s
        self._open: asyncio.Queue[Lease] = asyncio.Queue()
        self._leases: dict[str, Lease] = {}
        self._waits: set[asyncio.Timeout] = set()  # one per agent that waits for a task
        self._closed = False
        self._large = LargeWork()

    async def check(self) -> None:
        """No-op: agents may come at any time."""

    async def close(self) -> None:
        """Answer the agents that wait. Every run ends its own lease."""
        self._closed = True
        for each in self._waits:
            if not each.expired():
                each.reschedule(0)

    async def run(self, folder: Path, variables: Mapping[str, str], waiting: Waiting, /) -> None:
        task = json.loads(await asyncio.to_thread(lambda: (folder / TASK).read_text(encoding="utf-8")))
        remote_variables = {name: value for name, value in variables.items() if name not in _LOCAL}
        lease = Lease(folder, {"task": task, "variables": remote_variables, "lease_s": self._lease_s})
        self._leases[lease.id] = lease
        self._open.put_nowait(lease)
        try:
            with waiting():
                await lease.taken.wait()
            await self._wait(lease)
        finally:
            del self._leases[lease.id]

    async def _wait(self, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        while not lease.ended.done():
            if loop.time() >= lease.due:
                raise ProgramFailedError(f"sent no heartbeat for {self._lease_s:g} s")
            await asyncio.wait([lease.ended], timeout=lease.due - loop.time())
        if (problem := lease.ended.result()) is not None:
            raise ProgramFailedError(f"reported an error: {problem}")

    def routes(self, token: str | None) -> Sequence[Route]:
        """Routes for a gateway that starts. token: required of requests; None: none"""
        self._closed = False

        def route(path: str, answer: Callable[[Request], Awaitable[Response]], method: str) -> Route:
            async def endpoint(request: Request) -> Response:
                if token is not None and not hmac.compare_digest(given_token(request.headers), token.encode()):
                    return _refusal(401, "expected the header Authorization: Bearer TOKEN")
                return await answer(request)

            return Route(path, endpoint, methods=[method])

        return [
            route("/tasks/next", self._next, "GET"),
            route("/tasks/{lease}/heartbeat", self._heartbeat, "POST"),
            route("/tasks/{lease}/done", self._done, "POST"),
        ]

    async def _next(self, _: Request) -> Response:
        wait = asyncio.timeout(0 if self._closed else _WAIT_S)
        self._waits.add(wait)
        try:
            async with wait:
                while (lease := await self._open.get()).id not in self._leases:  # its episode is over
                    continue
        except TimeoutError:
            return _refusal(503, "the run is over") if self._closed else Response(status_code=204)
        finally:
            self._waits.remove(wait)
        self._extend(lease)
        lease.taken.set()
        return JSONResponse({"lease": lease.id, **lease.content})

    def _extend(self, lease: Lease) -> None:
        lease.due = asyncio.get_running_loop().time() + self._lease_s

    def _find_lease(self, request: Request) -> Lease | None:
        lease = self._leases.get(request.path_params["lease"])
        return None if lease is None or lease.ended.done() else lease

    async def _heartbeat(self, request: Request) -> Response:
        if (lease := self._find_lease(request)) is None:
            return _over()
        self._extend(lease)
        return JSONResponse({"lease_s": self._lease_s})

    async def _done(self, request: Request) -> Response:
        try:
            raw = await request.body() or b"{}"
            body = await self._large.run(len(raw), partial(ANY.read, raw))
            if not isinstance(body, dict) or (unknown := body.keys() - {"reward", "error"}):
                raise ValueError(f"unknown {sorted(unknown)}" if isinstance(body, dict) else "it is no object")
            if body.get("reward") is not None:
                read_reward(body["reward"])
        except (ValueError, RecursionError) as error:
            return _refusal(400, f"expected {{reward: .., error: ..}}, both optional: {error}")
        if (lease := self._find_lease(request)) is None:
            return _over()
        if body.get("reward") is not None:
            text = json.dumps(body["reward"])
            await asyncio.to_thread((lease.folder / REWARD).write_text, text, encoding="utf-8")
            if self._find_lease(request) is None:  # it ended meanwhile
                return _over()
        lease.ended.set_result(None if body.get("error") is None else str(body["error"]))
        return JSONResponse({})


def _over() -> Response:
    return _refusal(410, "the lease is over")


def _refusal(status: int, problem: str) -> Response:
    return JSONResponse({"detail": problem}, status_code=status)
