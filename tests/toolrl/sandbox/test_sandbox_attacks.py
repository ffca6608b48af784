"""What code does to its sandbox, short of a way out: an `Execution` each time, nothing left, nothing used up."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.toolrl.sandbox.sandbox_host import foreign_call, need_bubblewrap
from tests.toolrl.sandbox.sandbox_probes import PROBES, REFUSED
from tests.toolrl.sandbox.test_sandbox import OWN, search
from toolrl.sandbox.inside import seccomp
from toolrl.sandbox.local import LocalSandbox
from verl.envs.sandbox import Execution, Limits, Status
from verl.errors import DataError

ROOT = Path(__file__).parents[3]
SHORT = Limits(wall_s=1.0, cpu_s=1.0)
SYSTEM_PYTHON = "/usr/bin/python3"  # which an ordinary user may read


@dataclass(frozen=True)
class Pool:
    """A confined pool of two and the loop it lives in."""

    runner: asyncio.Runner
    sandbox: LocalSandbox

    def run(self, code: str, language: str = "python", **settings: Any) -> Execution:
        return self.runner.run(self.sandbox.run(code, language, **settings))

    def works(self) -> bool:
        return self.run("print('works')").stdout == "works\n"


@pytest.fixture(scope="module")
def sandbox(runner: asyncio.Runner) -> Iterator[LocalSandbox]:
    need_bubblewrap()
    sandbox = LocalSandbox(workers=2, preload=("numpy", "numpy.random"))
    yield sandbox
    runner.run(sandbox.close())


@pytest.fixture
def pool(runner: asyncio.Runner, sandbox: LocalSandbox) -> Pool:
    return Pool(runner, sandbox)


def test_int_0x80_with_the_number_of_ptrace_is_killed_by_sigsys(pool: Pool) -> None:
    done = pool.run(foreign_call(26))  # ptrace
    assert (done.status, done.return_code, done.stdout) == (Status.ERROR, -31, "")


async def test_open_descriptors_of_python_bash_and_a_session_are_0_1_2_and_a_session_s_3(sandbox: LocalSandbox) -> None:
    code = """
import fcntl
def is_open(number):
    try:
        return fcntl.fcntl(number, fcntl.F_GETFD) >= 0
    except OSError:
        return False
print(*filter(is_open, range(4096)))
"""
    assert (await sandbox.run(code)).stdout == "0 1 2\n"
    listed = "for number in /proc/self/fd/*; do echo -n ${number##*/}; done"
    assert (await sandbox.run(listed, "bash")).stdout.startswith("012")
    assert (await sandbox.run(f"python -c '{code}'", "bash")).stdout == "0 1 2\n"
    session = await sandbox.session()
    assert (await session.run(code)).stdout == "0 1 2 3\n"
    await session.close()


def test_no_traces_of_an_earlier_execution_in_the_memory_of_6_later_ones(pool: Pool) -> None:
    code = "assert 'trace-in-code'\nopen('out', 'w').write('trace-in-fetched')"
    first = pool.run(code, stdin="trace-in-stdin", files={"in": b"trace-in-file"}, fetch=["out"])
    assert first.files == {"out": b"trace-in-fetched"}
    for _ in range(6):
        done = pool.run(search("trace-in-"))
        assert (done.status, done.stdout) == (Status.FINISHED, "0\n")


async def test_two_sessions_at_once_have_files_variables_and_processes_apart(sandbox: LocalSandbox) -> None:
    one, two = await sandbox.session(), await sandbox.session()
    await one.run("import os, subprocess\nmine = 1\nopen('/tmp/mine', 'w').close()")
    await one.run("child = subprocess.Popen(['sleep', '98765'])")
    looked = await two.run(
        "import os\n"
        "commands = [open(f'/proc/{pid}/cmdline').read() for pid in os.listdir('/proc') if pid.isdigit()]\n"
        "'mine' in globals(), os.path.exists('/tmp/mine'), any('98765' in command for command in commands)"
    )
    assert looked.stdout == "(False, False, False)\n"
    assert (await one.run("mine, child.poll()")).stdout == "(1, None)\n"
    await one.close()
    await two.close()


async def test_an_answer_forged_ahead_by_a_session_cell_is_of_that_cell_alone(sandbox: LocalSandbox) -> None:
    forge = """
