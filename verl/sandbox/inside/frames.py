"""Messages between the pool and a supervisor: eight bytes with the length, then JSON; descriptors may go along."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

LENGTH = struct.Struct("!Q")
MOST_DESCRIPTORS = 16  # with one message


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """A frame's message, without its length."""
    message = json.loads(body)
    assert isinstance(message, dict)
    return message


def pack_files(files: Mapping[str, bytes]) -> dict[str, str]:
    """Files as JSON can hold them."""
    return {path: base64.b64encode(data).decode() for path, data in files.items()}


def unpack_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """The inverse of `pack_files`. ValueError for what is no base64."""
    return {path: base64.b64decode(data, validate=True) for path, data in files.items()}


def sealed(data: bytes) -> int:
    """A descriptor to read the data from; nobody can write there."""
    descriptor = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def contents(descriptor: int) -> bytes:
    """All that a file holds, wherever it is read at present."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Blocks until the frame is on its way."""
    channel.sendall(encode(message))


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and what came along; None when the other side has hung up."""
    head, descriptors, _, _ = socket.recv_fds(channel, LENGTH.size, MOST_DESCRIPTORS)  # a frame begins in one piece
    body = head and _read(channel, *LENGTH.unpack(head))
    return decode(body) if body else None, descriptors


def _read(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return b""
        parts += part
    return bytes(parts)
