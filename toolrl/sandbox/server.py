"""`toolrl sandbox-server`: this machine's sandbox behind SandboxFusion's HTTP protocol.

Any client that reaches the port can run code: by default it listens on localhost only; on other interfaces a token is
required.
"""

import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse

from toolrl.sandbox import protocol
from toolrl.sandbox.inside import frames
from toolrl.sandbox.local import LANGUAGES, LocalSandbox
from toolrl.servers.answers import json_answer
from toolrl.servers.serving import add_serving_arguments, new_app, serve, serving_config
from verl.envs.sandbox import Execution, Limits, Status
from verl.errors import ConfigError, DataError, ServiceDownError
from verl.host.arguments import Arguments, positive_float, positive_int

log = logging.getLogger(__name__)


LARGEST = Limits(wall_s=300.0, memory_mib=4096)
MOST_CHARS, MOST_LINES = 1 << 13, 100  # of a traceback, the last ones: each newline could be a line


def make_app(sandbox: LocalSandbox, largest: Limits = LARGEST) -> FastAPI:
    """Its shutdown closes the sandbox. largest: maximum wall time and memory of a request"""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await sandbox.close()

    app = new_app("sandbox", lifespan)

    @app.exception_handler(DataError)
    async def refuse(_: Request, error: DataError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=400)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Runs a line of code: "ok" means that executions work."""
        try:
            done = await sandbox.run("print('ok')")
        except ServiceDownError as error:
            raise HTTPException(503, str(error)) from error
        return {"status": done.stdout.strip()}

    @app.get("/v1/ping")
    async def ping() -> str:
        """Liveness, independent of the load on the workers."""
        return "pong"

    @app.post("/run_code")
    async def run_code(request: protocol.RunCodeRequest) -> StreamingResponse:
        """Answers with a RunCodeResponse."""
        limits = protocol.limits_of(request.run_timeout, request.memory_limit_MB, sandbox.limits, largest)
        try:
            stdin, given = request.stdin or "", _files(request.files)
            done = await sandbox.run(request.code, request.language, stdin, given, request.fetch_files, limits)
        except ServiceDownError as error:
            return await json_answer(protocol.RunCodeResponse(status="SandboxError", message=str(error)).model_dump())
        result = protocol.CommandRunResult(
            status=protocol.RUN_STATUS[done.status],
            execution_time=done.seconds,
            return_code=done.return_code,
            stdout=done.stdout,
            stderr=done.stderr,
        )
        status = "Success" if done.status is Status.FINISHED else "Failed"
        files = frames.pack_files(done.files)
        return await json_answer(protocol.RunCodeResponse(status=status, run_result=result, files=files).model_dump())

    @app.post("/run_jupyter")
    async def run_jupyter(request: protocol.RunJupyterRequest) -> StreamingResponse:
        """Run cells in one interpreter, in order. A failed cell does not stop the next ones. Answers with a
        RunJupyterResponse."""
        try:
            response = await _run_cells(sandbox, request, largest)
        except ServiceDownError as error:
            response = protocol.RunJupyterResponse(status="SandboxError", message=str(error))
        return await json_answer(response.model_dump())

    return app


async def _run_cells(
    sandbox: LocalSandbox, request: protocol.RunJupyterRequest, largest: Limits
) -> protocol.RunJupyterResponse:
    """largest: maximum per cell; the total time limit is that times the number of cells."""
    started = time.monotonic()
    of_all = replace(largest, wall_s=largest.wall_s * len(request.cells))
    limits = protocol.limits_of(request.total_timeout, request.memory_limit_MB, sandbox.limits, of_all)
    session = await sandbox.session(_files(request.files))
    results: list[Execution] = []
    left_s = request.total_timeout
    try:
        for code in request.cells:
            wall_s = min(left_s, request.cell_timeout or left_s, largest.wall_s)
            results.append(await session.run(code, replace(limits, wall_s=wall_s, cpu_s=wall_s)))
            left_s -= results[-1].seconds
            if results[-1].return_code is None or left_s <= 0:  # killed, so the variables are lost
                break
        files = await session.fetch(request.fetch_files)
    finally:
        await session.close()
    ended = len(results) == len(request.cells) and all(done.return_code is not None for done in results)
    timed_out = any(done.status is Status.TIMEOUT for done in results) or left_s <= 0
    status = "Finished" if ended else "TimeLimitExceeded" if timed_out else "Error"
    return protocol.RunJupyterResponse(
        status="Success" if ended else "Failed",
        driver=protocol.CommandRunResult(status=status, execution_time=time.monotonic() - started),
        cells=[_cell(done) for done in results],
        files=frames.pack_files(files),
    )


def _cell(done: Execution) -> protocol.CellResult:
    """A traceback goes to stderr and to `error`, for programs and for notebooks."""
    end = done.stderr[-MOST_CHARS:]
    name, _, value = end.strip().rpartition("\n")[2].partition(": ")
    error: list[dict[str, Any]] = [{"ename": name, "evalue": value, "traceback": end.splitlines()[-MOST_LINES:]}]
    failed = done.status is not Status.FINISHED
    return protocol.CellResult(stdout=done.stdout, stderr=done.stderr, error=error if failed else [])


def _files(files: dict[str, str | None]) -> dict[str, bytes]:
    try:
        return frames.unpack_files({path: data or "" for path, data in files.items()})
    except ValueError as error:
        raise DataError("a file is not valid base64", "base64", field="files") from error


def arguments() -> Arguments:
    parser = Arguments("toolrl sandbox-server", __doc__)
    add_serving_arguments(parser, port=8080, max_body_mib=32)
    parser.add_argument("--workers", type=positive_int, default=2, help="concurrent executions")
    parser.add_argument("--isolation", default="bubblewrap", choices=["bubblewrap", "none"])
    parser.add_argument("--memory-mib", type=positive_int, default=Limits().memory_mib, help="default memory limit")
    parser.add_argument("--max-timeout-s", type=positive_float, default=LARGEST.wall_s, help="maximum of a request")
    parser.add_argument("--max-memory-mib", type=positive_int, default=LARGEST.memory_mib, help="maximum of a request")
    parser.add_argument("--require-cgroup", action="store_true", help="fail if no cgroup can be created")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted. Returns 2 if it cannot start."""
    options = arguments().read(argv)
    logging.basicConfig(level=logging.INFO)
    limits = Limits(memory_mib=options.memory_mib)
    try:
        sandbox = LocalSandbox(options.workers, options.isolation, limits=limits, require_cgroup=options.require_cgroup)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    log.info("%s, %d workers", " and ".join(LANGUAGES), options.workers)
    log.info("limits are enforced by %s", sandbox.cgroups or "polling: cannot create a cgroup here")
    largest = Limits(wall_s=options.max_timeout_s, memory_mib=max(options.memory_mib, options.max_memory_mib))
    return serve(make_app(sandbox, largest), serving_config(options))


if __name__ == "__main__":
    sys.exit(main())
