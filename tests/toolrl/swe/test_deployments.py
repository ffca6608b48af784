"""SWE-ReX's docker deployment, unchanged, serves our client; the engine is a stand-in (fake_docker.py)."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.data.validation import diff
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe import fake_docker
from tests.toolrl.swe.repositories import (
    BUG,
    FILES,
    FIX,
    GOLD,
    HIDDEN,
    calc_task,
    git,
    patch,
    pytest_environment,
    run,
    with_history,
    write,
)
from tests.toolrl.swe.test_harbor import folder_of, verdict
from tests.toolrl.swe.test_swe_ends import until
from tests.toolrl.swe.test_swe_remote import swerex
from toolrl.envs.swe.env import SweFactory
from toolrl.swe.deployments import DeployedRuntimes, Deployments
from toolrl.swe.runtime import CommandFailedError, CommandStatus, RuntimeLostError
from toolrl.swe.scoring import PatchOutcome, collect_patch, score_patch
from toolrl.swe.tasks import SweTask, read_swe_task
from verl.errors import ConfigError, DataError

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]


class Docker:
    """Images by name, and what is left of containers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        need_bubblewrap()
        self.folder, self.python = folder / "docker", swerex()
        self.environment = pytest_environment(folder)
        venv = Path(self.python).parents[1]
        homes = {str(Path(python).resolve().parents[1]) for python in (self.python, sys.executable)}
        binds = ":".join([str(venv), self.environment, *homes])
        command = f'exec {sys.executable} {fake_docker.__file__} {self.folder} "{binds}" "$@"'
        program = write(folder / "bin", {"docker": f"#!/bin/sh\n{command}\n"}) / "docker"
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{venv / 'bin'}:{os.environ['PATH']}")

    def task(self, **fields: Any) -> SweTask:
        """The repository with a bug as an image, and its task."""
        image = write(self.folder / "images" / "calc" / "testbed", FILES)
        for arguments in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "base"]):
            subprocess.run([*GIT, *arguments], cwd=image, check=True)
        task = calc_task(self.folder, repository=None, image="calc", base_commit="HEAD", **fields)
        return replace(task, python=f"{self.environment}/bin/python")

    def runtimes(self, **settings: Any) -> DeployedRuntimes:
        return DeployedRuntimes({"python": self.python, "type": "docker", "startup_timeout": 60, **settings})

    @property
    def containers(self) -> list[Path]:
        folder = self.folder / "containers"
        return list(folder.iterdir()) if folder.exists() else []


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    return Docker(tmp_path, monkeypatch)


@pytest.mark.long
def test_every_runtime_is_a_fresh_container_and_none_is_left(docker: Docker) -> None:
    async def main() -> None:
        runtimes, task = docker.runtimes(), docker.task()
        first, second = await asyncio.gather(runtimes.start(task), runtimes.start(task))
        assert len(docker.containers) == 2
        await first.run("sed -i 's/a - b/a + b/' calc/core.py && echo junk > junk.txt")
        made = await collect_patch(first, task)
        await first.close()
        assert "+    return a + b" in made and "junk.txt" in made
        assert (await second.run("cat calc/core.py")).output.rstrip("\n") == FILES["calc/core.py"].rstrip("\n")
        await second.close()
        assert docker.containers == []
        assert (await score_patch(runtimes, task, made)).outcome is PatchOutcome.RESOLVED
        assert (await score_patch(runtimes, task, patch({"README.md": "x\n"}))).outcome is PatchOutcome.UNRESOLVED
        await runtimes.start(task)
        await runtimes.close()

    run(main(), 240)
    assert docker.containers == []


@pytest.mark.long
def test_the_base_of_a_patch_is_what_the_image_holds(docker: Docker) -> None:
    """Its files that git ignores or does not know stay, and its changes since the commit of the row are no patch."""
    task = docker.task()
    image = docker.folder / "images" / "calc" / "testbed"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=image, capture_output=True, text=True, check=True).stdout
    write(
        image, {"calc.egg-info/PKG-INFO": "Name: calc\n", ".gitignore": "built\n", "built": "1\n", "README.md": "2\n"}
    )
    subprocess.run([*GIT, "commit", "-q", "-a", "-m", "prepared"], cwd=image, check=True)
    write(image, {"README.md": "uncommitted\n", "calc/__init__.py": FILES["calc/__init__.py"] + "# own\n"})
    found = "from pathlib import Path\nfrom calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    found += "    assert Path('calc.egg-info/PKG-INFO').exists() and Path('built').read_text() == '1\\n'\n"
    hidden = {"hidden_tests": {"tests/test_calc.py": found}, "fail_to_pass": ("tests/test_calc.py::test_add",)}
    task = replace(task, base_commit=commit.strip(), pass_to_pass=(), **hidden)

    async def main() -> None:
        runtimes = docker.runtimes()
        runtime = await runtimes.start(task)
        assert await collect_patch(runtime, task) == ""
        await runtime.run(
            "sed -i 's/a - b/a + b/' calc/core.py; rm -rf .git; git init -q; echo x > calc.egg-info/PKG-INFO"
        )
        made = await collect_patch(runtime, task)
        await runtime.close()
        assert [line for line in made.splitlines() if line[:4] in ("--- ", "+++ ")] == [
            "--- a/calc/core.py",
            "+++ b/calc/core.py",
        ]
        verdict = await score_patch(runtimes, task, made)
        assert verdict.outcome is PatchOutcome.RESOLVED, verdict.detail
        await runtimes.close()

    run(main(), 240)


