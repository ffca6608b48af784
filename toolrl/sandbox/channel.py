"""The owner's end of a socket to a supervisor, in an event loop: messages as frames (inside/frames.py)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from toolrl.sandbox.cgroups import Group
from toolrl.sandbox.inside import frames


def send_hello(channel: socket.socket, group: Group | None) -> None:
    """The first message to a supervisor: the files of its cgroup, which are closed here."""
    purposes, descriptors = (group.purposes, group.descriptors) if group else ([], [])
    with contextlib.suppress(OSError):  # it has died, which the first task detects
        socket.send_fds(channel, [frames.encode({"cgroup": purposes})], descriptors)
    if group:
        group.close()


async def send_frame(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Raises OSError if the supervisor has exited."""
    frame = frames.encode(message)
    sent = socket.send_fds(channel, [frame], list(descriptors))
    await asyncio.get_running_loop().sock_sendall(channel, frame[sent:])


async def receive_frame(channel: socket.socket) -> dict[str, Any]:
    """The next message. Raises OSError or EOFError if the supervisor has exited."""
    head = await _receive(channel, frames.LENGTH.size)
    return frames.decode(await _receive(channel, *frames.LENGTH.unpack(head)))


async def _receive(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(channel, min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
