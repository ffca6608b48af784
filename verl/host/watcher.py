"""The process that cleans up after a run, however the run ends. Started by `scratch.py` as a standalone script.

After the controller's end it kills all processes of the run, and removes their shared memory and the run's folder. A
process belongs to the run if its environment contains the folder's name, or if it descends from such a process.
Standard library only: it lives as long as the run, in about 10 MB.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Set
from contextlib import suppress

MARK = "VERL_RUN_FOLDER"
PERIOD_S = 2.0  # interval between scans of the run's processes, which take about 10 ms
_TRACKER_S = 3.0  # grace period for Python's resource trackers, which clean up after their dead processes
_END_S = 20.0
# Of multiprocessing, its shared memory, torch and NCCL. Other files are not touched.
_SHARED_MEMORY, _SHARED_NAMES = "/dev/shm/", ("sem.mp-", "psm_", "torch_", "nccl-")
_CGROUPS = "verl-sandbox"
_KILLED = """
The controller (process {pid}) ended without cleaning up: it was killed (kill -9, the kernel's out-of-memory killer, a
scheduler), or its shutdown hung and was aborted. Its other processes were killed and its temporary files removed.
Run the same command again to resume from the last checkpoint.
"""


class RunProcesses:
    def __init__(self, folder: str, controller: int) -> None:
        self._folder = folder
        self._entry = f"{MARK}={folder}\0".encode()
        self._controller = controller
        self._since = _process_table()[os.getpid()][1]
        self._known: set[tuple[int, int]] = set()  # (process id, start)
        self._foreign: set[tuple[int, int]] = set()  # known not to belong to this run
        self._mapped: set[int] = set()  # inodes

    def look(self) -> None:
        """Record processes and their mapped files, which cannot be determined after a process is killed."""
        self._members()
        there = set(_shared_files())
        for pid, _ in self._known:
            self._mapped |= _mapped_by(pid, there)

    def tidy(self) -> None:
        """Kill the processes, except the controller and its children; then remove all leftover files."""
        self.look()
        started = time.monotonic()
        while (members := self._members()) and time.monotonic() < started + _END_S:
            patient = time.monotonic() < started + _TRACKER_S
            for pid, _ in members:
                if not (patient and b"multiprocessing.resource_tracker" in _read(pid, "cmdline")):
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self._remove_shared()
        remove_tree(self._folder)

    def _remove_shared(self) -> None:
        """Remove shared memory that is in use no more. A descendant of the controller may still be ending."""
        deadline = time.monotonic() + _TRACKER_S
        while True:
            left = {inode: path for inode, path in _shared_files().items() if inode in self._mapped}
            in_use = {inode for pid in _processes() for inode in _mapped_by(pid, left.keys())}
            for inode in left.keys() - in_use:
                with suppress(OSError):
                    os.unlink(left[inode])
            if in_use <= _mapped_by(self._controller, in_use) or time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def _members(self) -> set[tuple[int, int]]:
        """The living processes, without the controller and, while it is alive, its children."""
        table = _process_table()
        above = {pid: _ancestors(pid, table) for pid in table}
        alive = {(pid, start) for pid, (_, start) in table.items()}
        marked = {each for each in alive - self._known - self._foreign if self._entry in _read(each[0], "environ")}
        family = {pid for pid, _ in self._known | marked}
        for pid, start in alive - self._known:
            of_controller = self._controller in above[pid] and start >= self._since
            belongs = (pid, start) in marked or of_controller or bool(family & above[pid])
            (self._known if belongs else self._foreign).add((pid, start))
        self._foreign &= alive
        self._known = {each for each in self._known & alive if each[0] not in (self._controller, os.getpid())}
        return {(pid, start) for pid, start in self._known if self._controller not in above[pid]}


def remove_tree(folder: str | os.PathLike[str]) -> None:
    """As far as possible, whatever is in it: folders nested thousands deep, folders without permissions, such as those
    of an overlay. No link is followed. Paths are relative to open folders, of which two are open at a time.
    """
    try:
        here = _unlocked(os.fspath(folder))
    except OSError:  # a file, or gone
        with suppress(OSError):
            os.unlink(folder)
        return
    above = [("", os.fstat(here), _emptied(here))]  # from the top to `here`: (name, identity, folders within)
    try:
        while above:
            name, _, within = above[-1]
            if within:
                with suppress(OSError):
                    inner = _unlocked(within[-1], here)
                    os.close(here)
                    here = inner
                    above.append((within[-1], os.fstat(here), _emptied(here)))
                within.pop()
                continue
            above.pop()
            if above:
                outer = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
                os.close(here)
                here = outer
                if not os.path.samestat(os.fstat(here), above[-1][1]):  # moved meanwhile
                    return
                with suppress(OSError):
                    os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)
    with suppress(OSError):
        os.rmdir(folder)


def _emptied(folder: int) -> list[str]:
    """Remove all but folders, whose names are returned."""
    left = []
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            left.append(name)
        except OSError:
            continue
    return left


def _unlocked(name: str, folder: int | None = None) -> int:
    """A folder's descriptor, after its owner has all permissions. Raises OSError, also for a link."""
    seen = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        with suppress(OSError):  # another user's, which may be open to us
            os.chmod(f"/proc/self/fd/{seen}", 0o700)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=seen)
    finally:
        os.close(seen)


