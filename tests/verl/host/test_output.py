"""Standard streams that cannot be written: one line on the other stream, and the exit code of a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from toolrl.cli import COMMANDS

NO_SPACE = "DataError: no space left on /dev/full (No space left on device). Free some space\n"
WARNS = (
    "import logging; from verl.config.commands import TRAIN; from verl.trainer.cli import run_cli; "
    "run = lambda args, console: [logging.warning('a'), console.print('b'), console.print('c')]; "
    "raise SystemExit(run_cli([], '', TRAIN, run))"
)
EVERY_HELP = """
import sys
from toolrl.cli import COMMANDS, main
for names in ([], *([name] for name in COMMANDS)):
    sys.stdout = open("/dev/full", "w")
    try:
        code = main([*names, "--help"])
    except SystemExit as end:
        code = end.code
    sys.stderr.write(f"{names} {code}\\n")
"""
SIGNALED = """
import os, signal, sys
from verl.config.commands import TRAIN
from verl.host.output import checked_streams
from verl.trainer.cli import run_cli
def run(args, console):
    console.print("runs")
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGINT)
with checked_streams():
    raise SystemExit(run_cli([], "", TRAIN, run))
"""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-m", "verl.trainer.main_ppo", "--help"], NO_SPACE),
        (["-m", "verl.trainer.main_ppo", "data=none.jsonl", "model=m"], "ConfigError: data.train_files: there is no"),
        (["-c", WARNS], NO_SPACE),
    ],
)
def test_a_log_on_a_full_disk_is_a_one_line_error(argv: list[str], message: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, *argv]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count("\n") == 1
        assert subprocess.run(command, cwd=ROOT, stdout=full, stderr=full, check=False).returncode == 2


def toolrl(arguments: str, streams: str) -> subprocess.CompletedProcess[str]:
    """A command in a shell, with its streams as the shell writes them."""
    line = f"{sys.executable} -m toolrl.cli {arguments} {streams}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("argv", ["--version", "metrics", "train --help"])
def test_a_small_command_on_a_full_disk_is_one_line(argv: str) -> None:
    done = toolrl(argv, "> /dev/full")
    assert (done.returncode, done.stderr) == (2, NO_SPACE)
    assert toolrl(argv, "> /dev/full 2> /dev/full").returncode == 2


@pytest.mark.long
def test_every_command_on_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-W", "ignore", "-c", EVERY_HELP]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "".join(f"{NO_SPACE}{arguments} 2\n" for arguments in ([], *([name] for name in COMMANDS)))


@pytest.mark.parametrize(
    ("argv", "streams", "code", "output"),
    [
        ("metrics", "| true", 141, ""),  # as if SIGPIPE had ended it
        ("train --help", "| true", 141, ""),
        ("metrics", ">&-", 2, "DataError: standard output: cannot be written (Bad file descriptor). "),
        ("metrics", "<&- >&- 2>&-", 2, ""),
        ("metrics", "> /dev/null 2> /dev/full", 0, ""),
        ("metrics", "> /dev/null 2>&-", 0, ""),
        ("nonsense", "2> /dev/full", 2, ""),
        ("nonsense", "2>&-", 2, ""),
        ("nonsense", "2>&1 >&- | true", 2, ""),
    ],
)
def test_streams_that_are_gone_cost_no_traceback(argv: str, streams: str, code: int, output: str) -> None:
    done = toolrl(argv, streams)
    assert done.returncode == code and done.stderr.startswith(output) and done.stderr.count("\n") == bool(output)


def test_a_reader_that_is_gone_does_not_keep_a_signal_from_ending_a_run_in_order() -> None:
    """Ctrl-C ends `toolrl train | tee log` and the `tee`, in any order."""
    command, pipe = [sys.executable, "-c", SIGNALED], subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    process.stdout.close()
    process.stdin.write("go on\n")
    process.stdin.close()
    assert process.wait(60) == 130
