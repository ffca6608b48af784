"""The report of running runs, which refreshes itself: server-sent events announce new steps."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from toolrl.analysis.report.page import render
from toolrl.servers.serving import Gate, ServingConfig, bounded_config, find_token
from verl.checkpoint.crash import CRASH_FILES
from verl.errors import ConfigError, VerlError
from verl.host.daemon import run_async

_WATCHED = ("metrics.jsonl", "collapses.jsonl", "config.yaml")
_PERIOD_S = 1.0
_FRESH = {"cache-control": "no-store"}
LOCAL = ServingConfig("127.0.0.1", 0)


class ReportServer:
    """`/` is the report as of now, `/events?seen=VERSION` a stream with an event `changed` after every step of a run.

    A page has the version that it was rendered from, so a step that ends before its stream is open is an event, too.

    config: where it listens and who may read; a port of 0 is any
    user_code: as in `RunFolder`
    """

    def __init__(self, folders: Sequence[Path], config: ServingConfig = LOCAL, user_code: bool = False) -> None:
        """Raises ConfigError if it cannot listen, or the token cannot be used."""
        self.folders, self.user_code = folders, user_code
        self._lock = threading.Lock()
        self._page: tuple[str, bytes] | None = None
        token = find_token(config)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            self._listening = socket.create_server((config.host, config.port), family=family)
        except (OSError, OverflowError, TypeError) as error:  # TypeError: an invalid host name
            why = error.strerror if isinstance(error, OSError) else error
            where = f"{config.host}:{config.port}"
            raise ConfigError(f"cannot listen on {where} ({why}); choose another --host or --port") from error
        self.port: int = self._listening.getsockname()[1]
        self.has_token = token is not None
        routes = [Route("/", self._answer_page), Route("/events", self._answer_events)]
        self._settings = bounded_config(Gate(Starlette(routes=routes), config, token), lifespan="off")
        self._server = uvicorn.Server(self._settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def serve_forever(self) -> None:
        """Until an interrupt, or `shutdown` in another thread."""
        gc.freeze()  # as in every server
        run_async(self._server.serve(sockets=[self._listening]), self._settings.get_loop_factory())

    def shutdown(self) -> None:
        self._server.should_exit = True

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

    async def _answer_page(self, _: Request) -> Response:
        try:
            return HTMLResponse(await asyncio.to_thread(self.page), headers=_FRESH)
        except VerlError as error:
            return PlainTextResponse(f"the run cannot be read: {error}", 503)

    async def _answer_events(self, request: Request) -> Response:
        seen = request.headers.get("last-event-id", request.query_params.get("seen", ""))
        return StreamingResponse(self._events(seen), media_type="text/event-stream", headers=_FRESH)

    async def _events(self, known: str) -> AsyncIterator[str]:
        """Until the browser closes the connection.

        known: the version that the browser has, by its page or by the last event before it connected again
        """
        while not self._server.should_exit:
            now = await asyncio.to_thread(self.version)
            yield ": \n\n" if now == known else f"event: changed\nid: {now}\ndata: {now}\n\n"
            known = now
            await asyncio.sleep(_PERIOD_S)


def _stamp(path: Path) -> tuple[float, int]:
    try:
        status = path.stat()
    except OSError:
        return (0.0, 0)
    return (status.st_mtime, status.st_size)
