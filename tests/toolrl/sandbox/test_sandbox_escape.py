"""Ways out of the sandbox are closed; the same code finds them open where there is no isolation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import pytest

from tests.toolrl.sandbox.sandbox_host import foreign_call, need_bubblewrap
from tests.toolrl.sandbox.sandbox_probes import PROBES, REFUSED, Probe
from toolrl.envs.agent.confined import Confinement
from toolrl.sandbox import local
from toolrl.sandbox.fork_server import Isolation
from toolrl.sandbox.inside import seccomp
from toolrl.sandbox.local import LocalSandbox
from verl.envs.sandbox import Execution, Limits, Status

SECRET = "do-not-print-4711"
LIMITS = Limits(wall_s=20.0)
# Waits with a file, shared memory, sockets and a process that others must not see.
VICTIM = """
import os, socket, sys, time
from pathlib import Path
for folder in ("/tmp", "/dev/shm"):
    Path(folder, "victim-secret").write_text("mine")
listening = []
for address in ("\\0victim-socket", "/tmp/victim-socket"):
    listening.append(socket.socket(socket.AF_UNIX))
    listening[-1].bind(address)
    listening[-1].listen()
if os.fork() == 0:
    os.execv("/bin/sleep", ["victim-ISOLATION", "500"])
time.sleep(500)
"""
VICTIM_FILES = [Path("/tmp/victim-secret"), Path("/dev/shm/victim-secret"), Path("/tmp/victim-socket")]


class Agents:
    """The confinement of agents, with the limits of code and a server on its network, as a pool of Python code."""

    def __init__(self) -> None:
        limits = Limits(wall_s=400.0, cpu_s=60.0)
        self._confinement = Confinement([], limits, self._listen, require_cgroup=False)

    async def _listen(self, inside: socket.socket) -> asyncio.Server:
        return await asyncio.start_server(lambda *_: None, sock=inside)

    async def run(self, code: str, language: str = "python", limits: Limits = LIMITS) -> Execution:
        start = "import os; os.chdir('/tmp/work'); exec(compile(open('main.py').read(), 'main.py', 'exec'))"
        await self._confinement.start(sys.executable)
        variables = {"OPENAI_BASE_URL": "http://127.0.0.1:8100/v1", "REWARD_FILE": "/tmp/work/reward.json"}
        return await self._confinement.run([sys.executable, "-c", start], {"main.py": code.encode()}, variables)

    async def close(self) -> None:
        await self._confinement.close()


@dataclass
class Place:
    """A pool, what a probe knows of the host, and an execution that goes on all the time."""

    runner: asyncio.Runner
    sandbox: LocalSandbox | Agents
    host: dict[str, object]
    victim: asyncio.Task[Execution]

    def run(self, code: str, language: str = "python", limits: Limits = LIMITS) -> Execution:
        return self.runner.run(self.sandbox.run(code, language, limits=limits))


@contextlib.contextmanager
def make_place(isolation: Isolation | Literal["agent"], folder: Path) -> Iterator[Place]:
    """The host's services, secrets and a victim; then a pool of two."""
    abstract = f"verl-probe-{os.getpid()}-{isolation}"
    (folder / "secret").write_text(SECRET)
    column = seccomp.MACHINES[platform.machine()][1]
    numbers = {name: pair[column] for name, pair in (REFUSED | seccomp.ALLOWED).items()}
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        for address in (f"\0{abstract}", str(folder / "socket")):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address)
            server.listen()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("VERL_SECRET", SECRET)
        patch.setattr(local, "GRACE_S", 600.0)  # no one reads the victim's heartbeats between two tests
        runner = stack.enter_context(asyncio.Runner())
        sandbox: LocalSandbox | Agents
        if isolation == "agent":
            for each in (folder, working := folder / "working"):
                each.mkdir(mode=0o755, exist_ok=True)
            patch.chdir(working)
            sandbox = Agents()
        else:
            sandbox = LocalSandbox(workers=2, isolation=isolation, preload=("numpy",))
        host = {
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "abstract": abstract,
            "folder": str(folder),
            "secret": SECRET,
            "numbers": numbers,
            "marker": "pytest",
            "project": __file__,
        }

        async def start_victim() -> asyncio.Task[Execution]:
            code = VICTIM.replace("ISOLATION", isolation)
            task = asyncio.create_task(sandbox.run(code, limits=Limits(wall_s=400, cpu_s=60)))
            while not _find(f"victim-{isolation}"):
                assert not task.done(), task.result()
                await asyncio.sleep(0.05)
            return task

        place = Place(runner, sandbox, host, runner.run(start_victim()))
        yield place
        place.victim.cancel()
        runner.run(sandbox.close())
        for path in VICTIM_FILES:
            path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    need_bubblewrap()
    with make_place("bubblewrap", tmp_path_factory.mktemp("inside")) as place:
        yield place


@pytest.fixture(scope="module", params=["bubblewrap", "agent"])
def confined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """An execution of code, and an agent's program."""
    need_bubblewrap()
    with make_place(request.param, tmp_path_factory.mktemp("confined")) as place:
        yield place


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with make_place("none", tmp_path_factory.mktemp("outside")) as place:
        yield place


