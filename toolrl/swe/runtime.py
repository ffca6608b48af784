"""A runtime: one repository in one place, with a persistent shell. Implementations: local.py, remote.py.

A command that fails, runs out of time or is killed is a `CommandResult`. An operation on a file that fails is a
`CommandFailedError`. Only a runtime that broke raises `RuntimeLostError`: an infrastructure fault, never the policy's.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from verl.errors import DataError, ServiceDownError, VerlError
from verl.host import untrusted_files
from verl.host.untrusted_files import Limits

if TYPE_CHECKING:
    from toolrl.swe.tasks import SweTask

TESTBED = "/testbed"  # the repository, in every runtime
BASE_GIT = "/base.git"  # its history of one commit, the base of patches, in every runtime
DEFAULT_SESSION = "default"
MAX_OUTPUT_CHARS = 30_000
MAX_OUTPUT_MIB = 128  # of a program: it is held in memory
MAX_UPLOAD_MIB = 2048  # of a file or folder, likewise


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """Of one runtime, for all of its processes together. Raises DataError."""

    memory_mib: int = 2048
    processes: int = 128
    file_mib: int = 1024  # written on disk, in the repository, /tmp and the home folder together
    files: int = 100_000  # written likewise, with folders
    command_s: float = 300.0  # default hard time-out of a command
    output_chars: int = MAX_OUTPUT_CHARS  # of a command; the middle is cut

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if not (isinstance(limit, int | float) and limit > 0):
                raise DataError(f"{name} is {limit!r}", "a number above 0", field="limits")


class CommandStatus(StrEnum):
    """How a command of a session ended."""

    FINISHED = "finished"
    RUNNING = "running"  # the soft time-out passed; an empty command waits for it
    TIMEOUT = "timeout"  # the hard time-out passed, and it was ended
    KILLED = "killed"  # with its shell: it exceeded a limit, or ended the shell


@dataclass(frozen=True, slots=True)
class CommandResult:
    """output: stdout and stderr in order. exit_code: None unless finished. reason: for a kill"""

    output: str
    exit_code: int | None
    status: CommandStatus
    cwd: str = TESTBED
    reason: str = ""
    shell_restarted: bool = False  # variables and functions are lost; the working folder is kept


@dataclass(frozen=True, slots=True)
class Completed:
    """A process of its own, beside the sessions.

    exit_code: None if it ran out of time, was killed, or wrote more than MAX_OUTPUT_MIB to stdout and stderr
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes


class RuntimeLostError(ServiceDownError):
    """The runtime is gone, or does not answer: a new one must start from the task."""

    def __init__(self, problem: str, *_: object) -> None:
        super().__init__("runtime", problem)

    def __reduce__(self) -> tuple[type[RuntimeLostError], tuple[str]]:
        return type(self), (self.problem,)


class TaskFaultError(RuntimeLostError):
    """The task is at fault, not the machine: every runtime of it ends like this one."""


class CommandFailedError(VerlError):
    """An operation failed in a runtime that works: a missing file, no space, a busy session."""


