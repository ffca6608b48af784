"""Threads that nothing waits for."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import subprocess
import sys
import threading

import pytest

from tests.support.until import until
from verl.config.commands import TRAIN
from verl.host.daemon import run_async, run_in_daemon_thread
from verl.trainer.cli import run_cli

_INTERRUPTED = """
import signal, sys, threading
from types import SimpleNamespace
from tests.support.until import until
from verl.config.commands import TRAIN
from verl.host.daemon import run_async
from verl.trainer.cli import run_cli
from verl.trainer.ppo import PPOTrainer

signal.signal(signal.SIGINT, signal.default_int_handler)

def learn(batch, step, rows):
    print("learning", flush=True)
    threading.Event().wait()

ahead = SimpleNamespace(config=SimpleNamespace(rollout=SimpleNamespace(max_staleness=1)))
trainer = PPOTrainer(rollouts=ahead, learner=SimpleNamespace(learn=learn), weight_sync=None)
sys.exit(run_cli([], "", TRAIN, lambda argv, console: run_async(trainer._learn(None, None, []))))
"""


def test_arguments_context_and_exceptions_cross_threads() -> None:
    word = contextvars.ContextVar("word", default="none")

    def fail() -> None:
        raise StopIteration("as it is")  # a future would refuse it

    async def asked() -> tuple[tuple[int, int], str]:
        word.set("set")
        with pytest.raises(RuntimeError, match="StopIteration"):  # a coroutine turns it into one
            await run_in_daemon_thread(fail)
        return await run_in_daemon_thread(divmod, 7, 2), await run_in_daemon_thread(word.get)

    assert asyncio.run(asked()) == ((3, 1), "set")


def test_an_event_loop_ends_before_its_threads_do() -> None:
    release = threading.Event()

    async def left() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_in_daemon_thread(release.wait), 0.01)

    asyncio.run(left())
    release.set()


@pytest.mark.long
def test_an_interrupt_does_not_wait_for_the_update_that_goes_on_beside_rollouts() -> None:
    process = subprocess.Popen([sys.executable, "-c", _INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "learning\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "shutting down" in output and "interrupted: " in output


async def _doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_a_coroutine_runs_with_and_without_a_running_loop() -> None:
    async def inside() -> int:
        return run_async(_doubled(21))  # as a notebook's cell would

    assert run_async(_doubled(21)) == 42
    assert asyncio.run(inside()) == 42


def test_exceptions_of_a_coroutine_arrive_from_its_own_thread() -> None:
    async def fail() -> None:
        raise LookupError("here")

    async def inside() -> None:
        run_async(fail())

    with pytest.raises(LookupError, match="here"):
        asyncio.run(inside())


def test_a_thread_of_its_own_sees_the_context_and_takes_the_loop() -> None:
    word = contextvars.ContextVar("word", default="none")

    class Loop(asyncio.SelectorEventLoop):
        pass

    async def seen() -> tuple[str, bool, bool]:
        in_main = threading.current_thread() is threading.main_thread()
        return word.get(), isinstance(asyncio.get_running_loop(), Loop), in_main

    async def inside() -> tuple[str, bool, bool]:
        word.set("mine")
        return run_async(seen(), Loop)

    assert asyncio.run(inside()) == ("mine", True, False)


def test_an_interrupt_ends_what_runs_in_a_thread_of_its_own() -> None:
    ended, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until(lambda: sys._current_frames()[main].f_back.f_code.co_name == "result")  # the main thread waits
        signal.pthread_kill(main, signal.SIGINT)

    async def wait() -> None:
        threading.Thread(target=interrupt).start()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def inside() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a notebook, not asyncio's own
        run_async(wait())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(inside())
    assert ended.is_set()


def test_a_command_runs_outside_the_main_thread(capsys: pytest.CaptureFixture[str]) -> None:
    async def apart() -> int:
        return await run_in_daemon_thread(run_cli, [], "", TRAIN, lambda argv, console: run_async(_doubled(2)))

    assert asyncio.run(apart()) == 4
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_an_interrupt_that_meets_a_task_lets_all_others_tidy_up(depth: int) -> None:
    tidied: list[str] = []

    async def leaf(interrupts: bool) -> None:
        try:
            await asyncio.sleep(0.01)
            if interrupts:
                raise KeyboardInterrupt
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.01)
            tidied.append("leaf")

    async def nested(level: int) -> None:
        try:
            work = (leaf(True), leaf(False)) if level == 0 else (nested(level - 1), leaf(False))
            await asyncio.gather(*map(asyncio.ensure_future, work))
        finally:
            await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            tidied.append(f"level {level}")

    with pytest.raises(KeyboardInterrupt):
        run_async(nested(depth))
    assert sorted(tidied) == sorted(["leaf"] * (depth + 2) + [f"level {level}" for level in range(depth + 1)])


def test_a_second_interrupt_ends_the_tidying_up() -> None:
    async def work() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            await asyncio.sleep(0.01)

    async def stubborn() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            raise KeyboardInterrupt("a second one")

    async def main() -> None:
        await asyncio.gather(work(), stubborn())

    with pytest.raises(KeyboardInterrupt, match="a second one"):
        run_async(main())
