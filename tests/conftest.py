"""Shared by all tests: where real data lies, and which environment variables must not leak in."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import pytest
from hypothesis import settings

from tests.support.skips import summary
from toolrl.check.doctor.versions import find_gpus, find_installed
from verl.utils.reward_score import rlla

if TYPE_CHECKING:
    from verl.chat.template import ChatTemplate

pytest_plugins = ["tests.chaos.results"]  # its options
ROOT = Path(__file__).parents[1]
COROUTINE_S = 300.0  # limit of a test that is a coroutine
LIMIT_S = 900.0  # of a test with its fixtures
UNLIMITED = {"slow", "gpu", "gpuset", "chaos"}
TOGGLES = (*rlla.TOGGLES, "STRICTMATCH")
settings.register_profile("untimed", deadline=None)  # cores are shared: no example is timed
# The same examples in every run, for .ci/run: whether a commit passes is no matter of chance. Other runs draw new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("TOOLRL_TEST_PROFILE", "untimed"))


def real_data(*parts: str) -> Path:
    """A file of the real data, or a skip that names what is missing and how to point to it."""
    folder = Path(os.environ.get("TOOLRL_TEST_DATA", ROOT.parent / "shared" / "data"))
    path = folder.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no {'/'.join(parts)} in {folder}; set TOOLRL_TEST_DATA (see dataset/README.md)")
    return path


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, or a skip that names how to make it."""
    path = Path(os.environ.get("TOOLRL_TEST_SMOLLM2", "/tmp/smollm2"))
    if not path.exists():
        pytest.skip(f"no SmolLM2 in {path}; make it with scripts/prepare_smollm2.py and set TOOLRL_TEST_SMOLLM2")
    return path


def need_vllm() -> None:
    """A skip where no engine can start: without vLLM, or with its build for GPUs on a machine that has none."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; source scripts/setup_env.sh", allow_module_level=True)
    if "vllm" in find_installed(["vllm"]) and not find_gpus():
        pytest.skip("vLLM's build for GPUs, and no GPU", allow_module_level=True)


def pytest_configure() -> None:
    """A shell or nohup ignores interrupts and hang-ups in background jobs, and all that tests start would inherit that.

    This process still survives a hang-up; what it starts has the default action.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """A test that hangs fails where it waits, and the others have their turn."""
    if UNLIMITED & {mark.name for mark in item.iter_markers()}:
        return (yield)
    watch = threading.Timer(LIMIT_S, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2))
    watch.daemon = True
    former = signal.signal(signal.SIGUSR2, _overdue)
    watch.start()
    try:
        return (yield)
    finally:
        watch.cancel()
        signal.signal(signal.SIGUSR2, former)


def _overdue(number: int, frame: FrameType | None) -> NoReturn:
    pytest.fail(f"not finished within {LIMIT_S:.0f} s")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in the event loop of its fixture `runner`, or in one of its own, with a limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    runner = pyfuncitem.funcargs.get("runner")
    run = runner.run if isinstance(runner, asyncio.Runner) else asyncio.run
    run(asyncio.wait_for(pyfuncitem.obj(**fixtures), COROUTINE_S))
    return True


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: object, error: object | None) -> None:
    """How a crashed worker ended, as a signal leaves nothing else, and whether memory has run out."""
    if error is None:
        return
    popen = node.gateway._io.popen  # type: ignore[attr-defined]
    with suppress(subprocess.TimeoutExpired):
        popen.wait(10)
    lines = [line for path in ("/proc/vmstat", "/proc/meminfo") for line in Path(path).read_text().splitlines()]
    facts = [" ".join(line.split()) for line in lines if line.startswith(("oom_kill", "MemTotal", "MemAvailable"))]
    sys.stderr.write(f"\nworker with process id {popen.pid}: exit code {popen.returncode}; {', '.join(facts)}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skips by reason, each with what would enable them, in place of one line for each test."""
    reports = terminalreporter.stats.get("skipped", [])
    for line in summary(str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple)):
        terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected lives to the end: no look for garbage while it grows, nor later. That takes a third of it."""
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole training runs first: started last, they would leave the second of two workers idle for a minute."""
    items.sort(key=lambda item: item.path.stem != "test_run")


@pytest.fixture(autouse=True)
def no_reward_toggles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reward reads the environment; tests set for themselves which variant they mean."""
    for name in TOGGLES:
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.fixture(scope="module")
def small_heap() -> None:
    """For limits of CPU time: collections do not walk what earlier tests have imported (half a second with vLLM)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """An event loop for what the tests of a file share; those of them that are coroutines run in it, too."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that all tests share, and none changes."""
    from tests.support.tiny import save_tiny_model  # imports torch

    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def chat() -> ChatTemplate:
    """The tiny model's tokenizer and chat template, likewise."""
    from transformers import AutoTokenizer

    from verl.chat.template import ChatTemplate

    return ChatTemplate(AutoTokenizer.from_pretrained(ROOT / "dataset/mini/tokenizer"))
