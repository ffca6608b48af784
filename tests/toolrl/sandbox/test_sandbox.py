"""toolrl.sandbox.local: what an execution is given, its result, its limits, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from toolrl.sandbox.fork_server import Isolation
from toolrl.sandbox.inside import seccomp
from toolrl.sandbox.local import LocalSandbox
from verl.envs.sandbox import Execution, Limits, Status
from verl.errors import ConfigError, DataError, ServiceDownError
from verl.host.services import check_services

ROOT = Path(__file__).parents[3]
OWN = os.getpid()  # part of what is looked for on the whole machine: these tests may run beside others of them


@pytest.fixture(scope="module", params=["bubblewrap", "none"])
def sandbox(runner: asyncio.Runner, request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    """A pool in the loop: what is tested here holds with and without isolation."""
    if request.param == "bubblewrap":
        need_bubblewrap()
    sandbox = LocalSandbox(workers=2, isolation=request.param, preload=("numpy", "numpy.random"))
    yield sandbox
    runner.run(sandbox.close())


@pytest.fixture
def run(runner: asyncio.Runner, sandbox: LocalSandbox) -> Callable[..., Execution]:
    return lambda *args, **settings: runner.run(sandbox.run(*args, **settings))


def test_printed_output_is_returned(run: Callable[..., Execution]) -> None:
    done = run("import sys\nprint('out', 'ü')\nprint('err', file=sys.stderr)")
    assert (done.status, done.return_code, done.stdout, done.stderr) == (Status.FINISHED, 0, "out ü\n", "err\n")
    assert 0 < done.seconds < 10


def test_the_code_is_the_main_module_of_a_fresh_interpreter(run: Callable[..., Execution]) -> None:
    code = "import sys, os\nprint(__name__, sys.argv, os.listdir('.'), sorted(k for k in globals() if k[0] != '_'))"
    assert run(code).stdout == "__main__ ['main.py'] [] ['os', 'sys']\n"


def test_an_exception_is_an_error_with_a_traceback_of_the_code_alone(run: Callable[..., Execution]) -> None:
    done = run("def f():\n    return 1 / 0\nf()")
    assert (done.status, done.return_code) == (Status.ERROR, 1)
    lines = done.stderr.splitlines()
    assert lines[:3] == ["Traceback (most recent call last):", '  File "main.py", line 3, in <module>', "    f()"]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "inside" not in done.stderr


@pytest.mark.parametrize(
    ("code", "status", "return_code"),
    [
        ("import sys; sys.exit(7)", Status.ERROR, 7),
        ("raise SystemExit", Status.FINISHED, 0),
        ("import sys; sys.exit('why')", Status.ERROR, 1),
        ("import os; os._exit(5)", Status.ERROR, 5),
        ("import os; os.kill(os.getpid(), 11)", Status.ERROR, -11),
        ("import os; os.abort()", Status.ERROR, -6),
        ("x = (", Status.ERROR, 1),
        ("'\\0'; import sys; sys.stdout.close()", Status.FINISHED, 0),
        ("\ud800", Status.ERROR, 1),
    ],
)
def test_how_code_ends(run: Callable[..., Execution], code: str, status: Status, return_code: int) -> None:
    done = run(code)
    assert (done.status, done.return_code) == (status, return_code)


def test_threads_and_exit_functions_are_waited_for(run: Callable[..., Execution]) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "bye")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("main")
"""
    assert run(code).stdout == "main\nthread\nbye\n"


def test_bash(run: Callable[..., Execution]) -> None:
    done = run("cat; echo $((6 * 7)); nonsense", "bash", stdin="given\n")
    assert done.stdout == "given\n42\n"
    assert "nonsense: command not found" in done.stderr
    assert (done.status, done.return_code) == (Status.ERROR, 127)
    assert run("python -c 'import numpy; print(numpy.arange(3).sum())'", "bash").stdout == "3\n"


