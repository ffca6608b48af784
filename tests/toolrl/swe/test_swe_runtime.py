"""Local runtimes: a persistent shell, files, snapshots, limits, and what one cannot see or outlive."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import FILES, calc_task
from toolrl.swe import shell
from toolrl.swe.local import LocalRuntime, LocalRuntimes
from toolrl.swe.runtime import (
    MAX_OUTPUT_MIB,
    CommandFailedError,
    CommandResult,
    CommandStatus,
    Runtime,
    RuntimeLimits,
    RuntimeLostError,
    clip,
)
from toolrl.swe.tasks import Repository
from verl.errors import DataError

pytestmark = pytest.mark.usefixtures("bubblewrap")


@pytest.fixture(scope="module")
def bubblewrap() -> None:
    need_bubblewrap()


@asynccontextmanager
async def started(folder: Path, overlay: bool = True, **fields: Any) -> AsyncIterator[LocalRuntime]:
    runtimes = LocalRuntimes(folder / "runtimes", overlay=overlay)
    try:
        yield await runtimes.start(calc_task(folder, **fields))
    finally:
        await runtimes.close()


async def output(runtime: Runtime, command: str) -> str:
    return (await runtime.run(command)).output.strip()


async def test_the_shell_keeps_folder_variables_and_functions(tmp_path: Path) -> None:
    async with started(tmp_path) as runtime:
        first = await runtime.run("cd calc; x=7; export y=8; f() { echo $((x + 1)); }; false")
        assert (first.exit_code, first.status, first.cwd) == (1, CommandStatus.FINISHED, "/testbed/calc")
        assert await output(runtime, "echo $?; echo $?") == "1\n0"
        assert await output(runtime, "pwd; f; sh -c 'echo $y'; read z; echo [$z]") == "/testbed/calc\n8\n8\n[]"
        assert await output(runtime, "cat <<X\nhere\nX\necho 'a\nb'") == "here\na\nb"
        assert (await runtime.run("echo 'open")).exit_code == 2  # a syntax error does not end the shell
        assert await output(runtime, "echo $x; echo err >&2") == "7\nerr"
        assert (await runtime.run("pwd", session="other")).output == "/testbed\n"
        assert await output(runtime, "trap 'echo failed' ERR; (exit 3)") == "failed"
        assert await output(runtime, "echo $?; trap - ERR") == "3"  # not trapped again
        assert await output(runtime, "set -x") == ""
        assert await output(runtime, "f; set +x") == "+ eval 'f; set +x'\n++ f\n++ echo 8\n8\n++ set +x"


async def test_a_shell_that_does_not_start_in_time_is_a_lost_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("START_S", 0.3), ("INTERRUPT_S", 0.3), ("BASH", ("/bin/sh", "-c", "trap '' INT; sleep 60"))):
        monkeypatch.setattr(shell, name, value)
    async with started(tmp_path) as runtime:
        with pytest.raises(RuntimeLostError, match="no shell starts"):
            await runtime.run("echo hi", 2.0)


@pytest.mark.parametrize("spoil", ["mkdir build; cd build; rm -r ../build", "chmod 000 ."])
async def test_a_new_shell_starts_where_it_can(tmp_path: Path, spoil: str) -> None:
    """Code that removes or closes the shell's folder gets no other runtime by that."""
    async with started(tmp_path) as runtime:
        await runtime.run(spoil)
        assert (await runtime.run("exit")).shell_restarted
        assert await output(runtime, "pwd") == ("/" if "chmod" in spoil else "/testbed")


