"""Is a server that does not answer slow, or gone? It is asked for something small beside what it works at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from verl.errors import ServiceDownError
from verl.services import GATEWAYS

TICKS = 30  # in which the time that a server may be silent is counted
log = logging.getLogger(__name__)


class HealthWatch:
    """Ends what waits for a server that has been silent for `timeout_s`, at the latest.

    Any answer will do but a gateway's, which stands before a server that is gone. A server that is stopped and goes on
    in time has lost nothing. One that was silent for too long is refused without waiting until it answers again.

    service: what the server is, for messages
    url:     what it answers at once, however busy it is
    problem: why it counts as gone; empty while it does not
    """

    def __init__(self, service: str, url: str, timeout_s: float, client: httpx2.AsyncClient) -> None:
        self.problem = ""
        self._service, self._url, self._timeout_s, self._client = service, url, timeout_s, client
        self._waiting: set[asyncio.Timeout] = set()
        self._watching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Around a request. Raises ServiceDownError where the server is gone, or goes meanwhile."""
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
        """Ask no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        """As long as somebody waits or the server is gone. A tick in which our own loop was held up is one tick."""
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
                elif num_silent == TICKS - 2:  # one has gone by since the last answer, and one may still go by
                    self._give_up(problem)
        finally:
            self._watching = None
            if probe is not None:
                probe.cancel()

    def _give_up(self, problem: str) -> None:
        self.problem = f"{self._url} has been silent for {self._timeout_s:g} s ({problem})"
        log.warning("%s: %s", self._service, self.problem)
        for limit in self._waiting:
            limit.reschedule(asyncio.get_running_loop().time())

    async def _ask(self) -> str:
        """Why it does not count as there; empty if it does."""
        try:
            status = (await self._client.get(self._url, timeout=self._timeout_s)).status_code
        except httpx2.HTTPError as error:
            return f"{type(error).__name__}: {error}".rstrip(": ")
        return f"answers {status}" if status in GATEWAYS else ""
