"""Where a run of the chaos suite lives: mounts, a /dev/shm and a temporary folder of its own, and what it leaves there.

The mounts are those of a process that only waits, in a mount namespace of its own. It ends with the harness, whatever
becomes of that, and the mounts end with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from tests.conftest import ROOT

MARK = "CHAOS_PLACE"  # in the environment of every process of a run
GONE_S = 15.0  # for the last processes to end
_CGROUPS = Path("/sys/fs/cgroup")


class Place:
    """Made for one case, closed after it."""

    def __init__(self, shm_mib: int = 2048) -> None:
        self.tmp = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))  # short: names of sockets lie below it
        self._watched = (Path("/dev/shm"), self.tmp)
        self._cgroups = _cgroups()
        self._lock = threading.Lock()
        self.seen: dict[int, float] = {}  # process id -> when it was made, of every process of the runs here
        mounting = f"mount -t tmpfs -o size={shm_mib}m shm /dev/shm && echo ready && exec cat"
        self._holder = subprocess.Popen(
            [*_apart(), "sh", "-c", mounting], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n", "no mount namespace can be made here"
        self._mounts = self.mounts()

    @property
    def enter(self) -> list[str]:
        """The beginning of a command line that runs in here."""
        as_root = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        joined = ["nsenter", "--target", str(self._holder.pid), "--mount", *as_root, f"--wdns={ROOT}"]
        return [*joined, "setpriv", "--pdeathsig", "KILL"]  # it does not outlive a harness that is killed

    def mount(self, folder: Path, options: str) -> Path:
        """Mount a disk of memory in here, which does not count as left; where the harness finds it."""
        subprocess.run([*self.enter, "mount", "-t", "tmpfs", "-o", options, "chaos", str(folder)], check=True)
        self._mounts = self.mounts()
        return self.inside(folder)

    def inside(self, path: Path) -> Path:
        """A path in here, for the harness."""
        return Path(f"/proc/{self._holder.pid}/root") / path.relative_to("/")

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Of a command in here."""
        own = {
            MARK: self.tmp.name,
            "TMPDIR": str(self.tmp),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "TORCHINDUCTOR_CACHE_DIR": "/tmp/chaos-inductor",  # a cache, which is meant to stay
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**kept, **own, **more}

    def mounts(self) -> list[str]:
        """Where something is mounted in here."""
        lines = Path(f"/proc/{self._holder.pid}/mountinfo").read_text().splitlines()
        return sorted(line.split()[4] for line in lines)

    def watch(self, pid: int, stop: threading.Event) -> None:
        """Remember the process and all below it until `stop`; those whose parent dies are known by then."""
        while not stop.wait(0.2):
            try:
                root = psutil.Process(pid)
                self.note([root, *root.children(recursive=True)])
            except psutil.NoSuchProcess:
                return

    def note(self, processes: Iterable[psutil.Process]) -> None:
        """Count these to the run."""
        for each in processes:
            try:
                made = each.create_time()
            except psutil.NoSuchProcess:
                continue
            with self._lock:
                self.seen[each.pid] = made

    def alive(self) -> list[psutil.Process]:
        """Processes of the runs that have not ended."""
        found = []
        with self._lock:
            seen = dict(self.seen)
        for each in psutil.process_iter():
            try:
                ours = seen.get(each.pid) == each.create_time() or self._marked(each.pid)
                if ours and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
            except psutil.NoSuchProcess:
                continue
        return found

    def _marked(self, pid: int) -> bool:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"{MARK}={self.tmp.name}".encode() in variables

    def leftovers(self) -> list[str]:
        """What the runs have left behind; processes have some seconds to end."""
        deadline = time.monotonic() + GONE_S
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.25)
        left = [f"process {each.pid} ({_command(each)})" for each in alive]
        for folder in self._watched:
            found = sorted(path.name for path in self.inside(folder).iterdir())
            left += [str(folder / name) for name in found]
        left += [f"mount {each}" for each in self.mounts() if each not in self._mounts]
        left += [f"cgroup {each}" for each in self._left_cgroups()]
        return left

    def _left_cgroups(self) -> list[str]:
        """New ones that name a process of the runs."""
        numbers = {str(pid) for pid in self.seen}
        new = _cgroups() - self._cgroups
        return sorted(each for each in new if numbers & set(Path(each).name.replace(".", "-").split("-")))

    def clear(self) -> None:
        """End what is left, and remove it."""
        for each in self.alive():
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(self.alive(), timeout=5)
        for folder in filter(Path.exists, map(self.inside, self._watched)):
            for path in folder.iterdir():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave nothing, whatever the runs have left."""
        self.clear()
        self._holder.kill()
        self._holder.wait()
        shutil.rmtree(self.tmp, ignore_errors=True)


def possible() -> bool:
    """Whether mounts of one's own can be had here: by root, or in a namespace where one is root."""
    have = shutil.which("unshare") is not None
    return have and subprocess.run([*_apart(), "true"], capture_output=True, check=False).returncode == 0


def _apart() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", "--mount", *as_root]


def _cgroups() -> set[str]:
    """All cgroups of the machine. Some end while they are listed."""
    return {folder for folder, _, _ in os.walk(_CGROUPS)}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(" ".join(process.cmdline()).split())[:100] or str(process.name())
    except psutil.NoSuchProcess:
        return "ended"
