"""Starts agents: a Python function in forks of its own interpreter, or any command. Each episode has a folder."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from verl.errors import ConfigError, DataError, ServiceDownError
from verl.json_values import read_json
from verl.kit.agent.confined import Confinement
from verl.kit.agent.inside import coding, programs
from verl.kit.serving.line_process import LineProcess
from verl.net.services import TOKEN_VARIABLE
from verl.system import untrusted_files
from verl.system.watcher import remove_tree

TASK, REWARD, OUTPUT = "task.json", "reward.json", "output.txt"
READY = ("claude_code", "codex", "opencode")  # functions of inside/coding.py
_SHOWN_CHARS = 600  # of the output of a program that failed
_READ_BYTES = 1 << 13  # of its end, which may be white space
_REWARD_BYTES = 1 << 20
_START_S = 120.0  # for the import of the agent's module
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of the trainer's interpreter


class ProgramFailedError(Exception):
    """The program did not end by itself, or with another exit status than 0."""


Waiting = Callable[[], AbstractContextManager[None]]  # around waits that are not the program's time


class Launcher(Protocol):
    """Runs a program per episode."""

    async def check(self) -> None:
        """Raises ConfigError if no program can be started."""

    async def run(self, folder: Path, variables: Mapping[str, str], waiting: Waiting, /) -> None:
        """Run a program to its end; killed with all that it started when this is cancelled. Raises ProgramFailedError.

        folder: with task.json; variables: added to the program's environment; waiting: until it can start
        """

    async def close(self) -> None:
        """Kill everything that runs."""


def output_end(folder: Path) -> str:
    """The last lines that the program wrote."""
    try:
        text = untrusted_files.read_end(folder, OUTPUT, _READ_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except DataError as error:
        text = str(error)
    return f": {text[-_SHOWN_CHARS:]}" if text else ""


def _environment(foreign: bool) -> dict[str, str]:
    """Of a program, without our secret; foreign: it does not run in the trainer's interpreter"""
    dropped = (TOKEN_VARIABLE, *(_OWN_VARIABLES if foreign else ()))
    return {name: value for name, value in os.environ.items() if name not in dropped}


class ProcessLauncher(ABC):
    """Programs that an interpreter starts (inside/programs.py), which ends each with all that it has started."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """name: of the interpreter, in messages"""
        self._name, self._numbers = name, count()
        self._process = LineProcess(name, command, "ended", _START_S, environment=environment)

    @property
    def pid(self) -> int | None:
        """Of the interpreter, if it runs."""
        return self._process.pid

    async def check(self) -> None:
        """Start the interpreter. Raises ConfigError."""
        try:
            await self._process.start()
        except ServiceDownError as error:
            raise ConfigError(f"{self._name} cannot be used: {error.problem}") from error

    @abstractmethod
    def request(self, folder: Path, variables: Mapping[str, str]) -> Mapping[str, Any]:
        """Fields of the interpreter's request to run a program."""

    async def run(self, folder: Path, variables: Mapping[str, str], waiting: Waiting, /) -> None:
        with waiting():
            await self.check()
        number = next(self._numbers)
        inbox = await self._process.open(number, run=number, folder=str(folder), **self.request(folder, variables))
        try:
            answer = await inbox.get()
        except asyncio.CancelledError:
            with suppress(ServiceDownError):  # its children end with it
                self._process.send(kill=number)
                await inbox.get()
            raise
        finally:
            self._process.forget(number)
        if "failed" in answer:
            problem = f"{self._name} ended with {_status(answer['code'])}"
        elif answer["code"] != 0:
            problem = answer.get("problem") or f"ended with {_status(answer['code'])}"
        else:
            return
        raise ProgramFailedError(f"{problem}{await asyncio.to_thread(output_end, folder)}")

    async def close(self) -> None:
        await self._process.close()


def _status(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"


class CommandLauncher(ProcessLauncher):
    """A command line, as `python agent.py --task {task_json}`; the placeholder becomes the path of the task's file."""

    def __init__(self, command: str, python: str | None, confinement: Confinement | None = None) -> None:
        """python: the interpreter for commands that begin with `python`. Raises ConfigError."""
        starter = (sys.executable, "-I", "-S", programs.__file__)
        super().__init__("the interpreter that starts env.command", starter, _environment(foreign=True))
        self._confinement = confinement
        try:
            self._arguments = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"env.command={command!r} cannot be split into arguments ({error})") from error
        if not self._arguments:
            raise ConfigError("env.command is empty")
        if python is not None and self._arguments[0] in ("python", "python3"):
            self._arguments[0] = python
        self._foreign = python is not None
        if confinement is not None:
            program, *rest = self._arguments
            confinement.check(shutil.which(program) or program, rest)

    async def check(self) -> None:
        if shutil.which(self._arguments[0]) is None:
            raise ConfigError(f"env.command: there is no program {self._arguments[0]!r}")
        await super().check()

    def request(self, folder: Path, variables: Mapping[str, str]) -> Mapping[str, Any]:
        arguments = [each.replace("{task_json}", str(folder / TASK)) for each in self._arguments]
        if self._confinement is None:
            return {"command": arguments, "variables": {**_environment(self._foreign), **variables}}
        command = self._confinement.command(arguments, folder, variables)
        return {"command": command, "variables": self._confinement.environment(variables)}