def test_stdin_and_files_go_in_and_come_out(run: Callable[..., Execution]) -> None:
    code = """
name = input()
with open("data/in.bin", "rb") as file:
    data = file.read()
with open(name, "wb") as file:
    file.write(data[::-1])
open("data/in.bin", "ab").write(b"more")
"""
    files = {"data/in.bin": b"\x00\x01\xff", "data/deep/er.txt": b""}
    done = run(code, stdin="out.bin\n", files=files, fetch=["out.bin", "data/in.bin", "missing"])
    assert done.stderr == ""
    assert done.files == {"out.bin": b"\xff\x01\x00", "data/in.bin": b"\x00\x01\xffmore"}


def test_links_out_of_the_working_folder_are_not_followed(run: Callable[..., Execution]) -> None:
    code = "import os\nos.symlink('/usr/bin/env', 'a'); os.symlink('..', 'b'); os.mkfifo('c'); os.symlink('c', 'd')"
    assert run(code, fetch=["a", "b/work/a", "c", "d"]).files == {}


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b"])
def test_a_path_out_of_the_working_folder_is_refused(run: Callable[..., Execution], path: str) -> None:
    with pytest.raises(DataError, match="relative path"):
        run("pass", fetch=[path])
    with pytest.raises(DataError, match="relative path"):
        run("pass", files={path: b""})


def test_an_unknown_language_is_refused(run: Callable[..., Execution]) -> None:
    with pytest.raises(DataError, match="'cobol'; expected one of python, bash"):
        run("pass", "cobol")


@pytest.mark.parametrize("name", ["wall_s", "cpu_s", "memory_mib", "processes", "file_mib", "output_kib"])
def test_a_limit_of_zero_is_refused(run: Callable[..., Execution], name: str) -> None:
    with pytest.raises(DataError, match=f"field '{name}': a limit of 0; expected more than 0"):
        run("pass", limits=Limits(**{name: 0}))


def test_time_is_limited_and_what_was_printed_is_kept(run: Callable[..., Execution]) -> None:
    done = run("print('before', flush=False)\nimport time\ntime.sleep(60)", limits=Limits(wall_s=2.5))
    assert (done.status, done.stdout, done.return_code) == (Status.TIMEOUT, "before\n", None)
    assert "more than 2.5 s of time" in done.stderr
    assert 2.5 <= done.seconds < 60


def test_cpu_time_is_that_of_all_processes(run: Callable[..., Execution]) -> None:
    code = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    done = run(code, limits=Limits(wall_s=60, cpu_s=1))
    assert (done.status, done.return_code) == (Status.TIMEOUT, None)
    assert "1 s of CPU time" in done.stderr


def test_memory_is_limited(run: Callable[..., Execution]) -> None:
    limits = Limits(memory_mib=128)
    small = "print(len(bytearray(64 << 20)) >> 20)"
    assert run(small, limits=limits).stdout == "64\n"
    done = run("try: bytearray(256 << 20)\nexcept MemoryError: print('caught')", limits=limits)
    assert done.stdout == "caught\n"
    done = run("x = []\nwhile True: x.append(bytearray(1 << 20))", limits=limits)
    assert done.status is Status.ERROR  # by the process's own limit, or by what adds up what all of them hold
    assert done.stderr.splitlines()[-1] in ("MemoryError", "killed: more than 128 MiB of memory")


def test_memory_is_that_of_all_processes(run: Callable[..., Execution]) -> None:
    code = "import os, time\nfor _ in range(2): os.fork()\nx = b'x' * (100 << 20)\ntime.sleep(60)"
    done = run(code, limits=Limits(memory_mib=256, wall_s=30))
    assert (done.status, done.return_code) == (Status.ERROR, None)
    assert "more than 256 MiB of memory" in done.stderr


def test_output_is_limited_and_a_flood_ends_in_time(run: Callable[..., Execution]) -> None:
    done = run("print('x' * 10_000)", limits=Limits(output_kib=4))
    assert (done.status, done.stdout) == (Status.FINISHED, "x" * 4096)
    done = run("while True: print('y' * 1000)", limits=Limits(output_kib=4, wall_s=2.5))
    assert (done.status, len(done.stdout)) == (Status.TIMEOUT, 4096)


