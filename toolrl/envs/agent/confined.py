"""Agents in the sandbox (toolrl/sandbox/programs.py): the gateway is their only network.

The gateway listens inside, on the loopback interface of each episode's own network namespace. What a program writes is
in a private /tmp, of which the trainer gets the reward and the end of its output.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolrl.envs.agent.inside import programs
from toolrl.sandbox.fork_server import SYSTEM, View, check_isolation
from toolrl.sandbox.local import MOST
from toolrl.sandbox.programs import FOLDER, PROGRAM_LIMITS, Listen, Program, ProgramSandbox
from verl.envs.sandbox import Execution, Limits, Status
from verl.errors import ConfigError

# Certificates and names, no secrets; the sandbox has an /etc/passwd, /etc/group and /etc/hosts of its own.
_CONFIGURATION = ("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/nsswitch.conf")
_PRIVATE = ("/tmp", "/dev", "/proc", "/etc", "/sandbox", FOLDER)  # paths that every program has for itself
_PATH = "/usr/local/bin:/usr/bin:/bin"
_OPTIONS = ("memory_mib", "processes", "file_mib")
# What a program writes when the kernel refuses it something, in Python, C and node, and the limit.
_SIGNS = {
    "memory_mib": ("MiB of memory",),
    "file_mib": ("No space left on device", "ENOSPC", "File too large"),
    "processes": ("Resource temporarily unavailable", "EAGAIN", "can't start new thread"),
}
_READABLE = 'for each; do test -r "$each" || { echo "$each"; exit 1; }; done'


def read_limits(setting: bool | Mapping[str, Any]) -> Limits:
    """The limits in env.options.sandbox. Raises ConfigError."""
    options = {} if isinstance(setting, bool) else dict(setting)
    most = asdict(MOST)
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ConfigError(f"env.options.sandbox.{name} is unknown; expected {', '.join(_OPTIONS)}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most[name]:
            raise ConfigError(f"env.options.sandbox.{name} must be from 1 to {most[name]}, got {value!r}")
    return replace(PROGRAM_LIMITS, **options)


class Confinement:
    """The sandbox of a command line.

    readable: files and folders that it sees, read-only, besides the system, its interpreter and the working folder.
        Folders of other episodes are not there.
    limits: of each episode
    listen: serves the gateway on a socket of an episode's own network
    """

    def __init__(self, readable: Sequence[str], limits: Limits, listen: Listen, *, require_cgroup: bool) -> None:
        """Raises ConfigError."""
        check_isolation("bubblewrap")
        for path in readable:
            if not Path(path).exists():
                raise ConfigError(f"env.options.readable: there is no {path!r}")
        self._readable = [str(each) for path in map(Path, readable) for each in (path.absolute(), path.resolve())]
        for path in (str(Path.cwd()), *self._readable):
            if Path(path).is_relative_to(FOLDER) or any(Path(own).is_relative_to(path) for own in _PRIVATE):
                raise ConfigError(f"env.options.sandbox: {path} is private in a sandbox, so name another folder")
        self._listen = listen
        self._new_sandbox = partial(ProgramSandbox, limits=limits, require_cgroup=require_cgroup)
        self._sandbox: ProgramSandbox | None = None

    def check(self, program: str, files: Sequence[str]) -> None:
        """Raises ConfigError for a file that the program would not find in the sandbox."""
        shown = [*SYSTEM, *_CONFIGURATION, *_own(program), *self._readable]
        for each in _files(program, *files):
            for path in {each.absolute(), each.resolve()}:
                if not any(map(path.is_relative_to, shown)):
                    raise ConfigError(f"env.options.sandbox=true hides {path}: add it to env.options.readable")

    async def try_out(self, program: str, files: Sequence[str], command: Sequence[str] = ()) -> Execution:
        """Run a command before the run, without a task and the gateway. Raises ServiceDownError.

        Raises ConfigError if the sandbox's user may not read the program or a file.
        """
        sandbox = self._new_sandbox(self._view(program))
        needed = [str(Path.cwd()), *(str(each.absolute()) for each in _files(program, *files))]
        try:
            tried = await sandbox.run(replace(_program(["sh", "-c", _READABLE, "sh", *needed], {}, {}), cwd="/"))
            if tried.status is not Status.FINISHED:
                hint = "chmod o+r opens a file, chmod o+x a folder above it"
                raise ConfigError(f"env.options.sandbox=true: its user may not read {tried.stdout.strip()}: {hint}")
            return await sandbox.run(_program(command, {}, {})) if command else tried
        finally:
            await sandbox.close()

    async def start(self, program: str) -> None:
        """Before the first episode of an event loop. Raises ServiceDownError."""
        if self._sandbox is None:
            self._sandbox = self._new_sandbox(self._view(program))
        await self._sandbox.start()

    async def run(self, command: Sequence[str], files: Mapping[str, bytes], variables: Mapping[str, str]) -> Execution:
        """A command with files in FOLDER, of which `REWARD_FILE` is returned. Raises ServiceDownError."""
        assert self._sandbox is not None
        return await self._sandbox.run(_program(command, files, variables), self._listen)

    async def close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    def _view(self, program: str) -> View:
        own = _own(program)
        episodes = Path(os.environ.get("TMPDIR") or tempfile.gettempdir()).resolve()
        hidden = [str(episodes)] if any(Path(path) in episodes.parents for path in own) else []
        return View([*_CONFIGURATION, *own], hidden, self._readable)


def limit_hint(execution: Execution) -> str:
    """Which option sets the limit that a program met, by the kernel's message for it."""
    printed = f"{execution.stdout}{execution.stderr}"
    met = [name for name, signs in _SIGNS.items() if any(sign in printed for sign in signs)]
    return f" (env.options.sandbox.{met[0]} sets the limit)" if met else ""


def _program(command: Sequence[str], files: Mapping[str, bytes], variables: Mapping[str, str]) -> Program:
    """With all of its variables."""
    url = variables.get("OPENAI_BASE_URL")
    port = None if url is None else urlsplit(url).port
    environment = {"PATH": _PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **variables}
    if port is None:
        return Program(command, str(Path.cwd()), environment, files)
    reward = Path(environment["REWARD_FILE"]).name
    return Program(command, str(Path.cwd()), environment, files, [reward], port)


def _files(*names: str) -> list[Path]:
    return [Path(name) for name in names if Path(name).is_file()]


def _own(program: str) -> list[str]:
    """Paths that every program needs: interpreters, the working folder, and our file that calls a function."""
    return [*_prefixes(sys.executable), *_prefixes(program), str(Path.cwd()), programs.__file__]


def _prefixes(program: str) -> list[str]:
    """The folders of an installed program and of what its links lead to, such as the base of a virtual environment."""
    path = Path(program).absolute()
    bins = []
    while path.is_symlink():
        bins.append(path.parent)
        path = Path(os.path.normpath(path.parent / path.readlink()))
    return [str(each.parent) for each in (*bins, path.parent) if each.name == "bin" and each.parent != Path("/")]