async def test_interrupts_and_time_outs_end_the_command_and_not_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin(runtime: Runtime, command: str) -> CommandResult:
        """What it shows at the soft time-out by which it has started; a busy machine needs several."""
        found = await runtime.run(command, soft_timeout_s=0.3)
        while not found.output:
            found = await runtime.run("", soft_timeout_s=0.3)
        return found

    async with started(tmp_path) as runtime:
        monkeypatch.setattr(shell, "INTERRUPT_S", 60.0)
        await runtime.run("x=7")
        late = await runtime.run("echo started; sleep 60; echo not here", timeout_s=2.0)
        assert (late.status, late.exit_code, late.output.strip()) == (CommandStatus.TIMEOUT, None, "started")
        soft = await begin(runtime, "echo one; until test -e /tmp/two; do sleep 0.1; done; echo two")
        assert (soft.status, soft.output) == (CommandStatus.RUNNING, "one\n")
        with pytest.raises(CommandFailedError, match="running"):
            await runtime.run("echo three")
        await runtime.write("/tmp/two", b"")
        assert (await runtime.run("")).output == "one\ntwo\n"
        await begin(runtime, "echo on; while :; do :; done; echo not here")
        stopped = await runtime.interrupt()
        assert (stopped.status, stopped.exit_code) == (CommandStatus.FINISHED, 130)
        assert await output(runtime, "echo $x") == "7"
        monkeypatch.setattr(shell, "INTERRUPT_S", 0.5)
        stubborn = await runtime.run("cd calc; trap '' INT; while :; do :; done", timeout_s=2.0)
        assert (stubborn.status, stubborn.shell_restarted) == (CommandStatus.TIMEOUT, True)
        assert await output(runtime, "echo [$x]") == "[]"
        ended = await runtime.run("exit 3")
        assert (ended.status, ended.shell_restarted) == (CommandStatus.KILLED, True)
        assert await output(runtime, "echo again") == "again"


async def test_a_long_output_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    async with started(tmp_path, limits=RuntimeLimits(output_chars=1000)) as runtime:
        long = (await runtime.run("seq 1 200000")).output
        assert long.startswith("1\n2\n3\n") and long.endswith("199999\n200000\n") and "omitted" in long
        assert len(long) < 1100
    assert clip("a" * 10 + "b" * 10, 4) == "aa\n[16 characters omitted]\nbb"
    assert clip("abcd", 4) == "abcd"


async def test_an_output_that_is_too_large_for_memory_is_no_result(tmp_path: Path) -> None:
    async with started(tmp_path, limits=RuntimeLimits(file_mib=1024)) as runtime:
        size = f"{MAX_OUTPUT_MIB + 1}M"
        done = await runtime.execute(["/bin/sh", "-c", f"head -c {size} /dev/zero"])
        assert (done.exit_code, done.stdout) == (None, b"")
        await runtime.run(f"truncate -s {size} large")
        with pytest.raises(CommandFailedError, match=f"more than {MAX_OUTPUT_MIB} MiB of output"):
            await runtime.read("large")


@pytest.mark.parametrize("overlay", [True, False])
async def test_files_travel_and_snapshots_restore_them(tmp_path: Path, overlay: bool) -> None:
    async with started(tmp_path, overlay) as runtime:
        assert runtime.layered is overlay
        data = bytes(range(256)) * 1000
        await runtime.write("/testbed/new/data.bin", data)
        assert await runtime.read("/testbed/new/data.bin") == data
        with pytest.raises(CommandFailedError, match="No such file"):
            await runtime.read("/testbed/absent")
        with pytest.raises(CommandFailedError, match=r"Read-only|denied"):
            await runtime.write("/usr/x", b"")
        name = await runtime.snapshot()
        await runtime.run("rm -r calc; echo changed > README.md; echo kept > /tmp/file; x=1")
        with pytest.raises(CommandFailedError, match="No such file"):
            await runtime.restore("99")
        assert await output(runtime, "echo [$x]") == "[1]"  # nothing has ended
        await runtime.restore(name)
        assert await output(runtime, "ls; cat README.md; ls /tmp; echo [$x]") == (
            "README.md\ncalc\nnew\ntests\nA calculator.\n[]"
        )
        await runtime.upload(tmp_path / "calc" / "calc", "/testbed/up/package")
        await runtime.download("/testbed/up/package", tmp_path / "down")
        assert (tmp_path / "down" / "core.py").read_text() == FILES["calc/core.py"]
        await runtime.run("ln -s /etc/passwd up/link")
        with pytest.raises(CommandFailedError, match="neither a file nor a folder"):
            await runtime.download("/testbed/up", tmp_path / "links")


