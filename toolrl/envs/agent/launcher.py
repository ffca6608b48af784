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

from toolrl.envs.agent.confined import Confinement, limit_hint
from toolrl.envs.agent.inside import coding, programs
from toolrl.sandbox.programs import FOLDER
from toolrl.servers.line_process import LineProcess
from verl.envs.sandbox import Status
from verl.errors import ConfigError, DataError, ServiceDownError
from verl.host import untrusted_files
from verl.host.services import TOKEN_VARIABLE
from verl.host.watcher import remove_tree
from verl.json_values import read_json

TASK, REWARD, OUTPUT = "task.json", "reward.json", "output.txt"
READY = ("claude_code", "codex", "opencode")  # functions of inside/coding.py
_SHOWN_CHARS = 600  # shown of a failed program's output
_READ_BYTES = 1 << 13  # read from its end, which may be white space
_REWARD_BYTES = 1 << 20
_START_S = 120.0  # limit of the import of the agent's module
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # specific to the trainer's interpreter


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
    """Environment variables of a program, without our secret; foreign: it does not run in the trainer's interpreter"""
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
        """Pid of the interpreter, if it runs."""
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

    def __init__(self, command: str, python: str | None) -> None:
        """python: the interpreter for commands that begin with `python`. Raises ConfigError."""
        starter = (sys.executable, "-I", "-S", programs.__file__)
        super().__init__("the interpreter that starts env.command", starter, _environment(foreign=True))
        self._arguments, self._foreign = _split(command, python), python is not None

    async def check(self) -> None:
        _find(self._arguments[0])
        await super().check()

    def request(self, folder: Path, variables: Mapping[str, str]) -> Mapping[str, Any]:
        arguments = [each.replace("{task_json}", str(folder / TASK)) for each in self._arguments]
        return {"command": arguments, "variables": {**_environment(self._foreign), **variables}}


def _split(command: str, python: str | None) -> list[str]:
    """The arguments of a command line. Raises ConfigError."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"env.command={command!r} cannot be split into arguments ({error})") from error
    if not arguments:
        raise ConfigError("env.command is empty")
    if python is not None and arguments[0] in ("python", "python3"):
        arguments[0] = python
    return arguments


def _find(program: str) -> str:
    """The path of a program. Raises ConfigError."""
    path = shutil.which(program)
    if path is None:
        raise ConfigError(f"env.command: there is no program {program!r}")
    return path


class FunctionLauncher(ProcessLauncher):
    """A Python function `run(base_url, task)`, imported once by an interpreter that forks for every episode."""

    def __init__(self, agent: str, python: str | None) -> None:
        """agent: file.py:function or module:function"""
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


class ConfinedLauncher:
    """A command line in the sandbox (confined.py), or a function, with an interpreter of its own for every episode.

    The program's files are in the sandbox alone. Its reward comes from there into the episode's folder.
    """

    def __init__(self, arguments: Sequence[str], confinement: Confinement, function: str | None = None) -> None:
        """Raises ConfigError. function: of file.py:function"""
        program, *rest = arguments
        self._program = _find(program)
        self._command = [self._program, *rest]
        self._confinement, self._function = confinement, function
        self._files = rest if function is None else [*rest, function.rpartition(":")[0]]
        self._checking, self._checked = asyncio.Lock(), False
        confinement.check(self._program, self._files)

    async def check(self) -> None:
        """In the sandbox, too, the function's module is imported before the run. Raises ConfigError."""
        async with self._checking:
            if not self._checked:
                command = () if self._function is None else [each.replace("{task_json}", "") for each in self._command]
                cannot = f"env.agent={self._function}: the agent cannot be used"
                try:
                    async with asyncio.timeout(_START_S):
                        tried = await self._confinement.try_out(self._program, self._files, command)
                except TimeoutError as error:
                    raise ConfigError(f"{cannot}: it is not imported within {_START_S:g} s") from error
                if tried.status is not Status.FINISHED:
                    problem = tried.stderr.strip().rpartition("\n")[2] or f"exit status {tried.return_code}"
                    raise ConfigError(f"{cannot}: {problem}")
                self._checked = True

    async def run(self, folder: Path, variables: Mapping[str, str], waiting: Waiting, /) -> None:
        with waiting():
            await self.check()
            await self._confinement.start(self._program)
        command = [each.replace("{task_json}", f"{FOLDER}/{TASK}") for each in self._command]
        task = (folder / TASK).read_bytes()
        inside = {**variables, "REWARD_FILE": f"{FOLDER}/{REWARD}"}
        execution = await self._confinement.run(command, {TASK: task}, inside)
        if execution.status is not Status.FINISHED:
            code = execution.return_code
            ended = f"was killed: {execution.killed}" if execution.killed else f"ended with {_status(code)}"
            written = f"{execution.stdout}\n{execution.stderr}".strip()[-_SHOWN_CHARS:]
            raise ProgramFailedError(f"{ended}{limit_hint(execution)}{f': {written}' if written else ''}")
        for name, reason in execution.left_out.items():
            raise ServiceDownError("the agent", f"{name}: {reason}")
        for name, content in execution.files.items():
            (folder / name).write_bytes(content)

    async def close(self) -> None:
        await self._confinement.close()


def check_function(agent: str) -> None:
    """Raises ConfigError unless it is file.py:function or module:function."""
    file, colon, attribute = agent.rpartition(":")
    if not colon or not attribute.isidentifier() or not file:
        expected = f"file.py:function, package.module:function or one of {', '.join(READY)}"
        raise ConfigError(f"env.agent={agent!r} must be {expected}")
    if file.endswith(".py") and not Path(file).is_file():
        raise ConfigError(f"env.agent={agent}: there is no file {file!r}")


def ready_agent(name: str) -> str:
    """The function of one of `READY`. Raises ConfigError if its program is not installed."""
    if not Path(".agents", name, "node_modules").is_dir():
        hint = f"bash scripts/agents/prepare.sh {name}"
        raise ConfigError(f"env.agent={name} is not installed in the working folder; install it with: {hint}")
    return f"{coding.__file__}:{name}"


def build_launcher(
    agent: str | None, command: str | None, python: str | None, confinement: Confinement | None = None
) -> Launcher:
    """A launcher of the agent or the command. Raises ConfigError."""
    if (agent is None) == (command is None):
        raise ConfigError("env.name=agent needs env.agent=file.py:function, env.command or env.options={pull: true}")
    if python is not None and not os.access(python, os.X_OK):
        raise ConfigError(f"env.options.python={python} is not an interpreter that can be started")
    if agent is not None:
        check_function(agent)
        if confinement is None:
            return FunctionLauncher(agent, python)
        called = (python or sys.executable, programs.__file__, agent, "{task_json}")
        return ConfinedLauncher(called, confinement, agent)
    assert command is not None
    if confinement is None:
        return CommandLauncher(command, python)
    return ConfinedLauncher(_split(command, python), confinement)


def read_reward_file(folder: Path) -> object | None:
    """Content of reward.json; None without one. Raises ServiceDownError if it cannot be read as JSON."""
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
