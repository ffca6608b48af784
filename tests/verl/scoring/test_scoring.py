"""Rewards in processes of their own: users' code that raises, hangs or dies costs one response and nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.every import every
from tests.support.until import until
from toolrl.check.lab.__main__ import as_trajectory
from verl.errors import ConfigError, DataError
from verl.scoring.pool import Fault, ScoringPool
from verl.scoring.process import ScoringLimits, ScoringProcess
from verl.scoring.rewards import build_rewards
from verl.types import Message, Outcome, Score, StopReason, Task, Trajectory
from verl.utils.reward_score.base import build_reward

REWARD = """
import ctypes, os, signal, subprocess, sys, time

class Odd(Exception):
    def __reduce__(self):
        raise TypeError("not to be sent")

class Mute(Exception):
    def __str__(self):
        raise self

def judge(response, answer):
    act, _, path = response.partition(" ")
    if act == "raise":
        raise ValueError("no service")
    if act == "interrupt":
        raise KeyboardInterrupt
    if act == "exit":
        sys.exit(3)
    if act == "nan":
        return float("nan")
    if act == "text":
        return "good"
    if act == "none":
        return None
    if act == "lambda":
        return lambda: 1.0
    if act == "close":
        os.closerange(0, 4096)
    if act == "print":
        print("x" * 5_000_000, flush=True)
        print("x" * 5_000_000, file=sys.stderr, flush=True)
    if act == "raise_odd":
        raise Odd
    if act == "raise_mute":
        raise Mute
    if act == "ignore":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    if act == "hang":
        time.sleep(600)
    if act == "hang_in_c":
        return "a" < "a" * pow(7, 10**9)
    if act == "die":
        os._exit(7)
    if act == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if act == "eat":
        return len(bytearray(2**34)[:1])
    if act == "fork":
        os.fork()
    if act == "child":
        open(path, "w").write(str(subprocess.Popen(["sleep", "600"]).pid))
    if act in ("once", "slowly") and not os.path.exists(path):
        open(path, "w").write(str(os.getpid()))
        time.sleep(600 if act == "once" else 3)
    if act == "":
        return -1.0
    return float(response == answer) + float(os.environ.get("BONUS", 0))

