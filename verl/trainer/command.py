"""What the commands of this folder have in common: their words, errors and exit codes. Imports nothing heavy."""

from __future__ import annotations

import logging
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from verl.config.schema import ModelConfig
from verl.config.show import as_yaml, key_table
from verl.errors import ConfigError, DataError, VerlError
from verl.utils.versions import SET_UP, missing_package, script

_DATA_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv")


@dataclass(frozen=True)
class Words:
    """A command line, split into settings and options."""

    settings: list[str]
    options: list[str]

    def only_show(self, config: Any, console: Console) -> bool:
        """Print the configuration if that is all that is wanted."""
        if "--cfg" in self.options:
            console.print(as_yaml(config), markup=False, soft_wrap=True)
        return "--cfg" in self.options


def told(
    words: Sequence[str], help_text: str, kind: type, run: Callable[[Words, Console], int], known: Sequence[str] = ()
) -> int:
    """`run` with its words, errors told in a line or two instead of a traceback. Returns the exit code.

    known: options of this command beside --help and --cfg job
    Exit codes: what `run` returns; 2 for a configuration or data that cannot be used; 1 for a run that failed; 130 for
    one that was interrupted
    """
    console = Console(highlight=False, emoji=False)
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    try:
        split = _split(words, known)
        if "--help" in split.options:
            console.print(escape(help_text), key_table(kind), sep="\n")
            return 0
        with _heeding_interrupts(console):
            return run(split, console)
    except VerlError as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", soft_wrap=True)
        if not isinstance(error, ConfigError | DataError) and error.__cause__ is not None:
            console.print("".join(traceback.format_exception(error.__cause__)), markup=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError | DataError) else 1
    except ModuleNotFoundError as error:
        problem = missing_package(error)
        if problem is None:
            raise
        console.print(f"[bold red]ConfigError[/]: {escape(problem)}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(
            "[bold red]interrupted[/]: started again, a training goes on from its last checkpoint, an evaluation from "
            "its answers"
        )
        return 130


@contextmanager
def _heeding_interrupts(console: Console) -> Iterator[None]:
    """The first Ctrl-C says so and ends what waits, at once; a second one ends the tidying up, too.

    asyncio's own handler would do neither before the loop runs again, and it does not while workers are waited for.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        console.print("\nstopping: what was started is being ended, which takes some seconds; Ctrl-C again hurries it")
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()  # only there handlers can be set
    if before is not signal.default_int_handler or not in_main_thread:  # or whoever started this wants no interrupts
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _split(words: Sequence[str], known: Sequence[str]) -> Words:
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
    return Words(settings, options)


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
