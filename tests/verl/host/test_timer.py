"""Code that takes too long is broken off, and timers that others have set go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType

import pytest

from toolrl.reward_score.math_equality import same_answer
from verl.chat.bounds import RenderTimeoutError, render_deadline
from verl.host.timer import PROCESSOR, REAL, raising_after


def work(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture(params=[REAL, PROCESSOR])
def timer(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param
    signal.setitimer(request.param, 0.0)


def test_a_loop_is_broken_off_again_and_again(timer: int) -> None:
    with pytest.raises(KeyError), raising_after(0.05, lambda: KeyError("late"), timer, again_s=0.05):
        with pytest.raises(KeyError):
            work(30.0)
        work(30.0)
    assert signal.getitimer(timer) == (0.0, 0.0)


def test_a_timer_that_was_set_before_goes_on_with_what_it_had_left(timer: int) -> None:
    signal.setitimer(timer, 100.0, 7.0)
    for _ in range(2):
        with raising_after(30.0, RuntimeError, timer):
            work(0.1)
    left_s, interval_s = signal.getitimer(timer)
    assert 40.0 < left_s < 99.9 and interval_s == 7.0


def test_a_timer_that_is_due_meanwhile_goes_off_at_the_end(timer: int) -> None:
    rung = []

    def ring(number: int, frame: FrameType | None) -> None:
        rung.append(number)

    number = {REAL: signal.SIGALRM, PROCESSOR: signal.SIGPROF}[timer]
    before = signal.signal(number, ring)
    try:
        signal.setitimer(timer, 0.05)
        with raising_after(30.0, RuntimeError, timer):
            early = [*rung]  # before the block, on a machine that was busy just then
            work(0.2)
            assert rung == early
        work(0.2)
        assert rung == [number]
    finally:
        signal.signal(number, before)


def test_templates_and_answers_leave_the_timers_of_others_alone() -> None:
    try:
        for timer in (REAL, PROCESSOR):
            signal.setitimer(timer, 1000.0)
        with render_deadline():
            pass
        assert same_answer("1/2", "0.5")
        assert all(signal.getitimer(timer)[0] > 0 for timer in (REAL, PROCESSOR))
    finally:
        for timer in (REAL, PROCESSOR):
            signal.setitimer(timer, 0.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_template_whose_interruption_was_dropped_is_interrupted_again() -> None:
    class Slow:
        def __del__(self) -> None:
            time.sleep(1)

    with pytest.raises(RenderTimeoutError), render_deadline(0.1):
        Slow()
        while True:
            pass


def test_code_in_a_thread_is_interrupted_too_and_nothing_outlives_its_block() -> None:
    def work() -> str:
        with pytest.raises(RenderTimeoutError, match=r"longer than 0\.05 s"), render_deadline(0.05):
            while True:
                with suppress(ValueError):
                    pass
        for _ in range(200):  # late ones are dropped
            with suppress(RenderTimeoutError), render_deadline(1e-5):
                sum(range(100))
        return "ended"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result(60) == "ended"
        assert pool.submit(lambda: sum(range(100_000))).result(60) == 4_999_950_000


def test_a_signal_of_an_earlier_timer_that_comes_late_interrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may take it, and hand it on when the next block is already being set up."""
    install, before = signal.signal, signal.getsignal(signal.SIGALRM)

    def late(number: int, handler: object) -> object:
        former = install(number, handler)  # type: ignore[arg-type]
        if handler is not before:
            signal.raise_signal(number)
        return former

    monkeypatch.setattr(signal, "signal", late)
    with raising_after(30.0, RenderTimeoutError):
        pass
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_repeating_timer_never_outlives_its_block() -> None:
    """Its signals come at every moment of the way out. The generator is driven without contextlib's own calls."""
    before = signal.getsignal(signal.SIGALRM)
    for _ in range(2000):
        block = raising_after.__wrapped__(1e-5, RenderTimeoutError, again_s=1e-5)
        with suppress(RenderTimeoutError):
            try:
                next(block)
            finally:
                block.close()
        assert signal.getitimer(REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is before