def test_a_file_is_limited(run: Callable[..., Execution]) -> None:
    done = run("open('big', 'wb').write(bytes(3 << 20))", limits=Limits(file_mib=2))
    assert done.status is Status.ERROR
    assert "OSError" in done.stderr


def test_processes_started_by_code_end_with_it(run: Callable[..., Execution]) -> None:
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", "54321.{OWN}"])
    os._exit(0)
time.sleep(0.2)
"""
    assert run(code).status is Status.FINISHED
    assert run(f"{code}\ntime.sleep(60)", limits=Limits(wall_s=0.5)).status is Status.TIMEOUT
    assert not [p for p in psutil.process_iter(["cmdline"]) if f"54321.{OWN}" in (p.info["cmdline"] or [])]


async def test_executions_run_side_by_side(sandbox: LocalSandbox) -> None:
    many = await asyncio.gather(*[sandbox.run(f"import time; time.sleep(0.05); print({i})") for i in range(8)])
    assert [done.stdout for done in many] == [f"{i}\n" for i in range(8)]


async def test_waiting_for_a_turn_is_not_charged(sandbox: LocalSandbox) -> None:
    code, limits = "import time; time.sleep(0.2)", Limits(wall_s=4.0)
    many = await asyncio.gather(*[sandbox.run(code, limits=limits) for _ in range(44)])  # the last waits for 4.2 s
    assert {done.status for done in many} == {Status.FINISHED}


def test_random_numbers_differ_between_executions(run: Callable[..., Execution]) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    first, second = run(code).stdout.split(), run(code).stdout.split()
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_cpu_time_of_the_execution_before_is_not_charged(run: Callable[..., Execution]) -> None:
    code = "import time\nwhile time.process_time() < 0.7: pass\ntime.sleep(0.3)"
    for _ in range(2):
        assert run(code, limits=Limits(cpu_s=1)).status is Status.FINISHED


# Prints how often a text lies in its own memory. SPELLED has other letters between the text's, and so has the pattern:
# an earlier search must leave nothing for a later one to find.
SEARCH = """
import re
found = 0
spelled = re.compile(b"".join(b"[%c]" % letter for letter in SPELLED[::2]))
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if " rw" in line:
            memory.seek(start)
            found += sum(1 for _ in spelled.finditer(memory.read(end - start)))
print(found)
"""


def search(*secrets: str) -> str:
    """Code that looks for secrets which it does not itself contain."""
    return "".join(f"SPELLED = {[*'-'.join(secret).encode()]}{SEARCH}" for secret in secrets)


def test_nothing_of_an_execution_is_in_the_memory_of_the_next(run: Callable[..., Execution]) -> None:
    assert run("here = 'in-my-own-code'\n" + search("in-my-own-code")).stdout != "0\n"
    first = run(
        "import os\nprint('mark-print' + 'ed', input(), os.getppid())\nassert 'mark-in-code'",
        stdin="mark-in-stdin",
        files={f"mark-in-name-{number}": b"mark-in-file" for number in range(40)},
    )
    assert first.stdout.startswith("mark-printed mark-in-stdin")
    done = run(search("mark-printed", "mark-in-code", "mark-in-stdin", "mark-in-name", "mark-in-file"))
    assert (done.status, done.stdout) == (Status.FINISHED, "0\n" * 5)


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
async def test_a_supervisor_is_used_again_unless_it_knows_something(isolation: Isolation) -> None:
    if isolation == "bubblewrap":
        need_bubblewrap()
    sandbox = LocalSandbox(workers=1, isolation=isolation, preload=())
    supervisor = 0

    async def is_new(**settings: Any) -> bool:
        nonlocal supervisor
        before = supervisor
        done = await sandbox.run("import os; print(os.getppid(), os.getpid())", **settings)
        supervisor, pid = map(int, done.stdout.split())
        return supervisor != before or pid == 2  # the second of a pid namespace is its first execution

    assert [await is_new() for _ in range(4)] == [True, False, False, False]
    assert not await is_new(fetch=["a"])
    assert [await is_new() for _ in range(2)] == [True, False]
    session = await sandbox.session()
    await session.run("x = 1")
    await session.close()
    assert await is_new()
    await sandbox.close()


async def test_a_session_keeps_its_variables(sandbox: LocalSandbox) -> None:
    one, two = await sandbox.session(), await sandbox.session()
    assert (await one.run("x = 1\nx + 1")).stdout == "2\n"
    assert (await two.run("x = 10")).stdout == ""
    failed = await one.run("x += 1\n1 / 0")
    assert (failed.status, failed.return_code) == (Status.ERROR, 1)
    assert failed.stderr.splitlines()[1] == '  File "cell 2", line 2, in <module>'
    assert (await one.run("print(x)")).stdout == "2\n"
    assert (await two.run("x")).stdout == "10\n"
    await one.close()
    await two.close()


async def test_a_session_that_was_killed_starts_anew(sandbox: LocalSandbox) -> None:
    session = await sandbox.session()
    await session.run("x = 1")
    slow = await session.run("print('slow')\nwhile True: pass", Limits(wall_s=2.5))
    assert (slow.status, slow.stdout) == (Status.TIMEOUT, "slow\n")
    assert "NameError" in (await session.run("x")).stderr
    ended = await session.run("import os; os._exit(4)")
    assert (ended.status, ended.return_code) == (Status.ERROR, 4)
    assert (await session.run("'x' in globals()")).stdout == "False\n"
    await session.close()
    assert (await session.run("'after its end'")).stdout == "'after its end'\n"
    await session.close()


async def test_a_session_rests_between_cells(sandbox: LocalSandbox) -> None:
    code = """
