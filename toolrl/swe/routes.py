"""The requests of a runtime server: leases and images, sessions, files."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import FastAPI, File, Form, HTTPException, Request, UploadFile
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse

from toolrl.servers.answers import PIECE, streamed
from toolrl.swe import wire
from toolrl.swe.leases import SHARED, Leased, Leases
from toolrl.swe.local import LocalRuntime
from toolrl.swe.runtime import TESTBED, CommandFailedError, CommandStatus, Completed, RuntimeLostError
from verl.errors import DataError
from verl.host import untrusted_files
from verl.host.untrusted_files import Limits, shown
from verl.host.watcher import remove_tree

KEPT_ANSWERS = 16  # per lease, for repeated requests
WRITTEN_BYTES = 4 << 20  # of an image, at a time
IMAGE_SECONDS, IMAGE_FILES = 300.0, 1_000_000
MAX_REF_BYTES = 1 << 10  # of .git/HEAD and of the branch that it names
QUOTED_BYTES = 1 << 16  # of an output in an error
SLOW_ENCODINGS = ("idna", "punycode")  # in Python, with loops in loops
UNZIP = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])"


class Failure(Exception):  # noqa: N818  an answer, rather than an error of the server
    """An error that the client raises again, by the path of its class."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.class_path = name if name.startswith("builtins.") else wire.ERRORS + name


class LeaseRoutes:
    """Images, leases and their ends."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    def add_to(self, app: FastAPI) -> None:
        app.get("/")(self.root)
        app.get("/health")(self.health)
        app.get("/is_alive")(self.is_alive)
        app.put("/image/{digest}")(self.image)
        app.post("/lease")(self.lease)
        app.post("/close")(self.close)

    async def root(self) -> dict[str, Any]:
        return {"message": "hello world", "leases": len(self._leases)}

    async def health(self) -> dict[str, int]:
        return {"leases": len(self._leases)}

    async def is_alive(self, request: Request) -> dict[str, Any]:
        """Renews a lease."""
        if name := request.headers.get(wire.LEASE):
            await self._leases.of(name)
        return {"is_alive": True, "message": ""}

    async def image(
        self, digest: Annotated[str, PathParameter(pattern="^[0-9a-f]{40}$")], request: Request
    ) -> dict[str, str]:
        leases = self._leases
        target, folder, most_mib = leases.images.folder / digest, leases.runtimes.episodes, leases.max_body_mib
        with await asyncio.to_thread(lambda: tempfile.TemporaryFile("w+b", dir=folder)) as archive:
            await _receive(request, archive)
            await asyncio.to_thread(_unpack_image, archive, target, folder, most_mib)
        await leases.images.make_room(digest)
        return {}

    async def lease(self, request: wire.LeaseRequest) -> wire.Lease:
        return await self._leases.start(request)

    async def close(self, request: Request) -> dict[str, str]:
        await self._leases.end(request.headers.get(wire.LEASE, SHARED))
        return {}


class _RuntimeRoutes:
    """Requests to the runtime of a lease."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    async def _once(self, request: Request, work: Callable[[Leased], Awaitable[Any]]) -> Any:
        """Do it once, even if the client repeats the request because its connection broke.

        A lost runtime ends its lease: it has no use, but files.
        """
        name = request.headers.get(wire.LEASE, SHARED)
        leased = await self._leases.of(name)
        number = request.headers.get(wire.REQUEST_ID) or secrets.token_hex(8)
        if number not in leased.answers:
            leased.answers[number] = asyncio.ensure_future(_counted(leased, work))
            while len(leased.answers) > KEPT_ANSWERS:
                leased.answers.popitem(last=False)
        try:
            return await asyncio.shield(leased.answers[number])
        except RuntimeLostError:
            await self._leases.end(name)
            raise


