"""HTTP services: our own ones listen here. Everything heavy is imported by who needs it."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from typing import Any


def serve(app: Any, host: str, port: int) -> int:
    """Serve an ASGI application until interrupted. Returns 2, after a line on stderr, for an address it cannot have."""
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        sys.stderr.write(f"error: cannot listen on {host} port {port} ({error}); choose another --host or --port\n")
        return 2
    with listening, suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
    return 0