class Runtime(Protocol):
    """A started runtime. All methods raise RuntimeLostError; those on files also CommandFailedError."""

    async def run(
        self,
        command: str,
        timeout_s: float | None = None,
        soft_timeout_s: float | None = None,
        session: str = DEFAULT_SESSION,
    ) -> CommandResult:
        """Run a command in a persistent shell: working folder, variables and functions are kept.

        timeout_s: the command is interrupted, then killed; default: the limit of the runtime
        soft_timeout_s: the result is then RUNNING, and the command continues; an empty command waits for it
        """

    async def interrupt(self, session: str = DEFAULT_SESSION) -> CommandResult:
        """Ctrl-C: end the running command; the shell remains."""

    async def execute(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        cwd: str = TESTBED,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        """Run a program outside of any session, in a clean environment."""

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, with its folders."""

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or a folder of this machine to `target`."""

    async def download(self, source: str, target: Path) -> None:
        """Copy a file or a folder to `target` on this machine. Links and devices are refused."""

    async def snapshot(self) -> str:
        """Copy the state of all files; processes continue. Returns its name."""

    async def restore(self, name: str) -> None:
        """Set all files back; all processes end."""

    async def end_processes(self) -> None:
        """End what the code has started, sessions included; files stay. Without effect in containers."""

    async def close(self) -> None:
        """End all processes and remove all files."""


class Runtimes(Protocol):
    """A place where runtimes start."""

    async def start(self, task: SweTask) -> Runtime:
        """A fresh runtime of a task's repository, after its setup. Raises RuntimeLostError and DataError."""

    async def close(self) -> None:
        """End all runtimes."""


def clip(text: str, limit: int) -> str:
    """The beginning and the end of a text of more than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters omitted]\n{text[-half:]}"


class Collected:
    """The bytes of an output, of which the middle is dropped beyond a bound."""

    def __init__(self, limit_chars: int) -> None:
        self._limit = limit_chars
        self._most = 4 * limit_chars  # bytes: no character has more than four
        self._head, self._tail = bytearray(), bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = self._most - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        excess = max(0, len(self._tail) - self._most)
        del self._tail[:excess]
        self._dropped += excess

    def text(self) -> str:
        gap = f"\n[{self._dropped} bytes omitted]\n".encode() if self._dropped else b""
        return clip((self._head + gap + self._tail).decode(errors="replace"), self._limit)


async def checked(runtime: Runtime, argv: Sequence[str], stdin: bytes = b"", cwd: str = TESTBED) -> bytes:
    """The standard output of a program. Raises CommandFailedError if it fails."""
    done = await runtime.execute(argv, stdin, cwd)
    if done.exit_code != 0:
        problem = done.stderr.decode(errors="replace").strip()[-500:] or f"exit code {done.exit_code}"
        raise CommandFailedError(f"{shlex.join(argv)[:200]}: {problem}")
    return done.stdout


class FilesByPrograms:
    """The file operations of a runtime, by its own `execute`: with the rights of the code that runs there.

    Relative paths are those of the repository, which need not exist.
    """

    async def read(self: Runtime, path: str) -> bytes:
        return await checked(self, ["/bin/cat", "--", _absolute(path)], cwd="/")

    async def write(self: Runtime, path: str, data: bytes) -> None:
        script = 'mkdir -p -- "$(dirname -- "$0")" && cat > "$0"'
        await checked(self, ["/bin/sh", "-c", script, _absolute(path)], data, cwd="/")

    async def upload(self: Runtime, source: Path, target: str) -> None:
        packed = await asyncio.to_thread(_packed, source, PurePosixPath(target).name)
        script = 'mkdir -p -- "$0" && tar -xf - --no-same-owner -C "$0"'
        folder = str(PurePosixPath(_absolute(target)).parent)
        await checked(self, ["/bin/sh", "-c", script, folder], packed, cwd="/")

    async def download(self: Runtime, source: str, target: Path) -> None:
        path = PurePosixPath(_absolute(source))
        packed = await checked(self, ["/bin/tar", "-cf", "-", "-C", str(path.parent), "--", path.name], cwd="/")
        try:
            await asyncio.to_thread(_unpack_as, packed, path.name, target)
        except (DataError, OSError) as error:
            raise CommandFailedError(f"{source} cannot be copied: {error}") from error


def _absolute(path: str) -> str:
    return str(PurePosixPath(TESTBED, path))


def _packed(source: Path, name: str) -> bytes:
    """Raises DataError for what is neither a file nor a folder of files, folders and links."""
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:  # a copy, which no other process changes
        copy = Path(folder, "copy")
        if source.is_dir():
            untrusted_files.copy_tree(source, copy, Limits(mib=MAX_UPLOAD_MIB), followed=False)
        elif source.is_file() and source.stat().st_size > MAX_UPLOAD_MIB << 20:
            raise DataError(f"is no file of at most {MAX_UPLOAD_MIB} MiB", file=str(source))
        else:
            untrusted_files.copy_file(source, copy)
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(copy, name)
    return packed.getvalue()


def _unpack_as(packed: bytes, name: str, target: Path) -> None:
    """Raises DataError, OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, tempfile.TemporaryFile() as archive:
        archive.write(packed)
        made = Path(folder, "made")
        untrusted_files.unpack(archive, made, Limits(mib=MAX_OUTPUT_MIB), links="none")
        (made / name).rename(target)
