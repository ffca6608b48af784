"""Task folders of Harbor: what is read of them, what is refused, and the verdict of their own tests."""

from __future__ import annotations

import asyncio
import random
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import run, write
from tests.toolrl.swe.test_swe_remote import TOKEN, runtime_server
from toolrl.swe.harbor import MAX_PACKED_MIB, solve
from toolrl.swe.image import prepare_image
from toolrl.swe.local import LocalRuntimes
from toolrl.swe.remote import RemoteRuntimes
from toolrl.swe.runtime import CommandFailedError, RuntimeLimits, Runtimes
from toolrl.swe.scoring import PatchOutcome, PatchVerdict, collect_patch, score_patch
from toolrl.swe.tasks import SweTask, as_task_row, read_swe_task
from verl.data.tasks import to_task
from verl.errors import DataError

FOLDER = {
    "instruction.md": "<!-- benchmark canary GUID 1234 -->\n\nWrite the sum of numbers.txt to /app/sum.txt.\n",
    "task.toml": """schema_version = "1.1"

[task]
name = "sums/sum"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 250.0
env = { EXPECTED = "6" }

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 512
storage = "1G"
allow_internet = false
env = { UNIT = "kg" }
""",
    "environment/numbers.txt": "1\n2\n3\n",
    "tests/test.sh": """#!/bin/bash
expected=$(cat /tests/unit.txt)
if [ "$(cat /app/sum.txt)" = "$EXPECTED $UNIT" ] && [ "$UNIT" = "$expected" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo '{"reward": 0.25}' > /logs/verifier/reward.json
fi
""",
    "tests/unit.txt": "kg\n",
    "solution/solve.sh": """total=0
while read -r number; do total=$((total + number)); done < numbers.txt
echo "$total $UNIT" > sum.txt
""",
}


def folder_of(parent: Path, **changes: str | None) -> Path:
    """changes: name of a file, `__` for a slash and `_dot_` for a dot -> its text; None: it is left out"""
    changed = {name.replace("__", "/").replace("_dot_", "."): text for name, text in changes.items()}
    files = {name: text for name, text in {**FOLDER, **changed}.items() if text is not None}
    return write(parent / "sum", files)


