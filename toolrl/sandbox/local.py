"""Runs untrusted code on this machine: each execution is a fork of a warm interpreter, in its own namespaces.

    LocalSandbox -> ForkServer: bwrap -> inside/zygote.py -> inside/supervisor.py -> the code
                                                             one execution after the other, or a session

The fork server receives one end of a socket per supervisor. The supervisor answers there, and kills its processes when
the other end is closed. Code, input and output are passed in memfds and never enter the supervisor's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import marshal
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from toolrl.sandbox.cgroups import HINT, CgroupPool, find_cgroups
from toolrl.sandbox.channel import receive_frame, send_frame
from toolrl.sandbox.fork_server import BWRAP_HINT, Channel, ForkServer, Isolation, check_isolation
from toolrl.sandbox.inside import frames
from verl.envs.sandbox import Execution, Limits, Status
from verl.errors import ConfigError, DataError, ServiceDownError

LANGUAGES = ("python", "bash")
GRACE_S = 15.0  # without a heartbeat, until a supervisor counts as lost; a busy one sends one every 2 s
DEFAULT_LIMITS = Limits()
# Largest limits of a request; the machine's own bounds apply as well.
MOST = Limits(wall_s=1e6, cpu_s=1e6, memory_mib=1 << 24, processes=1 << 22, file_mib=1 << 20, output_kib=1 << 20)
NAME_BYTES, PATH_BYTES = 255, 4000  # Linux's bounds; the path of the working folder takes part of 4096
log = logging.getLogger(__name__)


class LocalSandbox:
    """A pool of fork servers.

    workers:   fork servers and concurrent executions; further ones are queued, which does not count as their time
    isolation: "none" keeps resource limits and process cleanup, but gives no other guarantee
    preload:   modules imported before the fork; modules that are not installed are skipped
    require_cgroup: raise ConfigError if this machine has no cgroup to limit memory, processes and CPU time
    """

    def __init__(
        self,
        workers: int = 2,
        isolation: Isolation = "bubblewrap",
        preload: Sequence[str] = ("numpy", "numpy.random", "sympy"),
        limits: Limits = DEFAULT_LIMITS,
        require_cgroup: bool = False,
    ) -> None:
        check_isolation(isolation)
        self.cgroups = find_cgroups()
        if self.cgroups is None and require_cgroup:
            asked = "sandbox.isolation=strict (servers: --require-cgroup)"
            raise ConfigError(f"{asked}: no cgroup can be made here. {HINT}")
        self._cgroup_pool = CgroupPool(self.cgroups) if self.cgroups else None
        self._isolation = isolation
        self.limits = limits
        self.slots = asyncio.Semaphore(workers)  # one per running execution
        self._servers = [ForkServer(isolation, preload, self._cgroup_pool) for _ in range(workers)]

    async def run(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Execution:
        """Run code in its own processes. Raises DataError for an invalid language or path."""
        if language not in LANGUAGES:
            raise DataError(f"language {language!r}", f"one of {', '.join(LANGUAGES)}", field="language")
        bounds = limits or self.limits
        request = _request(language, code, files or {}, bounds)
        task = {"limits": asdict(bounds), "fetch": _paths(fetch, "fetch"), "fetch_mib": bounds.file_mib}
        for _ in range(2):
            async with self.slots, self.converse() as conversation:
                if execution := await conversation.run(task, request, stdin.encode(errors="replace")):
                    conversation.over = not fetch  # a supervisor that read files is not reused
                    return execution
            log.warning("a sandbox supervisor exited without an answer")
        raise ServiceDownError("sandbox", "its supervisor exited without an answer, twice in a row")

    async def session(self, files: Mapping[str, bytes] | None = None) -> LocalSession:
        return LocalSession(self, files or {})

    async def check_services(self) -> None:
        """Raises ServiceDownError if executions cannot be confined, as in many containers."""
        log.info("sandbox: limits are enforced by %s", self.cgroups or "polling: cannot create a cgroup here")
        if self._isolation == "none":
            return
        trial = LocalSandbox(1, self._isolation, preload=())  # starts at once, and belongs to this event loop only
        try:
            await trial.run("pass")
        finally:
            await trial.close()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        if self._cgroup_pool:
            await asyncio.to_thread(self._cgroup_pool.close)

    @contextlib.asynccontextmanager
    async def converse(self) -> AsyncIterator[Exchange]:
        """A supervisor of the least busy server; terminated after the block unless `over`."""
        server = min(self._servers, key=lambda each: each.num_channels)
        server.num_channels += 1
        try:
            channel = await server.open()
            conversation = Exchange(channel, server)
            try:
                yield conversation
            finally:
                (server.keep if conversation.over else server.drop)(channel)
        finally:
            server.num_channels -= 1


class Exchange:
    def __init__(self, channel: Channel, server: ForkServer) -> None:
        self._channel = channel.socket
        self._server = server
        self.alive = False  # whether the interpreter of the last answer still runs
        self.over = False  # no state is left; the supervisor can be reused

    async def run(self, task: Mapping[str, Any], *inputs: bytes, more: Sequence[int] = ()) -> Execution | None:
        """Run a task; inputs and outputs bypass the supervisor's memory. None if it is lost. more: descriptors"""
        with contextlib.ExitStack() as stack:
            outputs = [os.memfd_create("output") for _ in range(2)]
            for output in outputs:
                stack.callback(os.close, output)
            answer = await self.ask(task, *inputs, outputs=[*outputs, *more])
            if answer is None:
                return None
            self.alive = answer.get("alive", False)
            return _execution(answer, *map(frames.contents, outputs))

    async def ask(self, task: Mapping[str, Any], *inputs: bytes, outputs: Sequence[int] = ()) -> dict[str, Any] | None:
        """The answer; None if the supervisor is lost. If it hangs, its fork server is replaced."""
        try:
            async with asyncio.timeout(GRACE_S):
                await self.send(task, *inputs, outputs=outputs)
            while True:
                async with asyncio.timeout(GRACE_S):
                    answer = await receive_frame(self._channel)
                if "beat" not in answer:
                    return answer
        except TimeoutError:
            self._server.replace(f"no heartbeat of a supervisor within {GRACE_S:g} s")
        except (OSError, EOFError):
            pass
        return None

    async def send(self, task: Mapping[str, Any], *inputs: bytes, outputs: Sequence[int] = ()) -> None:
        with contextlib.ExitStack() as stack:
            descriptors = [*map(frames.sealed, inputs)]
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            await send_frame(self._channel, task, [*descriptors, *outputs])


