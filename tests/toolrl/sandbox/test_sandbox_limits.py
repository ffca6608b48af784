"""Limits hold for whatever an execution does: with cgroups of the version that this machine has."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from toolrl.sandbox.cgroups import find_cgroups
from toolrl.sandbox.local import LocalSandbox
from verl.envs.sandbox import Execution, Limits, Status
from verl.errors import ConfigError

ROOT = Path(__file__).parents[3]
LIMIT_MIB = 64
MOST_MIB = LIMIT_MIB * 1.1
WITHIN = Limits(wall_s=30, cpu_s=30, memory_mib=LIMIT_MIB)
Cells = Callable[..., list[Execution]]

SHARED_UNMAPPED = """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
MIB, PAGE = 1 << 20, 4096
for number in range(448):
    start = libc.mmap(None, ctypes.c_size_t(2 * MIB), 3, 0x21, -1, ctypes.c_long(0))
    if start in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(ctypes.get_errno())
    for page in range(0, 2 * MIB, PAGE):
        ctypes.memset(start + page, 1, 1)
    libc.munmap(ctypes.c_void_p(start + PAGE), ctypes.c_size_t(2 * MIB - PAGE))
    print("held", 2 * (number + 1), flush=True)
"""
VMSPLICE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
HUGE, PAGE = 2 << 20, 4096
class Piece(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]
ends, slots = os.pipe(), 0
kept = [ends]
for number in range(448):
    start = libc.mmap(None, ctypes.c_size_t(2 * HUGE), 3, 0x22, -1, ctypes.c_long(0))
    huge = -(-start // HUGE) * HUGE
    libc.madvise(ctypes.c_void_p(huge), ctypes.c_size_t(HUGE), 14)
    ctypes.memset(huge, 1, HUGE)
    if slots == 14:
        ends, slots = os.pipe(), 0
        kept.append(ends)
    if libc.vmsplice(ends[1], ctypes.byref(Piece(huge, PAGE)), ctypes.c_ulong(1), 0) < 0:
        raise OSError(ctypes.get_errno(), "vmsplice")
    slots += 1
    libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(2 * HUGE))
    print("held", 2 * (number + 1), flush=True)
"""
BESIDE = """
import os, select, time
def beside(count, fill):
    # Steps of fill in as many processes. They end when one process was killed, because its memory is free again:
    # its pipe, opened first, closes before its other files.
    pipes, start = [os.pipe() for _ in range(count)], os.pipe()
    for own in range(count):
        if os.fork() == 0:
            for end in [start[1], *(end for number, (_, end) in enumerate(pipes) if number != own)]:
                os.close(end)
            os.read(start[0], 1)
            others = [end for number, (end, _) in enumerate(pipes) if number != own]
            for _ in fill():
                if select.select(others, [], [], 0)[0]:
                    break
            time.sleep(20)
            os._exit(0)
    for end in [start[1], *(end for _, end in pipes)]:
        os.close(end)
    print([os.wait()[1] for _ in range(count)])
"""
SHARED_DONTNEED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
MIB = 1 << 20
def fill():
    start = libc.mmap(None, ctypes.c_size_t(40 * MIB), 3, 0x21, -1, ctypes.c_long(0))
    if start in (None, ctypes.c_void_p(-1).value):
        os._exit(1)
    for number in range(40):
        ctypes.memset(start + number * MIB, 1, MIB)
        libc.madvise(ctypes.c_void_p(start + number * MIB), ctypes.c_size_t(MIB), 4)
        os.write(1, b"held +1\\n")
        yield
beside(20, fill)
"""
UNIX_SOCKETS = """
import socket
kept = []
def fill():
    # Paced: usage is checked every 0.1 s, and what is got hold of between two checks is no matter of this test.
    for number in range(120):
        time.sleep(0.005)
        try:
            kept.extend(socket.socketpair())
        except OSError:
            return
        for end in kept[-2:]:
            end.setblocking(False)
            sent = 0
            try:
                while True:
                    sent += end.send(bytes(32768))
            except OSError:
                pass
            os.write(1, b"sent %d\\n" % sent)
            yield
