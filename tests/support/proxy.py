"""A network that fails: a TCP proxy in front of a server, which can be set to damage what the server answers."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Self

FAULTS = ("refuse", "garbage", "cut", "corrupt", "stall")
MODES = ("pass", "slow", *FAULTS)
_SLOW_S = 0.05  # per part of an answer
_PART = 65536


class Proxy:
    """mode: of connections that are made, and of answers on open ones. turns: modes of one connection after another"""

    def __init__(self, host: str, port: int, mode: str = "pass", turns: Sequence[str] = ()) -> None:
        self.mode, self._turns = mode, cycle(turns) if turns else None
        self._target = host, port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._ended = threading.Event()
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for each in (self._listening, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                own = next(self._turns) if self._turns else None
                if (own or self.mode) == "refuse":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._open += [client, server]
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client, own), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(_PART):
                target.sendall(part)
        self._close(source, target)

    def _answer(self, server: socket.socket, client: socket.socket, own: str | None) -> None:
        with suppress(OSError):
            while part := server.recv(_PART):
                mode = own or self.mode
                if mode == "slow" and self._ended.wait(_SLOW_S):
                    break
                if mode == "stall":
                    self._ended.wait()
                if mode in ("garbage", "cut", "refuse"):
                    client.sendall({"garbage": b"\x00garbage\r\n" * 9, "cut": part[: len(part) // 2]}.get(mode, b""))
                    break
                client.sendall(bytes(each ^ 0xFF for each in part) if mode == "corrupt" else part)
        self._close(server, client)

    def _close(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def behind(url: str, mode: str = "pass", turns: Sequence[str] = ()) -> Iterator[Proxy]:
    """A proxy in front of the server at this URL."""
    host, _, port = url.removeprefix("http://").partition(":")
    with Proxy(host, int(port), mode, turns) as proxy:
        yield proxy