import threading, time
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
time.sleep(0.1)
"""
    session = await sandbox.session()
    before = int((await session.run(code + "ticks")).stdout)
    await asyncio.sleep(1.0)
    after = int((await session.run("ticks")).stdout)
    await session.close()
    assert before <= after < before + 50


async def test_a_session_ignores_unsolicited_answers(sandbox: LocalSandbox) -> None:
    session = await sandbox.session()
    assert (await session.run("import os, time\nos.write(3, b'\\0' * 50)\n1 / 0")).status is Status.ERROR
    done = await session.run("time.sleep(0.2)\n'the second'")
    assert (done.status, done.stdout) == (Status.FINISHED, "'the second'\n")
    closed = await session.run("os.close(3)\ntime.sleep(60)", Limits(wall_s=0.4))
    assert closed.status is Status.TIMEOUT
    await session.close()


async def test_a_cell_without_a_waiting_caller_ends_its_session(sandbox: LocalSandbox) -> None:
    session = await sandbox.session()
    await session.run("x = 1")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.run("import time; time.sleep(60); print('late')"), 0.3)
    assert "NameError" in (await session.run("x")).stderr
    await session.close()


async def test_a_cancelled_execution_is_killed(sandbox: LocalSandbox) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sandbox.run(f"sleep 65432.{OWN}", "bash", limits=Limits(wall_s=50)), 0.5)
    for _ in range(600):
        if not [p for p in psutil.process_iter(["cmdline"]) if f"65432.{OWN}" in (p.info["cmdline"] or [])]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it lives on")


async def test_a_fork_server_that_died_is_replaced(sandbox: LocalSandbox) -> None:
    await sandbox.run("pass")
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("inside.zygote" in word for word in child.cmdline()):
                child.send_signal(signal.SIGKILL)
    done = await asyncio.gather(*[sandbox.run("print(1)") for _ in range(4)])
    assert {each.stdout for each in done} == {"1\n"}


OWNER = """
import asyncio, sys
from verl.envs.sandbox import Limits
from toolrl.sandbox.local import LocalSandbox
async def main():
    sandbox = LocalSandbox(workers=1, isolation=sys.argv[1], preload=())
    session = await sandbox.session()
    await session.run("x = 1")
    print("ready", flush=True)
    await sandbox.run("sleep 76543", "bash", limits=Limits(wall_s=50))
