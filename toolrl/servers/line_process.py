"""Programs in an interpreter of their own, which read and write lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from verl.errors import ServiceDownError

MAX_LINE = 1 << 28
Line = Mapping[str, Any]


class LineProcess:
    """A program, started on first use, and again after it has died. It ends with its standard input.

    Its first line is {"ready": ..} or {"failed": problem}. Raises ServiceDownError for one that has ended.

    name:    in messages
    key:     the field of its lines with the id of the request that they answer
    start_s: limit for its first line
    end_s:   limit for its end, after which it is killed; None: none
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        key: str,
        start_s: float | None,
        end_s: float | None = 10.0,
        environment: Mapping[str, str] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self.name = name
        self._command, self._key, self._start_s, self._end_s = command, key, start_s, end_s
        self._environment, self._stderr = environment, stderr
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._inboxes: dict[Hashable, asyncio.Queue[Line]] = {}

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Unless it runs."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._end_of_lines()
                self._process = await self._start_process()
                self._reading = asyncio.create_task(self._read(self._process))

    async def open(self, id: Hashable, /, **line: Any) -> asyncio.Queue[Line]:
        """Send a request. Its answers arrive in the queue, and {"failed": .., "code": ..} if the process ends."""
        await self.start()
        inbox = self._inboxes[id] = asyncio.Queue()
        self.send(**line)
        return inbox

    def send(self, **line: Any) -> None:
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            raise ServiceDownError(self.name, "its process has ended")
        process.stdin.write(json.dumps(line).encode() + b"\n")

    async def next(self, inbox: asyncio.Queue[Line]) -> Line:
        line = await inbox.get()
        if "failed" in line:
            raise ServiceDownError(self.name, line["failed"])
        return line

    def forget(self, id: Hashable) -> None:
        self._inboxes.pop(id, None)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._end_s):
                await process.wait()
        await _kill(process)
        await self._end_of_lines()

    async def _end_of_lines(self) -> None:
        """Until requests to an ended process have failed. In another event loop than before, they have."""
        if self._reading is not None and not self._reading.done():
            await asyncio.wait([self._reading])

    async def _start_process(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=pipe,
                stdout=pipe,
                stderr=self._stderr,
                limit=MAX_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise ServiceDownError(self.name, f"{self._command[0]} cannot be started ({error})") from error
        problem = f"did not start within {self._start_s} s"
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._start_s):
                    assert process.stdout is not None
                    line = json.loads(await process.stdout.readline() or "{}")
                if "ready" in line:
                    return process
                problem = line.get("failed", "ended while starting; its messages are on stderr")
        except BaseException:
            await _kill(process)
            raise
        await _kill(process)
        raise ServiceDownError(self.name, problem)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Pass on its lines; what still waits when it ends, or the event loop does, has failed."""
        assert process.stdout is not None
        try:
            while raw := await process.stdout.readline():
                line = json.loads(raw)
                inbox = self._inboxes.get(line.get(self._key, ""))
                if inbox is not None:
                    inbox.put_nowait(line)
            await process.wait()
        finally:
            code = await _kill(process)
            for inbox in self._inboxes.values():
                inbox.put_nowait({"failed": f"its process has ended with code {code}", "code": code})
            self._inboxes.clear()


async def _kill(process: asyncio.subprocess.Process) -> int:
    """The exit code, also of a process that has ended. What it has started ends with it."""
    with suppress(ProcessLookupError):
        process.kill()
    return await process.wait()