beside(10, fill)
"""
REFUSED = "vmsplice 4 KiB of each 2 MiB huge page into pipes, then munmap"
EVASIONS = {
    "MAP_SHARED|MAP_ANONYMOUS, touched, all but one page unmapped, repeated": SHARED_UNMAPPED,
    REFUSED: VMSPLICE,
    "MAP_SHARED + madvise(DONTNEED), 20 processes": BESIDE + SHARED_DONTNEED,
    "buffers of unix sockets, 10 processes x 120 pairs": BESIDE + UNIX_SOCKETS,
}


def held_mib(stdout: str) -> float:
    """What the code reports that it holds."""
    latest = max(map(int, re.findall(r"^held (\d+)$", stdout, re.MULTILINE)), default=0)
    added = sum(map(int, re.findall(r"^held \+(\d+)$", stdout, re.MULTILINE)))
    return latest + added + sum(map(int, re.findall(r"^sent (\d+)$", stdout, re.MULTILINE))) / (1 << 20)


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[asyncio.Runner, LocalSandbox]]:
    need_bubblewrap()
    with asyncio.Runner() as runner:
        sandbox = LocalSandbox(workers=1, preload=())
        if sandbox.cgroups is None:
            assert os.geteuid() != 0, "root can make cgroups"
            pytest.skip("no cgroup can be made here")
        yield runner, sandbox
        runner.run(sandbox.close())


@pytest.fixture
def run(place: tuple[asyncio.Runner, LocalSandbox]) -> Callable[..., Execution]:
    runner, sandbox = place
    return lambda *args, **settings: runner.run(sandbox.run(*args, **settings))


@pytest.fixture
def cells(place: tuple[asyncio.Runner, LocalSandbox]) -> Cells:
    """Runs cells of one session, with a pause after each."""
    runner, sandbox = place

    async def run_cells(*codes: str, pause_s: float = 0.0, limits: Limits = WITHIN) -> list[Execution]:
        session = await sandbox.session()
        done = []
        for code in codes:
            done.append(await session.run(code, limits))
            await asyncio.sleep(pause_s)
        await session.close()
        return done

    return lambda *codes, **settings: runner.run(run_cells(*codes, **settings))


@pytest.mark.parametrize("evasion", EVASIONS)
def test_memory_ends_at_the_limit(run: Callable[..., Execution], evasion: str) -> None:
    done = run(EVASIONS[evasion], limits=WITHIN)
    assert done.status is Status.ERROR
    if evasion == REFUSED:  # everywhere: nothing that is in use needs it
        assert "OSError: [Errno 38] vmsplice" in done.stderr and held_mib(done.stdout) == 0
        return
    assert 1 < held_mib(done.stdout) <= MOST_MIB
    assert f"more than {LIMIT_MIB} MiB of memory" in done.stderr or "MemoryError" in done.stderr


def test_memory_that_an_execution_left_charged_is_not_billed_to_the_next(run: Callable[..., Execution]) -> None:
    for _ in range(4):
        run("open('/tmp/file', 'wb').write(bytes(10 << 20)); b'x' * (30 << 20)", limits=WITHIN)
    done = run("x = b'x' * (40 << 20); print(len(x) >> 20)", limits=WITHIN)
    assert (done.status, done.stdout) == (Status.FINISHED, "40\n")


def test_a_child_that_the_kernel_killed_for_memory_ends_the_execution(run: Callable[..., Execution]) -> None:
    code = f"import os\nif os.fork() == 0:\n    exec({SHARED_UNMAPPED!r})\nos.wait()\nprint('parent')"
    done = run(code, limits=WITHIN)
    assert (done.status, done.return_code) == (Status.ERROR, None)
    assert done.stderr.endswith(f"killed: more than {LIMIT_MIB} MiB of memory\n")


def test_a_small_program_that_runs_out_of_memory_leaves_its_supervisor_alive(run: Callable[..., Execution]) -> None:
    code = "exec 3<>/dev/shm/x; head -c 12M /dev/zero >&3; x=$(head -c 200M /dev/zero | tr '\\0' x); echo ${#x}"
    supervisor = run("import os; print(os.getppid(), flush=True)").stdout
    done = run(code, "bash", limits=WITHIN)
    assert done.status is Status.ERROR
    assert run("import os; print(os.getppid(), flush=True)").stdout == supervisor


WAKES = """
import ctypes, os, signal, threading, time
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGCONT, lambda *_: None)
event = (ctypes.c_int * 16)(0, 0, signal.SIGCONT)  # struct sigevent: SIGEV_SIGNAL
timer, every_50_ms = ctypes.c_void_p(), (ctypes.c_long * 4)(0, 50000000, 0, 50000000)
assert libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, ctypes.byref(every_50_ms), None) == 0
"""
BURNS = (
    WAKES
    + """
