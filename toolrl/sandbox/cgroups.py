"""Kernel limits on memory and processes, and CPU time accounting: one cgroup per supervisor.

Version 2 is used if its controllers are available below or beside the cgroup of this process; else version 1, which
needs root, together with cgroup.freeze of a version 2 hierarchy without controllers. The limits of this process's own
cgroup apply to executions too.

A pool's folders are named after its process, which holds a lock on them: a pool that was killed leaves unlocked
folders, which the next one removes.
"""

import contextlib
import fcntl
import logging
import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids")  # version 2, which accounts CPU time without a controller
HIERARCHIES = ("memory", "pids", "cpuacct")  # version 1
CELL = "cell"  # cgroup of a session's processes, frozen between cells
NAME = "verl-sandbox"
REMOVE_S = 5.0  # wait for killed processes to disappear
JOIN_S = 10.0
_DELEGATED = "in a delegated cgroup: systemd-run --user --scope -p Delegate=yes COMMAND"
HINT = f"run as root, or {_DELEGATED}; a container needs a writable /sys/fs/cgroup"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Files:
    """One cgroup's files; purposes as in inside/cgroup.py."""

    folders: tuple[Path, ...]  # to create, outer ones first
    no_swap: tuple[Path, str]  # set once, if the file exists
    opened: tuple[tuple[str, Path], ...]  # purpose, file


@dataclass(frozen=True)
class Cgroups:
    """A place in the hierarchy where cgroups can be created."""

    version: int
    bases: dict[str, Path]  # the folder of each hierarchy: "unified" for version 2, else those of HIERARCHIES
    freezer: Path | None = None  # version 1 only: the folder of an additional version 2 hierarchy

    @property
    def freezes(self) -> bool:
        """Whether sessions can be frozen, which their processes cannot undo."""
        return self.version == 2 or self.freezer is not None

    def __str__(self) -> str:
        frozen = "" if self.freezes else ", without a freezer"
        return f"cgroup version {self.version}{frozen} ({', '.join(map(str, self.bases.values()))})"

    def folders(self, pool: str) -> list[Path]:
        bases = [*self.bases.values(), *([self.freezer] if self.freezer else [])]
        return [base / pool for base in bases]

    def files(self, pool: str, name: str) -> Files:
        if self.version == 2:
            folder = self.bases["unified"] / pool / name
            cell = folder / CELL
            opened = [("join", folder / "cgroup.procs"), ("memory_max", folder / "memory.max")]
            opened += [("memory_used", folder / "memory.current"), ("memory_events", folder / "memory.events")]
            opened += [("reclaim", folder / "memory.reclaim"), ("processes_max", folder / "pids.max")]
            opened += [("cpu_stat", folder / "cpu.stat"), *_freezing(cell)]
            return Files((folder, cell), (folder / "memory.swap.max", "0"), tuple(opened))
        memory, pids, cpuacct = (self.bases[each] / pool / name for each in HIERARCHIES)
        opened = [("join", each / "tasks") for each in (memory, pids, cpuacct)]  # faster than cgroup.procs
        opened += [("memory_max", memory / "memory.limit_in_bytes"), ("memory_used", memory / "memory.usage_in_bytes")]
        opened += [("memory_events", memory / "memory.oom_control"), ("reclaim", memory / "memory.force_empty")]
        opened += [("processes_max", pids / "pids.max"), ("cpu_ns", cpuacct / "cpuacct.usage")]
        cells = [self.freezer / pool / name] if self.freezer else []
        opened += [each for cell in cells for each in _freezing(cell)]
        folders = dict.fromkeys((memory, pids, cpuacct, *cells))  # hierarchies may be mounted as one
        return Files(tuple(folders), (memory / "memory.swappiness", "0"), tuple(opened))


def _open(file: Path) -> int:
    """Open with all access modes that the file's permission bits allow."""
    mode = file.stat().st_mode
    how = os.O_RDONLY if not mode & 0o222 else os.O_RDWR if mode & 0o444 else os.O_WRONLY
    return os.open(file, how | os.O_CLOEXEC)


def _freezing(cell: Path) -> list[tuple[str, Path]]:
    return [("cell", cell / "cgroup.procs"), ("freeze", cell / "cgroup.freeze")]


class Group:
    """The cgroup of a supervisor, as open files that are passed to it."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.descriptors: list[int] = []
        self.purposes: list[str] = []  # one per descriptor
        try:
            for folder in files.folders:
                folder.mkdir()
            if files.no_swap[0].exists():
                files.no_swap[0].write_text(files.no_swap[1])
            for purpose, file in files.opened:
                if purpose != "reclaim" or file.exists():  # since Linux 5.19
                    self.descriptors.append(_open(file))
                    self.purposes.append(purpose)
        except OSError:
            self.close()
            self.remove()
            raise

    def close(self) -> None:
        """Close the files; the supervisor keeps its own descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def remove(self) -> bool:
        """Remove the folders; False while a process is left in them."""
        return not [folder for folder in reversed(self._files.folders) if not _remove(folder)]


