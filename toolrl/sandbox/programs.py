"""Runs programs of others in the sandbox, next to code: under the same supervisors, filter, namespaces and limits.

A program differs from code in what it needs: more of the host to read, and one server. The supervisor makes the socket
on which that server listens, in the program's own network namespace, and passes it to the owner.
"""

from __future__ import annotations

import asyncio
import marshal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from toolrl.sandbox.cgroups import HINT, CgroupPool, find_cgroups
from toolrl.sandbox.fork_server import ForkServer, View
from toolrl.sandbox.local import MOST, Exchange
from verl.envs.sandbox import Execution, Limits
from verl.errors import ConfigError, ServiceDownError

FOLDER = "/tmp/work"  # working folder of a program
OUTPUT_KIB = 64  # kept from the end of each output
FETCH_MIB = 1
PROGRAM_LIMITS = Limits(
    wall_s=MOST.wall_s, cpu_s=MOST.cpu_s, memory_mib=4096, processes=512, file_mib=1024, output_kib=OUTPUT_KIB
)
Listen = Callable[[socket.socket], Awaitable[asyncio.Server]]  # starts a server on a socket


@dataclass(frozen=True)
class Program:
    """env: all of its variables; files: by their names in FOLDER; fetch: files to return; port: of the server"""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    files: Mapping[str, bytes]
    fetch: Sequence[str] = ()
    port: int | None = None


class ProgramSandbox:
    """One fork server for any number of programs at a time. Belongs to the event loop of the first one until `close`.

    view: what they see of the host
    require_cgroup: raise ConfigError if this machine has no cgroup to limit memory and processes
    """

    def __init__(self, view: View, limits: Limits = PROGRAM_LIMITS, *, require_cgroup: bool = False) -> None:
        cgroups = find_cgroups()
        if cgroups is None and require_cgroup:
            raise ConfigError(f"sandbox.isolation=strict: no cgroup can be made here. {HINT}")
        self._pool = CgroupPool(cgroups) if cgroups else None
        self._view, self.limits = view, limits
        self._server: ForkServer | None = None

    async def start(self) -> None:
        """Raises ServiceDownError. The first program would wait for it, too."""
        if self._server is None:
            self._server = ForkServer("bubblewrap", (), self._pool, self._view)
            self._server.drop(await self._server.open())

    async def run(self, program: Program, listen: Listen | None = None) -> Execution:
        """Until it ends, or this is cancelled: then it is killed with all that it started. Raises ServiceDownError.

        listen: called with a socket that listens on the program's own loopback interface
        """
        await self.start()
        assert self._server is not None
        server = self._server
        channel = await server.open()
        try:
            execution = await self._run(Exchange(channel, server), program, listen)
        finally:
            server.drop(channel)
        if execution is None:
            raise ServiceDownError("sandbox", "its supervisor exited without an answer")
        return execution

    async def _run(self, exchange: Exchange, program: Program, listen: Listen | None) -> Execution | None:
        message = {"argv": list(program.argv), "cwd": program.cwd, "env": dict(program.env)}
        request = marshal.dumps({"language": "program", "code": message, "files": dict(program.files)})
        task: dict[str, Any] = {"limits": asdict(self.limits), "fetch": list(program.fetch), "fetch_mib": FETCH_MIB}
        task["last_output"] = True
        if listen is None:
            return await exchange.run(task, request, b"")
        local, remote = socket.socketpair()
        with local, remote:
            local.setblocking(False)
            serving = asyncio.create_task(_serve(local, listen))
            try:
                return await exchange.run(task | {"port": program.port}, request, b"", more=[remote.fileno()])
            finally:
                serving.cancel()
                with suppress(asyncio.CancelledError):
                    await serving

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if self._pool:
            await asyncio.to_thread(self._pool.close)


async def _serve(door: socket.socket, listen: Listen) -> None:
    """Serve on the socket that comes through the door."""
    loop = asyncio.get_running_loop()
    come = asyncio.Event()
    loop.add_reader(door, come.set)
    try:
        await come.wait()
    finally:
        loop.remove_reader(door)
    _, descriptors, _, _ = socket.recv_fds(door, 1, 1)
    if not descriptors:  # the supervisor has exited, which the exchange reports
        return
    server = await listen(socket.socket(fileno=descriptors[0]))
    try:
        await loop.create_future()
    finally:
        server.close()