class LocalSession:
    """An interpreter that keeps its variables; its processes are paused between cells.

    The limits on memory, processes and files are those of the first cell after a start; time limits are per cell. The
    session's own process reports whether a cell succeeded, so its code can fake this, but only for itself.
    """

    def __init__(self, sandbox: LocalSandbox, files: Mapping[str, bytes]) -> None:
        self._sandbox = sandbox
        self._files = files
        self._stack = contextlib.AsyncExitStack()
        self._conversation: Exchange | None = None
        self._lock = asyncio.Lock()

    async def run(self, code: str, limits: Limits | None = None) -> Execution:
        """Run the next cell; the value of a final expression is shown, as in a notebook."""
        bounds = limits or self._sandbox.limits
        _check_limits(bounds)
        async with self._lock, self._sandbox.slots:
            if self._conversation is None or not self._conversation.alive:
                await self._end()
                request = _request("session", "", self._files, bounds)
                self._conversation = await self._stack.enter_async_context(self._sandbox.converse())
                await self._conversation.send({"limits": asdict(bounds)}, request, b"")
            try:
                execution = await self._conversation.run({"code": code, "limits": asdict(bounds)})
            except BaseException:  # no caller is waiting any more
                await self._end()
                raise
            if execution is None:
                await self._end()
                raise ServiceDownError("sandbox", "a session's supervisor exited without an answer")
            return execution

    async def fetch(self, paths: Sequence[str]) -> Mapping[str, bytes]:
        """Terminates the interpreter: files must not change while they are read."""
        names = _paths(paths, "fetch")
        async with self._lock:
            if self._conversation is None:
                return {}
            self._conversation.alive = False
            answer = await self._conversation.ask({"fetch": names})
            return frames.unpack_files(answer["files"]) if answer else {}

    async def close(self) -> None:
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        self._conversation = None
        await self._stack.aclose()


def _request(language: str, code: str, files: Mapping[str, bytes], limits: Limits) -> bytes:
    paths = {PurePosixPath(name) for name in _paths(files, "files")}
    _check_limits(limits)
    for path in paths:
        if clash := paths.intersection(path.parents):
            raise DataError(f"{clash.pop()} is a file and the folder of {path}", "one of the two", field="files")
    size = sum(map(len, files.values()))
    if size > limits.file_mib << 20:
        raise DataError(f"files of {size} bytes", f"at most file_mib={limits.file_mib} MiB in all", field="files")
    return marshal.dumps({"language": language, "code": code, "files": dict(files)})


def _check_limits(limits: Limits) -> None:
    most = asdict(MOST)
    for name, bound in asdict(limits).items():
        if not 0 < bound <= most[name]:
            raise DataError(f"a limit of {bound}", f"more than 0 and at most {most[name]}", field=name)


def _paths(paths: Iterable[str], field: str) -> list[str]:
    """The paths, each once. Raises DataError unless they lie in the working folder."""
    names = list(dict.fromkeys(paths))
    for name in names:
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise DataError(f"path {name!r}", "a relative path in the working folder, without '..'", field=field)
        try:
            longest = max(len(os.fsencode(part)) for part in path.parts)
        except UnicodeEncodeError as error:
            raise DataError(f"path {name!r}", "text that UTF-8 can encode", field=field) from error
        if longest > NAME_BYTES or len(os.fsencode(name)) > PATH_BYTES:
            bounds = f"at most {NAME_BYTES} bytes between slashes and {PATH_BYTES} in all"
            raise DataError(f"a path of {len(name)} characters, {name[:40]!r}..", bounds, field=field)
    return names


def _execution(answer: Mapping[str, Any], stdout: bytes, stderr: bytes) -> Execution:
    if "broken" in answer:
        raise ServiceDownError("sandbox", f"this machine cannot confine an execution: {answer['broken']}. {BWRAP_HINT}")
    if "refused" in answer:
        raise DataError(f"files that cannot be written ({answer['refused']})", "less than file_mib", field="files")
    notes = [f"killed: {answer['reason']}\n"] if answer["reason"] else []
    notes += [f"not fetched: {name!r}: {reason}\n" for name, reason in answer["left_out"].items()]
    out, errors = (
        (text[start:] + text[:start]).decode(errors="replace")
        for text, start in zip((stdout, stderr), answer["starts"], strict=True)
    )
    return Execution(
        status=Status(answer["status"]),
        stdout=out,
        stderr=errors + "".join(notes),
        return_code=answer["return_code"],
        seconds=answer["seconds"],
        files=frames.unpack_files(answer["files"]),
        killed=answer["reason"],
        left_out=answer["left_out"],
    )
