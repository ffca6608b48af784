"""Shared by all commands: arguments, error messages and exit codes. Imports nothing heavy."""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from verl.checkpoint.crash import crash_reported, is_reported
from verl.checkpoint.deadline import Deadline
from verl.config.commands import Command
from verl.config.load import SHORTHANDS, load_config, shorthand_help
from verl.config.schema import Config, ModelConfig, RewardConfig
from verl.config.show import as_yaml, key_help
from verl.data.first_bytes import DATA_SUFFIXES, check_ends
from verl.errors import ConfigError, DataError, VerlError
from verl.host.arguments import read_arguments, unknown_option
from verl.host.exits import exit_code_of
from verl.host.output import Messages, Output
from verl.host.packages import SET_UP, missing_package, script
from verl.host.signals import Ended, ending_on_signals
from verl.host.signals import exit_code as signal_code
from verl.registry import resolve
from verl.tracking.console import LOG_TIME
from verl.utils.reward_score.base import REWARDS

_MAX_LINES = 12  # per message or traceback, so that a crash does not fill the terminal
_OUTCOMES: dict[int, str] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hung up",
    signal.SIGPIPE: "the reader of the output has gone",
}
_RESUME_NOTE = (
    "run the same command to resume: a training from its last checkpoint (without one it starts anew), an evaluation "
    "from its answers"
)
_OPTIONS = ("--help", "--config=", "--user-code", "--cfg=")  # every command has them
_CONFIG = "--config="
_USER_CODE = "--user_code"  # in the spelling of parsed options


@dataclass(frozen=True)
class CliArgs:
    """Command-line arguments: the configuration that the settings (key=value) give, and the options."""

    config: Config
    options: list[str]


def run_cli(
    argv: Sequence[str],
    help_text: str,
    command: Command,
    run: Callable[[CliArgs, Console], object],
    known: Sequence[str] = (),
    notes: Callable[[Config], Iterable[str]] = lambda _: (),
) -> int:
    """Parse `argv` and call `run`; errors are printed in a line or two instead of a traceback. Returns the exit code.

    With --help and --cfg, `run` is not called: they print the keys and the configuration that the command uses.
    known: options of this command besides --help, --config and --cfg; those with a value end in =
    notes: lines that --cfg job prints as comments after the configuration
    Exit codes: what `run` returns if that is a number, else 0; 2 for an unusable configuration, data or folder; 1 for a
    failed run; 130, 143 and 129 after Ctrl-C, SIGTERM and SIGHUP
    """
    interactive = None if sys.stdout.isatty() else False  # FORCE_COLOR, which notebooks and CI set, makes no terminal
    output = sys.stdout if isinstance(sys.stdout, Output) else Output(sys.stdout)  # that of `toolrl`
    console = Console(file=cast(TextIO, output), highlight=False, emoji=False, force_interactive=interactive)
    logging.basicConfig(level=logging.WARNING, handlers=[_log_handler(console)])
    deadline = Deadline()

    def on_signal(number: int) -> None:
        deadline.start(signal_code(number))
        _announce(console, number, "shutting down (a few seconds)", "to force")

    try:
        settings, options = _parse(argv, known)
        if "--help" in options:
            texts = help_text.rstrip(), shorthand_help(command), key_help(command)
            console.print(*map(escape, texts), sep="\n\n", soft_wrap=True)
            return 0
        with deadline.active(), ending_on_signals(on_signal):
            config = load_config(settings, command, _file_of(options), _USER_CODE in options)
            if "--cfg" in options:
                comments = "".join(f"# {line}\n" for line in notes(config))
                console.print(as_yaml(config, command) + comments, markup=False, soft_wrap=True)
                return 0
            outcome = run(CliArgs(config, options), console)
            return outcome if isinstance(outcome, int) else 0
    except ModuleNotFoundError as error:
        if (problem := missing_package(error)) is None:
            raise
        console.print(f"[bold red]ConfigError[/]: {escape(problem)}", soft_wrap=True)
        return 2
    except Exception as error:
        if not isinstance(error, VerlError) and not is_reported(error):
            raise
        if output.error is None:
            with suppress(DataError):  # output.error from now on
                _print_failure(console, error)
        if output.error is not None:
            _print_failure(Console(file=cast(TextIO, Messages(sys.stderr)), stderr=True, highlight=False), error)
        return exit_code_of(error)
    except KeyboardInterrupt as error:
        number, note = (error.number, error.note) if isinstance(error, Ended) else (int(signal.SIGINT), "")
        with suppress(OSError, DataError):  # the terminal is closed, or a disk is full
            console.print(f"[bold red]{_OUTCOMES[number]}[/]: {escape(note or _RESUME_NOTE)}", soft_wrap=True)
        return signal_code(number)