class CommandRoutes(_RuntimeRoutes):
    """Commands, in sessions and without, and snapshots between them."""

    def add_to(self, app: FastAPI) -> None:
        app.post("/snapshot")(self.snapshot)
        app.post("/restore")(self.restore)
        app.post("/end_processes")(self.end_processes)
        app.post("/create_session")(self.create_session)
        app.post("/run_in_session")(self.run_in_session)
        app.post("/close_session")(self.close_session)
        app.post("/execute")(self.execute)

    async def snapshot(self, request: Request) -> wire.Snapshot:
        return wire.Snapshot(name=await self._once(request, lambda leased: leased.runtime.snapshot()))

    async def restore(self, request: Request, body: wire.Snapshot) -> dict[str, str]:
        await self._once(request, lambda leased: leased.runtime.restore(body.name))
        return {}

    async def end_processes(self, request: Request) -> dict[str, str]:
        await self._once(request, lambda leased: leased.runtime.end_processes())
        return {}

    async def create_session(self, request: Request, body: wire.SessionRequest) -> dict[str, str]:
        return {"output": await self._once(request, lambda leased: _create(leased, body)), "session_type": "bash"}

    async def run_in_session(self, request: Request, body: wire.ActionRequest) -> wire.ActionResponse:
        self._leases.check_seconds(body.timeout, body.soft_timeout)
        observation: wire.ActionResponse = await self._once(request, lambda leased: _act(leased, body))
        return observation

    async def close_session(self, request: Request, body: wire.SessionRequest) -> dict[str, str]:
        await self._once(request, lambda leased: _close_session(leased, body.session))
        return {"session_type": "bash"}

    async def execute(self, request: Request, body: wire.CommandRequest) -> StreamingResponse:
        """Answers with a CommandResponse."""
        self._leases.check_seconds(body.timeout)
        return streamed(await self._once(request, lambda leased: _execute(leased, body)))


class FileRoutes(_RuntimeRoutes):
    """Files of a runtime, read and written."""

    def add_to(self, app: FastAPI) -> None:
        app.post("/read_file")(self.read_file)
        app.post("/write_file")(self.write_file)
        app.post("/upload")(self.upload)

    async def read_file(self, request: Request, body: wire.ReadFile) -> StreamingResponse:
        """Answers with the `content`."""
        data: bytes = await self._once(request, lambda leased: leased.runtime.read(body.path))
        try:
            content = _text("content", data, body.encoding or "utf-8", body.errors or "strict")
            return streamed(await asyncio.to_thread(lambda: [b"{", *content, b"}"]))
        except (ValueError, LookupError) as error:
            raise Failure("builtins.ValueError", f"{body.path}: {str(error)[:1000]}") from error

    async def write_file(self, request: Request, body: wire.WriteFile) -> dict[str, str]:
        try:
            content = body.content.encode()
        except UnicodeEncodeError as error:
            raise Failure("builtins.ValueError", f"{body.path}: {error.reason}") from error
        await self._once(request, lambda leased: leased.runtime.write(body.path, content))
        return {}

    async def upload(
        self,
        request: Request,
        file: Annotated[UploadFile, File()],
        target_path: Annotated[str, Form()],
        unzip: Annotated[bool, Form()] = False,
    ) -> dict[str, str]:
        data = await file.read()
        await self._once(request, lambda leased: _upload(leased.runtime, data, target_path, unzip))
        return {}


async def _counted(leased: Leased, work: Callable[[Leased], Awaitable[Any]]) -> Any:
    leased.in_flight += 1
    try:
        return await work(leased)
    finally:
        leased.in_flight -= 1
        leased.renewed = time.monotonic()


async def _receive(request: Request, archive: BinaryIO) -> None:
    """The body into a file, some MiB at a time. Raises HTTPException if the disk is full."""
    pieces: list[bytes] = []
    try:
        async for piece in request.stream():
            pieces.append(piece)
            if sum(map(len, pieces)) > WRITTEN_BYTES or not piece:
                await asyncio.to_thread(archive.writelines, pieces)
                pieces = []
    except OSError as error:
        raise HTTPException(507, f"the image cannot be stored: {error}") from error


def _unpack_image(archive: BinaryIO, target: Path, folder: Path, most_mib: float) -> None:
    """Raises HTTPException for what is no image, and if the disk is full, which another server's may not be.

    folder: on the same disk, removed also after a kill
    """
    unfinished = Path(tempfile.mkdtemp(dir=folder))
    tree, limits = unfinished / "tree", Limits(mib=most_mib, files=IMAGE_FILES, seconds=IMAGE_SECONDS)
    try:
        untrusted_files.unpack(archive, tree, limits, "kept", mine=False)
        if not untrusted_files.is_folder(tree / ".git"):  # which every runtime has as a folder of its own
            raise HTTPException(wire.REFUSED, "the image has no folder .git")
        if (named := _head(tree)) != target.name:
            raise HTTPException(wire.REFUSED, f"the image's commit is {named}, not that of its path, {target.name}")
        if not target.exists():
            tree.rename(target)
    except DataError as error:
        raise HTTPException(wire.REFUSED, f"the image cannot be unpacked: {error}") from error
    except OSError as error:
        raise HTTPException(507, f"the image cannot be stored: {error}") from error
    finally:
        remove_tree(unfinished)