asyncio.run(main())
"""


def test_the_pool_does_not_outlive_a_killed_owner(sandbox: LocalSandbox, request: Any) -> None:
    isolation = request.node.callspec.params["sandbox"]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, isolation], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout and owner.stdout.readline() == b"ready\n"
    below: list[psutil.Process] = []
    for _ in range(200):
        below = psutil.Process(owner.pid).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("76543" in each.cmdline() for each in below):
                break
        time.sleep(0.05)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(below, timeout=10)
    assert len(below) >= 4
    assert alive == []


async def _no_orphan(executions: int) -> None:
    sandbox = LocalSandbox(workers=2, preload=())
    code = "import os\nif os.fork() == 0:\n    os.setsid()\n    os.execv('/bin/sleep', ['sleep', '1000'])"
    await sandbox.run("pass")
    before = len(psutil.Process().children(recursive=True))
    for start in range(0, executions, 20):
        done = await asyncio.gather(*[sandbox.run(code) for _ in range(start, start + 20)])
        assert {each.status for each in done} == {Status.FINISHED}
    for _ in range(100):
        if len(psutil.Process().children(recursive=True)) <= before + 4:  # the second fork server, and its supervisor
            break
        await asyncio.sleep(0.05)
    assert len(psutil.Process().children(recursive=True)) <= before + 4
    assert len(psutil.Process().open_files()) < 50
    await sandbox.close()


@pytest.mark.parametrize("executions", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_executions_leave_no_orphan(executions: int) -> None:
    need_bubblewrap()
    asyncio.run(_no_orphan(executions))


def test_without_bubblewrap_the_error_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"apt-get install bubblewrap.*sandbox\.isolation=none"):
        LocalSandbox()


def test_an_unknown_isolation_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="docker: must be bubblewrap or none"):
        LocalSandbox(isolation="docker")  # type: ignore[arg-type]


def test_no_isolation_warns(caplog: pytest.LogCaptureFixture) -> None:
    LocalSandbox(isolation="none")
    assert len(caplog.records) == 1
    assert "untrusted code has this user's permissions" in caplog.text


def test_a_bubblewrap_that_does_not_work_is_a_service_that_is_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: no permission to make namespaces' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ServiceDownError, match="no permission to make namespaces"):
        asyncio.run(LocalSandbox().run("pass"))
    with pytest.raises(ServiceDownError, match="no permission to make namespaces"):
        asyncio.run(check_services([LocalSandbox()]))  # before anything heavy starts
    asyncio.run(check_services([LocalSandbox(isolation="none")]))


def test_a_sandbox_that_works_passes_its_check_and_leaves_nothing_behind() -> None:
    need_bubblewrap()
    before = psutil.Process().children()
    asyncio.run(check_services([LocalSandbox()]))
    assert psutil.Process().children() == before


async def test_a_supervisor_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setattr("toolrl.sandbox.local.GRACE_S", 0.5)
    sandbox = LocalSandbox(workers=1, preload=())
    await sandbox.run("pass")
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor of what ran may be ending
            each.send_signal(signal.SIGSTOP)
    assert (await sandbox.run("print(1)", limits=Limits(wall_s=1.0))).stdout == "1\n"
    await sandbox.close()


@pytest.mark.long
async def test_a_supervisor_that_its_code_has_stopped_ends_with_the_sandbox(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "toolrl.sandbox.local.GRACE_S", 4.0
    )  # longer than a fork server and the code take on a busy machine
    log = tmp_path / "supervisors"
    code = (
        f"import os, signal\nprint(os.getppid(), file=open({str(log)!r}, 'a'))\nos.kill(os.getppid(), signal.SIGSTOP)"
    )
    sandbox = LocalSandbox(workers=1, isolation="none", preload=())
    with pytest.raises(ServiceDownError, match="without an answer, twice"):
        await sandbox.run(code, limits=Limits(wall_s=0.5))
    await sandbox.close()
    supervisors = [int(line) for line in log.read_text().split()]
    assert len(supervisors) == 2

    def lives(pid: int) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        return False

    deadline = time.monotonic() + 20
    while any(map(lives, supervisors)):
        assert time.monotonic() < deadline, "a supervisor outlives its sandbox"
        time.sleep(0.05)


def test_the_filter_decides_about_every_number_of_every_machine_it_knows() -> None:
    for machine, (arch, column) in seccomp.MACHINES.items():
        assert len(seccomp.program(machine)) % 8 == 0
        numbers = {pair[column]: name for name, pair in seccomp.ALLOWED.items()}
        for number in (*range(600), 1 << 30, (1 << 32) - 1):
            expected = numbers.get(number) not in (None, "prlimit64")  # of another process: with these arguments
            assert (_verdict(machine, arch, number) == seccomp.ALLOW[0][3]) is expected, (machine, number)
        assert _verdict(machine, arch ^ 1, 0) == seccomp.KILL[0][3]
    with pytest.raises(KeyError):
        seccomp.program("vax")


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_the_filter_decides_about_arguments(machine: str) -> None:
    arch, column = seccomp.MACHINES[machine]

    def allows(name: str, *arguments: int, counted: bool = True) -> bool:
        number = seccomp.ALLOWED[name][column]
        assert number is not None
        return _verdict(machine, arch, number, arguments, counted=counted) == seccomp.ALLOW[0][3]

    for counted in (True, False):
        assert allows("mmap", 0, 4096, 3, 0x22, counted=counted)  # private, without a file
        assert allows("mmap", 0, 4096, 3, 0x01, counted=counted)  # shared, of a file
        assert allows("mmap", 0, 4096, 3, 0x21, counted=counted) is counted
        assert allows("setsockopt", 3, 1, 7, counted=counted) is counted  # SO_SNDBUF
        assert allows("setsockopt", 3, 1, 2, counted=counted)  # SO_REUSEADDR
        assert allows("setsockopt", 3, 6, 7, counted=counted)
    assert allows("prlimit64", 0, 7, 1) and allows("prlimit64", 0, 4, 0)
    assert not allows("prlimit64", 0, 4, 1)
    assert not allows("prlimit64", 0, 4, 1 << 32)
    assert not allows("prlimit64", 1, 7, 0)
    assert allows("socket", 10, 2 | 0x80800, 17) and allows("socket", 1, 5, 0)
    assert not allows("socket", 2, 3, 17) and not allows("socket", 2, 1, 262) and not allows("socket", 16, 3, 0)
    assert allows("socketpair", 1, 1, 0) and not allows("socketpair", 40, 1, 0)
    assert allows("clone", 0x1200011) and not allows("clone", 0x10000011)
    assert allows("ioctl", 0, 0x5401) and not allows("ioctl", 0, 0x5412 | 1 << 40)


def _verdict(machine: str, arch: int, number: int, arguments: Sequence[int] = (1,) * 6, *, counted: bool = True) -> int:
    """What the filter returns for a call, as the kernel would interpret it."""
    values = {seccomp.NUMBER_AT: number, seccomp.ARCH_AT: arch}
    for place, argument in enumerate(arguments):
        values[seccomp.ARGUMENTS_AT + 8 * place] = argument & 0xFFFFFFFF
        values[seccomp.ARGUMENTS_AT + 8 * place + 4] = argument >> 32
    tests: dict[int, Callable[[int, int], bool]] = {
        seccomp.JUMP_EQUAL: operator.eq,
        seccomp.JUMP_AT_LEAST: operator.ge,
        seccomp.JUMP_ANY_BIT: lambda word, bits: bool(word & bits),
    }
    program, place, word = seccomp.instructions(machine, counted=counted), 0, 0
    while True:
        code, if_true, if_false, value = program[place]
        place += 1
        if code == seccomp.RETURN:
            return value
        if code == seccomp.LOAD:
            word = values.get(value, 0)
        elif code == seccomp.AND:
            word &= value
        else:
            place += if_true if tests[code](word, value) else if_false


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
    ids=["x86_64", "aarch64"],
)
def test_the_numbers_are_those_of_the_kernels_headers(column: int, header: str) -> None:
    if not Path(header).exists():
        pytest.skip("no headers of the kernel")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", Path(header).read_text(), re.MULTILINE)
    numbers = {name: int(number) for name, number in found}
    named = {name: pair[column] for name, pair in seccomp.ALLOWED.items()}
    wrong = {name: number for name, number in named.items() if numbers.get(name, number) != number}
    assert not wrong
    assert sum(name in numbers for name in named) > 200
