"""Runs every command in a new process. The caller's may be a notebook with a running event loop, a script without a
main guard, or a driver of Ray; runs do not meet in it, and leave nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from verl.errors import ConfigError, VerlError
from verl.host.packages import missing_package

COMMANDS = {  # name -> its settings; its function
    "train": ("verl.config.commands:TRAIN", "verl.trainer.main_ppo:run"),
    "sft": ("verl.config.commands:SFT", "verl.trainer.main_sft:run"),
    "evaluate": ("toolrl.commands:EVAL", "toolrl.benchmarks.runner.command:run"),
    "probe": ("toolrl.commands:PROBE", "toolrl.check.probe.command:run"),
}
_CODE = "from toolrl.api.child import main; main()"
_PR_SET_PDEATHSIG = 1
_OUTPUT_S = 2.0  # wait for the rest of the output, if the process has left a child that holds it open


class RunProcessError(VerlError, RuntimeError):
    """The process of a command ended without a result."""


def run_command(name: str, arguments: Sequence[str]) -> Any:
    """The result of a command. Its output is this process's; an interrupt ends it, with a checkpoint if requested.

    Raises what the command raises, RunProcessError if its process was killed, and KeyboardInterrupt.
    """
    with tempfile.TemporaryDirectory(prefix="toolrl-") as folder:
        outcome = Path(folder) / "outcome.pkl"
        live = sys.stdout.isatty()
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, str(outcome), name, *arguments],
            env=os.environ | environment(),
            stdin=subprocess.DEVNULL,
            stdout=None if live else subprocess.PIPE,
            stderr=None if live else subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # one interrupt of a terminal reaches it through this process alone
        )
        interrupted = _wait(process)
        if interrupted is not None:
            raise interrupted
        if not outcome.exists():
            raise RunProcessError(_describe_end(process.returncode))
        result, error, notes = pickle.loads(outcome.read_bytes())  # noqa: S301  written by our own process
    if error is None:
        return result
    for note in notes:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    if isinstance(error, ModuleNotFoundError) and (problem := missing_package(error)) is not None:
        raise ConfigError(problem) from error
    raise error


def environment() -> dict[str, str]:
    """Modules are found as here; a running Ray of this process is used, and left running."""
    paths = [path or str(Path.cwd()) for path in sys.path]
    variables = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        variables["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    return variables


def _wait(process: subprocess.Popen[str]) -> KeyboardInterrupt | None:
    """Until the process has ended. Interrupts are passed on to it; the first is returned."""
    printer = threading.Thread(target=_forward, args=(process.stdout, sys.stdout), daemon=True)
    if process.stdout is not None:
        printer.start()
    first: KeyboardInterrupt | None = None
    while process.poll() is None:
        try:
            process.wait()
        except KeyboardInterrupt as interrupt:
            first = first or interrupt
            process.send_signal(signal.SIGINT)
    if process.stdout is not None:
        printer.join(_OUTPUT_S)
    return first


def _forward(source: IO[str] | None, target: IO[str]) -> None:
    assert source is not None
    for line in source:
        target.write(line)
        target.flush()


def _describe_end(code: int) -> str:
    reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the process of the run {reason} without a result; its output is above"


def main() -> None:
    """In the new process, with the arguments: file for the outcome, command, settings."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # a killed notebook ends its run
    signal.signal(signal.SIGINT, signal.default_int_handler)  # sent by `_wait`; ignored in a background job's children
    file, name, *arguments = sys.argv[1:]
    from rich.console import Console

    from verl.trainer.cli import CliArgs, run_cli

    settings, function = COMMANDS[name]

    def run(args: CliArgs, console: Console) -> None:
        outcome: tuple[Any, Exception | None, Sequence[str]]
        try:
            outcome = (_named(function)(args, console), None, ())
        except Exception as error:  # noqa: BLE001  raised again by `run_command`
            outcome = (None, _sendable(error), getattr(error, "__notes__", ()))
        Path(file).write_bytes(pickle.dumps(outcome))

    sys.exit(run_cli(arguments, "", _named(settings), run))


def _named(location: str) -> Any:
    module, _, attribute = location.partition(":")
    return getattr(import_module(module), attribute)


def _sendable(error: Exception) -> Exception:
    """The error; one that does not pickle as its text."""
    if not isinstance(error, VerlError):
        error.add_note("".join(traceback.format_exception(error)))
    with suppress(Exception):
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]  # noqa: S301  our own
    return RunProcessError(f"{type(error).__name__}: {error}")
