"""Our own servers as processes, for tests: started, waited for, ended."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import psutil

START_S = 60.0


def free_port() -> int:
    """One that the system gives to no other process for the next minute, and refuses connections until it is used.

    A connection that this end has closed first still has it; a server with SO_REUSEADDR, as all are, may listen there.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        accepted.close()
        client.recv(1)
        return int(server.getsockname()[1])


@contextmanager
def service(*command: str, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python command...`, from when `url` answers until it is killed."""
    process = subprocess.Popen([sys.executable, *command])
    try:
        wait_for(url, process)
        yield process
    finally:
        process.kill()
        process.wait()


def listeners(port: int) -> set[tuple[str, int]]:
    """(address, process) of the listener at the port."""
    found = psutil.net_connections("tcp")
    return {
        (each.laddr.ip, each.pid) for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until anything answers there, be it an error."""
    for _ in range(int(START_S / 0.05)):
        assert process.poll() is None, "the server ended before it answered"
        try:
            httpx2.get(url, timeout=5)
        except httpx2.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"{url} does not answer")