import os, sys, time
frame = sys._getframe()
while "request" not in frame.f_locals:
    frame = frame.f_back
os.write(3, frame.f_locals["request"]["token"].encode() + b"\\0")
time.sleep(0.3)
print("later")
1 / 0
"""
    session = await sandbox.session()
    assert (await session.run(forge)).status is Status.FINISHED
    following = await session.run("print('next')\nraise ValueError")
    assert (following.status, following.return_code) == (Status.ERROR, 1)
    assert following.stdout == "later\nnext\n"
    await session.close()


async def test_caller_cancelled_in_a_cell_and_20_callers_cancelled_leave_nothing(sandbox: LocalSandbox) -> None:
    session = await sandbox.session()
    tasks = [asyncio.create_task(session.run(f"import os; os.system('sleep 87654.{OWN}')"))]
    tasks += [asyncio.create_task(sandbox.run(f"sleep 87654.{OWN}", "bash")) for _ in range(20)]
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)
    assert (await sandbox.run("print(1)")).stdout == "1\n"
    await session.close()
    for _ in range(600):
        if not _commands_with(f"87654.{OWN}"):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("a process is left")


def test_much_on_stdout_and_stderr_is_cut_at_256_kib_each_and_the_owner_does_not_grow(pool: Pool) -> None:
    before = psutil.Process().memory_info().rss
    done = pool.run("head -c 400M /dev/zero & head -c 400M /dev/zero >&2; wait", "bash")
    assert (done.status, len(done.stdout), len(done.stderr)) == (Status.FINISHED, 256 << 10, 256 << 10)
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_bytes_that_are_no_utf_8_nul_and_lone_surrogates_in_output_and_code(pool: Pool) -> None:
    done = pool.run("import os\nos.write(1, b'\\xff\\0\\xed\\xa0\\x80')\nprint('\\ud800')")
    assert done.status is Status.FINISHED
    assert done.stdout.startswith("�\0�") and done.stdout.endswith("\\ud800\n")
    for code in ("\0", "'\ud800'", "#\udcff\n1"):
        for language in ("python", "bash"):
            assert pool.run(code, language).status in (Status.FINISHED, Status.ERROR)


@pytest.mark.parametrize(
    "change",
    [
        "fcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)",
        "fcntl.fcntl(1, 1031, 4096)  # F_SETPIPE_SZ",
        "os.set_blocking(1, False)",
    ],
    ids=["packet-mode", "resized", "non-blocking"],
)
def test_stdout_is_complete(pool: Pool, change: str) -> None:
    code = f"""
import fcntl, os, select
{change}
left = memoryview(b"x" * 200_000)
while left:
    select.select([], [1], [])
    left = left[os.write(1, left[:4096]):]
"""
    done = pool.run(code)
    assert (done.status, len(done.stdout)) == (Status.FINISHED, 200_000)


def test_a_daemon_that_prints_after_the_exit_is_ended_and_nothing_is_in_the_next_answer(pool: Pool) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True: os.write(1, b'late ')\ntime.sleep(0.1)"
    )
    assert pool.run(code).status is Status.FINISHED
    for _ in range(4):
        assert pool.run("print(1)").stdout == "1\n"


def test_a_fork_storm_with_setsid_and_all_signals_ignored_ends_at_its_limit_and_leaves_nothing(pool: Pool) -> None:
    code = f"""