def burn():
    while True:
        pass
threading.Thread(target=burn, daemon=True).start()
"""
)
# Two processes: the address space of one alone ends before the limit of all.
GROWS = (
    "import os\nforked = os.fork() == 0\n"
    + WAKES
    + """
kept = []
def grow():
    while True:
        kept.append(b"x" * (1 << 20))
        time.sleep(0.005)
if forked:
    grow()
threading.Thread(target=grow, daemon=True).start()
"""
)
CPU_S = "import resource\nused = resource.getrusage(resource.RUSAGE_SELF)\nprint(used.ru_utime + used.ru_stime)"


@pytest.mark.long
def test_session_wakes_itself_by_timer(cells: Cells) -> None:
    first, second = cells(BURNS + CPU_S, CPU_S, pause_s=2.0)
    assert first.status is Status.FINISHED, first
    assert second.status is Status.FINISHED, second
    assert float(second.stdout) - float(first.stdout) < 0.2  # in 2 s between the cells


@pytest.mark.long
def test_session_memory_between_cells(cells: Cells) -> None:
    limits = Limits(wall_s=30, cpu_s=30, memory_mib=512)
    first, second = cells(GROWS + "len(kept)", "len(kept)", pause_s=2.0, limits=limits)
    assert first.status is Status.FINISHED, first
    assert int(second.stdout) - int(first.stdout) < 50


def test_session_memory_ends_at_the_limit(cells: Cells) -> None:
    done = cells("x = 1", SHARED_UNMAPPED, "x")
    assert held_mib(done[1].stdout) <= MOST_MIB
    assert done[1].status is Status.ERROR
    assert "NameError" in done[2].stderr


BURN_S = "while time.process_time() < {}: pass"
SIGCHLD_IGNORED = f"""
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(40):
    if os.fork() == 0:
        {BURN_S.format(0.1)}
        os._exit(0)
    time.sleep(0.12)
"""
ORPHANS = f"""
import os, time
for _ in range(40):
    if os.fork() == 0:
        if os.fork() == 0:
            {BURN_S.format(0.1)}
        os._exit(0)
    os.wait()
    time.sleep(0.12)
"""


@pytest.mark.parametrize("code", [SIGCHLD_IGNORED, ORPHANS], ids=["CPU by SIGCHLD ignored", "CPU by orphans"])
def test_cpu_of_all_is_counted(run: Callable[..., Execution], code: str) -> None:
    done = run(code, limits=Limits(wall_s=60, cpu_s=1))
    assert done.status is Status.TIMEOUT, done
    assert "more than 1 s of CPU time" in done.stderr


def test_100_ended_jobs(run: Callable[..., Execution]) -> None:
    done = run("for i in $(seq 100); do ( (true) & ); done; echo done", "bash")
    assert (done.status, done.stdout, done.stderr) == (Status.FINISHED, "done\n", "")


def test_processes_are_limited(run: Callable[..., Execution]) -> None:
    code = """
import os, time
for number in range(100):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError:
        print(number)
        os._exit(0)
"""
    assert run(code, limits=Limits(processes=10)).stdout == "9\n"


@pytest.fixture(scope="module")
def uncounted() -> Iterator[tuple[asyncio.Runner, LocalSandbox]]:
    """A pool on a machine without any cgroup."""
    need_bubblewrap()
    with asyncio.Runner() as runner:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("toolrl.sandbox.local.find_cgroups", lambda: None)
            sandbox = LocalSandbox(workers=1, preload=())
        yield runner, sandbox
        runner.run(sandbox.close())


@pytest.mark.parametrize("evasion", EVASIONS)
def test_without_a_cgroup_each_way_around_the_memory_limit_is_closed(
    uncounted: tuple[asyncio.Runner, LocalSandbox], evasion: str
) -> None:
    runner, sandbox = uncounted
    done = runner.run(sandbox.run(EVASIONS[evasion], limits=WITHIN))
    assert held_mib(done.stdout) < (1 if evasion != "buffers of unix sockets, 10 processes x 120 pairs" else 400)
    assert done.status is Status.ERROR or "256" in done.stdout, done


def test_without_a_cgroup_there_is_no_shared_memory_by_device(
    uncounted: tuple[asyncio.Runner, LocalSandbox],
) -> None:
    runner, sandbox = uncounted
    assert "FileNotFoundError" in runner.run(sandbox.run("open('/dev/zero', 'r+b')")).stderr


def test_without_a_cgroup_pools_of_processes_work(uncounted: tuple[asyncio.Runner, LocalSandbox]) -> None:
    runner, sandbox = uncounted
    code = """
