"""Serves runtimes of this machine over SWE-ReX's wire (wire.py).

    toolrl runtime-server --capacity 8 --environments environments [--port 8200]

Clients of SWE-ReX, which know no lease, share one runtime with an empty repository. Any client that reaches the port
can run code in a runtime: beyond localhost a token is required (Authorization: Bearer, or X-API-Key).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakValueDictionary

from fastapi import Body, FastAPI, File, Form, HTTPException, Request, UploadFile
from fastapi import Path as PathParameter
from fastapi.responses import JSONResponse

from verl.errors import ConfigError, DataError
from verl.kit.serving.serving import add_serving_arguments, new_app, serve, serving_config
from verl.kit.swe import wire
from verl.kit.swe.image import ImageStore, prepare_image
from verl.kit.swe.local import LocalRuntime, LocalRuntimes
from verl.kit.swe.runtime import TESTBED, CommandFailedError, CommandStatus, RuntimeLimits, RuntimeLostError
from verl.kit.swe.tasks import Repository, SweTask
from verl.system import untrusted_files
from verl.system.arguments import Arguments, positive_float, positive_int
from verl.system.untrusted_files import Limits
from verl.system.watcher import remove_tree

SHARED = "shared"  # the lease of clients that know none
SHARED_IDLE_S = 3600.0
KEPT_ANSWERS = 16  # per lease, for repeated requests
IMAGE_SECONDS, IMAGE_FILES = 300.0, 1_000_000
LARGEST = RuntimeLimits(
    memory_mib=16_384, processes=4_096, file_mib=65_536, files=2_000_000, command_s=14_400.0, output_chars=1_000_000
)
OPTIONS = {"memory_mib": "--max-memory-mib", "file_mib": "--max-file-mib", "command_s": "--max-timeout-s"}
UNZIP = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])"
log = logging.getLogger(__name__)
Operation = Callable[[], Awaitable[Any]]


@dataclass(slots=True)
class Leased:
    """A runtime that a client holds, with the answers to its last requests."""

    runtime: LocalRuntime
    limit_s: float
    held: ExitStack  # its slot and its image
    renewed: float = field(default_factory=time.monotonic)
    sessions: set[str] = field(default_factory=set)
    answers: OrderedDict[str, asyncio.Task[Any]] = field(default_factory=OrderedDict)
    in_flight: int = 0


class Failure(Exception):  # noqa: N818  an answer, rather than an error of the server
    """An error that the client raises again, by the path of its class."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.class_path = name if name.startswith("builtins.") else wire.ERRORS + name


