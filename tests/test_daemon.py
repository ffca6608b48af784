"""Threads that nothing waits for."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import subprocess
import sys
import threading

import pytest

from verl.daemon import in_daemon

_INTERRUPTED = """
import signal, sys, threading
from types import SimpleNamespace
from verl.config.schema import Config
from verl.trainer.command import run_async, told
from verl.trainer.ppo import PPOTrainer

signal.signal(signal.SIGINT, signal.default_int_handler)

def learn(lesson, step):
    print("learning", flush=True)
    threading.Event().wait()

ahead = SimpleNamespace(settings=SimpleNamespace(max_staleness=1))
trainer = PPOTrainer(ahead, SimpleNamespace(learn=learn), None)
sys.exit(told([], "", Config, lambda words, console: run_async(trainer._learn(None))))
"""


def test_what_is_given_and_what_is_raised_arrive() -> None:
    word = contextvars.ContextVar("word", default="none")

    def fail() -> None:
        raise StopIteration("as it is")  # a future would refuse it

    async def asked() -> tuple[tuple[int, int], str]:
        word.set("told")
        with pytest.raises(RuntimeError, match="StopIteration"):  # a coroutine turns it into one
            await in_daemon(fail)
        return await in_daemon(divmod, 7, 2), await in_daemon(word.get)

    assert asyncio.run(asked()) == ((3, 1), "told")


def test_an_event_loop_ends_before_its_threads_do() -> None:
    release = threading.Event()

    async def left() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_daemon(release.wait), 0.01)

    asyncio.run(left())
    release.set()


def test_an_interrupt_does_not_wait_for_the_update_that_goes_on_beside_rollouts() -> None:
    process = subprocess.Popen([sys.executable, "-c", _INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "learning\n"
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopping: " in said and "interrupted: " in said
