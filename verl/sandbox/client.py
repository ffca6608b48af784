"""A sandbox behind HTTP: one or more servers that speak SandboxFusion's protocol, ours or the original.

Each request goes to the server with the fewest requests under way. A server that fails is left alone for a while,
longer each time, and has to answer a health check before it gets requests again; its request goes on to another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from verl.errors import ConfigError, DataError, ServiceDownError
from verl.health import HealthWatch
from verl.sandbox.base import Execution, Limits, Status
from verl.sandbox.inside import frames
from verl.sandbox.protocol import STATUS_OF, RunCodeRequest, RunCodeResponse, RunJupyterRequest, RunJupyterResponse
from verl.services import check_urls, service_headers

FIRST_REST_S = 0.2  # of a server that failed; doubles with each failure in a row
LONGEST_REST_S = 30.0
HEALTH_S = 5.0
CONNECT_S = 5.0
JSON = {"Content-Type": "application/json"}
REFUSED = (400, 404, 422)  # trying again would not help
TOO_LARGE = 413
DEFAULT_LIMITS = Limits()
Answer = TypeVar("Answer", RunCodeResponse, RunJupyterResponse)
log = logging.getLogger(__name__)


class TooLargeError(DataError):
    """Code and files are more than a server takes."""


@dataclass
class Server:
    """What is known of one server."""

    url: str
    watch: HealthWatch
    under_way: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0
    problem: str = ""

    def failed(self, problem: str) -> None:
        """Leave it alone for a while."""
        self.failures += 1
        self.problem = problem
        self.rests_until = time.monotonic() + min(LONGEST_REST_S, FIRST_REST_S * 2 ** (self.failures - 1))
        log.warning("sandbox server %s: %s", self.url, problem)


class RemoteSandbox:
    """Sandbox servers as one.

    urls:         such as http://host:8080
    max_requests: under way at a time, over all servers; more wait
    patience_s:   how long to go on trying before ServiceDownError names the servers and what is wrong with each
    queue_s:      how long a server may let a request wait for its turn, besides the code's own limit
    health_timeout_s: how long a server may be silent, to /v1/ping too, before its requests go to another
    """

    def __init__(
        self,
        urls: Sequence[str],
        max_requests: int = 64,
        patience_s: float = 30.0,
        queue_s: float = 60.0,
        limits: Limits = DEFAULT_LIMITS,
        health_timeout_s: float = 30.0,
    ) -> None:
        if not urls:
            raise ConfigError("sandbox.urls is empty: name at least one, such as http://127.0.0.1:8080")
        self.limits = limits
        self._slots = asyncio.Semaphore(max_requests)
        self._patience_s = patience_s
        self._queue_s = queue_s
        self._http = httpx2.AsyncClient(
            limits=httpx2.Limits(max_connections=max_requests + 2 * len(urls)),  # some to ask how they are
            trust_env=False,  # a proxy of the environment is for the internet
            headers=service_headers(),
        )
        self._servers = [self._server(url.rstrip("/"), health_timeout_s) for url in urls]

    def _server(self, url: str, health_timeout_s: float) -> Server:
        return Server(url, HealthWatch(f"sandbox server {url}", f"{url}/v1/ping", health_timeout_s, self._http))

    async def run(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Execution:
        """One piece of code, by whichever server is free. Of the limits, time and memory are told to it."""
        bounds = limits or self.limits
        request = RunCodeRequest(
            code=code,
            language=language,
            run_timeout=bounds.wall_s,
            memory_limit_MB=bounds.memory_mib,
            stdin=stdin,
            files=dict(frames.pack_files(files or {})),
            fetch_files=list(fetch),
        )
        try:
            answer = await self._ask("/run_code", request, RunCodeResponse, bounds.wall_s)
        except TooLargeError as error:  # files that code has written, as a rule
            return Execution(Status.ERROR, "", f"not run: {error}\n", None, 0.0)
        result = answer.run_result
        if result is None or result.status not in STATUS_OF:
            raise ServiceDownError("sandbox", f"an answer without a result: {answer.model_dump_json()[:300]}")
        return Execution(
            status=STATUS_OF[result.status],
            stdout=result.stdout or "",
            stderr=result.stderr or "",
            return_code=result.return_code,
            seconds=result.execution_time or 0.0,
            files=frames.unpack_files(answer.files),
        )

    async def session(self) -> RemoteSession:
        """Cells that share variables; see `RemoteSession` for how."""
        return RemoteSession(self)

    async def check_services(self) -> None:
        """Raises ServiceDownError where no server answers."""
        urls = [f"{server.url}/health" for server in self._servers]
        hint = "Start one with python -m verl.sandbox.server, or correct sandbox.urls"
        await check_urls("sandbox", urls, hint, trust_env=False, headers=service_headers())

    async def close(self) -> None:
        """Close the connections; the servers go on."""
        for server in self._servers:
            server.watch.close()
        await self._http.aclose()

    async def run_cells(self, cells: Sequence[str], limits: Limits) -> RunJupyterResponse:
        """All cells, in one fresh interpreter; each has the wall time of `limits`."""
        total_s = limits.wall_s * len(cells)
        request = RunJupyterRequest(
            cells=list(cells), cell_timeout=limits.wall_s, total_timeout=total_s, memory_limit_MB=limits.memory_mib
        )
        return await self._ask("/run_jupyter", request, RunJupyterResponse, total_s)

    async def _ask(self, path: str, request: BaseModel, kind: type[Answer], wall_s: float) -> Answer:
        timeout = httpx2.Timeout(wall_s + self._queue_s, connect=CONNECT_S)
        async with self._slots:
            deadline = time.monotonic() + self._patience_s
            while True:
                server = await self._choose(deadline)
                server.under_way += 1
                try:
                    async with server.watch.beside():
                        response = await self._http.post(
                            server.url + path, content=request.model_dump_json(), headers=JSON, timeout=timeout
                        )
                    if response.status_code == TOO_LARGE:
                        raise TooLargeError(f"{server.url} refuses a request: {response.text[:300]}")
                    if response.status_code in REFUSED:
                        raise DataError(f"{server.url} refuses a request: {response.text[:300]}", "what it supports")
                    answer = kind.model_validate_json(response.raise_for_status().content)
                    if answer.status != "SandboxError":
                        server.failures = 0
                        return answer
                    server.failed(f"SandboxError: {answer.message}")
                except ServiceDownError as error:
                    server.failed(error.problem)
                except (httpx2.HTTPError, ValidationError) as error:
                    server.failed(f"{type(error).__name__}: {error}")
                finally:
                    server.under_way -= 1

    async def _choose(self, deadline: float) -> Server:
        """The server with the least to do, after a rest of those that failed if there is no other."""
        while True:
            now = time.monotonic()
            for server in sorted(self._servers, key=lambda each: each.under_way):
                if server.rests_until <= now and (server.failures == 0 or await self._is_healthy(server)):
                    return server
            next_s = min(server.rests_until for server in self._servers) - time.monotonic()
            if time.monotonic() + next_s > deadline:
                problems = "; ".join(f"{server.url}: {server.problem}" for server in self._servers)
                raise ServiceDownError("sandbox", f"no server works. {problems}")
            await asyncio.sleep(max(0.0, next_s))

    async def _is_healthy(self, server: Server) -> bool:
        """Whether it answers; servers that know no /health say so, which is an answer."""
        if server.watch.problem:
            server.failed(server.watch.problem)
            return False
        try:
            response = await self._http.get(f"{server.url}/health", timeout=HEALTH_S)
        except httpx2.HTTPError as error:
            server.failed(f"{type(error).__name__}: {error}")
            return False
        if response.status_code >= 500:
            server.failed(f"/health answers {response.status_code}: {response.text[:300]}")
            return False
        return True


class RemoteSession:
    """Variables kept by a protocol that keeps none: every call runs all earlier cells again, in a fresh interpreter.

    So cells must be repeatable, and the n-th costs as much as all n together; what earlier cells print is left out of
    the answer. A cell that was killed is forgotten, with all before it, as a local session forgets its variables.
    """

    def __init__(self, sandbox: RemoteSandbox) -> None:
        self._sandbox = sandbox
        self._cells: list[str] = []

    async def run(self, code: str, limits: Limits | None = None) -> Execution:
        """The next cell, after all earlier ones."""
        cells = [*self._cells, code]
        started = time.monotonic()
        answer = await self._sandbox.run_cells(cells, limits or self._sandbox.limits)
        seconds = time.monotonic() - started
        if not answer.cells or len(answer.cells) < len(cells):  # an earlier cell did not end this time
            self._cells = []
            return Execution(
                Status.TIMEOUT, "", "killed: an earlier cell, which ran again, took too long\n", None, seconds
            )
        last = answer.cells[-1]
        stdout = last.stdout + "".join(f"{shown.get('data', {}).get('text/plain', '')}\n" for shown in last.display)
        timed_out = answer.driver is not None and answer.driver.status == "TimeLimitExceeded"
        killed = answer.status != "Success" and (timed_out or not last.error)
        status = Status.TIMEOUT if timed_out else Status.ERROR if killed or last.error else Status.FINISHED
        self._cells = [] if killed else cells
        stderr = last.stderr or "".join(f"{error.get('ename')}: {error.get('evalue')}\n" for error in last.error)
        return Execution(status, stdout, stderr, None if killed else int(status is not Status.FINISHED), seconds)

    async def close(self) -> None:
        """Forget the cells."""
        self._cells = []