import multiprocessing
from multiprocessing import shared_memory
if __name__ == "__main__":
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    value = multiprocessing.Value("i", 3)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(abs, [-1, -2]), value.value)
    memory.close(), memory.unlink()
"""
    done = runner.run(sandbox.run(code))
    assert done.stdout == "[1, 2] 3\n", done


@pytest.mark.parametrize("code", [BURNS, GROWS], ids=["CPU", "memory"])
def test_without_a_cgroup_a_session_that_goes_on_between_cells_is_ended(
    uncounted: tuple[asyncio.Runner, LocalSandbox], code: str
) -> None:
    runner, sandbox = uncounted

    async def cells() -> tuple[Execution, Execution]:
        session = await sandbox.session()
        limits = Limits(wall_s=30, cpu_s=30, memory_mib=1024)
        assert (await session.run(code, limits)).status is Status.FINISHED
        second = None
        while second is None or second.status is Status.FINISHED:  # a busy machine takes longer to reach a limit
            await asyncio.sleep(1.5)
            second = await session.run("1")
        third = await session.run("kept")
        await session.close()
        return second, third

    second, third = runner.run(asyncio.wait_for(cells(), 30))
    assert re.search(r"killed: more than (0.1 s of CPU time|1024 MiB of memory)\n", second.stderr), second
    assert "NameError" in third.stderr


def test_without_a_cgroup_cpu_by_orphans_is_counted(uncounted: tuple[asyncio.Runner, LocalSandbox]) -> None:
    runner, sandbox = uncounted
    done = runner.run(sandbox.run(ORPHANS, limits=Limits(wall_s=60, cpu_s=1)))
    assert done.status is Status.TIMEOUT, done


def test_without_a_cgroup_100_ended_jobs(uncounted: tuple[asyncio.Runner, LocalSandbox]) -> None:
    runner, sandbox = uncounted
    done = runner.run(sandbox.run("for i in $(seq 100); do ( (true) & ); done; echo done", "bash"))
    assert (done.status, done.stdout) == (Status.FINISHED, "done\n")


def test_a_cgroup_can_be_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolrl.sandbox.local.find_cgroups", lambda: None)
    with pytest.raises(ConfigError, match=r"sandbox.isolation=strict .* no cgroup can be made here. run as root"):
        LocalSandbox(isolation="none", require_cgroup=True)


def folders_of_pools(owner: int) -> list[Path]:
    """Those of a process's pools that are there."""
    return [
        Path(parent) / name
        for parent, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(f"verl-sandbox-{owner}-")
    ]


OWNER = """
import asyncio
from verl.envs.sandbox import Limits
from toolrl.sandbox.local import LocalSandbox
async def main():
    sandbox = LocalSandbox(workers=1, preload=())
    session = await sandbox.session()
    await session.run("x = 1")
    print("ready", flush=True)
    await sandbox.run("sleep 50", "bash", limits=Limits(wall_s=50))
asyncio.run(main())
"""


def test_cgroups_of_a_killed_owner_are_gone_after_the_next_start(
    run: Callable[..., Execution],
) -> None:
    assert run("1").status is Status.FINISHED  # the pool of this process lives
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout and owner.stdout.readline() == b"ready\n"
    below = psutil.Process(owner.pid).children(recursive=True)
    assert folders_of_pools(owner.pid)
    owner.kill()
    owner.wait()
    psutil.wait_procs(below, timeout=20)
    find_cgroups()
    assert folders_of_pools(owner.pid) == []
    assert folders_of_pools(os.getpid())  # those of pools that live stay


async def test_a_closed_pool_leaves_no_cgroup() -> None:
    need_bubblewrap()
    before = set(folders_of_pools(os.getpid()))
    sandbox = LocalSandbox(workers=2, preload=())
    session = await sandbox.session()
    await session.run("x = 1")
    await asyncio.gather(*[sandbox.run("pass", fetch=["a"]) for _ in range(3)])
    await sandbox.close()  # the session, too
    assert set(folders_of_pools(os.getpid())) <= before
