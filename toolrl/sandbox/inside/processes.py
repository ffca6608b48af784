"""Resource usage and termination of the descendants of this process."""

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .kernel import MIB

TICKS = os.sysconf("SC_CLK_TCK")
MOST_OOM_SCORE = 500  # fork server and its supervisors; untrusted code has 1000


@dataclass(frozen=True)
class Usage:
    """Total usage of all descendants."""

    cpu_s: float  # includes exited processes
    memory_mib: float  # proportional set size
    processes: int


def wake_at_ends() -> int:
    """A descriptor that is readable when a child has exited."""
    wakes, woken = os.pipe()
    for descriptor in (wakes, woken):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    return wakes


def cpu_s_of_ended() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def usage(*, isolated: bool) -> Usage:
    """isolated: unix sockets of the private network namespace count with full buffers"""
    cpu_s, memory_mib, count = cpu_s_of_ended(), 0.0, 0
    if isolated:
        num_sockets = len(Path("/proc/self/net/unix").read_text().splitlines()) - 1  # minus the header line
        with socket.socket(socket.AF_UNIX) as fresh:
            memory_mib = num_sockets * fresh.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) / MIB
    for pid, stat in _below(os.getpid()):
        count += 1
        cpu_s += sum(int(ticks) for ticks in stat[11:15]) / TICKS  # utime, stime, and those of its reaped children
        with contextlib.suppress(OSError):  # it has exited
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            memory_mib += next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0)
    return Usage(cpu_s, memory_mib, count)


def spare(pid: int) -> None:
    """Let the OOM killer prefer untrusted code. Raises OSError for a raised minimum, as by Ray."""
    score = Path(f"/proc/{pid}/oom_score_adj")
    if int(score.read_text()) > MOST_OOM_SCORE:
        score.write_text(str(MOST_OOM_SCORE))


def signal_all(number: int, *, isolated: bool) -> None:
    """Send a signal to all descendants: at once as init of a pid namespace, else one by one."""
    for pid in [-1] if isolated else [pid for pid, _ in _below(os.getpid())]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_all(main: int, *, isolated: bool) -> int:
    """Kill and reap all descendants; returns the wait status of `main`."""
    status = 0
    while True:
        signal_all(signal.SIGKILL, isolated=isolated)
        try:
            pid, its_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == main:
            status = its_status


def reap_orphans(main: int) -> None:
    """Reap exited orphans, so that they no longer count as processes."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == main:  # keep its status for later; its exit ends the execution
                return
            os.waitpid(ended.si_pid, 0)


def _below(ancestor: int) -> Iterator[tuple[int, list[str]]]:
    """Living descendants, with the fields of /proc/PID/stat after the name: state, parent, ..."""
    stats: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has exited
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            stats[int(folder.name)] = fields
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    waiting = children.get(ancestor, [])
    while waiting:
        pid = waiting.pop()
        waiting.extend(children.get(pid, []))
        if stats[pid][0] != "Z":
            yield pid, stats[pid]
