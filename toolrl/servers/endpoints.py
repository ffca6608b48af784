"""HTTP servers of one service: a client with the token, health watches, and fail-over."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx2
from pydantic import ValidationError

from toolrl.servers.health import HealthWatch
from verl.errors import ConfigError, ServiceDownError
from verl.host.services import check_urls, service_headers

MIN_BACKOFF_S = 0.2  # after a failure; doubles with each consecutive one
MAX_BACKOFF_S = 30.0
HEALTH_S = 5.0
T = TypeVar("T")
log = logging.getLogger(__name__)


class Endpoint:
    def __init__(self, name: str, url: str, watch: HealthWatch) -> None:
        self.name, self.url, self.watch = name, url, watch
        self.in_flight = 0  # requests
        self.failures = 0  # consecutive
        self.skipped_until = 0.0
        self.problem = ""

    @asynccontextmanager
    async def asked(self, *failures: type[Exception]) -> AsyncIterator[None]:
        """Raises ServiceDownError if the server is down, and for HTTP errors and `failures`."""
        raised: tuple[type[Exception], ...] = (httpx2.HTTPError, ValidationError, *failures)
        try:
            async with self.watch.guard():
                yield
        except raised as error:
            raise ServiceDownError(self.name, f"{type(error).__name__}: {error}") from error

    def failed(self, problem: str) -> None:
        """Start or extend the backoff."""
        self.failures += 1
        self.problem = problem
        self.skipped_until = time.monotonic() + min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** (self.failures - 1))
        log.warning("%s: %s", self.name, problem)

    async def is_healthy(self, client: httpx2.AsyncClient, path: str) -> bool:
        """True if the server answers at this path; a 404 counts."""
        try:
            async with self.asked():
                response = await client.get(self.url + path, timeout=HEALTH_S)
        except ServiceDownError as error:
            self.failed(error.problem)
            return False
        if response.status_code >= 500:
            self.failed(f"{path} returned {response.status_code}: {response.text[:300]}")
        return response.status_code < 500


class EndpointPool:
    """The servers of a service.

    service: name of a server in messages, such as "sandbox"
    hint:    what to do if no server answers
    health_timeout_s: time without any response, to `ping` too, after which requests to a server fail
    ping:    path of the health watch, which answers at once even under load
    health:  path of the check before the start and after a failure; empty: the URLs are routes, not servers
    client:  options of the HTTP client; proxies of the environment are ignored by default

    Raises ConfigError if there is no URL, or an invalid one.
    """

    def __init__(
        self,
        service: str,
        urls: str | Sequence[str],
        hint: str,
        health_timeout_s: float,
        ping: str = "/health",
        health: str = "/health",
        **client: Any,
    ) -> None:
        urls = [url.rstrip("/") if health else url for url in ([urls] if isinstance(urls, str) else urls)]
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ConfigError(f"urls={urls} names no {service}; expected e.g. http://127.0.0.1:8000")
        self._service, self._hint, self._health = service, hint, health
        self.client = httpx2.AsyncClient(**{"trust_env": False, **client}, headers=service_headers())
        self.endpoints = []
        for url in urls:
            watch = HealthWatch(f"{service} {url}", url + ping, health_timeout_s, self.client)
            self.endpoints.append(Endpoint(f"{service} {url}", url, watch))

    async def check_services(self) -> None:
        urls = [endpoint.url + self._health for endpoint in self.endpoints]
        await check_urls(self._service, urls, self._hint, self.client.trust_env, service_headers())

    async def close(self) -> None:
        """Close the connections; the servers keep running."""
        for endpoint in self.endpoints:
            endpoint.watch.close()
        await self.client.aclose()

    async def first_answer(self, first: int, ask: Callable[[Endpoint], Awaitable[T]]) -> T:
        """The answer of server `first` (modulo their number) or the next one that is up. Raises ServiceDownError."""
        problems = []
        for offset in range(len(self.endpoints)):
            endpoint = self.endpoints[(first + offset) % len(self.endpoints)]
            try:
                answer = await ask(endpoint)
            except ServiceDownError as error:
                problems.append(f"{endpoint.url}: {error.problem}")
                if not endpoint.problem:
                    log.warning("%s: %s; the others are asked until it answers", endpoint.name, error.problem)
                endpoint.problem = error.problem
            else:
                endpoint.problem = ""
                return answer
        raise ServiceDownError(self._service, "; ".join(problems))

    async def least_busy(self, deadline: float, among: Sequence[Endpoint] = ()) -> Endpoint:
        """The server with the fewest requests, after its backoff. Raises ServiceDownError past the deadline.

        among: the servers to choose from; empty: all
        """
        endpoints = among or self.endpoints
        while True:
            now = time.monotonic()
            for endpoint in sorted(endpoints, key=lambda each: each.in_flight):
                if endpoint.skipped_until > now:
                    continue
                if endpoint.failures == 0 or await endpoint.is_healthy(self.client, self._health):
                    return endpoint
            next_s = min(endpoint.skipped_until for endpoint in endpoints) - time.monotonic()
            if time.monotonic() + next_s > deadline:
                problems = "; ".join(f"{endpoint.url}: {endpoint.problem}" for endpoint in endpoints)
                raise ServiceDownError(self._service, f"no server works. {problems}")
            await asyncio.sleep(max(0.0, next_s))
