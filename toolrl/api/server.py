"""A trained model behind an OpenAI-compatible endpoint, in a process of its own."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2

from toolrl.api.child import environment
from verl.errors import ServiceDownError

_START_S = 600.0  # a large model on a slow disk
_STOP_S = 20.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Server:
    """A running server. base_url, model: for OpenAI's client, as `OpenAI(base_url=server.base_url, api_key="none")`"""

    base_url: str
    model: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End it, by force if it takes too long."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()


def serve(folder: Path, port: int | None) -> Server:
    """Start `toolrl serve` for a run's folder and wait until it responds. It ends with this process at the latest.

    Raises ServiceDownError.

    port: default: a free one
    """
    port = _free_port() if port is None else port
    command = [sys.executable, "-m", "toolrl.cli", "serve", str(folder), "--port", str(port)]
    surroundings = os.environ | environment()
    process = subprocess.Popen(command, env=surroundings, stdin=subprocess.DEVNULL, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}/v1", folder.name, process)
    atexit.register(server.stop)
    deadline = time.monotonic() + _START_S
    try:
        while not _responds(server.base_url):
            if process.poll() is not None:
                raise ServiceDownError("toolrl serve", f"ended with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise ServiceDownError("toolrl serve", f"did not respond within {_START_S:.0f} s")
            time.sleep(_POLL_S)
    except BaseException:
        server.stop()
        raise
    return server


def _responds(base_url: str) -> bool:
    """Asks the one address that needs no token."""
    try:
        return httpx2.get(base_url.removesuffix("/v1") + "/health", timeout=_POLL_S).is_success
    except httpx2.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