import os, signal, time
open("/proc/self/comm", "w").write("storm-{OWN}")
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError: time.sleep(0.01)
"""

    def num_left() -> int:
        return sum(each.info["name"] == f"storm-{OWN}" for each in psutil.process_iter(["name"]))

    async def storm() -> tuple[Execution, int]:
        running, most = asyncio.create_task(pool.sandbox.run(code, limits=SHORT)), 0
        while not running.done():
            most = max(most, await asyncio.to_thread(num_left))
        return await running, most

    done, most = pool.runner.run(storm())
    assert done.status is not Status.FINISHED and most > 1
    for _ in range(100):
        if not num_left():
            break
        time.sleep(0.1)
    assert not num_left() and pool.works()


ODD_ENDS = (
    "import os; os.abort()",
    "import ctypes; ctypes.string_at(0)",
    "import os; os._exit(0)",
    "import os; os._exit(300)",
    "import sys; sys.stdout.close(); sys.stderr.close()",
    "import os; os.close(0); os.close(1); os.close(2)",
    "import builtins; builtins.__dict__.clear()",
    "import sys; sys.modules.clear()",
    "import sys; sys.stdout = sys.stderr = None; 1 / 0",
    "import os, signal; os.kill(0, signal.SIGKILL)",
    "raise KeyboardInterrupt",
    "raise BaseException",
    "class E(Exception):\n    def __str__(self): raise self\nraise E",
    "import sys; sys.exit(10**100)",
    "import os; os.execv('/nonexistent', ['x'])",
    "import threading; threading._shutdown = None; import atexit; atexit.register(lambda: 1 / 0)",
)


@pytest.mark.parametrize("code", ODD_ENDS)
def test_odd_ends_are_an_execution_each(pool: Pool, code: str) -> None:
    assert pool.run(code).status in (Status.FINISHED, Status.ERROR)


def test_an_endless_atexit_ends_at_its_limit(pool: Pool) -> None:
    done = pool.run("import atexit, time\natexit.register(time.sleep, 60)", limits=SHORT)
    assert done.status is Status.TIMEOUT


HARD_CODE = {
    "deep parentheses": "(" * 100_000 + ")" * 100_000,
    "300,000 minus signs": "-" * 300_000 + "1",
    "a regex bomb": "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
    "9**9**8": "9**9**8",
    "recursion without limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
}


@pytest.mark.parametrize("code", HARD_CODE.values(), ids=HARD_CODE)
def test_hard_code_is_an_error_a_timeout_or_out_of_memory(pool: Pool, code: str) -> None:
    assert pool.run(code, limits=SHORT).status in (Status.ERROR, Status.TIMEOUT)


def test_odd_files_when_fetched_bring_nothing_of_the_host(pool: Pool) -> None:
    """Fifo, device link, folder, mode 0, moved and replaced working folder, names that are no UTF-8."""
    code = """
import os
os.mkfifo("fifo")
os.symlink("/dev/zero", "device")
os.mkdir("folder")
open("closed", "w").write("x"); os.chmod("closed", 0)
open(b"\\xff", "w").write("y")
"""
    done = pool.run(code, fetch=["fifo", "device", "folder", "closed", "\udcff"])
    assert done.status is Status.FINISHED
    assert {name: data for name, data in done.files.items() if name != "closed"} == {"\udcff": b"y"}
    for replace in ("os.symlink('/usr/bin', 'work')", "os.mkdir('work')", "open('work', 'w').close()"):
        moved = pool.run(f"import os\nos.chdir('/tmp'); os.rename('work', 'w')\n{replace}", fetch=["env", "closed"])
        assert moved.files == {}


def test_a_zip_bomb_is_not_expanded(pool: Pool) -> None:
    code = """
