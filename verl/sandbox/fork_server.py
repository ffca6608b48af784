"""A process that forks supervisors: how bubblewrap starts it, how it is found dead and started again."""

from __future__ import annotations

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
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from verl.errors import ConfigError, ServiceDownError
from verl.sandbox.cgroups import CgroupPool, Group
from verl.sandbox.inside import frames, processes, seccomp

Isolation = Literal["bubblewrap", "none"]
MEND = (
    "apt-get install bubblewrap (or your system's package of that name); `python -m verl.doctor` tries it. "
    "sandbox.isolation=none runs code unconfined: for code that you trust"
)
INSIDE = Path(__file__).parent / "inside"
START = "import sys; sys.path.insert(0, {!r}); from inside.zygote import main; del sys.path[0]; main()"
START_S = 60.0  # until it has loaded its modules
LAST_WORDS = 2000  # characters of what a server that failed has said
# Of the host, what an execution sees, read-only; besides the interpreter's folders.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
UNCOUNTED_DEVICE = "zero"  # shared mappings of it are memory that only a cgroup counts
DEVICE_LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}  # below /proc/self/fd
MOVED = "/python"  # where an interpreter below /tmp lies, as /tmp is private
NOBODY = 65534  # the user of untrusted code where root starts the pool
HOME = {"HOME": "/tmp/work", "TMPDIR": "/tmp", "PWD": "/tmp/work"}  # of isolated executions
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # a fork keeps one thread alone
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
log = logging.getLogger(__name__)


def check_isolation(isolation: str) -> None:
    """ConfigError where this machine cannot confine code as asked; a warning where nobody asks."""
    if isolation == "none":
        log.warning("sandbox.isolation=none: untrusted code runs with the rights of this user, network included")
        return
    if isolation != "bubblewrap":
        raise ConfigError(f"sandbox.isolation={isolation}: it is bubblewrap or none")
    if sys.platform != "linux" or platform.machine() not in seccomp.MACHINES:
        raise ConfigError(f"sandbox.isolation=bubblewrap needs Linux on one of {', '.join(seccomp.MACHINES)}")
    if shutil.which("bwrap") is None:
        raise ConfigError(f"sandbox.isolation=bubblewrap: no program `bwrap`. {MEND}")
    if sys.base_prefix != sys.prefix and Path(sys.base_prefix).is_relative_to("/tmp"):
        raise ConfigError(f"sandbox: the interpreter in {sys.base_prefix} lies below /tmp, which executions do not see")


@dataclass(frozen=True)
class Channel:
    """To a supervisor.

    group: the cgroup that was made for it
    """

    socket: socket.socket
    group: Group | None

    def close(self) -> None:
        """The supervisor ends, and all that it has started."""
        self.socket.close()


