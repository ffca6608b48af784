"""Health checks that distinguish a slow server from a dead one, concurrent with the actual requests."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from verl.errors import ServiceDownError
from verl.host.services import GATEWAYS

TICKS = 30  # number of intervals into which the timeout is divided
log = logging.getLogger(__name__)


class HealthWatch:
    """Aborts requests to a server that has not answered health checks for `timeout_s`.

    Any response counts except a gateway's error, which means that the server behind it is gone. After a timeout,
    requests fail at once until the server answers again.

    problem: why the server counts as down; empty if it is up
    """

    def __init__(self, service: str, url: str, timeout_s: float, client: httpx2.AsyncClient) -> None:
        self.problem = ""
        self._service, self._url, self._timeout_s, self._client = service, url, timeout_s, client
        self._waiting: set[asyncio.Timeout] = set()
        self._watching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Raises ServiceDownError if the server is down, or goes down during the request."""
        if self.problem:
            raise ServiceDownError(self._service, self.problem)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._waiting.add(limit)
                if self._watching is None:
                    self._watching = asyncio.create_task(self._watch())
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ServiceDownError(self._service, self.problem) from error
        finally:
            self._waiting.discard(limit)

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        """While requests wait or the server is down. A blocked event loop counts as one tick."""
        tick_s = self._timeout_s / TICKS
        num_silent = 0
        loop = asyncio.get_running_loop()
        probe: asyncio.Task[str] | None = None
        try:
            await asyncio.sleep(tick_s)  # most requests are answered by then
            while self._waiting or self.problem:
                tick_end = loop.time() + tick_s
                probe = probe or asyncio.create_task(self._ask())
                _, unanswered = await asyncio.wait({probe}, timeout=tick_s)
                problem = "no answer" if unanswered else probe.result()
                if not unanswered:
                    probe = None
                    await asyncio.sleep(max(0.0, tick_end - loop.time()))
                num_silent = num_silent + 1 if problem else 0
                if not problem and self.problem:
                    log.warning("%s answers again", self._service)
                    self.problem = ""
                elif num_silent == TICKS - 2:  # one tick passed since the last answer, and one may still pass
                    self._give_up(problem)
        finally:
            self._watching = None
            if probe is not None:
                probe.cancel()

    def _give_up(self, problem: str) -> None:
        self.problem = f"{self._url} has not answered for {self._timeout_s:g} s ({problem})"
        log.warning("%s: %s", self._service, self.problem)
        for limit in self._waiting:
            limit.reschedule(asyncio.get_running_loop().time())

    async def _ask(self) -> str:
        """The problem found by one health check; empty if the server is up."""
        try:
            status = (await self._client.get(self._url, timeout=self._timeout_s)).status_code
        except httpx2.HTTPError as error:
            return f"{type(error).__name__}: {error}".rstrip(": ")
        return f"returned status {status}" if status in GATEWAYS else ""
