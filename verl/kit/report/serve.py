"""The report of running runs, which refreshes itself: server-sent events announce new steps."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil

from verl.checkpoint.crash import CRASH_FILES
from verl.errors import ConfigError, VerlError
from verl.kit.report.page import render

_WATCHED = ("metrics.jsonl", "collapses.jsonl", "config.yaml")
_PERIOD_S = 1.0
_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_EVERY = ("0.0.0.0", "")


def _own_names() -> set[str]:
    """The names and IPv4 addresses of this machine."""
    addresses = {each.address for every in psutil.net_if_addrs().values() for each in every if each.family == AF_INET}
    return {socket.gethostname(), socket.getfqdn(), *addresses}


class ReportServer(ThreadingHTTPServer):
    """`/` is the report as of now, `/events?seen=VERSION` a stream with an event `changed` after every step of a run.

    A page has the version that it was rendered from, so a step that ends before its stream is open is an event, too.

    host: only pages of this host and of this machine are answered, so that no other site can read the report by a name
        that it points here
    user_code: as in `RunFolder`
    """

    daemon_threads = True

    def __init__(
        self, folders: Sequence[Path], host: str = "127.0.0.1", port: int = 0, user_code: bool = False
    ) -> None:
        self.folders, self.user_code = folders, user_code
        self._lock = threading.Lock()
        self._page: tuple[str, bytes] | None = None
        self.names = {host, *_LOCAL, *(_own_names() if host in _EVERY else ())}
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"cannot listen on {host}:{port} ({why}); choose another --port") from error

    def version(self) -> str:
        """Changes with every step of a run, and when it crashes."""
        crashes = [path for folder in self.folders for path in sorted(folder.glob(CRASH_FILES))[-1:]]
        stamps = [_stamp(path) for path in (*(each / name for each in self.folders for name in _WATCHED), *crashes)]
        return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]

    def page(self) -> bytes:
        """The report, written once per change."""
        with self._lock:
            now = self.version()  # before the files are read: what is written meanwhile is a later version
            if self._page is None or self._page[0] != now:
                self._page = (now, render(self.folders, now, self.user_code)[0].encode())
            return self._page[1]


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in self.server.names:
            self.send_error(HTTPStatus.FORBIDDEN, "the host of the request is not this server")
        elif (asked := urlsplit(self.path)).path == "/":
            self._send_page()
        elif asked.path == "/events":
            seen = parse_qs(asked.query).get("seen", [""])[0]
            self._send_events(self.headers.get("Last-Event-ID", seen))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_page(self) -> None:
        try:
            page = self.server.page()
        except VerlError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the run cannot be read", str(error))
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(page)

    def _send_events(self, known: str) -> None:
        """Until the browser closes the connection; comments in between find out that it has.

        known: the version that the browser has, by its page or by the last event before it connected again
        """
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        try:
            while True:
                now = self.server.version()
                event = ": \n\n" if now == known else f"event: changed\nid: {now}\ndata: {now}\n\n"
                self.wfile.write(event.encode())
                self.wfile.flush()
                known = now
                time.sleep(_PERIOD_S)
        except OSError:
            return

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request."""


def _stamp(path: Path) -> tuple[float, int]:
    try:
        found = path.stat()
    except OSError:
        return (0.0, 0)
    return (found.st_mtime, found.st_size)
