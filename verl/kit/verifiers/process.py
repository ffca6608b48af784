"""The worker process (inside/worker.py) of the trainer: started on first use, and again after it has died."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, ServiceDownError

WORKER = Path(__file__).with_name("inside") / "worker.py"
MAX_LINE = 1 << 28
END_S = 10.0
Line = Mapping[str, Any]


class WorkerProcess:
    """Lines to and from the worker. Raises ServiceDownError for a worker that does not start, or has ended.

    python: interpreter with verifiers and the environment's package
    options: of the worker, see there
    """

    def __init__(self, python: str, options: Mapping[str, Any], start_s: float) -> None:
        if not os.access(python, os.X_OK):
            hint = "build it with scripts/verifiers/prepare.sh"
            raise ConfigError(f"env.options.python={python} is not an interpreter of an environment; {hint}")
        self._python, self._options, self._start_s = str(Path(python).absolute()), options, start_s
        self.name = f"verifiers environment {options['id']}"
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._inboxes: dict[str, asyncio.Queue[Line]] = {}

    async def open(self, name: str, **line: Any) -> asyncio.Queue[Line]:
        """Send the first line of an episode (or of a listing); its answers arrive in the queue."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start()
        inbox = self._inboxes[name] = asyncio.Queue()
        await self.send(**line)
        return inbox

    async def send(self, **line: Any) -> None:
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            raise ServiceDownError(self.name, "its process has ended")
        process.stdin.write(json.dumps(line).encode() + b"\n")
        with suppress(ConnectionError):  # the inboxes get the reason
            await process.stdin.drain()

    async def next(self, inbox: asyncio.Queue[Line]) -> Line:
        line = await inbox.get()
        if "failed" in line:
            raise ServiceDownError(self.name, line["failed"])
        return line

    def forget(self, name: str) -> None:
        self._inboxes.pop(name, None)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            await _kill(process)
        if self._reading is not None:
            await self._reading

    async def _start(self) -> None:
        binaries = str(Path(self._python).parent)
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        environment["PATH"] = f"{binaries}{os.pathsep}{environment.get('PATH', '')}"  # uv starts its programs
        process = await asyncio.create_subprocess_exec(
            self._python,
            str(WORKER),
            json.dumps(self._options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=MAX_LINE,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._start_s):
                first = await process.stdout.readline()
        except TimeoutError as error:
            await _kill(process)
            raise ServiceDownError(self.name, f"did not start within start_s={self._start_s:g}") from error
        line = json.loads(first) if first else {"failed": "ended while starting; its messages are on stderr"}
        if "failed" in line:
            await _kill(process)
            raise ServiceDownError(self.name, line["failed"])
        self._process, self._reading = process, asyncio.create_task(self._read(process, process.stdout))

    async def _read(self, process: asyncio.subprocess.Process, stdout: asyncio.StreamReader) -> None:
        while raw := await stdout.readline():
            line = json.loads(raw)
            inbox = self._inboxes.get(line.get("episode", ""))
            if inbox is not None:
                inbox.put_nowait(line)
        code = await _kill(process)
        for inbox in self._inboxes.values():
            inbox.put_nowait({"failed": f"its process has ended with code {code}"})


async def _kill(process: asyncio.subprocess.Process) -> int:
    """The exit code, also of a process that has ended."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(ProcessLookupError):
        process.kill()
    return await process.wait()


async def list_tasks(worker: WorkerProcess, count: int) -> list[Line]:
    """The data of the first tasks of the environment's taskset."""
    inbox = await worker.open("", list=count)
    tasks: list[Line] = []
    while "listed" not in (line := await worker.next(inbox)):
        tasks.append(line["task"])
    worker.forget("")
    return tasks
