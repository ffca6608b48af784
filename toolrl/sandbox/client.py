"""A remote sandbox: one or more servers with SandboxFusion's HTTP protocol, ours or the original."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import httpx2
from pydantic import BaseModel

from toolrl.sandbox.inside import frames
from toolrl.sandbox.protocol import STATUS_OF, RunCodeRequest, RunCodeResponse, RunJupyterRequest, RunJupyterResponse
from toolrl.servers.endpoints import EndpointPool
from verl.envs.sandbox import Execution, Limits, Status
from verl.errors import ConfigError, DataError, ServiceDownError

CONNECT_S = 5.0
JSON = {"Content-Type": "application/json"}
REFUSED = (400, 404, 422)  # a retry would not help
TOO_LARGE = 413
DEFAULT_LIMITS = Limits()
Answer = TypeVar("Answer", RunCodeResponse, RunJupyterResponse)


class TooLargeError(DataError):
    """Code and files exceed the server's size limit."""


class RemoteSandbox(EndpointPool):
    """Load-balances over sandbox servers. The request of a server that fails is retried on another one.

    max_requests: in flight, over all servers; further ones are queued
    patience_s:   retry period before a ServiceDownError that lists the servers with their problems
    queue_s:      maximum queueing time on a server, in addition to the code's own limit
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
            raise ConfigError("sandbox.urls is empty: give at least one, such as http://127.0.0.1:8080")
        self.limits = limits
        self._slots = asyncio.Semaphore(max_requests)
        self._patience_s = patience_s
        self._queue_s = queue_s
        hint = "Start one with toolrl sandbox-server, or correct sandbox.urls"
        connections = httpx2.Limits(max_connections=max_requests + 2 * len(urls))  # plus those of health checks
        super().__init__("sandbox", urls, hint, health_timeout_s, "/v1/ping", limits=connections)

    async def run(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Execution:
        """Run code on the least busy server. Of the limits, only time and memory are sent."""
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
        except TooLargeError as error:  # usually files that code has written
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
        return RemoteSession(self)

    async def run_cells(self, cells: Sequence[str], limits: Limits) -> RunJupyterResponse:
        """Run all cells in one fresh interpreter, each with the wall time of `limits`."""
        cell_s, total_s = limits.wall_s, limits.wall_s * len(cells)
        request = RunJupyterRequest(cells=list(cells), cell_timeout=cell_s, total_timeout=total_s)
        request.memory_limit_MB = limits.memory_mib
        return await self._ask("/run_jupyter", request, RunJupyterResponse, total_s)

    async def _ask(self, path: str, request: BaseModel, kind: type[Answer], wall_s: float) -> Answer:
        timeout, body = httpx2.Timeout(wall_s + self._queue_s, connect=CONNECT_S), request.model_dump_json()
        async with self._slots:
            deadline = time.monotonic() + self._patience_s
            while True:
                server = await self.least_busy(deadline)
                server.in_flight += 1
                try:
                    async with server.asked():
                        url = server.url + path
                        response = await self.client.post(url, content=body, headers=JSON, timeout=timeout)
                        if response.status_code == TOO_LARGE:
                            raise TooLargeError(f"{server.url} rejected a request: {response.text[:300]}")
                        if response.status_code in REFUSED:
                            problem = f"{server.url} rejected a request: {response.text[:300]}"
                            raise DataError(problem, "what it supports")
                        answer = kind.model_validate_json(response.raise_for_status().content)
                    if answer.status != "SandboxError":
                        server.failures = 0
                        return answer
                    server.failed(f"SandboxError: {answer.message}")
                except ServiceDownError as error:
                    server.failed(error.problem)
                finally:
                    server.in_flight -= 1


class RemoteSession:
    """Sessions over a stateless protocol: every call replays all earlier cells in a fresh interpreter.

    So cells must be repeatable, and the n-th costs as much as all n together; the output of earlier cells is dropped.
    After a cell is killed, all cells are dropped, as a local session loses its variables.
    """

    def __init__(self, sandbox: RemoteSandbox) -> None:
        self._sandbox = sandbox
        self._cells: list[str] = []

    async def run(self, code: str, limits: Limits | None = None) -> Execution:
        cells = [*self._cells, code]
        started = time.monotonic()
        answer = await self._sandbox.run_cells(cells, limits or self._sandbox.limits)
        seconds = time.monotonic() - started
        if not answer.cells or len(answer.cells) < len(cells):  # an earlier cell timed out in the replay
            self._cells = []
            return Execution(Status.TIMEOUT, "", "killed: the replay of an earlier cell timed out\n", None, seconds)
        last = answer.cells[-1]
        stdout = last.stdout + "".join(f"{shown.get('data', {}).get('text/plain', '')}\n" for shown in last.display)
        timed_out = answer.driver is not None and answer.driver.status == "TimeLimitExceeded"
        killed = answer.status != "Success" and (timed_out or not last.error)
        status = Status.TIMEOUT if timed_out else Status.ERROR if killed or last.error else Status.FINISHED
        self._cells = [] if killed else cells
        stderr = last.stderr or "".join(f"{error.get('ename')}: {error.get('evalue')}\n" for error in last.error)
        return Execution(status, stdout, stderr, None if killed else int(status is not Status.FINISHED), seconds)

    async def close(self) -> None:
        self._cells = []