@pytest.mark.long
def test_the_history_of_an_image_is_replaced(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the fix on a branch, in a stash and in a repository inside; a patch cannot take it from there."""
    monkeypatch.delenv("TERM", raising=False)  # on such a terminal, git's pager waits for a key
    task = docker.task()
    image = docker.folder / "images" / "calc" / "testbed"
    shutil.rmtree(image)
    with_history(image)
    git(image, "tag", "v1.2")
    with_history(image / "vendor")

    async def main() -> None:
        runtimes = docker.runtimes()
        runtime = await runtimes.start(task)
        seen = await runtime.run(
            "git log --all --oneline | wc -l; git describe --tags; git status --short; git stash list"
        )
        assert seen.output.split() == ["1", "v1.2"]
        objects = "for folder in .git /base.git; do git --git-dir=$folder cat-file --batch-all-objects --batch; done"
        for text, count in (("a - b", "2"), ("a + b", "0")):  # once in each of them
            assert (await runtime.run(f"({objects}) | grep -ac '{text}'")).output.strip() == count
        await runtime.run("sed -i 's/a - b/a + b/' vendor/calc/core.py")
        assert "vendor/calc/core.py" in (await runtime.run("git diff --stat")).output
        assert "+++ b/vendor/calc/core.py" in await collect_patch(runtime, task)
        await runtime.close()
        cheat = "import os\nos.system('cd /testbed; git checkout -q main -- calc/core.py')\nfrom calc.core import *\n"
        verdict = await score_patch(runtimes, task, patch({"calc/__init__.py": cheat}))
        assert verdict.outcome is PatchOutcome.UNRESOLVED, verdict.detail
        await runtimes.close()

    run(main(), 240)


@pytest.mark.long
def test_a_row_of_swe_smith_runs_in_its_image(docker: Docker) -> None:
    """The image has no bug, and the tests, which the policy does not see."""
    image = write(docker.folder / "images" / "smith" / "testbed", {**FILES, "calc/core.py": FIX, **HIDDEN})
    for arguments in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "base"]):
        git(image, *arguments)
    row = {
        "instance_id": "owner__calc.12345678.func_1",
        "patch": diff({"calc/core.py": FIX}, {"calc/core.py": BUG}),
        "FAIL_TO_PASS": ["tests/test_calc.py::test_add", "tests/test_calc.py::TestAdd::test_zero"],
        "PASS_TO_PASS": ["tests/test_calc.py::test_nothing", "tests/test_name.py::test_name"],
        "image_name": "smith",
        "repo": "swesmith/owner__calc.12345678",
        "problem_statement": "add subtracts",
    }
    task = replace(read_swe_task(row, remote=True), python=f"{docker.environment}/bin/python")

    async def main() -> None:
        runtimes = docker.runtimes()
        runtime = await runtimes.start(task)
        seen = "ls tests; grep -c 'a - b' calc/core.py; git log --all --oneline | wc -l; git status --short"
        assert (await runtime.run(seen)).output.split() == ["test_name.py", "1", "1"]
        fake = "mkdir -p tests && echo 'def test_add(): pass' > tests/test_calc.py"
        await runtime.run(f"{fake}; sed -i 's/a - b/a + b/' calc/core.py")
        made = await collect_patch(runtime, task)
        await runtime.close()
        assert "+    return a + b" in made and "test_calc" not in made
        gold = await score_patch(runtimes, task, made)
        assert gold.outcome is PatchOutcome.RESOLVED, gold.detail
        verdict = await score_patch(runtimes, task, patch({"README.md": "x\n"}))
        assert (verdict.outcome, verdict.fail_to_pass, verdict.pass_to_pass) == (PatchOutcome.UNRESOLVED, 0.0, 1.0)
        with pytest.raises(RuntimeLostError, match=r"smith cannot be the base of patches: git .*patch failed"):
            await runtimes.start(replace(task, bug_patch=GOLD))
        await runtimes.close()

    run(main(), 240)
    assert docker.containers == []


@pytest.mark.long
def test_our_client_works_with_swe_rex_own_server(docker: Docker, tmp_path: Path) -> None:
    async def main() -> None:
        runtimes = docker.runtimes()
        runtime = await runtimes.start(docker.task(setup="cd calc"))
        assert (await runtime.run("x=7; pwd")).output.strip() == "/testbed/calc"
        done = await runtime.run("echo $x; (exit 3)")
        assert (done.output.strip(), done.exit_code) == ("7", 3)
        late = await runtime.run("sleep 60", timeout_s=1)
        assert late.status is CommandStatus.TIMEOUT
        assert (await runtime.run("echo $x")).output.strip() == "7"
        data = bytes(range(256)) * 500
        await runtime.write("sub/data.bin", data)
        assert await runtime.read("/testbed/sub/data.bin") == data
        with pytest.raises(CommandFailedError, match="No such file"):
            await runtime.read("absent")
        ended = await runtime.execute(["/bin/sh", "-c", "cat; echo err >&2; exit 4"], b"in\xff")
        assert (ended.exit_code, ended.stdout, ended.stderr) == (4, b"in\xff", b"err\n")
        assert (await runtime.execute(["sleep", "60"], timeout_s=0.5)).exit_code is None
        await runtime.download("sub", tmp_path / "down")
        await runtime.upload(tmp_path / "down", "copy")
        assert await runtime.read("copy/data.bin") == data
        for unsupported in (runtime.snapshot(), runtime.run("true", soft_timeout_s=1)):
            with pytest.raises(CommandFailedError, match="SWE-ReX has no"):
                await unsupported
        await runtime.close()
        await runtimes.close()

    run(main(), 240)


@pytest.mark.long
def test_a_start_that_fails_or_is_cancelled_leaves_nothing(docker: Docker) -> None:
    async def main() -> None:
        runtimes, task = docker.runtimes(pull="never"), docker.task()
        with pytest.raises(RuntimeLostError, match="setup"):
            await runtimes.start(replace(task, setup="false"))
        with pytest.raises(RuntimeLostError):
            await runtimes.start(replace(task, image="absent"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtimes.start(task), 0.2)
        with pytest.raises(DataError, match="names no image"):
            await runtimes.start(replace(task, image=""))
        await runtimes.close()

    run(main(), 240)
    assert until(lambda: docker.containers == [])


@pytest.mark.long
def test_a_task_folder_runs_in_its_image(docker: Docker, tmp_path: Path) -> None:
    """The working folder is no repository, and has files of the image alone."""
    toml = '[verifier]\nenv = { EXPECTED = "6" }\n[environment]\ndocker_image = "sums"\nenv = { UNIT = "kg" }\n'
    folder = folder_of(tmp_path, task_dot_toml=toml, environment__Dockerfile="FROM ubuntu:24.04\n")
    write(docker.folder / "images" / "sums" / "app", {"numbers.txt": "1\n2\n3\n"})
    task = read_swe_task({"harbor": str(folder)}, remote=True)
    assert (task.image, task.repository) == ("sums", None)

    async def main() -> None:
        runtimes = docker.runtimes()
        assert (await verdict(runtimes, task, None)).score.total == 1.0
        assert (
            await verdict(runtimes, task, "echo 5 > sum.txt; echo 1 > /logs/verifier/reward.txt")
        ).score.total == 0.25
        await runtimes.close()

    run(main(), 240)
    with pytest.raises(DataError, match=r"is an image \(sums\).*option `deployment`"):
        read_swe_task({"harbor": str(folder)})
    (folder / "task.toml").write_text("")
    with pytest.raises(DataError, match=r"is an image \(Dockerfile\).*docker build -t IMAGE"):
        read_swe_task({"harbor": str(folder)}, remote=True)


OWNER = """
import asyncio, sys, time
from pathlib import Path
from toolrl.swe.deployments import DeployedRuntimes
from toolrl.swe.tasks import SweTask

async def main(python):
    runtimes = DeployedRuntimes({"python": python, "type": "docker"})
    await runtimes.start(SweTask("t", "", ("a::b",), image="calc"))
    print("started", flush=True)
    time.sleep(600)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.long
def test_containers_end_with_a_killed_trainer(docker: Docker) -> None:
    docker.task()
    with subprocess.Popen([sys.executable, "-c", OWNER, docker.python], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"started\n"
        assert len(docker.containers) == 1
        owner.kill()
    assert until(lambda: docker.containers == [])


def test_settings_that_cannot_be_used_are_refused() -> None:
    python = sys.executable
    for settings in ({"type": "docker"}, {"python": "/none", "type": "docker"}, {"python": python}):
        with pytest.raises(ConfigError, match="python: an interpreter with swe-rex"):
            Deployments(settings)
    with pytest.raises(ConfigError, match="without `image`"):
        Deployments({"python": python, "type": "docker", "image": "x"})
    with pytest.raises(ConfigError, match="not both"):
        SweFactory(urls=["http://a"], deployment={"python": python, "type": "docker"})


@pytest.mark.long
async def test_a_python_without_swe_rex_is_found_before_the_start() -> None:
    factory = SweFactory(deployment={"python": shutil.which("python3") or "", "type": "docker"})
    with pytest.raises(RuntimeLostError, match=r"starts no deployments.*swerex"):
        await factory.check_services()
    await factory.close()