def _process_table() -> dict[int, tuple[int, int]]:
    """(parent, start in ticks since boot) of every running process, by process id."""
    table = {}
    for pid in _processes():
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        if fields and fields[0] not in (b"Z", b"X"):
            table[pid] = int(fields[1]), int(fields[19])
    return table


def _ancestors(pid: int, table: dict[int, tuple[int, int]]) -> set[int]:
    found: set[int] = set()
    while pid in table and (pid := table[pid][0]) and pid not in found:
        found.add(pid)
    return found


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _read(pid: int, file: str) -> bytes:
    with suppress(OSError), open(f"/proc/{pid}/{file}", "rb") as opened:  # another user's process, or already gone
        return opened.read()
    return b""


def _shared_files() -> dict[int, str]:
    """This user's shared-memory files that a crash may leave behind: paths by inode."""
    found = {}
    with suppress(OSError):
        for entry in os.scandir(_SHARED_MEMORY):
            with suppress(OSError):
                if entry.name.startswith(_SHARED_NAMES) and entry.stat().st_uid == os.getuid():
                    found[entry.inode()] = entry.path
    return found


def _mapped_by(pid: int, inodes: Set[int]) -> set[int]:
    """Those that a process maps. By inode, because glibc renames semaphores."""
    if not inodes:
        return set()
    lines = (line.split() for line in _read(pid, "maps").splitlines() if _SHARED_MEMORY.encode() in line)
    return {int(fields[4]) for fields in lines} & inodes


def _remove_cgroups(controller: int) -> None:
    """Those of the controller's sandboxes (toolrl/sandbox/cgroups.py), once they are empty."""
    name, deadline = f"{_CGROUPS}-{controller}-", time.monotonic() + _TRACKER_S
    for place, folders, _ in os.walk("/sys/fs/cgroup"):
        for pool in (f"{place}/{each}" for each in folders if each.startswith(name)):
            while os.path.isdir(pool) and time.monotonic() < deadline:
                for inner, _, _ in os.walk(pool, topdown=False):
                    with suppress(OSError):
                        os.rmdir(inner)
                time.sleep(0.05)


def main(folder: str, controller: int) -> int:
    """Wait for the controller's end and clean up. Standard input: a byte if it ends orderly."""
    run = RunProcesses(folder, controller)
    ended = False
    # The pipe alone is not sufficient: a child forked by the controller may hold its other end.
    while os.getppid() == controller and not ended:
        run.look()
        ended = bool(select.select([0], [], [], PERIOD_S)[0])
    in_order = ended and os.read(0, 1) != b""
    run.tidy()
    # A child of the controller may write there still, where a second Ctrl-C has broken off its end.
    deadline = time.monotonic() + _END_S
    while in_order and time.monotonic() < deadline:
        time.sleep(0.2)
        if not os.path.isdir(folder):
            break
        run.tidy()
    if not in_order:
        _remove_cgroups(controller)
        with suppress(OSError):
            os.write(2, _KILLED.format(pid=controller).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