import zlib
squeeze = zlib.compressobj(1)
bomb = b"".join(squeeze.compress(bytes(1 << 20)) for _ in range(400)) + squeeze.flush()
print(len(zlib.decompress(bomb)))
"""
    done = pool.run(code, limits=Limits(memory_mib=128))
    assert done.status in (Status.ERROR, Status.TIMEOUT)
    assert done.stdout == ""


def test_looking_for_names_that_are_not_there_ends_at_its_limit(pool: Pool) -> None:
    code = "import os\nfor number in range(10**9): os.path.exists(f'/usr/{number}')"
    assert pool.run(code, limits=SHORT).status is Status.TIMEOUT
    assert pool.works()


def test_random_uuid_secrets_and_numpy_random_differ_in_two_executions(pool: Pool) -> None:
    code = "import random, uuid, secrets, numpy\n"
    code += "print(random.random(), uuid.uuid4(), secrets.token_hex(), numpy.random.rand())"
    first, second = pool.run(code).stdout.split(), pool.run(code).stdout.split()
    assert len(first) == 4
    assert not set(first) & set(second)


async def test_60_executions_failing_ones_and_8_given_up_leave_the_owner_no_descriptor(sandbox: LocalSandbox) -> None:
    await asyncio.gather(*[sandbox.run("pass") for _ in range(4)])
    before = psutil.Process().num_fds()
    await asyncio.gather(*[sandbox.run("1 / 0" if number % 2 else "pass") for number in range(60)])
    given_up = [asyncio.create_task(sandbox.run("import time; time.sleep(60)")) for _ in range(8)]
    await asyncio.sleep(0.2)
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    with pytest.raises(DataError):
        await sandbox.run("pass", files={"a": b"", "a/b": b""})
    await asyncio.gather(*[sandbox.run("pass") for _ in range(4)])
    assert psutil.Process().num_fds() <= before + 1


def test_a_loop_of_links_fetched_is_left_out(pool: Pool) -> None:
    code = "import os\nos.symlink('a', 'a'); os.symlink('c', 'b'); os.symlink('b', 'c')"
    done = pool.run(code, fetch=["a", "b", "c/d"])
    assert (done.status, done.files) == (Status.FINISHED, {})


async def test_a_loop_of_links_fetched_from_a_session_is_left_out(sandbox: LocalSandbox) -> None:
    session = await sandbox.session()
    await session.run("import os\nos.symlink('a', 'a'); open('b', 'w').write('x')")
    assert await session.fetch(["a", "b"]) == {"b": b"x"}
    await session.close()


FILES_THAT_CANNOT_BE = {
    "20 MiB where 16 are allowed": {"a": bytes(20 << 20)},
    "two that are too large together": {"a": bytes(9 << 20), "b": bytes(9 << 20)},
    "more than there are inodes": {f"folder/{number}": b"" for number in range(17_000)},
    "small ones whose pages are too many": {f"{number}": b"x" for number in range(5_000)},
    "a name of 300 characters": {"a" * 300: b""},
    "a name of 300 bytes": {"ü" * 150: b""},
    "a path of 5,000 characters": {"/".join(["a" * 99] * 50): b""},
    "a beside a/b": {"a": b"", "a/b": b""},
    "a/b/c beside ./a//b": {"a/b/c": b"", "./a//b": b""},
    "a surrogate in a name": {"a\ud800": b""},
}


@pytest.mark.parametrize("files", FILES_THAT_CANNOT_BE.values(), ids=FILES_THAT_CANNOT_BE)
def test_impossible_files_are_a_data_error(pool: Pool, files: dict[str, bytes]) -> None:
    with pytest.raises(DataError, match="field 'files'"):
        pool.run("pass", files=files)
    assert pool.works()


@pytest.mark.parametrize("files", [{str(number): b"x" for number in range(300)}, {"a": b"", "a/b": b""}])
async def test_impossible_files_of_a_session_are_a_data_error(sandbox: LocalSandbox, files: dict[str, bytes]) -> None:
    session = await sandbox.session(files)
    with pytest.raises(DataError, match="field 'files'"):
        await session.run("pass", Limits(file_mib=1))
    await session.close()
    assert (await sandbox.run("print('works')")).stdout == "works\n"


@pytest.mark.parametrize("name", ["a" * 300, "a\ud800", "../x"])
def test_impossible_names_to_fetch_are_a_data_error(pool: Pool, name: str) -> None:
    with pytest.raises(DataError, match="field 'fetch'"):
        pool.run("pass", fetch=[name])


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("memory_mib", 10**13),
        ("processes", 10**9),
        ("file_mib", 10**13),
        ("output_kib", 10**18),
        ("wall_s", math.inf),
        ("wall_s", math.nan),
        ("cpu_s", math.nan),
    ],
)
async def test_impossible_limits_are_a_data_error(sandbox: LocalSandbox, name: str, bound: float) -> None:
    limits = Limits(**{name: bound})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"field '{name}': a limit of .*; expected more than 0 and at most"):
        await sandbox.run("pass", limits=limits)
    session = await sandbox.session()
    await session.run("x = 1")
    with pytest.raises(DataError, match=f"field '{name}'"):
        await session.run("x", limits)
    assert (await session.run("x")).stdout == "1\n"
    await session.close()


def test_the_largest_limits_are_those_of_the_machine(pool: Pool) -> None:
    limits = Limits(wall_s=1e6, cpu_s=1e6, memory_mib=1 << 24, processes=1 << 22, file_mib=1 << 20, output_kib=1 << 20)
    assert pool.run("print(1)", limits=limits).stdout == "1\n"


def test_sparse_files_and_one_file_by_8_names_are_fetched_up_to_file_mib_in_all(pool: Pool) -> None:
    code = """