def _head(tree: Path) -> str:
    """The commit that .git/HEAD names, as `git commit` writes it. Raises DataError."""
    file = ".git/HEAD"
    try:
        named = untrusted_files.read(tree, file, MAX_REF_BYTES).decode(errors="replace").strip()
        if named.startswith("ref: "):
            file = f".git/{named.removeprefix('ref: ')}"
            named = untrusted_files.read(tree, file, MAX_REF_BYTES).decode(errors="replace").strip()
    except FileNotFoundError as error:
        raise DataError("is missing", "the commit of the image", file=shown(file)) from error
    return shown(named)


async def _create(leased: Leased, body: wire.SessionRequest) -> str:
    if body.session in leased.sessions:
        raise Failure("SessionExistsError", f"session {body.session} already exists")
    leased.sessions.add(body.session)
    sources = " && ".join(f". {source}" for source in body.startup_source)
    return (await leased.runtime.run(sources, session=body.session)).output if sources else ""


async def _close_session(leased: Leased, session: str) -> None:
    _check_session(leased, session)
    leased.sessions.discard(session)
    await leased.runtime.close_session(session)


def _check_session(leased: Leased, session: str) -> None:
    if session not in leased.sessions:
        raise Failure("SessionDoesNotExistError", f"session {session!r} does not exist")


async def _act(leased: Leased, body: wire.ActionRequest) -> wire.ActionResponse:
    _check_session(leased, body.session)
    if body.is_interactive_command or body.is_interactive_quit:
        raise Failure("builtins.ValueError", "sessions have no terminal: interactive programs are not supported")
    if body.action_type == "bash_interrupt":
        done = await leased.runtime.interrupt(body.session)
    else:
        done = await leased.runtime.run(body.command, body.timeout, body.soft_timeout, body.session)
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


async def _execute(leased: Leased, body: wire.CommandRequest) -> list[bytes]:
    argv = body.command if isinstance(body.command, list) else [body.command]
    argv = ["/bin/sh", "-c", *argv] if body.shell else argv
    if body.merge_output_streams:
        argv = ["/bin/sh", "-c", 'exec "$0" "$@" 2>&1', *argv]
    done = await leased.runtime.execute(argv, b"", body.cwd or TESTBED, body.env, body.timeout)
    if done.exit_code is None:
        raise Failure("CommandTimeoutError", f"Timeout ({body.timeout}s) exceeded, or killed, while running command")
    if body.check and done.exit_code != 0:
        ends = (stream[-QUOTED_BYTES:] for stream in (done.stdout, done.stderr))
        stdout, stderr = (end.decode(errors="backslashreplace") for end in ends)
        problem = f"Command {body.command!r} failed with exit code {done.exit_code}. {stdout!r} {stderr!r}"
        raise Failure("NonZeroExitCodeError", f"{body.error_msg}: {problem}".removeprefix(": "))
    return await asyncio.to_thread(_response, done)


def _response(done: Completed) -> list[bytes]:
    """A CommandResponse as JSON, in pieces."""
    stdout, stderr = _text("stdout", done.stdout), _text("stderr", done.stderr)
    return [b"{", *stdout, b",", *stderr, f',"exit_code":{done.exit_code}}}'.encode()]


def _text(name: str, data: bytes, encoding: str = "utf-8", errors: str = "backslashreplace") -> Iterator[bytes]:
    """A field of a JSON object. Raises ValueError, LookupError."""
    if encoding.lower() in SLOW_ENCODINGS:
        raise LookupError(f"{encoding} is not supported")
    text = io.TextIOWrapper(io.BytesIO(data), encoding, errors, newline="")
    yield f'"{name}":"'.encode()
    while piece := text.read(PIECE):
        yield json.dumps(piece)[1:-1].encode()
    yield b'"'


async def _upload(runtime: LocalRuntime, data: bytes, target: str, unzip: bool) -> None:
    place = f"/tmp/{secrets.token_hex(8)}.zip" if unzip else target
    await runtime.write(place, data)
    if unzip:
        done = await runtime.execute(["python3", "-I", "-c", UNZIP, place, target])
        if done.exit_code != 0:
            raise CommandFailedError(f"{target}: {done.stderr.decode(errors='replace')[-500:]}")
