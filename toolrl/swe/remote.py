"""Runtimes on other machines, over SWE-ReX's wire: servers of ours; deployments of SWE-ReX: deployments.py."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import logging
import math
import secrets
import tarfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from toolrl.servers.endpoints import Endpoint, EndpointPool
from toolrl.swe import wire
from toolrl.swe.abandoned import OwnedFolder
from toolrl.swe.image import ImageStore, image_key, prepare_image
from toolrl.swe.runtime import (
    DEFAULT_SESSION,
    TESTBED,
    CommandFailedError,
    CommandResult,
    CommandStatus,
    Completed,
    FilesByPrograms,
    RuntimeLimits,
    RuntimeLostError,
)
from toolrl.swe.tasks import SweTask
from verl.envs.clock import paused
from verl.errors import DataError, ServiceDownError
from verl.host.services import TOKEN_VARIABLE, service_token
from verl.units import MIB

CONNECT_S = 10.0
SLACK_S = 60.0  # for an answer, beyond the time-out of the command
MAX_STARTS = 2  # of a runtime, each on another server
RETRIES = 4  # attempts of a request whose connection breaks; the server knows a repeated one
PATIENCE_S = 600.0  # for a free runtime, and for a server that is busy
CLOSE_S = 10.0
STORE_GIB = 50.0  # of repositories that were sent, on the disk of the trainer
FULL_S = 1.0  # until a full server is asked again
WAITED = "all of its runtimes are in use"
QUEUED = httpx2.Timeout(None, connect=CONNECT_S)  # a server that has died is noticed by its health
HINT = "Start one with toolrl runtime-server, or correct the URLs"
START_HINT = "Start more servers, raise their --capacity, or lower max_running and max_scoring"
# The wire has text only: the outputs travel as base64.
WRAPPED = """
in=$0; d=$(mktemp -d); "$@" <"$in" >"$d/o" 2>"$d/e"; code=$?
base64 "$d/o"; base64 "$d/e" >&2; rm -rf "$d"; [ "$in" = /dev/null ] || rm -f "$in"; exit $code
"""
_OBSERVED = (
    "output",
    "exit_code",
)  # in every answer to a command: an answer without them must not read as an empty one
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
log = logging.getLogger(__name__)


class RemoteRuntimes(EndpointPool):
    """A pool of servers. Raises ConfigError for invalid URLs.

    urls:       servers of ours, which get the repository of a task; a task starts on the least busy one
    store:      place of a folder for repositories that are sent, which ends with the pool; default: a temporary one
    patience_s: waiting for a free runtime
    """

    def __init__(
        self,
        urls: Sequence[str],
        store: Path | None = None,
        patience_s: float = PATIENCE_S,
        health_timeout_s: float = 30.0,
    ) -> None:
        super().__init__("runtime server", urls, HINT, health_timeout_s, "/is_alive", "/is_alive")
        self._owned, self._patience_s = OwnedFolder(store), patience_s
        self._prepared: dict[str, Path] = {}
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._sending: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._open: set[RemoteRuntime] = set()
        if token := service_token():
            self.client.headers[wire.API_KEY] = token

    @cached_property
    def _images(self) -> ImageStore:
        return ImageStore(self._owned.path / "images", self._owned.path, STORE_GIB)

    async def start(self, task: SweTask) -> RemoteRuntime:
        if task.repository is None:
            raise DataError(
                f"task {task.id} has no repository", "a repository, or the option `deployment` for its image"
            )
        image = await self._image(task)
        name = Path(task.environment).name if task.environment else ""
        request = wire.LeaseRequest(
            image=image.name, environment=name, setup=task.setup, workdir=task.workdir, limits=task.limits
        )
        try:
            with self._images.used(image.name):
                async with (
                    paused(),
                    asyncio.timeout(self._patience_s),
                ):  # neither queues nor starts are the policy's time
                    return await self._start(request, image)
        except TimeoutError as error:
            problems = "; ".join(f"{each.url}: {each.problem or WAITED}" for each in self.endpoints)
            raise RuntimeLostError(f"none started within {self._patience_s:g} s. {problems}. {START_HINT}") from error

    async def close(self) -> None:
        """End all runtimes, and the connections; the servers keep running."""
        with contextlib.suppress(TimeoutError):  # their leases end anyway
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(runtime.close() for runtime in list(self._open)))
        await super().close()
        await asyncio.to_thread(self._owned.remove)

    async def _start(self, request: wire.LeaseRequest, image: Path) -> RemoteRuntime:
        failed: list[Endpoint] = []
        while True:
            server = await self.least_busy(math.inf, [each for each in self.endpoints if each not in failed])
            try:
                if runtime := await self._start_on(server, request, image):
                    return runtime
            except RuntimeLostError as error:
                failed.append(server)
                if len(failed) == min(MAX_STARTS, len(self.endpoints)):
                    raise
                log.warning("%s: %s; it starts elsewhere", server.url, error.problem)

    async def _start_on(self, server: Endpoint, request: wire.LeaseRequest, image: Path) -> RemoteRuntime | None:
        """None if the server is full or failed."""
        server.in_flight += 1  # while the runtime lives
        lease = None
        try:
            lease = await self._lease(server, request, image)
        except RuntimeLostError:
            raise
        except ServiceDownError as error:
            server.failed(error.problem)
        finally:
            if lease is None:
                server.in_flight -= 1
        if lease is None:
            return None

        async def end() -> None:
            server.in_flight -= 1
            self._open.discard(runtime)

        runtime = RemoteRuntime(self.client, server, request.limits, lease, end)
        self._open.add(runtime)
        return runtime

    async def _lease(self, server: Endpoint, request: wire.LeaseRequest, image: Path) -> wire.Lease | None:
        """None if the server is full. Raises ServiceDownError."""
        if not server.failures:  # else it is not known to be full
            server.problem = ""
        answer = await self._ask_lease(server, request)
        if answer.status_code == wire.NO_IMAGE:
            async with server.asked(KeyError, ValueError):  # another program's answer
                most_mib = int(answer.headers[wire.MAX_BODY])
            await self._send_image(server, image, most_mib)
            answer = await self._ask_lease(server, request)
        if answer.status_code == wire.FULL:
            server.problem, server.skipped_until = answer.text[:500], time.monotonic() + FULL_S
            return None
        if answer.status_code == wire.NO_LEASE:  # the start failed there
            raise RuntimeLostError(answer.text[:500])
        async with server.asked():
            lease = wire.Lease.model_validate_json(_accepted(server, answer).content)
        server.failures, server.problem = 0, ""
        return lease

    async def _ask_lease(self, server: Endpoint, request: wire.LeaseRequest) -> httpx2.Response:
        return await _answer(
            server, lambda: self.client.post(f"{server.url}/lease", json=request.model_dump(), timeout=QUEUED)
        )

    async def _send_image(self, server: Endpoint, image: Path, most_mib: int) -> None:
        """Once for all starts that miss it at a time."""
        await _shared(self._sending, (server.url, image.name), lambda: self._put_image(server, image, most_mib))

    async def _put_image(self, server: Endpoint, image: Path, most_mib: int) -> None:
        packed = await asyncio.to_thread(_pack, image)
        if len(packed) > most_mib * MIB:  # else the server would hang up while it is sent
            raise _too_large(server, f"{len(packed) / MIB:.1f} MiB; it accepts {most_mib} MiB")
        async with server.asked():
            url, kind = f"{server.url}/image/{image.name}", {"content-type": wire.TAR}
            _accepted(server, await self.client.put(url, content=packed, headers=kind, timeout=QUEUED))

    async def _image(self, task: SweTask) -> Path:
        """Nothing may be awaited between its return and its use."""
        key = image_key(task)
        while key not in self._prepared or not self._prepared[key].is_dir():
            await _shared(self._preparing, key, lambda: self._prepare(key, task))
        return self._prepared[key]

    async def _prepare(self, key: str, task: SweTask) -> None:
        image = self._prepared[key] = await asyncio.to_thread(prepare_image, task, self._images.folder)
        with self._images.used(image.name):
            await self._images.make_room(image.name)


class RemoteRuntime(FilesByPrograms):
    """See Runtime. lease: of a server of ours, which a task renews; None: a server of SWE-ReX. end: after the close"""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        server: Endpoint,
        limits: RuntimeLimits,
        lease: wire.Lease | None,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._client, self._server, self._limits, self._lease, self._end = client, server, limits, lease, end
        self._headers = {wire.LEASE: lease.lease} if lease else {}
        self._sessions: set[str] = set()
        self._renewing = asyncio.create_task(self._renew(lease.lease_s / 4)) if lease else None
        self._lost = ""

    async def run(
        self,
        command: str,
        timeout_s: float | None = None,
        soft_timeout_s: float | None = None,
        session: str = DEFAULT_SESSION,
    ) -> CommandResult:
        if soft_timeout_s is not None and not self._lease:
            raise CommandFailedError("a server of SWE-ReX has no soft time-outs")
        await self._need_session(session)
        hard_s = self._limits.command_s if timeout_s is None else timeout_s
        action = wire.ActionRequest(command=command, session=session, timeout=hard_s, check="silent")
        if self._lease:
            action = action.model_copy(update={"soft_timeout": soft_timeout_s, "extended": True})
        try:
            done = await self._result(action.model_dump(), hard_s)
            return done if self._lease else replace(done, output=_plain(done.output))
        except TimeoutError:
            await self.interrupt(session)
            return CommandResult("", None, CommandStatus.TIMEOUT)

    async def interrupt(self, session: str = DEFAULT_SESSION) -> CommandResult:
        await self._need_session(session)
        body: dict[str, Any] = {"action_type": "bash_interrupt", "session": session}
        return await self._result({**body, "extended": True} if self._lease else body, 10.0)

    async def execute(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        cwd: str = TESTBED,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        hard_s = self._limits.command_s if timeout_s is None else timeout_s
        source = "/dev/null"
        if stdin:
            source = f"/tmp/{secrets.token_hex(8)}.in"
            await self._upload(stdin, source)
        variables = [f"{name}={value}" for name, value in (env or {}).items()]  # the wire's `env` replaces all others
        command = ["/bin/sh", "-c", WRAPPED, source, *(["/usr/bin/env", *variables] if variables else []), *argv]
        body = wire.CommandRequest(command=command, timeout=hard_s, cwd=cwd)
        try:
            done = await self._ask("execute", body.model_dump(), hard_s)
        except TimeoutError:
            return Completed(None, b"", b"")
        return self._read(lambda: _completed(done))

    async def snapshot(self) -> str:
        self._need_lease("snapshots")
        made = await self._ask("snapshot", {}, self._limits.command_s)
        return self._read(lambda: str(made["name"]))

    async def restore(self, name: str) -> None:
        self._need_lease("snapshots")
        self._sessions.clear()
        await self._ask("restore", {"name": name}, self._limits.command_s)

    async def end_processes(self) -> None:
        if self._lease:
            self._sessions.clear()
            await self._ask("end_processes", None, self._limits.command_s)

    async def close(self) -> None:
        if self._renewing:
            self._renewing.cancel()
            self._renewing = None
        if not self._lost:
            if self._lease:
                with contextlib.suppress(RuntimeLostError):
                    await self._ask("close", None, SLACK_S)
            self._lost = "it is closed"
        if self._end:
            end, self._end = self._end, None
            await end()

    async def _need_session(self, session: str) -> None:
        """Shells of SWE-ReX begin where their server was started."""
        if session not in self._sessions:
            self._sessions.add(session)
            with contextlib.suppress(FileExistsError):
                body = wire.SessionRequest(session=session, startup_timeout=10.0)
                await self._ask("create_session", body.model_dump(), SLACK_S)
            if not self._lease:
                command = f"export TERM=dumb PAGER=cat GIT_PAGER=cat; cd {TESTBED}"  # else git may wait for a key
                enter = wire.ActionRequest(command=command, session=session, timeout=SLACK_S, check="ignore")
                await self._ask("run_in_session", enter.model_dump(), SLACK_S)

    def _need_lease(self, what: str) -> None:
        if not self._lease:
            raise CommandFailedError(f"a server of SWE-ReX has no {what}")

    async def _renew(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            with contextlib.suppress(httpx2.HTTPError, ServiceDownError):
                async with self._server.asked():
                    url = f"{self._server.url}/is_alive"
                    answer = await self._client.get(url, headers=self._headers, timeout=period_s)
                    if answer.status_code == wire.NO_LEASE:
                        self._lost = answer.text[:300]

    async def _upload(self, data: bytes, target: str) -> None:
        fields: dict[str, Any] = {"files": {"file": ("file", data)}, "data": {"target_path": target, "unzip": "false"}}
        await self._send("upload", fields, SLACK_S)

    async def _ask(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
        return await self._send(path, {"json": body} if body is not None else {}, seconds)

    async def _send(self, path: str, fields: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Raises RuntimeLostError, CommandFailedError for an operation that fails, TimeoutError for its own."""
        headers = {**self._headers, wire.REQUEST_ID: secrets.token_hex(16)}
        timeout = httpx2.Timeout(seconds + SLACK_S, connect=CONNECT_S)
        url, full_until = f"{self._server.url}/{path}", time.monotonic() + PATIENCE_S
        while True:
            if self._lost:
                raise RuntimeLostError(self._lost)
            try:
                answer = await _answer(
                    self._server, lambda: self._client.post(url, headers=headers, timeout=timeout, **fields)
                )
            except ServiceDownError as error:
                self._lost = error.problem
                raise RuntimeLostError(f"{self._server.url}: {error.problem}") from error
            if answer.status_code != wire.FULL or time.monotonic() > full_until:
                break
            async with paused():
                await asyncio.sleep(FULL_S)
        if answer.status_code == wire.FAILED:
            raise self._read(lambda: _error(answer.json()["swerexception"]))
        if answer.status_code == wire.TOO_LARGE:
            raise _too_large(self._server, answer.text[:300])
        if answer.status_code >= 400:
            self._lost = f"{self._server.url} answered {answer.status_code}: {answer.text[:300]}"
            raise RuntimeLostError(self._lost)
        return self._read(lambda: dict(answer.json() or {}))

    async def _result(self, body: Mapping[str, Any], seconds: float) -> CommandResult:
        answer = await self._ask("run_in_session", body, seconds)
        return self._read(lambda: _result(answer))

    def _read(self, reader: Callable[[], T]) -> T:
        """Raises RuntimeLostError for an answer that is not of this wire: of a proxy, or damaged on its way."""
        try:
            return reader()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._lost = f"{self._server.url} did not answer as a runtime server ({problem})"
            raise RuntimeLostError(self._lost) from error


