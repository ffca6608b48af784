"""Messages to and from a supervisor: eight bytes with the length, then JSON, and descriptors."""

import base64
import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

LENGTH = struct.Struct("!Q")
MOST_DESCRIPTORS = 16  # per message


def encode(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    return dict(json.loads(body))


def pack_files(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(data).decode() for path, data in files.items()}


def unpack_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """The inverse of `pack_files`. Raises ValueError for invalid base64."""
    return {path: base64.b64decode(data, validate=True) for path, data in files.items()}


def sealed(data: bytes) -> int:
    """A read-only memfd with the data."""
    descriptor = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def contents(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    channel.sendall(encode(message))


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors; None on end of file."""
    head, descriptors, _, _ = socket.recv_fds(channel, LENGTH.size, MOST_DESCRIPTORS)  # the header arrives in one piece
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