def test_a_folder_is_a_task(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    task = to_task(as_task_row({"harbor": str(folder)}), "0")
    assert task.prompt[-1].content == "Write the sum of numbers.txt to /app/sum.txt."
    swe = read_swe_task(task.extra)
    assert (swe.id, swe.workdir, swe.test_timeout_s) == ("sum", "/app", 250.0)
    assert (swe.limits.memory_mib, swe.limits.file_mib) == (512, 1024)
    assert swe.repository is not None and Path(swe.repository.path) == folder / "environment"
    assert swe.setup == "export UNIT=kg\ncd /app"


def test_an_image_needs_its_prepared_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tasks", environment__Dockerfile="FROM ubuntu:24.04\n")
    with pytest.raises(DataError, match=r"environment of sum is an image.*Dockerfile"):
        read_swe_task({"harbor": str(folder)}, tmp_path / "prepared")
    write(tmp_path / "prepared" / "sum", {"numbers.txt": "4\n"})
    write(tmp_path / "prepared" / "environments" / "sum", {"pyvenv.cfg": ""})
    task = read_swe_task({"harbor": str(folder)}, tmp_path / "prepared")
    assert task.repository is not None and Path(task.repository.path) == tmp_path / "prepared" / "sum"
    assert task.environment == str(tmp_path / "prepared" / "environments" / "sum")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"instruction_dot_md": None}, "instruction.md.*Harbor"),
        ({"task_dot_toml": None}, "task.toml cannot be read"),
        ({"task_dot_toml": "[verifier"}, "task.toml cannot be read"),
        ({"tests__test_dot_sh": None}, "has no tests/test.sh"),
        ({"task_dot_toml": "[environment]\ngpus = 1\n"}, "environment.gpus not supported"),
        ({"task_dot_toml": '[verifier]\nuser = "root"\n'}, "verifier.user not supported"),
        ({"task_dot_toml": "[[steps]]\nname = 'a'\n"}, "steps not supported"),
        ({"task_dot_toml": '[environment]\nmemory = "much"\n'}, "memory = 'much' is not a size"),
        ({"task_dot_toml": '[environment]\nmemory_mb = "x"\n'}, "memory_mb = 'x' cannot be used; expected a number"),
        ({"task_dot_toml": '[verifier]\ntimeout_sec = "x"\n'}, "timeout_sec = 'x' cannot be used"),
        ({"task_dot_toml": "[verifier]\ntimeout_sec = -1\n"}, "timeout_sec = -1 cannot be used"),
        ({"task_dot_toml": "environment = 5\n"}, r"toml: environment = 5 is not a table; expected \[environment\]"),
        ({"task_dot_toml": '[environment]\nworkdir = "/usr/lib"\n'}, "workdir '/usr/lib' cannot be used"),
        ({"task_dot_toml": '[verifier.env]\nKEY = "${API_KEY}"\n'}, "KEY=.*no variable of the host"),
        ({"task_dot_toml": '[environment]\ndocker_image = "a/b"\n'}, r"is an image \(a/b\)"),
    ],
)
def test_unusable_input_is_one_clear_error(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    folder = folder_of(tmp_path, **changes)
    with pytest.raises(DataError, match=problem):
        read_swe_task({"harbor": str(folder)})


def test_an_environment_is_used_or_refused(tmp_path: Path) -> None:
    row = {"harbor": str(folder_of(tmp_path)), "environment": "own"}
    assert read_swe_task(row).environment == "own"
    (tmp_path / "sum" / "task.toml").write_text('[environment]\ndocker_image = "a/b"\n')
    with pytest.raises(DataError, match="'environment': has no effect with the option `deployment`"):
        read_swe_task(row, remote=True)


def test_files_above_the_limit_of_storage_are_refused(tmp_path: Path) -> None:
    """What is collected has all files of the working folder: every patch would fail."""
    toml = "[environment]\nstorage_mb = {}\n"
    text = "".join(random.Random(0).choices(string.printable, k=2 << 20))  # git compresses it little
    for limit in (5, 3):
        folder = folder_of(tmp_path, environment__data_dot_csv=text, task_dot_toml=toml.format(limit))
        task = read_swe_task({"harbor": str(folder)})
        if limit == 5:
            assert (prepare_image(task, tmp_path / "images") / "data.csv").is_file()
    problem = r"files of sum and their history take 3\.\d MiB; expected at most 3 MiB\. Raise .*storage_mb"
    with pytest.raises(DataError, match=problem):
        prepare_image(task, tmp_path / "images")


def test_columns_of_other_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'setup'.*cannot be used with a task folder"):
        read_swe_task({"harbor": str(folder_of(tmp_path)), "setup": "true"})


async def verdict(runtimes: Runtimes, task: SweTask, commands: str | None) -> PatchVerdict:
    """Of what these commands leave; None: of the solution."""
    runtime = await runtimes.start(task)
    assert task.harbor is not None
    if commands is None:
        await solve(runtime, task.harbor)
    else:
        hidden = await runtime.run("ls /tests /solution; find / -name unit.txt -o -name solve.sh 2>/dev/null")
        assert "unit.txt" not in hidden.output and "solve.sh" not in hidden.output
        await runtime.run(commands)
    patch = await collect_patch(runtime, task)
    await runtime.close()
    return await score_patch(runtimes, task, patch)


@pytest.mark.long
def test_the_solution_scores_1_and_nothing_done_0(tmp_path: Path) -> None:
    need_bubblewrap()
    task = read_swe_task({"harbor": str(folder_of(tmp_path))})

    async def main() -> None:
        runtimes = LocalRuntimes()
        try:
            solved = await verdict(runtimes, task, None)
            assert (solved.outcome, solved.score.total) == (PatchOutcome.RESOLVED, 1.0), solved
            by_agent = await verdict(runtimes, task, 'pwd; echo "6 $UNIT" > /app/sum.txt')
            assert by_agent.score.total == 1.0
            idle = await verdict(runtimes, task, "true")
            assert (idle.outcome, idle.score.total) == (PatchOutcome.UNRESOLVED, 0.25)
            wrong = await verdict(runtimes, task, "echo 5 > sum.txt")
            assert (wrong.outcome, wrong.score.total) == (PatchOutcome.UNRESOLVED, 0.25)
            # What an agent writes elsewhere stays in its own runtime.
            cheat = "mkdir -p /tmp/logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 5 > sum.txt"
            assert (await verdict(runtimes, task, cheat)).score.total == 0.25
            small = replace(task, limits=RuntimeLimits(file_mib=1))
            # Whichever sees it first: the command that packs the folder, or the supervisor that measures the disk.
            with pytest.raises(CommandFailedError, match=r"the working folder has more than 1024 KiB|1 MiB of disk"):
                await verdict(runtimes, small, "head -c 1500K /dev/zero > x")
            with pytest.raises(CommandFailedError, match=f"packs to more than {MAX_PACKED_MIB} MiB"):
                await verdict(runtimes, task, f"head -c {MAX_PACKED_MIB + 1}M /dev/urandom > x")
        finally:
            await runtimes.close()

    run(main())


# What git leaves out of a patch: ignored files, an empty folder, modes, commits and a repository inside.
LEFT = """
echo 6 > out.log; mkdir empty; chmod 600 numbers.txt; rm keep/old.txt
git commit -q --allow-empty -m mine; mkdir inner; cd inner; git init -q; echo > code.py; git add code.py
"""
FOUND = """#!/usr/bin/env python3
import pathlib, subprocess
app = pathlib.Path("/app")
git = lambda *args: subprocess.run(["git", *args], cwd=app, capture_output=True, text=True).stdout.strip()
found = [(app / "out.log").exists(), (app / "empty").is_dir(), (app / "numbers.txt").stat().st_mode & 0o777 == 0o600]
found += [not (app / "keep" / "old.txt").exists(), git("log", "-1", "--format=%s") == "mine"]
found += [git("-C", "inner", "ls-files") == "code.py"]
pathlib.Path("/logs/verifier/reward.txt").write_text(str(sum(found) / len(found)))
"""


@pytest.mark.long
def test_all_of_the_working_folder_is_judged(tmp_path: Path) -> None:
    """By a test.sh in another language than bash, which its first line names."""
    need_bubblewrap()
    files = {"environment___dot_gitignore": "*.log\n", "environment__keep__old_dot_txt": "x"}
    task = read_swe_task({"harbor": str(folder_of(tmp_path, tests__test_dot_sh=FOUND, **files))})

    async def main() -> PatchVerdict:
        runtimes = LocalRuntimes()
        try:
            return await verdict(runtimes, task, LEFT)
        finally:
            await runtimes.close()

    found = run(main())
    assert found.score.total == 1.0, found


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("sleep 60", PatchOutcome.TIMEOUT),
        ("exit 1", PatchOutcome.NO_REPORT),
        ("echo nan > /logs/verifier/reward.txt", PatchOutcome.NO_REPORT),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', PatchOutcome.NO_REPORT),
        ("echo '{\"accuracy\": 1.0}' > /logs/verifier/reward.json", PatchOutcome.RESOLVED),
    ],
)
def test_outcomes_by_what_test_sh_leaves(tmp_path: Path, script: str, outcome: PatchOutcome) -> None:
    need_bubblewrap()
    toml = f"[verifier]\ntimeout_sec = {2.0 if outcome is PatchOutcome.TIMEOUT else 250.0}\n"
    folder = folder_of(tmp_path, tests__test_dot_sh=script, task_dot_toml=toml)
    task = read_swe_task({"harbor": str(folder)})

    async def main() -> PatchVerdict:
        runtimes = LocalRuntimes()
        try:
            return await verdict(runtimes, task, "echo 6 > sum.txt")
        finally:
            await runtimes.close()

    found = run(main())
    assert found.outcome is outcome and found.score.total == float(outcome is PatchOutcome.RESOLVED)


@pytest.mark.long
def test_a_runtime_server_runs_task_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setenv("VERL_SERVICE_TOKEN", TOKEN)
    task = read_swe_task({"harbor": str(folder_of(tmp_path))})

    async def main(url: str) -> None:
        pool = RemoteRuntimes([url], store=tmp_path / "store")
        assert (await verdict(pool, task, None)).score.total == 1.0
        assert (await verdict(pool, task, "echo 5 > sum.txt")).score.total == 0.25
        await pool.close()

    with runtime_server(tmp_path) as url:
        asyncio.run(main(url))
