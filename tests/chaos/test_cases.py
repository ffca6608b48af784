"""The list of the chaos suite leaves nothing out, and its results are kept: without starting a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import results
from tests.chaos.cases import CASES, FAULTS, POINTS, SIGNALS, TARGETS, End
from tests.chaos.faults import NAMES
from tests.chaos.harness import Baseline, Ended, Result, check_end, place
from tests.chaos.place import possible
from tests.support.programs import need
from verl.host import watcher


def test_every_target_meets_every_signal_and_every_point_is_met() -> None:
    met = {(case.target, case.signal) for case in CASES}
    assert {(target, signal) for target in TARGETS for signal in SIGNALS} <= met
    assert {("controller", "INT"), ("controller", "HUP")} <= met
    assert {case.point for case in CASES} == set(POINTS)
    assert len({case.name for case in CASES}) == len(CASES)
    assert len(CASES) + len(FAULTS) >= 60
    assert {case.name for case in CASES if case.short} == {
        "controller-KILL-checkpoint_write-hf",
        "scorer-KILL-update-hf",
        "engine-KILL-rollout-hf",
    }


def test_expectations_by_target_and_signal() -> None:
    ends = {case.name: (case.expected, case.exit_code) for case in CASES}
    assert ends["controller-KILL-rollout-hf"] == (End.KILLED, -9)
    assert ends["controller-TERM-rollout-hf"] == (End.TERMINATED, 143)
    assert ends["controller-HUP-rollout-hf"] == (End.TERMINATED, 129)
    assert ends["controller-INT-rollout-hf"] == (End.TERMINATED, 130)
    assert ends["controller-STOP-rollout-hf"] == (End.UNHARMED, 0)
    assert ends["rank-STOP-update-hf"] == (End.FAILED, 1)
    assert ends["scorer-KILL-score-hf"] == (End.HEALED, 0)
    assert ends["raylet-KILL-shutdown-hf"] == (End.UNHARMED, 0)


def test_untracked_files_are_part_of_the_commit(tmp_path: Path) -> None:
    need("git")
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        for folder in ("verl", "toolrl", "tests", "docs"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "known.py").write_text("1")
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("*.pyc")
    (tmp_path / "verl" / "cache.pyc").write_bytes(b"\xff")
    (tmp_path / "docs" / "new.md").write_text("not run")
    names = [results.described(tmp_path)]
    assert "+" not in names[0]
    for name, content in (
        ("verl/new.py", b"1"),
        ("verl/new.py", b"2"),
        ("tests/no text", b"\xff"),
        ("verl/known.py", b"2"),
    ):
        (tmp_path / name).write_bytes(content)
        names.append(results.described(tmp_path))
    assert len(set(names)) == 5 and all(name.startswith(f"{names[0]}+") for name in names[1:])
    (tmp_path / "verl" / "known.py").write_bytes(b"1")
    assert results.described(tmp_path) == names[3]


def problems_of(name: str, code: int, *lines: tuple[float, str], unbroken_lines: int = 12) -> list[str]:
    result, case = Result(), next(case for case in CASES if case.name == name)
    check_end(result, case, Ended(code, list(lines), 100.0), Baseline(Path(), [], "", unbroken_lines))
    return result.problems


def test_a_report_comes_within_the_health_timeout_and_ten_seconds_of_slack() -> None:
    def reported(at: float) -> list[str]:
        return problems_of("rank-KILL-update-hf", 1, (-3.0, "step 1"), (at, "trainer rank 0 (process 7) died"))

    assert not reported(0.5) and not reported(40.0)
    (problem,) = reported(40.1)
    assert "reported after 40.1 s, more than 40 s" in problem
    (problem,) = problems_of("rank-KILL-update-hf", 1, (0.5, "something died"))
    assert "does not name the rank" in problem


def test_the_watcher_reports_a_killed_controller() -> None:
    check_reported = watcher._KILLED.format(pid=7).splitlines()
    assert not problems_of("controller-KILL-update-hf", -9, *((1.0, line) for line in check_reported))
    (problem,) = problems_of("controller-KILL-update-hf", -9, (1.0, "Killed"))
    assert "does not name the controller" in problem


def test_a_report_adds_at_most_25_lines() -> None:
    def lines(count: int) -> list[tuple[float, str]]:
        return [(1.0, f"rollout rank 0 died, trainer rank 0 died, {number}") for number in range(count)]

    assert not problems_of("rank-KILL-update-hf", 1, *lines(25))
    assert problems_of("rank-KILL-update-hf", 1, *lines(26)) == ["26 lines after the crash"]
    for name in ("engine-KILL-rollout-hf", "controller-STOP-rollout-hf"):
        assert not problems_of(name, 0, (-9.0, "start"), *lines(36))
        assert problems_of(name, 0, (-9.0, "start"), *lines(37)) == ["26 lines more than a run that nothing breaks"]


def test_every_fault_is_written_out() -> None:
    assert tuple(FAULTS) == NAMES


def test_cases_passed_at_this_commit_are_skipped_and_the_table_has_the_last_result(tmp_path: Path) -> None:
    need("git")
    file, page, name = tmp_path / "results.jsonl", tmp_path / "page.md", CASES[0].name
    assert not results.passed(file, name)
    results.note(file, name, ["too slow"], {"exit": 1})
    assert not results.passed(file, name)
    results.note(file, name, [], {"exit": -9, "resumed_from": 1, "bit_equal": True})
    assert results.passed(file, name) and not results.passed(file, CASES[1].name)
    kept = "| controller, KILL, rollout (hf) | killed | passed | -9 |  | 3 | step 1 | yes | 0123456789ab | 2026-01-31 |"
    page.write_text(f"above\n{results.BEGIN}\nstale row\n{kept}\n{results.END}\nbelow\n")
    results.write_table(page, results.read_jsonl(file))
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "stale row" not in text
    assert f"2 of {len(CASES) + len(FAULTS)} cases passed, 0 failed" in text and kept in text
    today = results.read_jsonl(file)[-1]["time"][:10]
    ended = f"| {results.commit()} | {today} |"
    assert f"| controller, KILL, start (hf) | killed | passed | -9 |  |  | step 1 | yes {ended}" in text
    results.write_table(page, results.read_jsonl(file))
    assert page.read_text() == text


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux" or not possible(), reason="no mount namespace can be made here")
def test_a_place_has_mounts_of_its_own_and_leaves_nothing() -> None:
    with place(shm_mib=1) as where:
        own = where.environment({})
        script = "touch /dev/shm/left $TMPDIR/left; mount -t tmpfs none /mnt; sleep 99 & exec sleep 100"
        process = subprocess.Popen([*where.enter, "sh", "-c", script], env=own)
        try:
            while "/mnt" not in where.mounts():
                assert process.poll() is None
            left = where.leftovers()
        finally:
            process.kill()
            process.wait()
        assert [each for each in left if "sleep 99" in each] and [each for each in left if "sleep 100" in each]
        assert "mount /mnt" in left
        assert "/dev/shm/left" in left and str(where.tmp / "left") in left
        assert not Path("/dev/shm/left").exists() and not os.path.ismount("/mnt")
        assert len(where.alive()) == 1  # what the shell had started ends with the place
    assert not where.tmp.exists() and not where.alive()
