"""toolrl.sandbox.cgroups: where cgroups are made and what is written into them, on a folder that plays cgroupfs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolrl.sandbox.cgroups import CgroupPool, Cgroups, find_cgroups
from toolrl.sandbox.inside.cgroup import UNLIMITED, Cgroup
from toolrl.sandbox.inside.kernel import MIB

OF_VERSION_2 = {
    "cgroup.procs": "",
    "cgroup.freeze": "0",
    "cgroup.subtree_control": "",
    "cgroup.controllers": "memory pids",
    "memory.max": "max",
    "memory.current": "0",
    "memory.events": "low 0\noom 0\noom_kill 0\n",
    "memory.reclaim": "",
    "memory.swap.max": "max",
    "pids.max": "max",
    "cpu.stat": "usage_usec 1500000\nuser_usec 1\n",
}
OF_VERSION_1 = {
    "memory": {
        "memory.limit_in_bytes": "",
        "memory.usage_in_bytes": "0",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "memory.force_empty": "",
        "memory.swappiness": "60",
    },
    "pids": {"pids.max": "max"},
    "cpuacct": {"cpuacct.usage": "1500000000"},
}
READ_ONLY = ("memory.current", "memory.usage_in_bytes", "memory.events", "cpu.stat", "cgroup.controllers")


class Fake:
    """A folder in which new folders have the files that the kernel would put there."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = top
        self.proc = top / "proc"
        self.proc.mkdir()
        self.refused: set[Path] = set()  # folders with processes, which cannot have children with controllers
        mkdir, rmdir, write = Path.mkdir, Path.rmdir, Path.write_text

        def fake_mkdir(path: Path, *args: Any, **settings: Any) -> None:
            mkdir(path, *args, **settings)
            self.fill(path)

        def fake_rmdir(path: Path) -> None:
            for file in path.iterdir():
                if file.is_file():
                    file.unlink()
            rmdir(path)

        def fake_write(path: Path, text: str, *args: Any, **settings: Any) -> int:
            if path.name == "cgroup.subtree_control" and path.parent in self.refused:
                raise OSError(16, "Device or resource busy")
            return write(path, text.replace("+", ""), *args, **settings)

        monkeypatch.setattr(Path, "mkdir", fake_mkdir)
        monkeypatch.setattr(Path, "rmdir", fake_rmdir)
        monkeypatch.setattr(Path, "write_text", fake_write)

    def fill(self, folder: Path) -> None:
        if not folder.is_relative_to(self.top):
            return
        version_1 = folder.relative_to(self.top).parts[0]
        files = OF_VERSION_1.get(version_1, OF_VERSION_2) | ({"tasks": ""} if version_1 in OF_VERSION_1 else {})
        for name, text in files.items():
            file = folder / name
            with file.open("w") as opened:
                opened.write(text)
            file.chmod(0o444 if name in READ_ONLY else 0o200 if name in ("memory.reclaim",) else 0o644)

    def machine(self, cgroup: str, *mounts: tuple[str, str, str]) -> None:
        """What /proc shows of this process, and mounts as (folder, type, options)."""
        lines = [f"30 20 0:1 / {self.top / where} rw - {kind} x {options}" for where, kind, options in mounts]
        with (self.proc / "cgroup").open("w") as file:
            file.write(cgroup)
        with (self.proc / "mountinfo").open("w") as file:
            file.write("\n".join(lines))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path, monkeypatch)


def of_version_2(fake: Fake, own: str = "user.slice/a.scope") -> Path:
    (fake.top / "unified").mkdir()
    folder = fake.top / "unified"
    for part in Path(own).parts:
        folder /= part
        folder.mkdir()
    fake.machine(f"0::/{own}\n", ("unified", "cgroup2", "rw,nsdelegate"))
    return folder


def test_version_2_below_this_process_where_it_can_be(fake: Fake) -> None:
    own = of_version_2(fake)
    assert find_cgroups(fake.proc) == Cgroups(2, {"unified": own})
    assert (own / "cgroup.subtree_control").read_text() == "memory pids"


def test_version_2_beside_this_process_where_its_own_has_processes(fake: Fake) -> None:
    own = of_version_2(fake)
    fake.refused.add(own)
    assert find_cgroups(fake.proc) == Cgroups(2, {"unified": own.parent})


def test_no_cgroup_where_controllers_are_missing(fake: Fake) -> None:
    own = of_version_2(fake)
    for folder in (own, own.parent):
        (folder / "cgroup.controllers").chmod(0o644)
        (folder / "cgroup.controllers").write_text("cpu pids")
    assert find_cgroups(fake.proc) is None


def test_no_cgroup_where_none_is_mounted(fake: Fake) -> None:
    fake.machine("0::/\n")
    assert find_cgroups(fake.proc) is None


def test_no_cgroup_where_the_kernel_has_none(tmp_path: Path) -> None:
    assert find_cgroups(tmp_path) is None


def test_a_mount_of_nothing_is_read(fake: Fake) -> None:
    own = of_version_2(fake)
    with (fake.proc / "mountinfo").open("a") as file:
        file.write("\n31 20 0:2 / /mnt rw - tmpfs  rw")
    assert find_cgroups(fake.proc) == Cgroups(2, {"unified": own})