import os
with open("sparse", "wb") as file: file.truncate(3 << 20)
for number in range(8): os.link("sparse", f"link{number}")
open("small", "w").write("x")
"""
    names = ["sparse", *[f"link{number}" for number in range(8)], "small"]
    done = pool.run(code, fetch=names, limits=Limits(file_mib=4))
    assert done.files == {"sparse": bytes(3 << 20), "small": b"x"}
    assert "not fetched: 'link0': takes more than 4 MiB in all\n" in done.stderr


@pytest.mark.parametrize("language", ["python", "bash"])
def test_code_of_200_kb(pool: Pool, language: str) -> None:
    code = "#" * 200_000 + "\n" + {"python": "print(input())", "bash": 'read line; echo "$line" $0; nonsense'}[language]
    done = pool.run(code, language, stdin="given\n")
    if language == "python":
        assert (done.status, done.stdout) == (Status.FINISHED, "given\n")
    else:
        assert (done.status, done.return_code, done.stdout) == (Status.ERROR, 127, "given bash\n")
        assert "bash: line 2: nonsense: command not found" in done.stderr


def test_bash_code_of_5_mib_is_read_and_of_20_is_its_own_error(pool: Pool) -> None:
    assert pool.run("# comment\n" * 500_000 + "echo end", "bash", limits=Limits(wall_s=60, cpu_s=60)).stdout == "end\n"
    assert pool.run("#" * (20 << 20), "bash").status is Status.ERROR


async def test_flock_of_the_host_is_free_while_code_tries_to_hold_it(sandbox: LocalSandbox) -> None:
    code = """
