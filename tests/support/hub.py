"""A stand-in for the model hub, down to its connections."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Hub:
    """A server at a free port that counts connections.

    answer: what it sends; nothing: it is silent. every_s: seconds between two bytes of it
    """

    def __init__(self, answer: bytes = b"", every_s: float = 0.0) -> None:
        self.every_s = every_s
        self.socket, self.answer, self.connections = socket.create_server(("127.0.0.1", 0)), answer, 0
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        silent = []
        with suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                self.connections += 1
                if self.answer:
                    connection.recv(65536)
                    for place in range(len(self.answer)) if self.every_s else ():
                        connection.sendall(self.answer[place : place + 1])
                        time.sleep(self.every_s)
                    if not self.every_s:
                        connection.sendall(self.answer)
                    connection.close()
                else:
                    silent.append(connection)