def veRLs(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "source": float(data_source == "rlla")}
"""


LIMITS = ScoringLimits(timeout_s=60.0, memory_mib=1024, health_timeout_s=60.0)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "mine.py"
    path.write_text(REWARD)
    return path


@pytest.fixture(scope="module")
def pool(file: Path) -> Iterator[ScoringPool]:
    with ScoringPool(f"{file}:judge", {}, num_workers=2, limits=LIMITS) as made:
        yield made


def scores(pool: ScoringPool, *responses: str) -> list[Score | Fault]:
    task = Task("t", (Message("user", "?"),), "yes", "rlla")

    async def together() -> list[Score | Fault]:
        scoring = asyncio.gather(*(pool.score(as_trajectory(task, response), task, 0) for response in responses))
        return await asyncio.wait_for(scoring, 100)

    return asyncio.run(together())


def totals(pool: ScoringPool, *responses: str) -> list[float | None]:
    """None: not scored"""
    return [score.total if isinstance(score, Score) else None for score in scores(pool, *responses)]


def test_scores_come_back_and_workers_know_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BONUS", "2")
    with ScoringPool(f"{file}:judge", {}, num_workers=2) as pool:
        assert scores(pool, "yes", "no") == [Score(3.0, {}), Score(2.0, {})]


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("raise", "the reward raised ValueError: no service (mine.py, line 15, in judge)"),
        ("interrupt", "the reward raised KeyboardInterrupt"),
        ("exit", "the reward raised SystemExit: 3"),
        ("nan", "judge returned nan; expected a finite number"),
        ("die", "process died twice (exit code 7)"),
        ("text", "judge returned 'good'; expected a finite number"),
        ("none", "judge returned None; expected a finite number"),
        ("lambda", "judge returned <function judge.<locals>.<lambda> at"),
        ("close", "process died twice ("),  # its channel is closed before it ends
        ("raise_odd", "the reward raised Odd"),
        ("raise_mute", "process died twice (exit code 1)"),
    ],
)
def test_a_failing_episode_is_a_fault_and_the_others_are_scored(pool: ScoringPool, response: str, problem: str) -> None:
    one, fault, two = scores(pool, "yes", response, "no")
    assert isinstance(fault, Fault) and problem in str(fault) and str(fault).startswith("t, response 0: ")
    assert isinstance(one, Score) and isinstance(two, Score)
    assert totals(pool, "yes") == [1.0]


def test_verls_signature_is_understood(file: Path) -> None:
    with ScoringPool(f"{file}:veRLs", {}, num_workers=1) as pool:
        assert scores(pool, "yes") == [Score(1.0, {"source": 1.0})]


def test_a_reward_that_cannot_be_made_is_a_fault(file: Path) -> None:
    with ScoringPool(f"{file}:judges", {}, num_workers=1) as pool:
        (fault,) = scores(pool, "yes")
    assert isinstance(fault, Fault) and "has no 'judges'" in fault.problem


def test_an_environments_own_verdict_is_a_reward() -> None:
    task = Task("t#0", (Message("user", "go"),), "", "shop")
    judged = Trajectory(task, 0, (), StopReason.STOP, Outcome.SCORED, score=Score(0.5, {"state": 0.5}))
    never_judged = Trajectory(task, 0, (), StopReason.LENGTH, Outcome.MODEL_FAULT)
    reward = build_reward("env")
    assert reward.score(judged, task, 0) == Score(0.5, {"state": 0.5})
    with pytest.raises(ConfigError, match="there is no verdict"):
        reward.score(never_judged, task, 0)


@pytest.mark.parametrize(
    ("response", "limit"),
    [
        ("eat", "needs more than 1024 MiB (reward.memory_mib)"),
        ("crash", "crashes on this response (SIGSEGV)"),
    ],
)
def test_a_response_over_a_limit_is_scored_as_an_empty_one(
    file: Path, pool: ScoringPool, response: str, limit: str
) -> None:
    one, score = scores(pool, "yes", response)
    assert one == Score(1.0, {})
    assert isinstance(score, Score) and score.total == -1.0 and limit in score.exceeded


def test_a_response_over_the_time_limit_is_scored_as_an_empty_one(file: Path) -> None:
    limits = ScoringLimits(timeout_s=5.0)
    with ScoringPool(f"{file}:judge", {}, 4, limits) as pool:
        one, *stopped = scores(pool, "yes", "hang", "ignore", "hang_in_c")
        assert one == Score(1.0, {})
        for score in stopped:
            assert isinstance(score, Score) and score.total == -1.0
            assert score.exceeded == "the reward took longer than 5 s (reward.timeout_s)"


def test_a_reward_that_prints_megabytes_scores_as_one_that_does_not(pool: ScoringPool) -> None:
    assert totals(pool, "print", "yes", "print", "no") == [0.0, 1.0, 0.0, 0.0]


def test_a_response_over_a_limit_is_left_out_where_that_is_the_policy_of_faults(file: Path) -> None:
    limits = ScoringLimits(timeout_s=1.0, fault_policy="infrastructure")
    with ScoringPool(f"{file}:judge", {}, 1, limits) as pool:
        (fault,) = scores(pool, "hang")
        assert isinstance(fault, Fault) and "took longer than 1 s" in fault.problem


def test_many_stuck_responses_do_not_wait_for_other_deadlines(file: Path) -> None:
    with ScoringPool(f"{file}:judge", {}, 1, ScoringLimits(timeout_s=4.0)) as pool:
        assert totals(pool, "hang", "hang", "yes") == [-1.0, -1.0, 1.0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_dies_idle_is_made_anew_with_a_line_in_the_log(
    file: Path, how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    with ScoringPool(f"{file}:judge", {}, 1, LIMITS) as pool, caplog.at_level(logging.WARNING):
        assert scores(pool, "yes") == [Score(1.0, {})]
        (pid,) = pool.pids
        os.kill(pid, how)
        until(lambda: pool.pids not in ([pid], []))
        assert [record.getMessage() for record in caplog.records] == [
            f"scoring process {pid} died while idle ({how.name}"
            + (", sent from outside or by the kernel's OOM killer" if how == signal.SIGKILL else "")
            + "); restarting it"
        ]
        assert scores(pool, "yes") == [Score(1.0, {})]


@pytest.mark.parametrize("error", [BlockingIOError(11, "no process"), RuntimeError("can't start new thread")])
def test_a_machine_that_can_start_no_process_loses_responses_but_no_worker(file: Path, error: Exception) -> None:
    refuses = False

    def start(name: str, options: str, limits: ScoringLimits) -> ScoringProcess:
        if refuses:
            raise error
        return ScoringProcess(name, options, limits)

    with ScoringPool(f"{file}:judge", {}, 1, LIMITS, start) as pool:
        assert totals(pool, "yes") == [1.0]
        refuses = True
        os.kill(*pool.pids, signal.SIGKILL)
        until(lambda: not pool.pids)
        (fault,) = scores(pool, "yes")
        assert isinstance(fault, Fault) and f"cannot be started ({error})" in fault.problem
        refuses = False
        assert totals(pool, "yes") == [1.0]


def test_a_process_whose_state_cannot_be_read_has_its_deadline(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: psutil.Process) -> str:
        raise OSError(24, "Too many open files")

    with ScoringPool(f"{file}:judge", {}, 1, ScoringLimits(timeout_s=4.0)) as pool:
        assert totals(pool, "yes") == [1.0]
        monkeypatch.setattr(psutil.Process, "status", fail)
        assert totals(pool, "hang") == [-1.0]


def test_a_response_whose_process_is_killed_is_scored_once_more(file: Path, tmp_path: Path) -> None:
    with ScoringPool(f"{file}:judge", {}, 1, ScoringLimits()) as pool:
        assert scores_with(pool, f"once {tmp_path / 'pid'}", lambda: kill_pid_in(tmp_path / "pid", signal.SIGKILL))


@pytest.mark.long
def test_a_stopped_process_is_given_up_within_the_health_timeout(file: Path, tmp_path: Path) -> None:
    with ScoringPool(f"{file}:judge", {}, 1, ScoringLimits(timeout_s=60, health_timeout_s=1.0)) as pool:
        assert scores_with(pool, f"once {tmp_path / 'pid'}", lambda: kill_pid_in(tmp_path / "pid", signal.SIGSTOP))
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)  # idle
        until(lambda: pool.pids not in ([pid], []))


@pytest.mark.long
def test_a_process_that_was_stopped_and_goes_on_costs_nothing(file: Path, tmp_path: Path) -> None:
    """It sleeps 3 s of its 4, and is stopped for 6 more: the deadline does not run meanwhile."""

    def stop_for_a_while() -> None:
        kill_pid_in(tmp_path / "pid", signal.SIGSTOP)
        time.sleep(6)
        kill_pid_in(tmp_path / "pid", signal.SIGCONT)

    with ScoringPool(f"{file}:judge", {}, 1, ScoringLimits(timeout_s=4.0)) as pool:
        scores(pool, "yes")
        before = pool.pids
        assert scores_with(pool, f"slowly {tmp_path / 'pid'}", stop_for_a_while)
        assert pool.pids == before


def kill_pid_in(path: Path, how: signal.Signals) -> None:
    until(lambda: path.exists() and path.read_text() != "")
    os.kill(int(path.read_text()), how)


def scores_with(pool: ScoringPool, response: str, meanwhile: Callable[[], None]) -> bool:
    """Whether the response is scored as a wrong answer is, whatever happens meanwhile."""
    task = Task("t", (Message("user", "?"),), "yes", "rlla")

    async def together() -> Score | Fault:
        score, _ = await asyncio.gather(
            pool.score(as_trajectory(task, response), task, 0), asyncio.to_thread(meanwhile)
        )
        return score

    return asyncio.run(together()) == Score(0.0, {})


def test_forks_of_a_reward_send_no_answers_and_end_with_the_process(file: Path, tmp_path: Path) -> None:
    with ScoringPool(f"{file}:judge", {}, 1, LIMITS) as pool:
        assert totals(pool, "fork", "yes", "no") == [0.0, 1.0, 0.0]
        scores(pool, f"child {tmp_path / 'pid'}")
    until(lambda: ended(int((tmp_path / "pid").read_text())))


def ended(pid: int) -> bool:
    """Or waits for a parent that never asks how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_pool_ends_while_it_scores(file: Path) -> None:
    task = Task("t", (Message("user", "?"),), "yes", "rlla")

    async def leave() -> list[int]:
        with ScoringPool(f"{file}:judge", {}, 1, ScoringLimits()) as pool:
            waiting = [asyncio.ensure_future(pool.score(as_trajectory(task, "hang"), task, 0)) for _ in range(3)]
            while not pool.pids:
                await asyncio.sleep(0.05)
            await asyncio.sleep(2)
            pids = pool.pids
        await asyncio.wait(waiting, timeout=60)
        assert all(each.done() for each in waiting)
        return pids

    pids = asyncio.run(leave())
    until(lambda: every(map(ended, pids)))


def test_a_response_of_megabytes_is_scored(pool: ScoringPool) -> None:
    assert scores(pool, "x" * 5_000_000) == [Score(0.0, {})]


def test_the_reward_auto_needs_a_gold() -> None:
    """Without one every response would be compared with an empty answer."""
    prompt = (Message("user", "Hi"),)
    fine = [
        Task("a#0", prompt, "Ho", "mine"),
        Task("a#1", prompt, "", "mine", gold=Message("assistant", "")),
        Task("a#2", prompt, "", "mine", reward="calls"),
    ]
    empty = Task("a#3", prompt, "", "mine")
    assert [*build_rewards("auto").require_gold(fine)] == fine
    assert [*build_rewards("calls").require_gold([empty])] == [empty]
    with pytest.raises(DataError, match=r"^a, row 3: has no gold.*set reward\.name"):
        [*build_rewards("auto").require_gold([*fine, empty])]
