"""Runs a command inside a sandbox without network, and passes connections to one loopback port to a Unix socket.

    python forward.py SOCKET PORT COMMAND ..

Standard library only.
"""

import asyncio
import sys
from contextlib import suppress

_BYTES = 1 << 16


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that arrives, to its end."""
    with suppress(OSError):
        while part := await reader.read(_BYTES):
            writer.write(part)
            await writer.drain()
        writer.write_eof()


async def run(socket: str, port: int, command: "list[str]") -> int:
    """The exit status of the command."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(socket)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, back), copy(there, writer))
        for each in (writer, back):
            each.close()

    async with await asyncio.start_server(connected, "127.0.0.1", port):
        program = await asyncio.create_subprocess_exec(*command)
        code = await program.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
