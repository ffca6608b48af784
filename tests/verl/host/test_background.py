"""In the background, where a shell or nohup ignores interrupts and hang-ups: our own children do not depend on that."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SANDBOX = """
import asyncio, sys
from toolrl.sandbox.local import LocalSandbox

async def main():
    sandbox = LocalSandbox(1, "none", preload=())
    try:
        for code, language in (("import signal; print([signal.getsignal(each) == 1 for each in (1, 2, 3)])", "python"),
                               ("trap; echo none", "bash")):
            print((await sandbox.run(code, language)).stdout, end="")
    finally:
        await sandbox.close()

asyncio.run(main())
"""
API = """
import signal, sys
from verl.trainer import cli
cli.run_cli = lambda *_: print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
from toolrl.api import child
sys.argv[1:] = ["outcome", "train"]
child.main()
"""
PYTEST = """
import subprocess, sys
def test_started_processes_receive_interrupts():
    code = "import signal; print([signal.getsignal(each) == signal.SIG_IGN for each in (1, 2)])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[False, False]\\n"
"""


def ignore() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


def background(*command: str) -> str:
    """What a command prints that a shell has started in the background under nohup."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=ignore)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_code_in_the_sandbox_has_the_default_actions() -> None:
    assert background(sys.executable, "-c", SANDBOX) == "[False, False, False]\nnone\n"


def test_a_run_that_python_starts_can_be_interrupted_by_it() -> None:
    assert background(sys.executable, "-c", API) == "True\n"


def test_tests_start_processes_as_in_the_foreground(tmp_path: Path) -> None:
    file = tmp_path / "test_started.py"
    file.write_text(PYTEST)
    argv = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    assert "1 passed" in background(sys.executable, "-m", "pytest", *argv, str(file))