def _log_handler(console: Console) -> logging.Handler:
    """Rich's on a terminal; elsewhere dated lines without the width that a file does not have."""
    terminal = console.is_interactive
    handler = RichHandler(console=console, show_path=False) if terminal else _PlainHandler(console.file)
    line = "%(message)s" if terminal else "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(line, LOG_TIME))
    return handler


class _PlainHandler(logging.StreamHandler[Any]):
    """A full disk is an error of the next line that the console prints."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the name of logging
        if not isinstance(sys.exc_info()[1], DataError):
            super().handleError(record)


def announce_checkpoint(console: Console) -> Callable[[int], None]:
    """The callback that reports a signal to a run with trainer.save_on_signal."""
    return lambda number: _announce(console, number, "saving a checkpoint, then shutting down", "to skip it")


def _announce(console: Console, number: int, action: str, effect: str) -> None:
    """effect: of a second signal"""
    if number == signal.SIGINT:
        console.print(f"\n{action}; press Ctrl-C again {effect}")
    else:
        console.print(f"\n{signal.Signals(number).name}: {action}; send a second signal {effect}")


def _print_failure(console: Console, error: Exception) -> None:
    """Print the error and its notes; also the traceback of its cause if no crash report was written."""
    text = str(error).splitlines()
    if len(text) > _MAX_LINES:
        text = [*text[:_MAX_LINES], f".. and {len(text) - _MAX_LINES} more lines"]
    console.print(f"[bold red]{type(error).__name__}[/]: {escape(chr(10).join(text))}", soft_wrap=True)
    for note in getattr(error, "__notes__", ()):
        console.print(note, markup=False, soft_wrap=True)
    if exit_code_of(error) == 1 and not is_reported(error) and error.__cause__ is not None:
        lines = "".join(traceback.format_exception(error.__cause__)).splitlines()
        console.print("\n".join(lines[-_MAX_LINES:]), markup=False, soft_wrap=True)


def _parse(argv: Sequence[str], known: Sequence[str]) -> tuple[list[str], list[str]]:
    """(settings, options), each in one spelling: `key=value`, and `--name` or `--name=value`."""
    settings, options = [], []
    names = {each.strip("-=").replace("-", "_"): each.endswith("=") for each in (*_OPTIONS, *known)}
    try:
        arguments = list(read_arguments(argv, names))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for name, value in arguments:
        if name == "cfg":
            if value != "job":
                raise ConfigError("--cfg takes one value: --cfg job")
            options.append("--cfg")
        elif name is not None:
            options.append(f"--{name}={value}" if names[name] else f"--{name}")
        elif value == "-h":
            options.append("--help")
        else:
            settings.append(_setting(value, list(names)))
    return settings, options


def _setting(word: str, options: Sequence[str]) -> str:
    """`--key=value` as key=value. Raises ConfigError for an option that the command does not have."""
    key, equals, _ = word.removeprefix("--").partition("=")
    is_key = key in SHORTHANDS or "." in key
    if word.startswith("-") and not (is_key and equals and word.startswith("--")):
        raise ConfigError(f"write {key}=.., without a blank" if is_key else unknown_option(word, options))
    if not is_key and get_close_matches(key, names := [*options, *SHORTHANDS]):
        raise ConfigError(unknown_option(word, names))
    return word.removeprefix("--")


def _file_of(options: Sequence[str]) -> str | None:
    """The value of --config. Raises ConfigError if it is missing or given twice, or if --user-code has no file."""
    files = [each.removeprefix(_CONFIG) for each in options if each.startswith(_CONFIG)]
    if len(files) > 1 or "" in files:
        raise ConfigError("--config takes one YAML file, once")
    if _USER_CODE in options and not files:
        raise ConfigError("--user-code runs the code that the file of --config names; for rows, data.user_code=true")
    return files[0] if files else None


def print_verdict(console: Console, folder: Path) -> None:
    """Whether the run in this folder has learned, and what to look at first, where the report is installed."""
    from verl.trainer.hooks import VERDICT  # a slow import

    verdict_of = VERDICT.find()
    for sentence in verdict_of(folder) if verdict_of else ():
        console.print(sentence, markup=False, soft_wrap=True)


def check_engine(name: str) -> None:
    """Raises ConfigError if vLLM is selected but not installed. name: rollout.name"""
    if name == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            f"rollout.name=vllm: the package vllm is not installed; {SET_UP}. rollout.name=hf needs torch alone"
        )


def check_files(key: str, files: Sequence[str], needed: bool = False) -> None:
    """Raises ConfigError for a missing file, DataError for one that is empty or damaged."""
    if needed and not files:
        raise ConfigError(f"{key} is not set; give a .parquet, .jsonl, .json or .csv file, or several as [a,b]")
    for source in files:
        if source.endswith(DATA_SUFFIXES) and not Path(source).is_file():
            raise ConfigError(
                f"{key}: there is no file {source!r}; {script('dataset/README.md')} lists data sources, and "
                "embedded:train.parquet names an embedded file"
            )
        if source.endswith(DATA_SUFFIXES):
            check_ends(source)
    for source in files:
        if source.endswith(".parquet"):
            from verl.data.rows import check_pages  # a slow import: after the cheap checks

            check_pages(source)


def check_reward(config: RewardConfig) -> None:
    """Raises ConfigError for an unknown name. The user's own code runs later, with the data."""
    for name in config.terms:
        if ":" not in name:
            resolve("reward", name, REWARDS)