import fcntl, os, time
held = []
for path in ("/usr/bin/env", os.__file__):
    held.append(open(path))
    try: fcntl.flock(held[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError: pass
time.sleep(1)
"""
    tasks = [asyncio.create_task(sandbox.run(code)) for _ in range(2)]
    await asyncio.sleep(0.5)
    for path in ("/usr/bin/env", os.__file__):
        with Path(path).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    await asyncio.gather(*tasks)


def test_io_setup_of_the_host_works_while_code_tries_to_take_all(pool: Pool) -> None:
    number = {"x86_64": 206, "aarch64": 0}[platform.machine()]
    code = f"""
import ctypes, time
libc = ctypes.CDLL(None)
contexts = [ctypes.c_ulong() for _ in range(64)]
for context in contexts: libc.syscall({number}, 1024, ctypes.byref(context))
print(sum(context.value != 0 for context in contexts))
"""
    assert pool.run(code).stdout == "0\n"


@pytest.mark.parametrize(
    "code",
    [
        "import numpy; print(int((numpy.ones((50, 50)) @ numpy.ones((50, 50))).sum()))",
        "import threading\nt = threading.Thread(target=print, args=(125000,)); t.start(); t.join()",
        "import subprocess; print(subprocess.check_output(['sh', '-c', 'echo 125000'], text=True), end='')",
        "import multiprocessing as m\nwith m.Pool(2) as pool: print(sum(pool.map(abs, range(-499, 1))) + 250)",
        "import asyncio\nasync def f(): await asyncio.sleep(0); print(125000)\nasyncio.run(f())",
        "import sqlite3\nc = sqlite3.connect('db'); c.execute('create table t (x)'); c.commit(); print(125000)",
        "import mmap, tempfile\nwith tempfile.TemporaryFile() as f:\n"
        "    f.truncate(4096); m = mmap.mmap(f.fileno(), 0); m[0] = 1; m.flush(); print(125000)",
        "import fcntl\nwith open('own', 'w') as f: fcntl.lockf(f, fcntl.LOCK_EX); print(125000)",
        "import selectors, socket\na, b = socket.socketpair(); b.send(b'x'); socket.socket(); socket.socket(2, 2, 17)\n"
        "s = selectors.DefaultSelector(); s.register(a, 1); s.select(1); print(125000)",
    ],
    ids=["numpy", "threads", "subprocess", "multiprocessing", "asyncio", "sqlite3", "mmap", "lockf", "sockets"],
)
def test_usual_programs_work(pool: Pool, code: str) -> None:
    done = pool.run(code)
    assert (done.status, done.stdout, done.stderr) == (Status.FINISHED, "125000\n", "")


def test_shells_compilers_and_utilities_work(pool: Pool) -> None:
    code = """
set -e
echo 'int main(void) { return 0; }' > a.c
if command -v gcc > /dev/null; then gcc -O2 -o a a.c; ./a; fi
tar cf a.tar a.c; mkdir b; tar xf a.tar -C b; cp -a b c; mv c d; ln -s d e; touch -d 2020-01-01 f; sync
seq 1000 | sort -R | sort -n | tail -1 | tee g | xargs -n 1 echo
find . -name '*.c' | wc -l; df . > /dev/null; nproc > /dev/null; timeout 5 nice true; ulimit -c 0; mktemp > /dev/null
"""
    done = pool.run(code, "bash")
    assert (done.status, done.stdout, done.stderr) == (Status.FINISHED, "1000\n3\n", "")


def test_mountinfo_does_not_show_where_the_host_keeps_this_package(pool: Pool) -> None:
    mounts = pool.run("print(open('/proc/self/mountinfo').read())").stdout
    assert " /tmp " in mounts
    assert str(ROOT / "verl") not in mounts


ORDINARY_USER = """
import asyncio, sys
from toolrl.sandbox.local import LocalSandbox
async def main():
    sandbox = LocalSandbox(workers=1, preload=())
    for code in CODES:
        print((await sandbox.run(code)).stdout.split()[0], flush=True)
    await sandbox.close()
asyncio.run(main())
"""
OF_ORDINARY_USER = (
    "12 x32 call numbers; numbers with high bits, -1",
    "open_tree_attr, open_tree, mount_setattr, fsopen, pivot_root, umount2, chroot, setns",
    "add_key, request_key, keyctl; /proc/keys",
    "setpriority, SCHED_IDLE, affinity, ioprio, SIGSTOP, sigqueue, pidfd signal at the supervisor",
    "flock on a program of the system",
    "inotify on /usr",
    "memory of the supervisor",
    "a core file for the host's program",
)


def test_as_an_ordinary_user_8_of_these_probes_have_the_same_results() -> None:
    need_bubblewrap()
    if os.geteuid() != 0 or not _may_import():
        pytest.skip(f"needs root, and an ordinary user that may run {SYSTEM_PYTHON} on the package")
    numbers = _numbers()
    codes = [probe.program({"numbers": numbers}) for probe in PROBES if probe.name in OF_ORDINARY_USER]
    assert len(codes) == 8
    done = _as_ordinary_user(f"CODES = {codes!r}\n{ORDINARY_USER}")
    assert (done.stdout.split(), done.stderr) == (["BLOCKED"] * 8, "")


def _may_import() -> bool:
    with contextlib.suppress(OSError):
        return _as_ordinary_user("import toolrl.sandbox.local").returncode == 0
    return False


def _as_ordinary_user(code: str) -> subprocess.CompletedProcess[str]:
    packages = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(psutil.__file__).parents[1])}
    return subprocess.run(
        [SYSTEM_PYTHON, "-c", code],
        cwd=ROOT,
        env=packages,
        user=4242,
        group=4242,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )


def _numbers() -> dict[str, int | None]:
    column = seccomp.MACHINES[platform.machine()][1]
    return {name: pair[column] for name, pair in (REFUSED | seccomp.ALLOWED).items()}


def _commands_with(text: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if text in (each.info["cmdline"] or [])]