class FunctionLauncher(ProcessLauncher):
    """A Python function `run(base_url, task)`, imported once by an interpreter that forks for every episode."""

    def __init__(self, agent: str, python: str | None) -> None:
        """agent: file.py:function or module:function. Raises ConfigError."""
        file, colon, attribute = agent.rpartition(":")
        if not colon or not attribute.isidentifier() or not file:
            expected = f"file.py:function, package.module:function or one of {', '.join(READY)}"
            raise ConfigError(f"env.agent={agent!r} must be {expected}")
        if file.endswith(".py") and not Path(file).is_file():
            raise ConfigError(f"env.agent={agent}: there is no file {file!r}")
        self._agent = agent
        command = (python or sys.executable, programs.__file__, agent)
        super().__init__("the agent's interpreter", command, _environment(python is not None))

    async def check(self) -> None:
        """Raises ConfigError if the module cannot be imported."""
        try:
            await super().check()
        except ConfigError as error:
            raise ConfigError(f"env.agent={self._agent}: {error}") from error

    def request(self, folder: Path, variables: Mapping[str, str]) -> Mapping[str, Any]:
        return {"variables": dict(variables)}


class ConfinedFunction(CommandLauncher):
    """A function in a sandbox: an interpreter of its own for every episode, in place of a fork."""

    def __init__(self, agent: str, python: str | None, confinement: Confinement) -> None:
        """Raises ConfigError."""
        self._unconfined = FunctionLauncher(agent, python)
        confinement.check(python or sys.executable, [agent.rpartition(":")[0]])
        self._checking, self._checked = asyncio.Lock(), False
        command = shlex.join((python or sys.executable, programs.__file__, agent, "{task_json}"))
        super().__init__(command, python, confinement)

    async def check(self) -> None:
        """Imports the module outside of the sandbox: no policy has written anything yet. Raises ConfigError."""
        async with self._checking:
            if not self._checked:
                await self._unconfined.check()
                await self._unconfined.close()
                self._checked = True
        await super().check()


def ready_agent(name: str) -> str:
    """The function of one of `READY`. Raises ConfigError if its program is not installed."""
    if not Path(".agents", name, "node_modules").is_dir():
        hint = f"bash scripts/agents/prepare.sh {name}"
        raise ConfigError(f"env.agent={name} is not installed in the working folder; install it with: {hint}")
    return f"{coding.__file__}:{name}"


def build_launcher(
    agent: str | None, command: str | None, python: str | None, confinement: Confinement | None = None
) -> Launcher:
    """Of one of the two. Raises ConfigError."""
    if (agent is None) == (command is None):
        raise ConfigError("env.name=agent needs env.agent=file.py:function, env.command or env.options={pull: true}")
    if python is not None and not os.access(python, os.X_OK):
        raise ConfigError(f"env.options.python={python} is not an interpreter that can be started")
    if agent is not None:
        return FunctionLauncher(agent, python) if confinement is None else ConfinedFunction(agent, python, confinement)
    assert command is not None
    return CommandLauncher(command, python, confinement)


def read_reward_file(folder: Path) -> object | None:
    """What the program left in reward.json; None without one. Raises ServiceDownError if it cannot be read as JSON."""
    try:
        value: object = read_json(untrusted_files.read(folder, REWARD, _REWARD_BYTES).decode())
        return value
    except FileNotFoundError:
        return None
    except DataError as error:
        raise ServiceDownError("the agent", str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ServiceDownError("the agent", f"{REWARD} is not JSON ({error})") from error


@asynccontextmanager
async def episode_folder() -> AsyncIterator[Path]:
    """Removed with all that the program wrote; after kill -9 by the run's watcher, which owns TMPDIR."""
    folder = Path(tempfile.mkdtemp(prefix="agent-", dir=os.environ.get("TMPDIR")))
    try:
        yield folder
    finally:
        await asyncio.to_thread(remove_tree, folder)
