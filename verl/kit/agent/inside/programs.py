"""Runs inside the agent's own interpreter: imports the agent once and forks a process for every episode.

    python programs.py file.py:function [TASK]     TASK: the file of the only episode, which runs in this process

Standard library only. Commands arrive as lines of JSON on standard input: {"run": id, "folder": .., "variables": {..}}
and {"kill": id}. Answers go to standard output: {"ready": true} or {"failed": ..}, then {"ended": id, "code": ..}. An
episode's folder holds task.json, and gets output.txt and reward.json. All ends with the standard input.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import selectors
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, TextIO  # noqa: UP035  agents may need an old interpreter

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
Agent = Callable[[str, Any], Any]


def load(source: str) -> Agent:
    """The function of `file.py:function` or `module:function`."""
    name, _, attribute = source.rpartition(":")
    if name.endswith(".py"):
        sys.path.insert(0, str(Path(name).resolve().parent))
        spec = importlib.util.spec_from_file_location("agent_of_the_user", name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(name)
    function: Agent = getattr(module, attribute)
    inspect.signature(function).bind("base_url", {})
    return function


def run(function: Agent, folder: Path, variables: dict[str, str]) -> None:
    """An episode: calls `function(base_url, task)` and writes what it returns to reward.json."""
    os.environ.update(variables)
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    value = function(variables["OPENAI_BASE_URL"], task)
    if inspect.isawaitable(value):

        async def awaited() -> Any:
            return await value

        value = asyncio.run(awaited())
    if value is not None:
        new = folder / "reward.json.new"
        new.write_text(json.dumps(value, default=float), encoding="utf-8")  # numbers of numpy and torch
        new.replace(folder / "reward.json")


def fork(function: Agent, folder: Path, variables: dict[str, str], output: int) -> int:
    """The process id of a new episode, the leader of a process group. output: descriptor of its output's file"""
    pid = os.fork()
    if pid:
        with suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with suppress(OSError):
            os.setpgid(0, 0)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        os.closerange(3, 256)
        run(function, folder, variables)
        code = 0
    except BaseException:  # noqa: BLE001  the end of the process
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Programs:
    """The running episodes."""

    def __init__(self, function: Agent, answers: TextIO) -> None:
        self.function, self.answers = function, answers
        self.pids: dict[int, int] = {}  # by episode

    def answer(self, **fields: object) -> None:
        self.answers.write(json.dumps(fields) + "\n")
        self.answers.flush()

    def command(self, line: bytes) -> None:
        given = json.loads(line)
        if "kill" in given:
            if given["kill"] in self.pids:
                kill_group(self.pids[given["kill"]])
            return
        folder = Path(given["folder"])
        try:
            with (folder / "output.txt").open("ab") as output:
                self.pids[given["run"]] = fork(self.function, folder, given["variables"], output.fileno())
        except OSError as error:
            self.answer(ended=given["run"], code=None, problem=str(error))

    def reap(self) -> None:
        """Report ended episodes, with the processes that they left."""
        for episode, pid in list(self.pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid)  # while the id is still taken
            status = os.waitpid(pid, 0)[1]
            del self.pids[episode]
            self.answer(ended=episode, code=os.waitstatus_to_exitcode(status))

    def serve(self) -> None:
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        waits = selectors.DefaultSelector()
        waits.register(0, selectors.EVENT_READ)
        waits.register(wake, selectors.EVENT_READ)
        pending = b""
        while True:
            for key, _ in waits.select():
                received = os.read(key.fd, 1 << 16)
                if key.fd != 0:
                    self.reap()
                elif not received:
                    for pid in self.pids.values():
                        kill_group(pid)
                    return
                else:
                    *lines, pending = (pending + received).split(b"\n")
                    for line in lines:
                        self.command(line)


def main(source: str, task: str | None = None) -> int:
    if task is not None:
        run(load(source), Path(task).parent, dict(os.environ))
        return 0
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the agent's module prints is no answer
    try:
        function = load(source)
    except BaseException as error:  # noqa: BLE001  reported
        answers.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        return 1
    programs = Programs(function, answers)
    programs.answer(ready=True)
    programs.serve()
    return 0


if __name__ == "__main__":
    sys.path[:] = [each for each in sys.path if each != str(Path(__file__).parent)]  # its modules are not the agent's
    sys.exit(main(*sys.argv[1:]))