def _find(name: str) -> list[psutil.Process]:
    """Our processes of that name, as the host sees them."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if name in each.cmdline():
                found.append(each)
    return found


def names(probe: Probe) -> str:
    return probe.name


@pytest.mark.parametrize("probe", PROBES, ids=names)
def test_blocked(confined: Place, probe: Probe) -> None:
    done = confined.run(probe.program(confined.host))
    if done.killed != "more than 1024 MiB of memory":  # an agent's address space has no limit
        assert done.status is Status.FINISHED, done
        assert done.stdout.startswith("BLOCKED"), done
    assert not confined.victim.done()


@pytest.mark.parametrize("probe", [probe for probe in PROBES if probe.outside != "never"], ids=names)
def test_open_without_isolation(outside: Place, probe: Probe) -> None:
    if probe.outside == "root" and os.geteuid() != 0:
        pytest.skip("only root gets out this way")
    done = outside.run(probe.program(outside.host))
    assert done.stdout.startswith("ESCAPED"), done


def test_the_page_lists_every_probe() -> None:
    page = (Path(__file__).parents[3] / "docs/sandbox.md").read_text()
    _, _, table = page.partition("| probe | without isolation |\n| --- | --- |\n")
    listed = re.findall(r"^\| (.+?) \| (.*?) ?\|$", table, re.MULTILINE)
    without = {"anyone": "open", "root": "open to root", "never": ""}
    assert listed == [(probe.name, without[probe.outside]) for probe in PROBES]


def test_every_system_call_that_is_not_listed_is_not_there(confined: Place) -> None:
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for number in NUMBERS:
    result = libc.syscall(number, -1, -1, -1, -1, -1, -1)
    if result != -1 or ctypes.get_errno() != errno.ENOSYS:
        print(number, result, ctypes.get_errno())
"""
    column = seccomp.MACHINES[platform.machine()][1]
    allowed = {pair[column] for pair in seccomp.ALLOWED.values()}
    traps = {335, 336} if platform.machine() == "x86_64" else set()  # u(ret)probe: the kernel asks no filter
    if isinstance(confined.sandbox, Agents):
        traps.add(seccomp.FLOCK[column])  # without effect, as the probes show
    numbers = [number for number in range(1024) if number not in allowed | traps]
    assert {pair[column] for pair in REFUSED.values()} - {None, seccomp.FLOCK[column]} <= set(numbers)
    done = confined.run(f"NUMBERS = {numbers}\n{code}")
    assert (done.status, done.stdout, done.stderr) == (Status.FINISHED, "", "")


def test_no_capability_no_new_privileges_and_a_filter(confined: Place) -> None:
    shown = confined.run("print(open('/proc/self/status').read().strip())").stdout
    status = dict(line.split(":\t", 1) for line in shown.splitlines())
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_it_is_not_root_on_the_host_either(inside: Place) -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary user's executions have that user's rights on the host")
    assert not inside.victim.done(), inside.victim.result()
    (victim,) = _find("victim-bubblewrap")
    assert victim.uids().real == 65534
    assert inside.run("import os; print(os.getuid())").stdout == "1000\n"


@pytest.mark.parametrize("code", [":(){ :|:& };:; sleep 60", "yes", "while :; do sleep 60 & setsid sleep 60 & done"])
def test_a_runaway_shell_ends_at_its_limit(inside: Place, code: str) -> None:
    done = inside.run(code, "bash", Limits(wall_s=1.0, output_kib=8))
    assert done.status is not Status.FINISHED
    assert len(done.stdout) <= 8192
    assert inside.run("print(1)").stdout == "1\n"


def test_a_daemon_does_not_stay(confined: Place) -> None:
    code = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["daemon-of-test", "900"])
    os._exit(0)
"""
    assert confined.run(code).status is Status.FINISHED
    assert not _find("daemon-of-test")


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "."])
def test_nothing_is_left_for_the_next_execution(inside: Place, folder: str) -> None:
    assert inside.run(f"open('{folder}/left', 'w').write('x')").status is Status.FINISHED
    for _ in range(4):
        assert inside.run(f"import os; print(os.path.exists('{folder}/left'))").stdout == "False\n"


def test_tmp_and_the_working_folder_are_empty(inside: Place) -> None:
    code = "import os; print(os.listdir('.'), os.listdir('/tmp'), os.listdir('/dev/shm'), os.getcwd())"
    assert inside.run(code).stdout == "[] ['work'] ['work'] /tmp/work\n"


def test_an_answer_that_the_code_prints_stays_its_output(confined: Place) -> None:
    fake = '{"status": "finished", "return_code": 0, "stdout": "", "stderr": "", "seconds": 0, "files": {}}'
    done = confined.run(f"import os\nprint({fake!r}, flush=True)\nos._exit(3)")
    assert (done.status, done.return_code, done.stdout) == (Status.ERROR, 3, f"{fake}\n")


def test_calls_of_a_foreign_architecture_end_the_process(confined: Place) -> None:
    done = confined.run(foreign_call(20))  # getpid
    assert done.status is Status.ERROR
    assert done.return_code is not None and done.return_code < 0
    assert done.stdout == ""
