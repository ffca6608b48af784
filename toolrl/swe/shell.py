"""A persistent shell of a local runtime: bash, with one pipe for commands and one for their exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolrl.swe.runtime import (
    TESTBED,
    Collected,
    CommandFailedError,
    CommandResult,
    CommandStatus,
    RuntimeLostError,
)

if TYPE_CHECKING:
    from toolrl.swe.local import SupervisorLink

# Interactive, so that SIGINT ends the command and not the shell; no terminal, so that programs neither page nor color.
BASH = ("/bin/bash", "--noprofile", "--norc", "--noediting", "-i")
COMMANDS, CODES = 193, 194  # descriptors of the shell that commands do not hold
BEGIN = f"exec {COMMANDS}<&3 {CODES}>&4 3<&- 4>&-\n"
# `$?` is the last command's, by a list, which no ERR trap sees. `set -x` does not trace what is ours. The empty line
# ends what a syntax error in eval leaves in bash's parser.
ONE_COMMAND = (
    f"{{{{ IFS= read -r -d '' -u {COMMANDS} REPLY; (exit {{status}}) && :; }}}} 2>/dev/null\n"  # words: allowed
    f'eval "$REPLY" </dev/null {COMMANDS}<&- {CODES}>&-\n\n'  # words: allowed
    f'{{{{ printf \'%s\\0%s\\0\' "$?" "$PWD" >&{CODES}; }}}} 2>/dev/null\n'
)
INTERRUPT_S = 2.0  # until an interrupted command is killed with its shell
START_S = 20.0
# Bash's own, without a terminal, after a program that a signal ended.
NOISE = re.compile(r"^bash: \[\d+: \d+ \(\d+\)\] tcsetattr: Inappropriate ioctl for device\n", re.MULTILINE)
CHUNK = 1 << 16
MAX_CHUNKS = 64  # drained after a command: a background process may write without end


class RuntimeShell:
    def __init__(self, supervisor: SupervisorLink, variables: Mapping[str, str], output_chars: int) -> None:
        self._supervisor, self._variables, self._output_chars = supervisor, variables, output_chars
        self._cwd = TESTBED
        self._pid = 0
        self._running = False  # a command, since a soft time-out
        self._lock = asyncio.Lock()

    async def run(self, command: str, hard_s: float, soft_s: float | None) -> CommandResult:
        async with self._lock:
            if self._running and command.strip():
                raise CommandFailedError("the last command is running: wait with an empty one, or interrupt it")
            if not self._pid:
                await self._start()
            if not self._running:
                self._begin(command)
            return await self._result(hard_s, soft_s)

    async def interrupt(self) -> CommandResult:
        if self._pid:
            with contextlib.suppress(RuntimeLostError):
                await self._supervisor.signal(self._pid, signal.SIGINT)
        async with self._lock:
            if not self._running:
                return CommandResult("", None, CommandStatus.FINISHED, self._cwd)
            return await self._result(INTERRUPT_S, None)

    async def close(self) -> None:
        if self._pid:
            pid = self._pid
            await self._supervisor.signal(pid, signal.SIGKILL)
            await asyncio.wait({self._supervisor.ended(pid)})
        self.forget()

    def forget(self) -> None:
        """Its processes have ended."""
        if self._pid:
            self._pid = 0
            loop = asyncio.get_running_loop()
            for descriptor in (self._output, self._codes):
                loop.remove_reader(descriptor)
                os.close(descriptor)
            for pipe in (self._input, self._commands):
                pipe.close()
        self._running = False

    async def _start(self) -> None:
        """In the folder of the shell before; the code may have removed or closed it. Raises RuntimeLostError."""
        for cwd in dict.fromkeys((self._cwd, TESTBED, "/")):
            self._cwd = cwd
            started = await self._start_here()
            if started.status is CommandStatus.FINISHED:
                return
            await self.close()
        raise RuntimeLostError(f"no shell starts: {started.output[-500:]} {started.reason}")

    async def _start_here(self) -> CommandResult:
        pipes = [os.pipe() for _ in range(4)]  # input, output, commands, codes
        theirs = [pipes[0][0], pipes[1][1], pipes[1][1], pipes[2][0], pipes[3][1]]
        try:
            self._pid = await self._supervisor.spawn(BASH, self._variables, self._cwd, theirs)
        except BaseException:
            for descriptor in (pipes[0][1], pipes[1][0], pipes[2][1], pipes[3][0]):
                os.close(descriptor)
            raise
        finally:
            for descriptor in dict.fromkeys(theirs):
                os.close(descriptor)
        loop = asyncio.get_running_loop()
        self._output, self._codes = pipes[1][0], pipes[3][0]
        self._input, self._commands = [await _writer(pipes[number][1]) for number in (0, 2)]
        for descriptor, ready in ((self._output, self._take_output), (self._codes, self._take_code)):
            os.set_blocking(descriptor, False)
            loop.add_reader(descriptor, ready)
        self._input.write(BEGIN.encode())
        self._status = 0
        self._begin(":")
        return await self._result(START_S, None)

    def _begin(self, command: str) -> None:
        self._collected = Collected(self._output_chars)
        self._code = b""
        self._answered = asyncio.Event()
        self._running = True
        self._commands.write(command.replace("\0", "").encode(errors="replace") + b"\0")
        self._input.write(ONE_COMMAND.format(status=self._status).encode())

    async def _result(self, hard_s: float, soft_s: float | None) -> CommandResult:
        """Wait for the command, for the end of the shell, or for a time-out."""
        if soft_s is not None and soft_s < hard_s:
            if not await self._wait(soft_s):
                return self._made(None, CommandStatus.RUNNING)
        elif not await self._wait(hard_s):
            await self._supervisor.signal(self._pid, signal.SIGINT)
            if await self._wait(INTERRUPT_S):
                return self._finish(CommandStatus.TIMEOUT)
            await self._supervisor.signal(self._pid, signal.SIGKILL)
            await asyncio.wait({self._supervisor.ended(self._pid)})
            return self._lose(CommandStatus.TIMEOUT)
        return self._finish(CommandStatus.FINISHED)

    async def _wait(self, seconds: float) -> bool:
        """Whether the command or the shell has ended within this time."""
        answered = asyncio.ensure_future(self._answered.wait())
        ended = self._supervisor.ended(self._pid)
        try:
            waiting: set[asyncio.Future[Any]] = {answered, ended}
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()  # raises if the runtime is lost
            return self._answered.is_set() or ended.done()
        finally:
            answered.cancel()

    def _finish(self, status: CommandStatus) -> CommandResult:
        for _ in range(MAX_CHUNKS):
            if not self._take_output():
                break
        if not self._answered.is_set():
            return self._lose(CommandStatus.KILLED)
        code, cwd, _ = self._code.split(b"\0", 2)
        self._cwd, self._status = os.fsdecode(cwd), int(code)
        self._running = False
        return self._made(self._status if status is CommandStatus.FINISHED else None, status)

    def _lose(self, status: CommandStatus) -> CommandResult:
        self._take_output()
        reason, self._supervisor.excess = self._supervisor.excess, ""
        self.forget()
        return self._made(None, status, reason or "the shell has ended", restarted=True)

    def _made(
        self, code: int | None, status: CommandStatus, reason: str = "", *, restarted: bool = False
    ) -> CommandResult:
        return CommandResult(NOISE.sub("", self._collected.text()), code, status, self._cwd, reason, restarted)

    def _take_output(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, CHUNK)
            self._collected.add(data)
            if not data:
                asyncio.get_running_loop().remove_reader(self._output)
            return bool(data)
        return False

    def _take_code(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._codes, CHUNK)
            self._code += data
            if not data:
                asyncio.get_running_loop().remove_reader(self._codes)
            if self._code.count(b"\0") >= 2:
                self._answered.set()


async def _writer(descriptor: int) -> asyncio.WriteTransport:
    """Writes without blocking, whatever the size."""
    pipe = os.fdopen(descriptor, "wb", 0)
    transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, pipe)
    return transport