async def _shared(tasks: dict[K, asyncio.Task[None]], key: K, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Wait for the task with this key, which the first caller starts."""
    if key not in tasks:
        made = tasks[key] = asyncio.create_task(work())
        made.add_done_callback(lambda done: tasks.pop(key) and (done.cancelled() or done.exception()))
    await asyncio.shield(tasks[key])


async def _answer(server: Endpoint, ask: Callable[[], Awaitable[httpx2.Response]]) -> httpx2.Response:
    """To a request that is repeated if the connection breaks. Raises ServiceDownError."""
    for failures in itertools.count(1):
        try:
            async with server.asked():
                return await ask()
        except ServiceDownError:
            if failures == RETRIES:
                raise
            await asyncio.sleep(0.1 * 2**failures)
    raise AssertionError("the last attempt returns or raises")


def _accepted(server: Endpoint, answer: httpx2.Response) -> httpx2.Response:
    """Raises DataError for a request that another server would refuse, too; RuntimeLostError for a wrong token, which
    the same server would refuse again; httpx2.HTTPError for other failures."""
    if answer.status_code == wire.UNAUTHORIZED:
        problem = f"{server.url} answered 401: {answer.text[:300]}"
        raise RuntimeLostError(f"{problem}; set ${TOKEN_VARIABLE} to the token of the server")
    if answer.status_code == wire.REFUSED:
        raise DataError(f"{server.url}: {answer.text[:500]}", field="environment")
    if answer.status_code == wire.TOO_LARGE:
        raise _too_large(server, answer.text[:300])
    return answer.raise_for_status()


def _too_large(server: Endpoint, sizes: str) -> DataError:
    hint = "Start servers with a larger --max-body-mib, or leave out files that the task does not need"
    return DataError(f"the repository or a file is too large for {server.url}: {sizes}", hint=hint, field="repository")


def _error(failure: Mapping[str, Any]) -> Exception:
    """Of an operation that failed there."""
    kind, message = str(failure["class_path"]), str(failure["message"])
    if kind == wire.TIMED_OUT:
        return TimeoutError(message)
    if kind.endswith("SessionExistsError"):
        return FileExistsError(message)
    return CommandFailedError(f"{kind.rpartition('.')[2]}: {message[:1000]}")


def _completed(done: Mapping[str, Any]) -> Completed:
    code = None if done["exit_code"] is None else int(done["exit_code"])
    return Completed(code, _decoded(done["stdout"]), _decoded(done["stderr"]))


def _result(answer: Mapping[str, Any]) -> CommandResult:
    observed = wire.ActionResponse.model_validate({name: answer[name] for name in _OBSERVED} | dict(answer))
    status = CommandStatus(observed.status or CommandStatus.FINISHED)
    reason, restarted = observed.failure_reason, observed.shell_restarted
    return CommandResult(observed.output, observed.exit_code, status, observed.cwd, reason, restarted)


def _plain(text: str) -> str:
    """Without what the terminal of SWE-ReX's shells adds to lines and in front."""
    return text.replace("\r\n", "\n").replace("\r", "").lstrip("\n")


def _decoded(text: str) -> bytes:
    """Of base64; a message of the shell itself is kept as it is."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        return text.encode()


def _pack(image: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(image, ".")
    return packed.getvalue()
