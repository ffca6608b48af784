"""Supervises one runtime of toolrl/swe: the repository's layers on disk, and all processes in it.

The first process of a pid namespace, with a socket to the owner as standard input; everything ends with it. The owner's
pipes go directly to the processes that it starts, so that no output passes through here.

    /image    the repository as it was, read-only, shared by all runtimes of a task
    /episode  now/upper, now/tmp, now/home: what this runtime has written; snapshots/N: copies of `now`; base.git
    /testbed  the two together

Processes see /testbed, /tmp and /home/user, and `BASE_GIT`, but neither /image nor /episode.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

from . import disk, frames, kernel, processes
from .cgroup import Cgroup
from .child import FREE, IGNORED_IN_BACKGROUND, restrict
from .zygote import UNCOUNTED_MIB, finish_root, make_jail

IMAGE, EPISODE = Path("/image"), Path("/episode")
NOW, SNAPSHOTS = EPISODE / "now", EPISODE / "snapshots"
TESTBED = "/testbed"
BASE_GIT = "/base.git"  # the .git folder of what the agent started from, which the code cannot change
MOUNTS = {"upper": TESTBED, "tmp": "/tmp", "home": "/home/user"}  # layer: where it is visible
READ_ONLY = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
CHECK_S = 0.5  # interval of usage checks
CHECK_SHARE = 5  # a check that takes long comes less often
ROOM = disk.DiskUsage(1, 1000)  # beyond what is on disk after an excess, to remove files
BEAT_S = 2.0  # heartbeat interval


class Supervisor:
    def __init__(self, owner: socket.socket, settings: dict[str, Any]) -> None:
        hello, descriptors = frames.receive(owner)
        self._cgroup = Cgroup(hello["cgroup"], descriptors) if hello and descriptors else None  # joined by this process
        self._owner = owner
        self._limits: dict[str, Any] = settings["limits"]
        self._jail = make_jail(True, self._cgroup is not None)
        if self._cgroup:
            self._jail = replace(self._jail, virtual_mib=UNCOUNTED_MIB)
            self._cgroup.begin(self._limits)
        self._layered: bool = settings["overlay"]
        self._disk_limit = self._allowed = disk.DiskUsage(self._limits["file_mib"], self._limits["files"])
        self._sealed = False  # nothing can be written
        self._snapshots = 0
        self._children: set[int] = set()
        for folder in (NOW, SNAPSHOTS):
            folder.mkdir(mode=0o700)
        self._mount()
        self._before = disk.DiskUsage(0, 0) if self._layered else disk.usage(EPISODE, Path(TESTBED), sys.maxsize)

    def serve(self) -> None:
        """Until the owner closes its end, or the disk is full."""
        wakes = processes.wake_at_ends()
        frames.send(self._owner, {"ready": True, "layered": self._layered})
        next_check = next_beat = time.monotonic()
        while True:
            ready, _, _ = select.select([self._owner.fileno(), wakes], [], [], CHECK_S)
            if not disk.has_room(EPISODE):  # first, so that no failure for want of space counts as the code's
                frames.send(self._owner, {"lost": "the disk of its files is full"})
                return
            if wakes in ready:
                os.read(wakes, 1 << 16)
                self._reap()
            if self._owner.fileno() in ready and not self._answer():
                return
            if (now := time.monotonic()) >= next_check:
                self._check()
                ended = time.monotonic()
                next_check = ended + max(CHECK_S, (CHECK_SHARE - 1) * (ended - now))
            if now >= next_beat:
                frames.send(self._owner, {"beat": True})
                next_beat = now + BEAT_S

    def _answer(self) -> bool:
        """Do what the owner asks; False if it has gone."""
        request, descriptors = frames.receive(self._owner)
        if not request:
            return False
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            answer |= getattr(self, f"_do_{request['do']}")(request, descriptors)
        except (OSError, subprocess.CalledProcessError) as error:
            answer["problem"] = str(error)
        frames.send(self._owner, answer)
        return True

    def _do_spawn(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        pid = os.fork()
        if pid == 0:
            self._become(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._children.add(pid)
        return {"pid": pid}

    def _do_signal(self, request: dict[str, Any], _: list[int]) -> dict[str, Any]:
        """To a started process and its process group."""
        if request["pid"] in self._children:  # else the number may belong to another process by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(request["pid"], request["number"])
        return {}

    def _do_snapshot(self, _: dict[str, Any], __: list[int]) -> dict[str, Any]:
        self._snapshots += 1
        name = str(self._snapshots)
        processes.signal_all(signal.SIGSTOP, isolated=True)
        try:
            _copy(NOW, SNAPSHOTS / name)
        finally:
            processes.signal_all(signal.SIGCONT, isolated=True)
        return {"name": name}

    def _do_restore(self, request: dict[str, Any], _: list[int]) -> dict[str, Any]:
        (SNAPSHOTS / request["name"]).lstat()  # raises if there is none
        self._end_all()
        for target in MOUNTS.values():
            kernel.unmount(target)
        shutil.rmtree(NOW)
        _copy(SNAPSHOTS / request["name"], NOW)
        self._mount()
        return {}

    def _do_take_base(self, request: dict[str, Any], _: list[int]) -> dict[str, Any]:
        """Take a git folder that was made in /tmp for BASE_GIT, read-only."""
        folder = EPISODE / "base.git"
        (NOW / "tmp" / request["name"]).rename(folder)
        kernel.mount(str(folder), BASE_GIT, flags=kernel.MS_BIND)
        kernel.mount("", BASE_GIT, flags=READ_ONLY)
        return {}

    def _do_kill(self, _: dict[str, Any], __: list[int]) -> dict[str, Any]:
        self._end_all()
        return {}

    def _become(self, request: dict[str, Any], descriptors: list[int]) -> Never:
        """Turn this process, just forked, into the requested program."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *IGNORED_IN_BACKGROUND, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            above = [os.dup2(each, FREE + place) for place, each in enumerate(descriptors)]
            for place, descriptor in enumerate(above):
                os.dup2(descriptor, place)
            os.closerange(len(above), os.sysconf("SC_OPEN_MAX"))
            kernel.unshare(kernel.CLONE_NEWNS)
            for hidden in (EPISODE, IMAGE):
                kernel.unmount(str(hidden))
            restrict(self._jail, self._limits)
            os.chdir(request["cwd"])
            os.execvpe(request["argv"][0], request["argv"], request["env"])
        except BaseException as error:  # noqa: BLE001  a forked process must never return to its parent's code
            os.write(2, f"{error}\n".encode(errors="replace"))
            os._exit(127)

    def _mount(self) -> None:
        for name, target in MOUNTS.items():
            folder = NOW / name
            if not folder.exists():
                folder.mkdir()
                os.chown(folder, self._jail.user, self._jail.user)
                folder.chmod(0o1777 if name == "tmp" else 0o755)
                if name == "upper" and not self._layered:
                    _copy(IMAGE, folder)
            if name != "upper" or not self._layered or not self._mount_layers(folder):
                kernel.mount(str(folder), target, flags=kernel.MS_BIND)
        self._sealed = False

    def _mount_layers(self, upper: Path) -> bool:
        """False, after a copy of the repository, if the kernel refuses."""
        work = NOW / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        options = f"lowerdir={IMAGE},upperdir={upper},workdir={work},userxattr"
        try:
            kernel.mount("overlay", TESTBED, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        except OSError:
            self._layered = False
            _copy(IMAGE, upper)
        return self._layered

    def _check(self) -> None:
        """End all processes if they exceed a limit, with an event that names it."""
        if reason := self._excess():
            frames.send(self._owner, {"excess": reason})  # before the ends of processes that it explains
            self._end_all()
            if self._cgroup:
                self._cgroup.end()
                self._cgroup.begin(self._limits)

    def _excess(self) -> str:
        if self._cgroup and self._cgroup.out_of_memory():
            return f"more than {self._limits['memory_mib']} MiB of memory"
        if not self._cgroup:
            used = processes.usage(isolated=True)
            if used.memory_mib > self._limits["memory_mib"]:
                return f"more than {self._limits['memory_mib']} MiB of memory"
            if used.processes > self._limits["processes"]:
                return f"more than {self._limits['processes']} processes"
        return "" if self._sealed else self._excess_on_disk()

    def _excess_on_disk(self) -> str:
        """After an excess there is room to remove files; beyond twice a limit nothing can be written any more."""
        limit, before = self._disk_limit, self._before
        counted = disk.usage(EPISODE, Path(TESTBED), before.files + 2 * limit.files + 1)
        used = disk.DiskUsage(counted.mib - before.mib, counted.files - before.files)
        room = disk.DiskUsage(used.mib + ROOM.mib, used.files + ROOM.files)
        if used.mib <= self._allowed.mib and used.files <= self._allowed.files:
            self._allowed = _each(max, limit, _each(min, self._allowed, room))
            return ""
        self._allowed = _each(max, limit, room)
        share, what = max(
            (used.mib / limit.mib, f"{limit.mib} MiB of files"), (used.files / limit.files, f"{limit.files} files")
        )
        if share <= 2:
            return f"more than {what}"
        self._seal()
        return f"more than twice {what}; nothing can be written any more"

    def _seal(self) -> None:
        self._sealed = True
        for target in MOUNTS.values():
            kernel.mount("", target, flags=READ_ONLY)

    def _end_all(self) -> None:
        while True:
            processes.signal_all(signal.SIGKILL, isolated=True)
            try:
                self._ended(*os.waitpid(-1, 0))
            except ChildProcessError:
                return

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended(*ended)

    def _ended(self, pid: int, status: int) -> None:
        if pid in self._children:
            self._children.discard(pid)
            frames.send(self._owner, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _copy(source: Path, target: Path) -> None:
    """With owners, links, whiteouts and attributes."""
    subprocess.run(["/bin/cp", "-a", "--reflink=auto", f"{source}/.", str(target)], check=True, capture_output=True)


def _each(choose: Callable[[Iterable[Any]], Any], *usages: disk.DiskUsage) -> disk.DiskUsage:
    return disk.DiskUsage(choose(each.mib for each in usages), choose(each.files for each in usages))


def main() -> None:
    """Serve one runtime. Argument: JSON with the limits and the folders of the host that are visible."""
    settings = json.loads(sys.argv[1])
    owner = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    with contextlib.suppress(OSError):  # already done by an owner that is root
        processes.spare(os.getpid())
    finish_root(settings["bound"])
    private = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", private, "size=64m,nr_inodes=16k,mode=1777")
    kernel.mount("proc", "/proc", "proc", private | kernel.MS_NOEXEC, "subset=pid,hidepid=ptraceable")
    with contextlib.suppress(BrokenPipeError):
        Supervisor(owner, settings).serve()