class CgroupPool:
    def __init__(self, cgroups: Cgroups) -> None:
        self.cgroups = cgroups
        self._name = ""
        self._locks: list[int] = []
        self._count = 0
        self._groups: list[Group] = []  # all existing ones
        self._left: list[Group] = []  # the ones to remove when their processes have exited

    def make(self) -> Group:
        """Create a cgroup for one more supervisor. Raises OSError on failure."""
        if not self._name:
            self._begin()
        self._remove(self._left)
        self._count += 1
        self._groups.append(Group(self.cgroups.files(self._name, str(self._count))))
        return self._groups[-1]

    def leave(self, group: Group) -> None:
        self._left.append(group)

    def close(self) -> None:
        """Remove all; waits for killed processes to exit."""
        deadline = time.monotonic() + REMOVE_S
        while not self._remove(self._groups) and time.monotonic() < deadline:
            time.sleep(0.005)
        if self._groups:
            log.warning("%d sandbox cgroups are still in use; the next start removes them", len(self._groups))
        if self._name:
            for folder in self.cgroups.folders(self._name):
                _remove(folder)
        while self._locks:
            os.close(self._locks.pop())
        self._name, self._groups, self._left = "", [], []

    def _remove(self, groups: list[Group]) -> bool:
        gone = [group for group in groups if group.remove()]
        for kept in (self._groups, self._left):
            kept[:] = [group for group in kept if group not in gone]
        return not groups

    def _begin(self) -> None:
        name = f"{NAME}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        for folder in self.cgroups.folders(name):
            folder.mkdir(exist_ok=True)  # hierarchies may be mounted as one
            self._locks.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            with contextlib.suppress(BlockingIOError):  # already locked by this process
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        if self.cgroups.version == 2:
            _enable(self.cgroups.folders(name)[0])
        self._name = name


def find_cgroups(proc: Path = Path("/proc/self")) -> Cgroups | None:
    """A place where cgroups can be created, or None. Removes leftovers of killed pools."""
    try:
        mounts = _own_folders(proc)
    except OSError:  # a kernel without cgroups
        return None
    for top in {mounts[name][0] for name in ("unified", *HIERARCHIES) if name in mounts}:
        _remove_stale(top)
    return next(filter(_works, _candidates(mounts)), None)


def _own_folders(proc: Path) -> dict[str, tuple[Path, Path]]:
    """Controller of version 1, or "unified" -> its mount point, and this process's folder in it."""
    own = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(",") if names else ["unified"], path))
    folders = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = (_unescape(field) for field in before.split()[3:5])
        kind, _, options = after.split(" ")[:3]  # the middle one may be empty
        for name in ["unified"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []:
            if name in own and Path(own[name]).is_relative_to(root):
                folders[name] = Path(point), Path(point) / Path(own[name]).relative_to(root)
    return folders


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _candidates(mounts: dict[str, tuple[Path, Path]]) -> Iterator[Cgroups]:
    """This process's cgroup or its parent's: one with processes has no children with controllers."""
    top, own = mounts.get("unified", (None, None))
    if own:
        for folder in (own, own.parent) if own != top else (own,):
            if _enable(folder):
                yield Cgroups(2, {"unified": folder})
    if mounts.keys() >= set(HIERARCHIES):
        bases = {name: mounts[name][1] for name in HIERARCHIES}
        yield from (Cgroups(1, bases, freezer) for freezer in dict.fromkeys((own, None)))


def _enable(folder: Path) -> bool:
    try:
        if set(CONTROLLERS) <= set((folder / "cgroup.subtree_control").read_text().split()):
            return True
        if not set(CONTROLLERS) <= set((folder / "cgroup.controllers").read_text().split()):
            return False
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
    except OSError:
        return False
    return True


def _works(cgroups: Cgroups) -> bool:
    """Whether a process can join a cgroup created there."""
    try:
        with contextlib.closing(CgroupPool(cgroups)) as pool, contextlib.closing(pool.make()) as group:
            files = zip(group.purposes, group.descriptors, strict=True)
            joins = [descriptor for purpose, descriptor in files if purpose in ("join", "cell")]
            script = "".join(f"echo 0 >/proc/self/fd/{number} || exit 1\n" for number in joins)
            command = ["/bin/sh", "-c", script]
            done = subprocess.run(command, pass_fds=joins, capture_output=True, check=False, timeout=JOIN_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.debug("cannot use %s: %s", cgroups, error)
        return False
    return done.returncode == 0


def _remove_stale(top: Path) -> None:
    """Remove folders of killed pools: the process is gone, and no process holds the lock."""
    for parent, names, _ in os.walk(top):
        stale = [name for name in names if name.startswith(f"{NAME}-")]
        names[:] = [name for name in names if name not in stale]
        for name in stale:
            folder = Path(parent, name)
            if not Path("/proc", name.split("-")[2]).exists():
                with contextlib.suppress(OSError), _lock(folder):
                    for inner, _, _ in os.walk(folder, topdown=False):
                        _remove(Path(inner))


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