class Leases:
    """At most `capacity` runtimes; `queue` more requests wait for one."""

    def __init__(
        self,
        runtimes: LocalRuntimes,
        capacity: int,
        queue: int,
        lease_s: float,
        environments: Path | None,
        max_body_mib: int,
        max_images_gib: float,
        largest: RuntimeLimits = LARGEST,
    ) -> None:
        self.runtimes, self.lease_s = runtimes, lease_s
        self._largest = largest
        self.max_body_mib, self._max_images_gib = max_body_mib, max_images_gib
        self._slots, self._queue, self._environments = asyncio.Semaphore(capacity), queue, environments
        self._waiting = 0
        self._open: dict[str, Leased] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._open)

    @cached_property
    def images(self) -> ImageStore:
        return ImageStore(self.runtimes.folder / "images", self.runtimes.episodes, self._max_images_gib)

    async def start(self, request: wire.LeaseRequest) -> wire.Lease:
        """Once, even if the client repeats the request. Raises HTTPException if it cannot start here."""
        async with self._starting(request.lease):
            if request.lease not in self._open:
                await self._start(request)
        return wire.Lease(lease=request.lease, lease_s=self.lease_s)

    def check_seconds(self, *given: float | None) -> None:
        """Raises HTTPException for the time limits of a command beyond the server's."""
        for seconds in given:
            if seconds is not None and not 0 <= seconds <= self._largest.command_s:
                most = f"from 0 to {self._largest.command_s:g} s on this server (--max-timeout-s)"
                raise HTTPException(wire.REFUSED, f"a time limit of {seconds:g} s; expected {most}")

    async def _start(self, request: wire.LeaseRequest) -> None:
        for name, most in asdict(self._largest).items():
            if (given := getattr(request.limits, name)) > most:
                expected = f"at most {most:.15g} on this server ({OPTIONS.get(name, 'not adjustable')})"
                raise HTTPException(wire.REFUSED, f"limits.{name} is {given:.15g}; expected {expected}")
        image = self.images.folder / request.image
        if not image.is_dir():
            limit = {wire.MAX_BODY: str(self.max_body_mib)}
            raise HTTPException(wire.NO_IMAGE, f"there is no image {request.image}", limit)
        environment = ""
        if request.environment:
            folder = self._environments and self._environments / request.environment
            if folder is None or not folder.is_dir():
                raise HTTPException(wire.REFUSED, f"no environment {request.environment!r} in --environments {folder}")
            environment = str(folder)
        task = SweTask(
            request.lease,
            "",
            ("",),
            environment=environment,
            setup=request.setup,
            limits=request.limits,
            workdir=request.workdir,
        )
        await self._add(request.lease, image, task, self.lease_s)

    async def of(self, name: str) -> Leased:
        """A lease, renewed. Raises HTTPException if it has ended."""
        if name == SHARED:
            async with self._starting(SHARED):
                if SHARED not in self._open:
                    await self._add(SHARED, await self._empty_image(), SweTask(SHARED, "", ("",)), SHARED_IDLE_S)
        if name not in self._open:
            raise HTTPException(wire.NO_LEASE, f"there is no lease {name}: it was closed, or not renewed in time")
        found = self._open[name]
        found.renewed = time.monotonic()
        return found

    async def end(self, name: str) -> None:
        if found := self._open.pop(name, None):
            with found.held:
                await found.runtime.close()

    async def reap(self) -> None:
        """End the leases whose clients have vanished, forever."""
        while True:
            await asyncio.sleep(self.lease_s / 4)
            now = time.monotonic()
            for name, found in list(self._open.items()):
                working = name == SHARED and found.in_flight  # other clients renew during commands, too
                if not working and now - found.renewed > found.limit_s:
                    log.warning("lease %s was not renewed for %g s; ending its runtime", name[:8], found.limit_s)
                    await self.end(name)

    async def close(self) -> None:
        for name in list(self._open):
            await self.end(name)
        await self.runtimes.close()

    def _starting(self, name: str) -> asyncio.Lock:
        """Of a lease: the second of two equal requests waits for the first."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def _add(self, name: str, image: Path, task: SweTask, limit_s: float) -> None:
        if self._slots.locked() and self._waiting >= self._queue:
            raise HTTPException(wire.FULL, "all runtimes are in use", {"Retry-After": "1"})
        with ExitStack() as held:
            held.enter_context(self.images.used(image.name))
            self._waiting += 1
            try:
                await self._slots.acquire()
            finally:
                self._waiting -= 1
            held.callback(self._slots.release)
            runtime = await self.runtimes.start_from(image, task)
            self._open[name] = Leased(runtime, limit_s, held.pop_all())

    async def _empty_image(self) -> Path:
        with tempfile.TemporaryDirectory() as folder:
            task = SweTask(SHARED, "", ("",), repository=Repository(folder))
            return await asyncio.to_thread(prepare_image, task, self.images.folder)


def make_app(leases: Leases) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(leases.reap())
        yield
        reaper.cancel()
        await leases.close()

    app = new_app("runtimes", lifespan)

    @app.exception_handler(Failure)
    async def fail(_: Request, error: Failure) -> JSONResponse:
        return JSONResponse(wire.failure(error.class_path, str(error)), status_code=wire.FAILED)

    @app.exception_handler(CommandFailedError)
    async def fail_command(_: Request, error: CommandFailedError) -> JSONResponse:
        return JSONResponse(wire.failure("builtins.OSError", str(error)), status_code=wire.FAILED)

    @app.exception_handler(DataError)
    async def refuse(_: Request, error: DataError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=wire.REFUSED)

    @app.exception_handler(RuntimeLostError)
    async def lose(_: Request, error: RuntimeLostError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=wire.NO_LEASE)

    async def once(request: Request, work: Callable[[Leased], Awaitable[Any]]) -> Any:
        """Do it once, even if the client repeats the request because its connection broke.

        A lost runtime ends its lease: it has no use, but files.
        """
        name = request.headers.get(wire.LEASE, SHARED)
        found = await leases.of(name)
        number = request.headers.get(wire.REQUEST_ID) or secrets.token_hex(8)
        if number not in found.answers:
            found.answers[number] = asyncio.ensure_future(_counted(found, work))
            while len(found.answers) > KEPT_ANSWERS:
                found.answers.popitem(last=False)
        try:
            return await asyncio.shield(found.answers[number])
        except RuntimeLostError:
            await leases.end(name)
            raise

    @app.get("/")
    async def root() -> dict[str, Any]:
        return {"message": "hello world", "leases": len(leases)}

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"leases": len(leases)}

    @app.get("/is_alive")
    async def is_alive(request: Request) -> dict[str, Any]:
        """Renews a lease."""
        if name := request.headers.get(wire.LEASE):
            await leases.of(name)
        return {"is_alive": True, "message": ""}

    @app.put("/image/{digest}")
    async def image(
        digest: Annotated[str, PathParameter(pattern="^[0-9a-f]{40}$")],
        packed: Annotated[bytes, Body(media_type=wire.TAR)],
    ) -> dict[str, str]:
        target, most_mib = leases.images.folder / digest, leases.max_body_mib
        await asyncio.to_thread(_unpack_image, packed, target, leases.runtimes.episodes, most_mib)
        await leases.images.make_room(digest)
        return {}

    @app.post("/lease")
    async def lease(request: wire.LeaseRequest) -> wire.Lease:
        return await leases.start(request)

    @app.post("/snapshot")
    async def snapshot(request: Request) -> wire.Snapshot:
        return wire.Snapshot(name=await once(request, lambda found: found.runtime.snapshot()))

    @app.post("/restore")
    async def restore(request: Request, body: wire.Snapshot) -> dict[str, str]:
        await once(request, lambda found: found.runtime.restore(body.name))
        return {}

    @app.post("/create_session")
    async def create_session(request: Request, body: wire.SessionRequest) -> dict[str, str]:
        return {"output": await once(request, lambda found: _create(found, body)), "session_type": "bash"}

    @app.post("/run_in_session")
    async def run_in_session(request: Request, body: wire.ActionRequest) -> wire.ActionResponse:
        leases.check_seconds(body.timeout, body.soft_timeout)
        observation: wire.ActionResponse = await once(request, lambda found: _act(found, body))
        return observation

    @app.post("/close_session")
    async def close_session(request: Request, body: wire.SessionRequest) -> dict[str, str]:
        await once(request, lambda found: _close_session(found, body.session))
        return {"session_type": "bash"}

    @app.post("/execute")
    async def execute(request: Request, body: wire.CommandRequest) -> wire.CommandResponse:
        leases.check_seconds(body.timeout)
        response: wire.CommandResponse = await once(request, lambda found: _execute(found, body))
        return response

    @app.post("/read_file")
    async def read_file(request: Request, body: wire.ReadFile) -> dict[str, str]:
        data: bytes = await once(request, lambda found: found.runtime.read(body.path))
        try:
            return {"content": data.decode(body.encoding or "utf-8", body.errors or "strict")}
        except (UnicodeError, LookupError) as error:
            raise Failure("builtins.ValueError", f"{body.path}: {error}") from error

    @app.post("/write_file")
    async def write_file(request: Request, body: wire.WriteFile) -> dict[str, str]:
        await once(request, lambda found: found.runtime.write(body.path, body.content.encode()))
        return {}

    @app.post("/upload")
    async def upload(
        request: Request,
        file: Annotated[UploadFile, File()],
        target_path: Annotated[str, Form()],
        unzip: Annotated[bool, Form()] = False,
    ) -> dict[str, str]:
        data = await file.read()
        await once(request, lambda found: _upload(found.runtime, data, target_path, unzip))
        return {}

    @app.post("/close")
    async def close(request: Request) -> dict[str, str]:
        await leases.end(request.headers.get(wire.LEASE, SHARED))
        return {}

    return app


async def _counted(found: Leased, work: Callable[[Leased], Awaitable[Any]]) -> Any:
    found.in_flight += 1
    try:
        return await work(found)
    finally:
        found.in_flight -= 1
        found.renewed = time.monotonic()


def _unpack_image(packed: bytes, target: Path, folder: Path, most_mib: float) -> None:
    """Raises HTTPException for what is no image, and if the disk is full, which another server's may not be.

    folder: on the same disk, removed also after a kill
    """
    unfinished = Path(tempfile.mkdtemp(dir=folder))
    tree, limits = unfinished / "tree", Limits(mib=most_mib, files=IMAGE_FILES, seconds=IMAGE_SECONDS)
    try:
        with tempfile.TemporaryFile(dir=unfinished) as archive:
            archive.write(packed)
            untrusted_files.unpack(archive, tree, limits, "kept", mine=False)
        if not untrusted_files.is_folder(tree / ".git"):  # which every runtime has as a folder of its own
            raise HTTPException(wire.REFUSED, "the image has no folder .git")
        if not target.exists():
            tree.rename(target)
    except DataError as error:
        raise HTTPException(wire.REFUSED, f"the image cannot be unpacked: {error}") from error
    except OSError as error:
        raise HTTPException(507, f"the image cannot be stored: {error}") from error
    finally:
        remove_tree(unfinished)


async def _create(found: Leased, body: wire.SessionRequest) -> str:
    if body.session in found.sessions:
        raise Failure("SessionExistsError", f"session {body.session} already exists")
    found.sessions.add(body.session)
    sources = " && ".join(f". {source}" for source in body.startup_source)
    return (await found.runtime.run(sources, session=body.session)).output if sources else ""


async def _close_session(found: Leased, session: str) -> None:
    _check_session(found, session)
    found.sessions.discard(session)
    await found.runtime.close_session(session)


def _check_session(found: Leased, session: str) -> None:
    if session not in found.sessions:
        raise Failure("SessionDoesNotExistError", f"session {session!r} does not exist")


async def _act(found: Leased, body: wire.ActionRequest) -> wire.ActionResponse:
    _check_session(found, body.session)
    if body.is_interactive_command or body.is_interactive_quit:
        raise Failure("builtins.ValueError", "sessions have no terminal: interactive programs are not supported")
    if body.action_type == "bash_interrupt":
        done = await found.runtime.interrupt(body.session)
    else:
        done = await found.runtime.run(body.command, body.timeout, body.soft_timeout, body.session)
    observation = wire.ActionResponse(
        output=done.output,
        exit_code=None if body.check == "ignore" else done.exit_code,
        failure_reason=done.reason,
        status=done.status,
        cwd=done.cwd,
        shell_restarted=done.shell_restarted,
    )
    if body.extended:
        return observation
    if body.action_type == "bash_interrupt":
        return observation.model_copy(update={"exit_code": 0})
    if done.status is CommandStatus.TIMEOUT:
        raise Failure("CommandTimeoutError", f"timeout after {body.timeout} seconds while running {body.command!r}")
    if body.check == "raise" and done.exit_code != 0:
        problem = f"Command {body.command!r} failed with exit code {done.exit_code}. Its output:\n{done.output!r}"
        raise Failure("NonZeroExitCodeError", f"{body.error_msg}: {problem}".removeprefix(": "))
    return observation


async def _execute(found: Leased, body: wire.CommandRequest) -> wire.CommandResponse:
    argv = body.command if isinstance(body.command, list) else [body.command]
    argv = ["/bin/sh", "-c", *argv] if body.shell else argv
    if body.merge_output_streams:
        argv = ["/bin/sh", "-c", 'exec "$0" "$@" 2>&1', *argv]
    done = await found.runtime.execute(argv, b"", body.cwd or TESTBED, body.env, body.timeout)
    if done.exit_code is None:
        raise Failure("CommandTimeoutError", f"Timeout ({body.timeout}s) exceeded, or killed, while running command")
    stdout, stderr = (stream.decode(errors="backslashreplace") for stream in (done.stdout, done.stderr))
    if body.check and done.exit_code != 0:
        problem = f"Command {body.command!r} failed with exit code {done.exit_code}. {stdout!r} {stderr!r}"
        raise Failure("NonZeroExitCodeError", f"{body.error_msg}: {problem}".removeprefix(": "))
    return wire.CommandResponse(stdout=stdout, stderr=stderr, exit_code=done.exit_code)


async def _upload(runtime: LocalRuntime, data: bytes, target: str, unzip: bool) -> None:
    place = f"/tmp/{secrets.token_hex(8)}.zip" if unzip else target
    await runtime.write(place, data)
    if unzip:
        done = await runtime.execute(["python3", "-I", "-c", UNZIP, place, target])
        if done.exit_code != 0:
            raise CommandFailedError(f"{target}: {done.stderr.decode(errors='replace')[-500:]}")


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
    return serve(make_app(leases), serving_config(options), files=(wire.TAR, "multipart/form-data"))


if __name__ == "__main__":
    sys.exit(main())
