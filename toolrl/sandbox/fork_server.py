"""Starts the process that forks supervisors, in bubblewrap, and restarts it when it has died."""

import asyncio
import contextlib
import json
import logging
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from toolrl.sandbox.cgroups import CgroupPool, Group
from toolrl.sandbox.channel import send_hello
from toolrl.sandbox.inside import processes, seccomp
from verl.errors import ConfigError, ServiceDownError
from verl.host.untrusted_files import UNPRIVILEGED_UID

Isolation = Literal["bubblewrap", "none"]
BWRAP_HINT = (
    "apt-get install bubblewrap (or your system's package of that name); `toolrl doctor` tests it. "
    "sandbox.isolation=none runs code unconfined: for trusted code only"
)
INSIDE = Path(__file__).parent / "inside"
START = "import sys; sys.path.insert(0, {!r}); from inside.zygote import main; del sys.path[0]; main()"
START_S = 60.0  # limit for loading its modules
MAX_LOG_CHARS = 2000  # quoted from the output of a server that failed
# Host paths visible to executions, read-only, besides the interpreter's folders.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
UNCOUNTED_DEVICE = "zero"  # shared mappings of it use memory that only a cgroup counts
DEVICE_LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}  # below /proc/self/fd
MOVED = "/python"  # mount point of an interpreter below /tmp, because /tmp is private
HOME = {"HOME": "/tmp/work", "TMPDIR": "/tmp", "PWD": "/tmp/work"}  # in isolated executions
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # a fork keeps only one thread
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
log = logging.getLogger(__name__)


def check_isolation(isolation: str) -> None:
    """Raises ConfigError if this machine does not support it; warns if there is none."""
    if isolation == "none":
        log.warning("sandbox.isolation=none: untrusted code has this user's permissions, including the network")
        return
    if isolation != "bubblewrap":
        raise ConfigError(f"sandbox.isolation={isolation}: must be bubblewrap or none")
    if sys.platform != "linux" or platform.machine() not in seccomp.MACHINES:
        raise ConfigError(f"sandbox.isolation=bubblewrap needs Linux on one of {', '.join(seccomp.MACHINES)}")
    if shutil.which("bwrap") is None:
        raise ConfigError(f"sandbox.isolation=bubblewrap: `bwrap` not found. {BWRAP_HINT}")
    if sys.base_prefix != sys.prefix and Path(sys.base_prefix).is_relative_to("/tmp"):
        raise ConfigError(f"sandbox: the interpreter in {sys.base_prefix} lies below /tmp, invisible to executions")


@dataclass(frozen=True)
class View:
    """Read-only paths of the host that programs see besides the system and the interpreter.

    folders: paths of files and folders; hidden: folders among them that are empty inside; again: paths in these
    """

    folders: Sequence[str]
    hidden: Sequence[str] = ()
    again: Sequence[str] = ()

    @property
    def bound(self) -> list[str]:
        return [path for path in (*self.folders, *self.again) if Path(path).exists()]

    @property
    def arguments(self) -> list[str]:
        """Arguments of bubblewrap."""
        shown, again = ([["--ro-bind-try", path, path] for path in paths] for paths in (self.folders, self.again))
        return [*chain(*shown, *(["--tmpfs", folder] for folder in self.hidden), *again)]


@dataclass(frozen=True)
class Channel:
    """To a supervisor, which exits with all of its processes when the socket is closed."""

    socket: socket.socket
    group: Group | None


