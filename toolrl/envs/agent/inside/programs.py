"""Starts the programs of episodes: a function in forks of the agent's own interpreter, or commands.

    python programs.py file.py:function          imports the agent once, and forks it for every episode
    python programs.py file.py:function TASK     one episode in this process; TASK: its file, or nothing: import alone
    python programs.py                           commands

Standard library only. Requests arrive as lines of JSON on standard input: {"run": id, "folder": .., "variables": {..}},
for a command with "command": [..] and all of its variables, and {"kill": id}. Answers go to standard output: {"ready":
true} or {"failed": ..}, then {"ended": id, "code": ..}. An episode's folder holds task.json, and gets output.txt and
reward.json. All ends with the standard input.

Every program has a guard: a process between it and this one, to which everything falls that the program started and
left, also in a session of its own. The guard ends it with the episode.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import resource
import selectors
import signal
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, TextIO  # noqa: UP035  agents may need an old interpreter

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_AWAITED = (signal.SIGTERM, signal.SIGCHLD)
Agent = Callable[[str, Any], Any]


def load(source: str) -> Agent:
    """The function of `file.py:function` or `module:function`."""
    name, _, attribute = source.rpartition(":")
    if name.endswith(".py"):
        sys.path.insert(0, str(Path(name).resolve().parent))
        stem = Path(name).stem  # spawned processes find its functions by this name
        spec = importlib.util.spec_from_file_location("agent_of_the_user" if stem in sys.modules else stem, name)
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
    if "numpy" in sys.modules:  # unlike `random`, its generator is the same in every fork
        sys.modules["numpy"].random.seed()
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


def execute(command: list[str], variables: dict[str, str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(command[0], command, variables)


def start(work: Callable[[], None], output: int, own: Iterable[int]) -> int:
    """The process id of the guard of a new program.

    work: the program; output: descriptor of its output's file; own: descriptors that it does not get
    """
    pid = os.fork()
    if pid == 0:
        _end(lambda: guard(_fork(work, signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED), output, own)))
    return pid


def _fork(work: Callable[[], None], mask: Any, output: int, own: Iterable[int]) -> int:
    """The process id of the program, the leader of a session. Called in its guard."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    _control(_DEATH_SIGNAL, signal.SIGTERM)
    _control(_SUBREAPER, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    for descriptor in (nothing, output, *own):  # the agent's module may have opened others
        os.close(descriptor)
    pid = os.fork()
    if pid == 0:
        _control(_DEATH_SIGNAL, signal.SIGKILL)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _end(work)
    return pid


def _control(option: int, value: int) -> None:
    """prctl of this process, on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def _end(work: Callable[[], object]) -> None:
    """Work, and end this process: a copy of its parent, whose own end is not run."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001  the end of the process
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def guard(program: int) -> None:
    """Wait for the end of the program, or for SIGTERM; kill all that is left, and end as the program did."""
    while signal.sigwait(_AWAITED) == signal.SIGCHLD and not _has_ended(program):
        continue
    for kill in (os.kill, os.killpg):  # the id is still taken; the group is not there at the start
        with suppress(ProcessLookupError, PermissionError):
            kill(program, signal.SIGKILL)
    status = 0
    with suppress(ChildProcessError):  # none is left
        while True:
            pid, its_status = os.wait()
            if pid == program:
                status = its_status
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if that was the last
            for each in _children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _has_ended(program: int) -> bool:
    """Whether the program has, which stays uncollected; others are collected."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == program:
                return True
            os.waitpid(ended.si_pid, 0)
    return False


def _children() -> list[int]:
    """Child processes of this process."""
    children = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if int(file.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(file.parent.name))
    return children


class Programs:
    """The running episodes."""

    def __init__(self, function: Agent | None, answers: TextIO) -> None:
        self.function, self.answers = function, answers
        self.pids: dict[int, int] = {}  # episode -> pid of its guard
        self.descriptors = [answers.fileno()]  # that no program gets

    def answer(self, **fields: object) -> None:
        self.answers.write(json.dumps(fields) + "\n")
        self.answers.flush()

    def request(self, line: bytes) -> None:
        message = json.loads(line)
        if "kill" in message:
            if message["kill"] in self.pids:
                os.kill(self.pids[message["kill"]], signal.SIGTERM)
            return
        folder, variables = Path(message["folder"]), message["variables"]
        if self.function is None:
            work = partial(execute, message["command"], variables)
        else:
            work = partial(run, self.function, folder, variables)
        try:
            with (folder / "output.txt").open("ab") as output:
                self.pids[message["run"]] = start(work, output.fileno(), self.descriptors)
        except OSError as error:
            self.answer(ended=message["run"], code=None, problem=str(error))

    def reap(self) -> None:
        """Report ended episodes."""
        for episode, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[episode]
                self.answer(ended=episode, code=os.waitstatus_to_exitcode(status))

    def serve(self) -> None:
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        waits = selectors.EpollSelector()
        waits.register(0, selectors.EVENT_READ)
        waits.register(wake, selectors.EVENT_READ)
        self.descriptors += [wake, woken, waits.fileno()]
        pending = b""
        while True:
            for key, _ in waits.select():
                received = os.read(key.fd, 1 << 16)
                if key.fd != 0:
                    self.reap()
                elif not received:
                    for pid in self.pids.values():
                        os.kill(pid, signal.SIGTERM)
                    for pid in self.pids.values():
                        os.waitpid(pid, 0)
                    return
                else:
                    *lines, pending = (pending + received).split(b"\n")
                    for line in lines:
                        self.request(line)


def main(source: str | None = None, task: str | None = None) -> int:
    if source is not None and task is not None:
        agent = load(source)
        if task:
            run(agent, Path(task).parent, dict(os.environ))
        return 0
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the agent's module prints is no answer
    try:
        function = None if source is None else load(source)
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