@pytest.mark.parametrize("has_unified", [True, False])
def test_version_1_with_the_freezer_of_version_2_beside_it(fake: Fake, has_unified: bool) -> None:
    for name in ("memory", "pids", "cpuacct", "unified"):
        (fake.top / name / "job").mkdir(parents=True)
    (fake.top / "unified/cgroup.controllers").unlink(missing_ok=True)
    for folder in (fake.top / "unified", fake.top / "unified/job"):
        file = folder / "cgroup.controllers"
        if file.exists():
            file.chmod(0o644)
            file.write_text("")
    lines = "8:pids:/job\n4:memory:/job\n2:cpu,cpuacct:/job\n"
    mounts = [("memory", "cgroup", "rw,memory"), ("pids", "cgroup", "rw,pids"), ("cpuacct", "cgroup", "rw,cpu,cpuacct")]
    if has_unified:
        mounts.append(("unified", "cgroup2", "rw"))
        lines += "0::/job\n"
    fake.machine(lines, *mounts)
    found = find_cgroups(fake.proc)
    assert found is not None
    assert (found.version, found.freezes) == (1, has_unified)
    assert found.bases == {name: fake.top / name / "job" for name in ("memory", "pids", "cpuacct")}


@pytest.fixture(params=[1, 2])
def cgroup(request: pytest.FixtureRequest, fake: Fake) -> tuple[Cgroup, Callable[[str], Path]]:
    """One cgroup as a supervisor has it, and where its files are."""
    names = ("memory", "pids", "cpuacct", "unified")
    for name in names:
        (fake.top / name).mkdir()
    bases = {name: fake.top / name for name in names[:3]}
    both = Cgroups(1, bases, fake.top / "unified"), Cgroups(2, {"unified": fake.top / "unified"})
    pool = CgroupPool(both[request.param - 1])
    group = pool.make()

    def find(name: str) -> Path:
        return min(fake.top.glob(f"*/verl-sandbox-*/1/{name}"))  # "unified" comes last

    return Cgroup(group.purposes, group.descriptors), find


LIMITS = {"memory_mib": 64, "processes": 10}


def test_limits_are_written_and_usage_is_read(
    cgroup: tuple[Cgroup, Callable[[str], Path]], request: pytest.FixtureRequest
) -> None:
    held, find = cgroup
    version_2 = request.node.callspec.params["cgroup"] == 2
    maximum = find("memory.max" if version_2 else "memory.limit_in_bytes")
    used = find("memory.current" if version_2 else "memory.usage_in_bytes")
    events = find("memory.events" if version_2 else "memory.oom_control")
    used.chmod(0o644)
    used.write_text(f"{5 * MIB}\n")
    held.begin(LIMITS)
    assert maximum.read_text().startswith(str(69 * MIB))  # what was charged before is not billed
    assert find("pids.max").read_text().startswith("11")
    assert held.cpu_s() == 1.5
    assert not held.out_of_memory()
    events.chmod(0o644)
    events.write_text("oom_kill 1\n")
    assert held.out_of_memory()
    held.end()
    assert maximum.read_text().startswith(str(UNLIMITED))
    held.begin(LIMITS)
    assert not held.out_of_memory()  # those of the execution before do not count


def test_memory_that_stays_charged_is_reclaimed(
    cgroup: tuple[Cgroup, Callable[[str], Path]], request: pytest.FixtureRequest
) -> None:
    held, find = cgroup
    version_2 = request.node.callspec.params["cgroup"] == 2
    used = find("memory.current" if version_2 else "memory.usage_in_bytes")
    used.chmod(0o644)
    used.write_text(f"{200 * MIB}\n")
    held.begin(LIMITS)
    reclaim = find("memory.reclaim" if version_2 else "memory.force_empty")
    reclaim.chmod(0o644)
    assert reclaim.read_text() == str(200 * MIB)


def test_a_session_is_frozen_and_its_supervisor_is_not(
    cgroup: tuple[Cgroup, Callable[[str], Path]], request: pytest.FixtureRequest
) -> None:
    held, find = cgroup
    version_2 = request.node.callspec.params["cgroup"] == 2
    cell = "cell/" if version_2 else ""
    assert held.freezes
    held.take(4711)
    held.freeze(on=True)
    assert find(f"{cell}cgroup.procs").read_text() == "4711"
    assert find(f"{cell}cgroup.freeze").read_text() == "1"
    held.freeze(on=False)
    assert find(f"{cell}cgroup.freeze").read_text() == "0"
    joined = "cgroup.procs" if version_2 else "tasks"
    for file in Path(find("pids.max")).parent.glob(joined):
        assert file.read_text() == "0"


def test_a_pool_leaves_no_folder(fake: Fake) -> None:
    folder = of_version_2(fake)
    pool = CgroupPool(Cgroups(2, {"unified": folder}))
    groups = [pool.make() for _ in range(3)]
    (name,) = [each for each in folder.iterdir() if each.is_dir()]
    assert name.name.startswith(f"verl-sandbox-{os.getpid()}-")
    assert (name / "cgroup.subtree_control").read_text() == "memory pids"
    assert (name / "1/memory.swap.max").read_text() == "0"
    pool.leave(groups[0])
    pool.make()
    assert not (name / "1").exists()
    pool.close()
    assert not name.exists()


def test_folders_of_pools_that_are_gone_are_removed_at_the_next_start(fake: Fake) -> None:
    folder = of_version_2(fake)
    gone, lives = (folder / f"verl-sandbox-{pid}-0" for pid in (2**22 + 1, os.getpid()))
    for each in (gone, lives):
        (each / "1/cell").mkdir(parents=True)
        for middle in (each, each / "1"):
            fake.fill(middle)
    assert find_cgroups(fake.proc)
    assert not gone.exists()
    assert lives.exists()
