"""Serves runtimes of this machine over SWE-ReX's wire (wire.py).

    toolrl runtime-server --capacity 8 --environments environments [--port 8200]

Clients of SWE-ReX, which know no lease, share one runtime with an empty repository. Any client that reaches the port
can run code in a runtime: beyond localhost a token is required (Authorization: Bearer, or X-API-Key).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from toolrl.servers.bounds import Bounds
from toolrl.servers.serving import add_serving_arguments, new_app, serve, serving_config
from toolrl.swe import wire
from toolrl.swe.leases import LARGEST, OPTIONS, Leases
from toolrl.swe.local import LocalRuntimes
from toolrl.swe.routes import CommandRoutes, Failure, FileRoutes, LeaseRoutes
from toolrl.swe.runtime import CommandFailedError, RuntimeLostError
from verl.errors import ConfigError, DataError
from verl.host.arguments import Arguments, positive_float, positive_int

JSON = Bounds(max_mib=16)  # of commands and texts; files are uploaded


def make_app(leases: Leases) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(lambda: leases.images)  # made, and those of an earlier server measured
        reaper = asyncio.create_task(leases.reap())
        yield
        reaper.cancel()
        await leases.close()

    app = new_app("runtimes", lifespan, JSON)

    @app.exception_handler(Failure)
    async def fail(_: Request, error: Failure) -> JSONResponse:
        return JSONResponse(wire.failure(error.class_path, _printable(error)), status_code=wire.FAILED)

    @app.exception_handler(CommandFailedError)
    async def fail_command(_: Request, error: CommandFailedError) -> JSONResponse:
        return JSONResponse(wire.failure("builtins.OSError", _printable(error)), status_code=wire.FAILED)

    @app.exception_handler(DataError)
    async def refuse(_: Request, error: DataError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=wire.REFUSED)

    @app.exception_handler(RuntimeLostError)
    async def lose(_: Request, error: RuntimeLostError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=wire.NO_LEASE)

    for routes in (LeaseRoutes(leases), CommandRoutes(leases), FileRoutes(leases)):
        routes.add_to(app)
    return app


def _printable(error: Exception) -> str:
    """Its text may quote a path with half a character."""
    return str(error).encode(errors="backslashreplace").decode()


def arguments() -> Arguments:
    parser = Arguments("toolrl runtime-server", __doc__)
    add_serving_arguments(parser, port=8200, max_body_mib=512)
    parser.add_argument("--capacity", type=positive_int, default=4, help="runtimes at a time")
    parser.add_argument("--queue", type=positive_int, default=256, help="requests that wait for a runtime")
    parser.add_argument("--lease-s", type=positive_float, default=60.0, help="end runtimes that no client renews")
    parser.add_argument("--environments", type=Path, help="folder of environments (scripts/swe/prepare.py)")
    parser.add_argument("--folder", type=Path, help="for images and runtimes, on a disk; default: a temporary one")
    parser.add_argument("--max-images-gib", type=positive_float, default=50.0, help="of unused repositories on disk")
    for name, option in OPTIONS.items():
        kind = positive_float if name == "command_s" else positive_int
        parser.add_argument(option, type=kind, default=getattr(LARGEST, name), help="maximum of a lease")
    parser.add_argument("--require-cgroup", action="store_true", help="fail if no cgroup can be created")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Returns 2 if it cannot start."""
    parser = arguments()
    options = parser.read(argv)
    if options.environments and not options.environments.is_dir():
        parser.error(f"--environments {options.environments} is not a folder")
    if options.folder and options.folder.exists() and not options.folder.is_dir():
        parser.error(f"--folder {options.folder} is not a folder")
    logging.basicConfig(level=logging.INFO)
    try:
        runtimes = LocalRuntimes(options.folder, require_cgroup=options.require_cgroup)
    except (ConfigError, DataError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    environments = options.environments and options.environments.absolute()
    largest = replace(
        LARGEST, memory_mib=options.max_memory_mib, file_mib=options.max_file_mib, command_s=options.max_timeout_s
    )
    limits = (options.max_body_mib, options.max_images_gib, largest)
    leases = Leases(runtimes, options.capacity, options.queue, options.lease_s, environments, *limits)
    return serve(make_app(leases), serving_config(options))


if __name__ == "__main__":
    sys.exit(main())
