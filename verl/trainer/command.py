"""What the commands of this folder have in common: their words, errors and exit codes. Imports nothing heavy."""

from __future__ import annotations

import logging
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from verl.config.schema import ModelConfig
from verl.config.show import as_yaml, key_table
from verl.errors import ConfigError, VerlError
from verl.signals import Ended, ending_on_signals
from verl.signals import exit_code as signal_code
from verl.trainer.crash import exit_code_of, is_reported
from verl.trainer.deadline import Deadline
from verl.utils.versions import SET_UP, missing_package, script

_MOST_LINES = 12  # of a message, or of a traceback: a crash does not fill the terminal
_ENDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
_GOES_ON = "started again, a training goes on from its last checkpoint, an evaluation from its answers"
_DATA_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv")


@dataclass(frozen=True)
class CliArgs:
    """A command line, split into settings and options."""

    settings: list[str]
    options: list[str]

    def only_show(self, config: Any, console: Console) -> bool:
        """Print the configuration if that is all that is wanted."""
        if "--cfg" in self.options:
            console.print(as_yaml(config), markup=False, soft_wrap=True)
        return "--cfg" in self.options


def run_cli(
    words: Sequence[str], help_text: str, kind: type, run: Callable[[CliArgs, Console], int], known: Sequence[str] = ()
) -> int:
    """`run` with its words, errors told in a line or two instead of a traceback. Returns the exit code.

    known: options of this command beside --help and --cfg job
    Exit codes: what `run` returns; 2 for a configuration, data or a place that cannot be used; 1 for a run that failed;
    130, 143 and 129 for one that was ended by Ctrl-C, SIGTERM and SIGHUP
    """
    console = Console(highlight=False, emoji=False)
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    deadline = Deadline()

    def stopping(number: int) -> None:
        deadline.begin(signal_code(number))
        console.print(
            f"\n{_sender(number)}stopping: what was started is being ended, which takes some seconds; "
            f"{_again(number)} hurries it"
        )

    try:
        split = _split(words, known)
        if "--help" in split.options:
            console.print(escape(help_text), key_table(kind), sep="\n")
            return 0
        with deadline.of_this_command(), ending_on_signals(stopping):
            return run(split, console)
    except ModuleNotFoundError as error:
        problem = missing_package(error)
        if problem is None:
            raise
        console.print(f"[bold red]ConfigError[/]: {escape(problem)}", soft_wrap=True)
        return 2
    except Exception as error:
        if not isinstance(error, VerlError) and not is_reported(error):
            raise
        _print_failure(console, error)
        return exit_code_of(error)
    except KeyboardInterrupt as end:
        number, note = (end.number, end.note) if isinstance(end, Ended) else (int(signal.SIGINT), "")
        with suppress(OSError):  # a terminal that is gone
            console.print(f"[bold red]{_ENDS[number]}[/]: {escape(note or _GOES_ON)}", soft_wrap=True)
        return signal_code(number)


def save_first(console: Console) -> Callable[[int], None]:
    """What to print when a signal asks a run to save and to stop."""

    def announce(number: int) -> None:
        console.print(
            f"\n{_sender(number)}stopping: the run ends as soon as a checkpoint is written; "
            f"{_again(number)} ends it without"
        )

    return announce


def _sender(number: int) -> str:
    return "" if number == signal.SIGINT else f"{signal.Signals(number).name}: "


def _again(number: int) -> str:
    return "Ctrl-C again" if number == signal.SIGINT else "a second signal"


def _print_failure(console: Console, error: Exception) -> None:
    """A paragraph: the error, then its notes; the traceback of its cause where no file has it."""
    text = str(error).splitlines()
    if len(text) > _MOST_LINES:
        text = [*text[:_MOST_LINES], f".. and {len(text) - _MOST_LINES} lines more"]
    console.print(f"[bold red]{type(error).__name__}[/]: {escape(chr(10).join(text))}", soft_wrap=True)
    for note in getattr(error, "__notes__", ()):
        console.print(note, markup=False, soft_wrap=True)
    if exit_code_of(error) == 1 and not is_reported(error) and error.__cause__ is not None:
        lines = "".join(traceback.format_exception(error.__cause__)).splitlines()
        console.print("\n".join(lines[-_MOST_LINES:]), markup=False, soft_wrap=True)


def _split(words: Sequence[str], known: Sequence[str]) -> CliArgs:
    settings, options = [], []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            settings.append(word)
        elif word in ("-h", "--help"):
            options.append("--help")
        elif word == "--cfg":
            if next(rest, None) != "job":
                raise ConfigError("--cfg knows one thing to show: --cfg job")
            options.append(word)
        elif word in known:
            options.append(word)
        else:
            raise ConfigError(f"unknown option {word!r}; known: {', '.join(['--help', '--cfg job', *known])}")
    return CliArgs(settings, options)


def check_engine(key: str, name: str) -> None:
    """Raises ConfigError for vLLM where it is not installed. key: that names the engine"""
    if name == "vllm" and find_spec("vllm") is None:
        raise ConfigError(f"{key}=vllm: the package vllm is not installed; {SET_UP}. {key}=hf needs torch alone")


def check_files(key: str, files: Sequence[str], needed: bool = False) -> None:
    """Raises ConfigError for a file that is not there."""
    if needed and not files:
        raise ConfigError(f"{key} is not set; give a .parquet, .jsonl, .json or .csv file, or several as [a,b]")
    for source in files:
        if source.endswith(_DATA_SUFFIXES) and not Path(source).is_file():
            raise ConfigError(
                f"{key}: there is no file {source!r}; {script('dataset/README.md')} says where data comes from, and "
                "embedded:train.parquet names an embedded file"
            )


def check_model(config: ModelConfig, critic_path: str | None = None, key: str = "model.path") -> None:
    """Raises ConfigError for a model that is not named, or a folder that is not there. key: that names the model"""
    if config.path is None:
        raise ConfigError("model.path is not set; give a folder or a hub name")
    paths = {key: config.path, "model.tokenizer_path": config.tokenizer_path, "critic.path": critic_path}
    for key, path in paths.items():
        if path is not None and path.startswith((".", "/", "~")) and not Path(path).is_dir():
            raise ConfigError(f"{key}: there is no folder {path!r}")
