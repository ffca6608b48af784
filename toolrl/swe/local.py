"""Runtimes on this machine: one bubblewrap with a supervisor per episode (toolrl/sandbox/inside/repository.py).

LocalRuntimes -> LocalRuntime -> bwrap -> inside/repository.py -> shells and programs
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from toolrl.sandbox.cgroups import HINT, CgroupPool, find_cgroups
from toolrl.sandbox.channel import receive_frame, send_frame, send_hello
from toolrl.sandbox.fork_server import BWRAP_HINT, SYSTEM, check_isolation, confinement, in_bubblewrap
from toolrl.swe.abandoned import OwnedFolder
from toolrl.swe.image import image_key, make_base, prepare_image
from toolrl.swe.runtime import (
    BASE_GIT,
    DEFAULT_SESSION,
    MAX_OUTPUT_MIB,
    TESTBED,
    CommandFailedError,
    CommandResult,
    Completed,
    FilesByPrograms,
    RuntimeLostError,
    TaskFaultError,
)
from toolrl.swe.shell import RuntimeShell
from toolrl.swe.tasks import SweTask
from verl.errors import ConfigError, DataError
from verl.host import untrusted_files
from verl.host.watcher import remove_tree

IMAGE_GIT = "/image.git"  # the history of the image, of which the base shares objects
ENVIRONMENT = "/environment"  # the task's interpreter, in every runtime
HOME = "/home/user"
TAKEN = (  # what every runtime has at these paths, besides its interpreters
    *SYSTEM, "/etc", "/tmp", "/dev", "/proc", "/sys", "/sandbox", "/image", "/episode", IMAGE_GIT, BASE_GIT, TESTBED,
    ENVIRONMENT, HOME,
)  # fmt: skip
HARBOR_FOLDERS = ("tests", "solution", "logs")  # at the root, where only the supervisor can write
START = "import sys; sys.path.insert(0, '/sandbox'); from inside.repository import main; del sys.path[0]; main()"
START_S = 60.0
END_S = 5.0  # until a supervisor that does not end is killed
MAX_SETTINGS_BYTES = 1 << 16  # of an environment
GRACE_S = 15.0  # without a heartbeat, until a supervisor counts as lost
VARIABLES = {
    "HOME": HOME,
    "USER": "user",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "PS1": "",
    "PS2": "",
    "GIT_AUTHOR_NAME": "user",
    "GIT_AUTHOR_EMAIL": "user@localhost",
    "GIT_COMMITTER_NAME": "user",
    "GIT_COMMITTER_EMAIL": "user@localhost",
}


class LocalRuntimes:
    """Starts runtimes.

    folder:  for images, which stay there, and episodes, on a disk; default: the temporary folder, without images
    overlay: share the repository among the runtimes of a task if the kernel can; else each has a copy
    """

    def __init__(self, folder: Path | None = None, *, overlay: bool = True, require_cgroup: bool = False) -> None:
        check_isolation("bubblewrap")
        self.overlay = overlay
        self.cgroups = find_cgroups()
        if require_cgroup and self.cgroups is None:
            raise ConfigError(f"no cgroup can be created for runtimes: {HINT}")
        self._pool = CgroupPool(self.cgroups) if self.cgroups else None
        self._folder = folder
        self._images: dict[str, asyncio.Task[Path]] = {}
        self._open: set[LocalRuntime] = set()
        self._owned = OwnedFolder(folder)

    @property
    def folder(self) -> Path:
        """Of the images."""
        return self._folder or self.episodes

    @property
    def episodes(self) -> Path:
        return self._owned.path

    async def image(self, task: SweTask) -> Path:
        """The folder of a task's repository, shared by all of its runtimes."""
        if task.repository is None:
            raise DataError(f"task {task.id} has no repository here", "a folder, or a remote runtime")
        key = image_key(task)
        if key not in self._images or (self._images[key].done() and self._images[key].exception()):
            making = asyncio.to_thread(prepare_image, task, self.folder / "images")
            self._images[key] = asyncio.create_task(making)
        return await asyncio.shield(self._images[key])

    async def start(self, task: SweTask) -> LocalRuntime:
        return await self.start_from(await self.image(task), task)

    async def start_from(self, image: Path, task: SweTask) -> LocalRuntime:
        """A runtime of the repository in this folder, whichever the task names."""
        try:
            runtime = LocalRuntime(self, task, image)
        except OSError as error:
            raise RuntimeLostError(f"{self.episodes}: {error}") from error
        self._open.add(runtime)
        try:
            await runtime.open(self._pool)
            if task.setup:
                await set_up(runtime, task)
                await runtime.take_base(task)
        except BaseException:
            await runtime.close()
            raise
        return runtime

    async def close(self) -> None:
        await asyncio.gather(*(runtime.close() for runtime in list(self._open)))
        if self._pool:
            await asyncio.to_thread(self._pool.close)
        await asyncio.to_thread(self._owned.remove)

    def forget(self, runtime: LocalRuntime) -> None:
        self._open.discard(runtime)


