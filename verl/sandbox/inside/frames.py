"""Messages between the pool and a supervisor: four bytes that tell the length, then JSON."""

from __future__ import annotations

import base64
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

LENGTH = struct.Struct("!I")


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


def send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Blocks until the frame is on its way."""
    channel.sendall(encode(message))


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next message; None when the other side has hung up."""
    head = _read(channel, LENGTH.size)
    body = head and _read(channel, *LENGTH.unpack(head))
    return decode(body) if body else None


def _read(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return b""
        parts += part
    return bytes(parts)