def check_model(config: ModelConfig, key: str = "model.path", **others: str | None) -> None:
    """Raises ConfigError for an unset model or a missing folder.

    key: of the model setting; others: paths of further models by group, such as critic="folder"
    """
    if config.path is None:
        raise ConfigError("model.path is not set; give a folder or a hub name")
    paths = {key: config.path, "model.tokenizer_path": config.tokenizer_path}
    paths |= {f"{group}.path": path for group, path in others.items()}
    for key, path in paths.items():
        if path is not None and path.startswith((".", "/", "~")) and not Path(path).is_dir():
            raise ConfigError(f"{key}: there is no folder {path!r}")


def check_names(config: Config) -> None:
    """Raises ConfigError for an engine, an environment, tools or formats that there are not."""
    check_engine(config.rollout.name)
    from verl.build import env  # a slow import: after the cheap checks

    env.check_names(config.env, config.data.prompt_template)


@contextmanager
def in_run_folder(config: Config, alone: bool = True) -> Iterator[Path]:
    """The run folder, for exclusive use if `alone`; errors of the block are then reported in it."""
    from verl.build.run import run_folder
    from verl.host.files import check_temporary
    from verl.host.lock import alone_in

    folder = run_folder(config.trainer)
    check_temporary()
    if not alone:
        yield folder
        return
    with alone_in(folder, "choose another trainer.experiment_name"), crash_reported(folder):
        yield folder