async def set_up(runtime: Any, task: SweTask) -> None:
    """Run the commands of a task's setup. Raises RuntimeLostError: a failure is not the policy's."""
    done = await runtime.run(task.setup)
    if done.exit_code != 0:
        raise TaskFaultError(f"the setup of {task.id} failed ({done.status}, {done.exit_code}): {done.output[-500:]}")


class LocalRuntime(FilesByPrograms):
    """See Runtime. layered: the repository is shared by an overlay; else it was copied"""

    def __init__(self, owner: LocalRuntimes, task: SweTask, image: Path) -> None:
        self.limits = task.limits
        self.layered = True
        self._owner, self._image, self._environment = owner, image, task.environment
        self._workdir = task.workdir
        self._folder = Path(tempfile.mkdtemp(prefix="episode-", dir=owner.episodes))
        self._shells: dict[str, RuntimeShell] = {}
        self._supervisor: SupervisorLink | None = None
        self._closed = False

    async def open(self, pool: CgroupPool | None) -> None:
        """Start the supervisor. Raises RuntimeLostError."""
        limits = {"memory_mib": self.limits.memory_mib, "processes": self.limits.processes}
        limits |= {"file_mib": self.limits.file_mib, "files": self.limits.files}
        folders = _interpreter_folders(self._environment)
        settings = {"limits": limits, "overlay": self._owner.overlay, "bound": [inside for _, inside in folders]}
        confined = confinement(pool is not None, folders)
        confined += ["--as-pid-1", "--ro-bind", str(self._image), "/image", "--bind", str(self._folder), "/episode"]
        confined += ["--dir", TESTBED, "--dir", HOME]
        confined += [each for path in (IMAGE_GIT, BASE_GIT) for each in ("--ro-bind", str(self._image / ".git"), path)]
        if self._workdir and self._workdir != TESTBED:
            _check_workdir(self._workdir, [inside for _, inside in folders])
            confined += ["--symlink", TESTBED, self._workdir]
        for name in HARBOR_FOLDERS if self._workdir else ():
            confined += ["--symlink", f"/tmp/{name}", f"/{name}"]
        for hidden in _hidden_folders(self._environment):
            confined += ["--tmpfs", hidden]
        command = [_plain_python(), "-I", "-S", "-c", START, json.dumps(settings)]
        self._supervisor = SupervisorLink(confined, command, pool)
        self.layered = await self._supervisor.open()

    async def take_base(self, task: SweTask) -> None:
        """From now on patches are to the files as they are now. Raises RuntimeLostError."""
        name = f"base-{secrets.token_hex(8)}"
        try:
            await make_base(self, task, f"/tmp/{name}", objects=f"{IMAGE_GIT}/objects")
            await self.supervisor.ask("take_base", name=name)
        except CommandFailedError as error:
            raise RuntimeLostError(f"no base for patches can be made after the setup: {error}") from error

    async def run(
        self,
        command: str,
        timeout_s: float | None = None,
        soft_timeout_s: float | None = None,
        session: str = DEFAULT_SESSION,
    ) -> CommandResult:
        hard_s = self.limits.command_s if timeout_s is None else timeout_s
        return await self._shell(session).run(command, hard_s, soft_timeout_s)

    async def interrupt(self, session: str = DEFAULT_SESSION) -> CommandResult:
        return await self._shell(session).interrupt()

    async def close_session(self, session: str) -> None:
        """End a shell with its foreground processes."""
        if shell := self._shells.pop(session, None):
            await shell.close()

    async def execute(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        cwd: str = TESTBED,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        supervisor = self.supervisor
        hard_s = self.limits.command_s if timeout_s is None else timeout_s
        try:
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context(tempfile.TemporaryFile(dir=self._owner.episodes)) for _ in range(3)]
                await asyncio.to_thread(_fill, files[0], stdin)
                pid = await supervisor.spawn(argv, self.variables(env), cwd, [file.fileno() for file in files])
                end = supervisor.ended(pid)
                await asyncio.wait({end}, timeout=hard_s)
                if not end.done():
                    await supervisor.signal(pid, signal.SIGKILL)
                code = await end
                if sum(os.fstat(file.fileno()).st_size for file in files[1:]) > MAX_OUTPUT_MIB << 20:
                    return Completed(None, b"", f"more than {MAX_OUTPUT_MIB} MiB of output".encode())
                stdout, stderr = [await asyncio.to_thread(_contents, file) for file in files[1:]]
        except OSError as error:
            raise RuntimeLostError(f"{self._owner.episodes}: {error}") from error
        return Completed(None if code < 0 else code, stdout, stderr)

    async def snapshot(self) -> str:
        return str((await self.supervisor.ask("snapshot"))["name"])

    async def restore(self, name: str) -> None:
        if not name.isdecimal():
            raise CommandFailedError(f"there is no snapshot {name!r}")
        await self.supervisor.ask("restore", name=name)
        self._forget_shells()

    async def end_processes(self) -> None:
        await self.supervisor.ask("kill")
        self._forget_shells()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            for shell in self._shells.values():
                shell.forget()
            if self._supervisor:
                await self._supervisor.close()
            await asyncio.to_thread(remove_tree, self._folder)
            self._owner.forget(self)

    @property
    def supervisor(self) -> SupervisorLink:
        if self._supervisor is None or self._closed:
            raise RuntimeLostError("it is closed")
        if self._supervisor.lost:
            raise RuntimeLostError(self._supervisor.lost)
        return self._supervisor

    def variables(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        folders = "/usr/local/bin:/usr/bin:/bin"
        path = f"{ENVIRONMENT}/bin:{folders}" if self._environment else folders
        own = {"VIRTUAL_ENV": ENVIRONMENT} if self._environment else {}
        return {**VARIABLES, "PATH": path, **own, **(env or {})}

    def _forget_shells(self) -> None:
        for shell in self._shells.values():
            shell.forget()
        self._shells.clear()

    def _shell(self, session: str) -> RuntimeShell:
        supervisor = self.supervisor
        if session not in self._shells:
            self._shells[session] = RuntimeShell(supervisor, self.variables(), self.limits.output_chars)
        return self._shells[session]


class SupervisorLink:
    """The owner's end of the socket to a supervisor; its process is a child of this one."""

    def __init__(self, confined: Sequence[str], command: Sequence[str], pool: CgroupPool | None) -> None:
        self._confined, self._command, self._pool = confined, command, pool
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._count = 0
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._reading: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.lost = ""
        self.excess = ""  # the last limit that was exceeded; cleared by the shell that reports it

    async def open(self) -> bool:
        """Start; returns whether the repository is an overlay. Raises RuntimeLostError."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        try:
            with theirs:
                self._process = in_bubblewrap(self._confined, self._command, {}, theirs.fileno(), self._output)
            self._group = self._pool.make() if self._pool else None
        except OSError as error:
            raise RuntimeLostError(f"cannot start: {error}") from error
        send_hello(self._socket, self._group)
        self._reading = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(START_S):
                return await self._ready
        except TimeoutError as error:
            raise RuntimeLostError(f"no answer within {START_S:g} s after its start") from error

    async def ask(self, what: str, descriptors: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """The answer. Raises RuntimeLostError, and CommandFailedError for an operation that fails."""
        if self.lost:
            raise RuntimeLostError(self.lost)
        self._count += 1
        number = self._count
        coming: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = coming
        try:
            await send_frame(self._socket, {"do": what, "id": number, **fields}, descriptors)
        except OSError as error:
            self._lose(f"its supervisor has exited ({error})")
        try:
            answer = await coming
        finally:
            del self._answers[number]
        if "problem" in answer:
            raise CommandFailedError(f"{what}: {answer['problem']}")
        return answer

    async def spawn(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, descriptors: Sequence[int]) -> int:
        """Start a program with these descriptors from 0 on; returns its process id inside."""
        answer = await self.ask("spawn", descriptors, argv=list(argv), env=dict(env), cwd=cwd)
        return int(answer["pid"])

    def ended(self, pid: int) -> asyncio.Future[int]:
        """The exit code of a program, negative for a signal; shared by all who wait, none of whom may cancel it."""
        if pid not in self._ends:
            self._ends[pid] = asyncio.get_running_loop().create_future()
            if self.lost:
                _fail(self._ends[pid], self.lost)
        return self._ends[pid]

    async def signal(self, pid: int, number: int) -> None:
        await self.ask("signal", pid=pid, number=int(number))

    async def close(self) -> None:
        self._lose("it is closed")
        if self._reading:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._process:
            self._socket.close()  # which ends the supervisor, and so all of its processes
            await asyncio.to_thread(_end, self._process)
            self._output.close()
            if self._group and self._pool:
                self._pool.leave(self._group)

    async def _read(self) -> None:
        try:
            while True:
                async with asyncio.timeout(GRACE_S if self._ready.done() else START_S):
                    self._handle(await receive_frame(self._socket))
        except TimeoutError:
            self._lose(f"its supervisor has not answered for {GRACE_S:g} s")
        except (OSError, EOFError):
            self._lose(self._last_output() or "its supervisor has exited")

    def _handle(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready.set_result(message["layered"])
        elif "ended" in message:
            end = self.ended(message["ended"])
            if not end.done():
                end.set_result(message["code"])
        elif "excess" in message:
            self.excess = message["excess"]
        elif "lost" in message:
            self._lose(message["lost"])
        if "pid" in message:  # its number may be that of a program that has ended
            self._ends.pop(message["pid"], None)
        if message.get("id") in self._answers and not self._answers[message["id"]].done():
            self._answers[message["id"]].set_result(message)

    def _lose(self, problem: str) -> None:
        self.lost = self.lost or problem
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._answers.values(), *self._ends.values()]
        for future in waiting:
            _fail(future, self.lost)

    def _last_output(self) -> str:
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace").strip()[-1000:]
        return f"{printed}. {BWRAP_HINT}" if printed and not self._ready.done() else printed


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _fail(future: asyncio.Future[Any], problem: str) -> None:
    if not future.done():
        future.set_exception(RuntimeLostError(problem))
        future.exception()  # retrieved: there may be no waiter


def _fill(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.seek(0)


def _contents(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _plain_python() -> str:
    """The interpreter without any packages, which supervises; it lies in a folder that `_interpreter_folders` binds."""
    return str(Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"))


def _interpreter_folders(environment: str) -> list[tuple[str, str]]:
    """(path on the host, path inside) of the environment and of the interpreters that it and the supervisor need."""
    prefixes = [sys.base_prefix, *([str(_base_prefix(environment))] if environment else [])]
    folders = [(prefix, prefix) for prefix in dict.fromkeys(prefixes) if not Path(prefix).is_relative_to("/usr")]
    return folders + ([(environment, ENVIRONMENT)] if environment else [])


def _base_prefix(environment: str) -> Path:
    """Of the interpreter that a virtual environment was made with. Raises DataError."""
    try:
        settings = untrusted_files.read(Path(environment), "pyvenv.cfg", MAX_SETTINGS_BYTES, shared=True).decode()
        lines = [line.partition("=") for line in settings.splitlines()]
    except (OSError, ValueError) as error:
        problem, hint = f"{environment} is not a virtual environment ({error})", "Make it with scripts/swe/prepare.py"
        raise DataError(problem, hint=hint, field="environment") from error
    home = next((value.strip() for name, _, value in lines if name.strip() == "home"), "")
    prefix = Path(os.path.normpath(home)).parent
    if prefix.is_dir() and prefix.samefile("/"):  # /bin is /usr/bin
        return Path("/usr")
    if not prefix.is_absolute() or not all(any((prefix / each).glob("python*")) for each in ("bin", "lib")):
        problem = f"{environment}/pyvenv.cfg names {home!r} as the folder of its interpreter"
        raise DataError(problem, "bin of a Python with its lib beside", field="environment")
    return prefix


def _check_workdir(workdir: str, interpreters: Sequence[str]) -> None:
    """Raises DataError for a path that something else has, or is in."""
    path, harbor = Path(workdir), [f"/{name}" for name in HARBOR_FOLDERS]
    for other in map(Path, (*TAKEN, *harbor, *interpreters)):
        if path.is_relative_to(other) or other.is_relative_to(path):
            problem = f"{workdir} cannot be the working folder, because every runtime has {other}"
            raise DataError(problem, "another path, such as /app or /workspace", field="workdir")


def _hidden_folders(environment: str) -> list[str]:
    """Packages of the trainer's interpreters, where they would be visible."""
    prefixes = ["/usr", sys.base_prefix, *([str(_base_prefix(environment))] if environment else [])]
    visible = [Path(each) for each in prefixes]
    found = [Path(each) for each in site.getsitepackages()]
    found += [path for prefix in visible for path in prefix.glob("lib/python*/*-packages")]
    found += Path("/usr/local/lib").glob("python*/*-packages")
    inside = [path for path in found if path.is_dir() and any(path.is_relative_to(each) for each in visible)]
    return sorted({str(path) for path in inside})