async def test_runtimes_of_a_task_share_the_repository_and_nothing_else(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    runtimes = LocalRuntimes(tmp_path / "runtimes")
    task = calc_task(tmp_path)
    one, two = await asyncio.gather(runtimes.start(task), runtimes.start(task))
    assert len(list((tmp_path / "runtimes" / "images").iterdir())) == 1
    await one.run("echo changed > README.md; rm -r tests; echo x > /tmp/secret; sleep 500 & :")
    assert await output(two, "cat README.md; ls tests /tmp") == "A calculator.\n/tmp:\n\ntests:\ntest_name.py"
    assert "sleep" not in await output(two, "cat /proc/*/cmdline | tr '\\0' ' '")
    own = set(psutil.Process().children(recursive=True)) - before
    await runtimes.close()
    assert own and not [each for each in own if each.is_running()]
    assert [each.name for each in (tmp_path / "runtimes").iterdir()] == ["images"]
    with pytest.raises(RuntimeLostError):
        await one.run("echo a")
    assert (tmp_path / "calc" / "README.md").read_text() == FILES["README.md"]


async def test_neither_packages_of_the_trainer_nor_layers_nor_secrets_nor_a_network_are_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SERVICE_TOKEN", "secret-4711")
    async with started(tmp_path) as runtime:
        for module in ("torch", "numpy", "verl", "pytest", "pydantic", "pip"):
            assert "ModuleNotFoundError" in await output(runtime, f"/usr/bin/python3 -c 'import {module}'"), module
        assert await output(runtime, "ls /episode /image; env | grep 4711") == "/episode:\n\n/image:"
        assert "denied" in await output(runtime, "ls /proc/1/root") or "permitted" in await output(
            runtime, "ls /proc/1/root"
        )
        assert "Read-only" in await output(runtime, "echo x > /base.git/config")
        reach = "import socket; socket.create_connection(('127.0.0.1', 22), 2)"
        assert "Error" in await output(runtime, f'/usr/bin/python3 -c "{reach}"')
        assert "permitted" in await output(runtime, "kill -9 1")
        assert (await runtime.run("unshare -r true")).exit_code != 0


async def test_the_history_has_one_commit_without_hidden_tests(tmp_path: Path) -> None:
    source = tmp_path / "calc"
    task = calc_task(tmp_path)
    git = "git -c user.name=a -c user.email=a@b"
    (source / "tests" / "test_calc.py").write_text(task.hidden_tests["tests/test_calc.py"])
    os.system(f"cd {source} && git init -q && git add -A && {git} commit -qm one && git tag v1")
    (source / "calc" / "core.py").write_text("the fix = 4711\n")
    os.system(f"cd {source} && git add -A && {git} commit -qm fix")
    runtimes = LocalRuntimes(tmp_path / "runtimes")
    for revision in ("v1", ""):
        runtime = await runtimes.start(replace(task, repository=Repository(str(source), revision)))
        assert await output(runtime, "git log --all --format=%s; git status --short") == "base"
        assert await output(runtime, "git reflog | wc -l; ls tests") == "1\ntest_name.py"
        names = "git cat-file --batch-all-objects --batch-check='%(objectname)'"
        objects = f"for o in $({names}); do git cat-file -p $o; done"
        assert "test_add" not in await output(runtime, objects)
        assert ("4711" in await output(runtime, f"{objects}; grep -r 4711 .")) is (revision == "")
    with pytest.raises(DataError, match="no-such"):
        await runtimes.start(replace(task, repository=Repository(str(source), "no-such")))
    await runtimes.close()


async def test_beyond_a_limit_all_processes_end_and_the_runtime_goes_on(tmp_path: Path) -> None:
    limits = RuntimeLimits(memory_mib=128, processes=20, file_mib=16)
    async with started(tmp_path, limits=limits) as runtime:
        full = await runtime.run("for i in $(seq 20); do head -c 1000000 /dev/zero > f$i; sleep 0.05; done; sleep 60")
        assert (full.status, full.reason) == (CommandStatus.KILLED, "more than 16 MiB of files")
        assert (await runtime.run("rm f*; echo freed")).output == "freed\n"
        grow = "/usr/bin/python3 -c 'x = bytearray(400 << 20); import time; time.sleep(20)'"
        eaten = await runtime.run(grow)
        assert eaten.exit_code not in (0, None) or "MiB of memory" in eaten.reason
        many = await runtime.run("for i in $(seq 40); do sleep 30 & done")
        assert "fork" in many.output or many.status is CommandStatus.KILLED
        assert await output(runtime, "echo alive") == "alive"


HOLD = """
import os, sys, time
for _ in range(3):
    held = open("/testbed/" + sys.argv[1] if len(sys.argv) > 1 else "/tmp/held", "wb")
    held.write(bytes(8 << 20))
    held.flush()
    os.unlink(held.name)
    os.dup(held.fileno())
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("/usr/bin/python3 /tmp/hold.py", "16 MiB of files"),  # deleted, and open
        ("/usr/bin/python3 /tmp/hold.py name", "16 MiB of files"),
        ("for i in $(seq 60); do mkdir d$i; (cd d$i; touch $(seq 50)); sleep 0.02; done; sleep 280", "2000 files"),
        ("mkdir -p $(seq 3000); sleep 280", "2000 files"),
    ],
)
async def test_unlinked_and_empty_files_count_against_the_limits(tmp_path: Path, command: str, reason: str) -> None:
    async with started(tmp_path, limits=RuntimeLimits(file_mib=16, files=2000)) as runtime:
        await runtime.write("/tmp/hold.py", HOLD.encode())
        full = await runtime.run(command, timeout_s=280)
        assert (full.status, full.reason) == (CommandStatus.KILLED, f"more than {reason}")
        assert await output(runtime, "rm -rf d* [0-9]*; echo freed") == "freed"
        links = "head -c 8000000 /dev/zero > f; for i in $(seq 9); do ln f f$i; done; sleep 1.2; echo alive"
        assert await output(runtime, links) == "alive"  # one file, whatever its names


def test_a_limit_is_a_number_above_0() -> None:
    for wrong in ({"files": 0}, {"memory_mib": "512"}):
        with pytest.raises(DataError, match=r"field 'limits'.* a number above 0"):
            RuntimeLimits(**wrong)


async def test_beyond_twice_a_limit_nothing_is_written_any_more(tmp_path: Path) -> None:
    async with started(tmp_path, limits=RuntimeLimits(file_mib=16)) as runtime:
        name = await runtime.snapshot()
        over, twice = "more than 16 MiB of files", "more than twice 16 MiB of files; nothing can be written any more"
        reasons = [""]
        while reasons[-1] != twice and len(reasons) < 20:  # a command may be ended before it has written all
            ran = await runtime.run(f"head -c 12M /dev/zero > {len(reasons)}; sleep 4")
            reasons.append(ran.reason)
        assert reasons[-1] == twice and {*reasons[:-1]} <= {"", over}
        assert "Read-only" in await output(runtime, "echo x > e; rm 1; echo alive > /tmp/f; cat README.md")
        await runtime.restore(name)
        assert await output(runtime, "echo x > e; ls") == "README.md\ncalc\ne\ntests"


async def test_a_supervisor_that_dies_is_a_lost_runtime_and_not_a_failed_command(tmp_path: Path) -> None:
    async with started(tmp_path) as runtime:
        waiting = asyncio.create_task(runtime.run("sleep 600"))
        await asyncio.sleep(0.5)
        bwrap = [each for each in psutil.Process().children() if each.name() == "bwrap"]
        os.kill(bwrap[0].pid, signal.SIGKILL)
        with pytest.raises(RuntimeLostError):
            await waiting
        for operation in (runtime.run("echo"), runtime.execute(["true"]), runtime.read("/testbed/README.md")):
            with pytest.raises(RuntimeLostError):
                await operation


async def test_a_setup_that_fails_is_a_fault(tmp_path: Path) -> None:
    async with started(tmp_path, setup="echo made > built") as runtime:
        assert await output(runtime, "cat built") == "made"
    with pytest.raises(RuntimeLostError, match="setup of calc failed"):
        async with started(tmp_path / "two", setup="false"):
            raise AssertionError