class ForkServer:
    """Started on demand, restarted after a crash. num_channels: in use, maintained by the pool

    view: its executions are programs of others, which may reserve any address space and open more files
    """

    def __init__(
        self, isolation: Isolation, preload: Sequence[str], cgroups: CgroupPool | None, view: View | None = None
    ) -> None:
        self._isolation = isolation
        self._view = view
        self._preload = preload
        self._cgroups = cgroups
        self._lock = asyncio.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._idle: list[Channel] = []
        self.num_channels = 0

    async def open(self) -> Channel:
        """A non-blocking channel to an idle supervisor. Raises ServiceDownError if none starts."""
        async with self._lock:
            if self._process and (ended := self._process.poll()) is not None:
                cause = f"killed by {signal.Signals(-ended).name}" if ended < 0 else f"exit code {ended}"
                log.warning("sandbox fork server %d exited (%s); restarting", self._process.pid, cause)
                self.close()
            while self._idle:
                channel = self._idle.pop()
                if _is_idle(channel.socket):
                    return channel
                self.drop(channel)
            local, remote = socket.socketpair()
            local.setblocking(False)
            with remote:
                if not self._hand_over(remote):
                    await self._start()
                    if not self._hand_over(remote):
                        raise ServiceDownError("sandbox", "a fork server exited right after its start")
        return self._greet(local)

    def keep(self, channel: Channel) -> None:
        """Return a channel from `open` to the pool; its supervisor is idle."""
        self._idle.append(channel)

    def drop(self, channel: Channel) -> None:
        channel.socket.close()
        if channel.group and self._cgroups:
            self._cgroups.leave(channel.group)

    def replace(self, cause: str) -> None:
        """Terminate an unresponsive server; `open` restarts it."""
        if self._process:
            stopped = _stop_reason(self._process.pid)
            log.warning("sandbox fork server %d: %s (%s); restarting", self._process.pid, cause, stopped)
        self.close()

    def close(self) -> None:
        """Terminate it with all of its descendants."""
        while self._idle:
            self.drop(self._idle.pop())
        if self._control:
            self._control.close()
        if self._process:
            self._process.kill()
            if self._process.returncode is None:  # its pid and process group are not reused yet
                os.killpg(self._process.pid, signal.SIGCONT)  # a stopped supervisor could not exit
            self._process.wait()
        self._control = self._process = None

    def _greet(self, ours: socket.socket) -> Channel:
        """Send a new supervisor its cgroup, which it joins first."""
        try:
            group = self._cgroups.make() if self._cgroups else None
        except OSError as error:
            ours.close()
            raise ServiceDownError("sandbox", f"failed to create a cgroup: {error}") from error
        send_hello(ours, group)
        return Channel(ours, group)

    def _hand_over(self, channel: socket.socket) -> bool:
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [b"!"], [channel.fileno()])
        except OSError:
            return False
        return True

    async def _start(self) -> None:
        self.close()
        self._control, remote = socket.socketpair()
        self._control.setblocking(False)
        with tempfile.TemporaryFile() as output, remote:
            try:
                self._process = self._spawn(remote.fileno(), output)
                remote.close()
                async with asyncio.timeout(START_S):
                    if await asyncio.get_running_loop().sock_recv(self._control, 1):
                        return
                problem = "exited"
            except TimeoutError:
                problem = f"no answer within {START_S:.0f} s"
            except OSError as error:
                problem = str(error)
            self.close()
            output.seek(0)
            printed = output.read().decode(errors="replace").strip()[-MAX_LOG_CHARS:]
        raise ServiceDownError("sandbox", f"no fork server starts ({problem}): {printed or 'no output'}. {BWRAP_HINT}")

    def _spawn(self, control: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        isolated = self._isolation == "bubblewrap"
        prefix = _prefix_inside() if isolated else sys.prefix
        counted = self._cgroups is not None
        bound = _bound_folders() + (self._view.bound if self._view else [])
        settings = {"isolated": isolated, "counted": counted, "preload": self._preload, "bound": bound}
        settings["programs"] = self._view is not None
        python = str(Path(prefix, "bin", Path(sys.executable).name)) if isolated else sys.executable
        start = START.format("/sandbox" if isolated else str(INSIDE.parent))
        command = [python, "-I", "-c", start, json.dumps(settings)]
        variables = ENVIRONMENT | {"PATH": f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin"}
        if isolated:
            folders = [(sys.prefix if folder == MOVED else folder, folder) for folder in _bound_folders()]
            confined = confinement(counted, folders) + (self._view.arguments if self._view else [])
            return in_bubblewrap(confined, command, variables | HOME, control, output)
        return _popen(command, control, output, env=variables)


def _stop_reason(ancestor: int) -> str:
    stopped = []
    with contextlib.suppress(psutil.Error):  # it has exited
        first = psutil.Process(ancestor)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    stopped.append(f"{process.name()} {process.pid}")
    return f"stopped: {', '.join(stopped)}" if stopped else "none of its processes is stopped"


def _is_idle(channel: socket.socket) -> bool:
    """Whether the supervisor is waiting: it has neither disconnected nor sent an error."""
    try:
        channel.recv(1, socket.MSG_PEEK)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _popen(command: Sequence[str], control: int, output: IO[bytes], **settings: Any) -> subprocess.Popen[bytes]:
    """In its own session: Ctrl-C goes to the owner, which shuts it down in order."""
    return subprocess.Popen(command, stdin=control, stdout=output, stderr=output, start_new_session=True, **settings)


def in_bubblewrap(
    confined: Sequence[str], command: Sequence[str], variables: Mapping[str, str], control: int, output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a command in namespaces in which it is root. Raises OSError on failure. confined: see `confinement`

    If root starts it, the namespace also has an unprivileged user for untrusted code: bubblewrap blocks until the uid
    and gid maps are written.
    """
    arguments = ["bwrap", *confined]
    for name, value in variables.items():
        arguments += ["--setenv", name, value]
    if os.geteuid() != 0:
        return _popen([*arguments, "--", *command], control, output)
    info_read, info_write = os.pipe()
    block_read, block_write = os.pipe()
    arguments += ["--info-fd", str(info_write), "--userns-block-fd", str(block_read)]
    try:
        process = _popen([*arguments, "--", *command], control, output, pass_fds=(info_write, block_read))
        os.close(info_write)
        first = _first_process(info_read)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{first}/{name}").write_text(f"0 0 1\n{UNPRIVILEGED_UID} {UNPRIVILEGED_UID} 1\n")
        processes.spare(first)
    finally:
        for descriptor in (info_read, block_read, block_write):
            os.close(descriptor)
    return process


def _first_process(descriptor: int) -> int:
    """From bubblewrap's --info-fd JSON, without EOF while others hold the write end."""
    text = b""
    while not text.rstrip().endswith(b"}"):
        part = os.read(descriptor, 4096)
        if not part:
            raise OSError("bubblewrap exited at once")
        text += part
    return int(json.loads(text)["child-pid"])


def confinement(counted: bool, folders: Sequence[tuple[str, str]]) -> list[str]:
    """Bubblewrap's arguments: new namespaces with the visible part of the host.

    folders: read-only ones besides the system's, as (path on the host, path inside)
    """
    arguments = ["--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    arguments += ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), name]
        elif path.exists():
            arguments += ["--ro-bind", name, name]
    for folder in folders:
        arguments += ["--ro-bind", *folder]
    arguments += ["--ro-bind", str(INSIDE), "/sandbox/inside", "--proc", "/proc"]
    for name in ("/tmp", "/dev/shm", "/etc"):
        arguments += ["--dir", name]
    for name in DEVICES if counted else [each for each in DEVICES if each != UNCOUNTED_DEVICE]:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in DEVICE_LINKS.items():
        arguments += ["--symlink", f"/proc/self/fd{target}", f"/dev/{name}"]
    return [*arguments, "--chdir", "/"]


def _prefix_inside() -> str:
    return MOVED if Path(sys.prefix).is_relative_to("/tmp") else sys.prefix


def _bound_folders() -> list[str]:
    folders = dict.fromkeys((_prefix_inside(), sys.base_prefix))
    return [folder for folder in folders if not Path(folder).is_relative_to("/usr") and not folder.startswith("/tmp")]