class ForkServer:
    """One fork server, started when it is needed, and again when it has died.

    num_channels: channels that are in use, counted by the pool
    """

    def __init__(self, isolation: Isolation, preload: Sequence[str], cgroups: CgroupPool | None) -> None:
        self._isolation = isolation
        self._preload = preload
        self._cgroups = cgroups
        self._lock = asyncio.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._idle: list[Channel] = []
        self.num_channels = 0

    async def open(self) -> Channel:
        """A channel to an idle supervisor, non-blocking. ServiceDownError where no server can be started."""
        async with self._lock:
            if self._process and (ended := self._process.poll()) is not None:
                log.warning(
                    "fork server %d of the sandbox ended (%s); starting another", self._process.pid, _cause(ended)
                )
                self.close()
            while self._idle:
                channel = self._idle.pop()
                if _is_silent(channel.socket):
                    return channel
                self.drop(channel)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with theirs:
                if not self._hand_over(theirs):
                    await self._start()
                    if not self._hand_over(theirs):
                        raise ServiceDownError("sandbox", "a fork server ended as soon as it had started")
        return self._greet(ours)

    def keep(self, channel: Channel) -> None:
        """Take back a channel that `open` gave, whose supervisor has nothing more to do."""
        self._idle.append(channel)

    def drop(self, channel: Channel) -> None:
        """End a supervisor that is not to be used again."""
        channel.close()
        if channel.group and self._cgroups:
            self._cgroups.leave(channel.group)

    def replace(self, cause: str) -> None:
        """End a server that does not answer; `open` starts another one."""
        if self._process:
            number = self._process.pid
            log.warning("fork server %d of the sandbox: %s (%s); starting another", number, cause, _stopped(number))
        self.close()

    def close(self) -> None:
        """End it with everything below it."""
        while self._idle:
            self.drop(self._idle.pop())
        if self._control:
            self._control.close()
        if self._process:
            self._process.kill()
            if self._process.returncode is None:  # its number, and its group's, are not another's yet
                os.killpg(self._process.pid, signal.SIGCONT)  # a supervisor that was stopped could not end
            self._process.wait()
        self._control = self._process = None

    def _greet(self, ours: socket.socket) -> Channel:
        """Hand a new supervisor its cgroup, which it goes into before anything else."""
        if self._cgroups is None:
            _say_hello(ours, [], [])
            return Channel(ours, None)
        try:
            group = self._cgroups.make()
        except OSError as error:
            ours.close()
            raise ServiceDownError("sandbox", f"no cgroup can be made any more: {error}") from error
        _say_hello(ours, group.purposes, group.descriptors)
        group.close()
        return Channel(ours, group)

    def _hand_over(self, channel: socket.socket) -> bool:
        """Whether there was somebody to take it."""
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [b"!"], [channel.fileno()])
        except OSError:
            return False
        return True

    async def _start(self) -> None:
        self.close()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with tempfile.TemporaryFile() as said, theirs:
            try:
                self._process = self._spawn(theirs.fileno(), said)
                theirs.close()
                async with asyncio.timeout(START_S):
                    if await asyncio.get_running_loop().sock_recv(self._control, 1):
                        return
                problem = "it ended"
            except TimeoutError:
                problem = f"no answer in {START_S:.0f} s"
            except OSError as error:
                problem = str(error)
            self.close()
            said.seek(0)
            words = said.read().decode(errors="replace").strip()[-LAST_WORDS:]
        raise ServiceDownError("sandbox", f"no fork server starts ({problem}): {words or 'it said nothing'}. {MEND}")

    def _spawn(self, control: int, said: IO[bytes]) -> subprocess.Popen[bytes]:
        isolated = self._isolation == "bubblewrap"
        prefix = _prefix_inside() if isolated else sys.prefix
        counted = self._cgroups is not None
        settings = {"isolated": isolated, "counted": counted, "preload": self._preload, "bound": _bound_folders()}
        python = str(Path(prefix, "bin", Path(sys.executable).name)) if isolated else sys.executable
        start = START.format("/sandbox" if isolated else str(INSIDE.parent))
        command = [python, "-I", "-c", start, json.dumps(settings)]
        variables = ENVIRONMENT | {"PATH": f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin"}
        if isolated:
            return _in_bubblewrap(command, variables | HOME, control, said, counted)
        return _popen(command, control, said, env=variables)


def _cause(ended: int) -> str:
    return f"killed by {signal.Signals(-ended).name}" if ended < 0 else f"exit code {ended}"


def _stopped(ancestor: int) -> str:
    """Which processes at and below one are stopped, in words."""
    found = []
    with contextlib.suppress(psutil.Error):  # it has ended
        first = psutil.Process(ancestor)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    found.append(f"{process.name()} {process.pid}")
    return f"stopped: {', '.join(found)}" if found else "none of its processes is stopped"


def _say_hello(channel: socket.socket, purposes: Sequence[str], descriptors: Sequence[int]) -> None:
    """The first that a supervisor hears: the files of its cgroup."""
    with contextlib.suppress(OSError):  # it is gone, which the first task finds
        socket.send_fds(channel, [frames.encode({"cgroup": purposes})], descriptors)


def _is_silent(channel: socket.socket) -> bool:
    """Whether the supervisor at its end waits: it has neither hung up nor complained."""
    try:
        channel.recv(1, socket.MSG_PEEK)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _popen(command: Sequence[str], control: int, said: IO[bytes], **settings: Any) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is the owner's to hear, who ends it in order."""
    return subprocess.Popen(command, stdin=control, stdout=said, stderr=said, start_new_session=True, **settings)


def _in_bubblewrap(
    command: Sequence[str], variables: Mapping[str, str], control: int, said: IO[bytes], counted: bool
) -> subprocess.Popen[bytes]:
    """Start it in namespaces in which it is root. OSError where that fails.

    Where root starts it, the namespace also has an unprivileged user, whom untrusted code becomes: bubblewrap waits
    until we have told the kernel which users there are.
    """
    arguments = ["bwrap", *_confinement(counted)]
    for name, value in variables.items():
        arguments += ["--setenv", name, value]
    if os.geteuid() != 0:
        return _popen([*arguments, "--", *command], control, said)
    told, tells = os.pipe()
    go, goes = os.pipe()
    arguments += ["--info-fd", str(tells), "--userns-block-fd", str(go)]
    try:
        process = _popen([*arguments, "--", *command], control, said, pass_fds=(tells, go))
        os.close(tells)
        first = _first_process(told)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{first}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        processes.spare(first)
    finally:
        for descriptor in (told, go, goes):
            os.close(descriptor)
    return process


def _first_process(descriptor: int) -> int:
    """The process that bubblewrap tells of as JSON; others may hold the other end for longer."""
    text = b""
    while not text.rstrip().endswith(b"}"):
        part = os.read(descriptor, 4096)
        if not part:
            raise OSError("bubblewrap ended at once")
        text += part
    return int(json.loads(text)["child-pid"])


def _confinement(counted: bool) -> list[str]:
    """Bubblewrap's arguments: what of the host is there, and that nothing else is."""
    arguments = ["--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    arguments += ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), name]
        elif path.exists():
            arguments += ["--ro-bind", name, name]
    for folder in _bound_folders():
        arguments += ["--ro-bind", sys.prefix if folder == MOVED else folder, folder]
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
    """The interpreter's own, as far as they are not the system's."""
    folders = dict.fromkeys((_prefix_inside(), sys.base_prefix))
    return [folder for folder in folders if not Path(folder).is_relative_to("/usr") and not folder.startswith("/tmp")]
