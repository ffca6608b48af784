"""A sandbox without walls, for tests of what is built on one: real processes, temporary folders, wall limits.

The limits are those of code that does not end by itself. Other code has all the time that a busy machine takes for it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.envs.sandbox import Execution, Limits, Status

ENDLESS = ("while True: pass", "sleep 30")
SESSION = """
import base64, contextlib, io, json, sys, traceback
answers, names = sys.stdout, {}
for line in sys.stdin:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(base64.b64decode(line).decode(), names)
        except Exception:
            traceback.print_exc()
            code = 1
    print(json.dumps([out.getvalue(), err.getvalue(), code]), file=answers, flush=True)
"""


def _wall_s(limits: Limits | None, *code: str | bytes) -> float | None:
    texts = [each.decode(errors="replace") if isinstance(each, bytes) else each for each in code]
    endless = any(each in text for each in ENDLESS for text in texts)
    return (limits or Limits()).wall_s if endless else None


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


class PlainSession:
    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None

    async def run(self, code: str, limits: Limits | None = None) -> Execution:
        started = time.monotonic()
        if self.process is None:
            pipe = asyncio.subprocess.PIPE
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SESSION, stdin=pipe, stdout=pipe, start_new_session=True
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(base64.b64encode(code.encode()) + b"\n")
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), _wall_s(limits, code))
        except TimeoutError:
            await self.close()
            return Execution(Status.TIMEOUT, "", "", None, time.monotonic() - started)
        out, err, code_ended = json.loads(line)
        status = Status.ERROR if code_ended else Status.FINISHED
        return Execution(status, out, err, code_ended, time.monotonic() - started)

    async def close(self) -> None:
        if self.process is not None:
            await _ended(self.process)
        self.process = None


class PlainSandbox:
    def __init__(self) -> None:
        self.sessions: list[PlainSession] = []

    async def run(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Execution:
        wall_s, started = _wall_s(limits, code, *(files or {}).values()), time.monotonic()
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-I", "-c", code] if language == "python" else ["bash", "-c", code]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for path, content in (files or {}).items():
                (folder / path).write_bytes(content)
            process = await asyncio.create_subprocess_exec(
                *command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
            try:
                out, err = await asyncio.wait_for(process.communicate(stdin.encode()), wall_s)
            except TimeoutError:
                return Execution(Status.TIMEOUT, "", "", None, time.monotonic() - started)
            finally:
                await _ended(process)
            status = Status.ERROR if process.returncode else Status.FINISHED
            found = {path: (folder / path).read_bytes() for path in fetch if (folder / path).is_file()}
        return Execution(status, out.decode(), err.decode(), process.returncode, time.monotonic() - started, found)

    async def session(self) -> PlainSession:
        self.sessions.append(PlainSession())
        return self.sessions[-1]

    async def close(self) -> None:
        for session in self.sessions:
            await session.close()
