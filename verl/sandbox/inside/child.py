"""What a process does between its fork and the first line of untrusted code: it gives everything up."""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import resource
import signal
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from . import frames, interpreter, kernel, seccomp

INNER_ID = 1000  # the user that the code is, as it sees it
MIB = 1024 * 1024
NUM_FILES = 256  # open at once, by one process
CELLS = 3  # the descriptor through which a session gets its cells
FREE = 64  # descriptors from here on are not in use
ARGUMENT_BYTES = 1 << 17  # of one argument of a program, with its end: MAX_ARG_STRLEN of Linux
RUN_SCRIPT = 'IFS= read -rd "" <&{0}; exec {0}<&-; eval "$REPLY"'  # bash code from a descriptor
REFUSED = "refused: "  # begins a report of what is the request's fault


class RefusedError(Exception):
    """A request whose files cannot be written."""


@dataclass(frozen=True)
class Jail:
    """How executions are confined, the same for all of a fork server.

    user: id that untrusted code runs as, outside of its own user namespace
    filter: system calls that are refused, as the kernel reads it
    """

    isolated: bool
    user: int
    filter: bytes
    virtual_mib: int  # address space of the fork server, which every child begins with


def become(jail: Jail, limits: dict[str, Any], request: int, given: Sequence[int], report: int) -> Never:
    """Turn this process, just forked, into the one that runs a request's code; does not return.

    request: a file that holds it
    given:   standard input, output, error and, for a session, its cells
    report:  where to write why it cannot be done; closed without a word when all is given up
    """
    try:
        asked = marshal.loads(frames.contents(request))  # noqa: S302  from the owner, whose interpreter this is
        _write(asked["files"], jail)
        _give_up(jail, limits, given, report)
    except BaseException as error:  # noqa: BLE001  a forked process must never return to its parent's code
        blame = REFUSED if isinstance(error, RefusedError) else f"{type(error).__name__}: "
        os.write(report, f"{blame}{error}".encode(errors="replace"))
        os._exit(1)
    os.close(report)
    try:
        _run(asked)
    except BaseException as error:  # noqa: BLE001  the same
        os.write(2, f"{error}\n".encode(errors="replace"))
        os._exit(126)


def _write(files: dict[str, bytes], jail: Jail) -> None:
    """Put the request's files into the working folder, which is the present one."""
    try:
        for name, data in files.items():
            path = Path(name)
            for folder in reversed(path.parents[:-1]):
                if not folder.is_dir():
                    folder.mkdir()
                    os.chown(folder, jail.user, jail.user)
            path.write_bytes(data)
            os.chown(path, jail.user, jail.user)
    except OSError as error:  # more than there is room for
        raise RefusedError(str(error)) from error


def _give_up(jail: Jail, limits: dict[str, Any], given: Sequence[int], report: int) -> None:
    os.setsid()
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE) for descriptor in (*given, report)]
    for number, descriptor in enumerate(above[:-1]):
        os.dup2(descriptor, number)
    os.dup2(above[-1], report)
    os.closerange(len(given), report)
    os.closerange(report + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _bound(jail, limits)
    if jail.isolated:
        _confine(jail, limits["processes"])


def _run(request: dict[str, Any]) -> Never:
    if request["language"] == "bash":
        _run_bash(os.fsencode(request["code"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["language"] == "session":
        interpreter.run_cells(socket.socket(fileno=CELLS))
    os._exit(interpreter.run_program(request["code"]))


def _run_bash(code: bytes) -> Never:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if len(code) >= ARGUMENT_BYTES and b"\0" not in code:
        script = tempfile.TemporaryFile()  # noqa: SIM115  read by the program that this process becomes
        script.write(code)
        script.seek(0)
        os.set_inheritable(script.fileno(), True)
        code = RUN_SCRIPT.format(script.fileno()).encode()
    os.execv("/bin/bash", [b"bash", b"-c", code])


def _bound(jail: Jail, limits: dict[str, Any]) -> None:
    """Bounds of each process; the supervisor adds up time and memory of all of them."""
    bounds = {
        resource.RLIMIT_AS: (jail.virtual_mib + limits["memory_mib"]) * MIB,
        resource.RLIMIT_FSIZE: limits["file_mib"] * MIB,
        resource.RLIMIT_NOFILE: NUM_FILES,
        resource.RLIMIT_CORE: 1,  # at 0, a program that core files are piped to would be started
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_SIGPENDING: 1024,  # the kernel counts them for all of a user
    }
    for name, bound in bounds.items():
        _set_limit(name, bound)
    with contextlib.suppress(OSError):  # a hardened machine may forbid it
        _tell("oom_score_adj", "1000")  # the first to go if the machine runs short


def _set_limit(name: int, bound: int) -> None:
    """Set a limit for good, to what this machine allows at most if that is less."""
    most = resource.getrlimit(name)[1]
    bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
    resource.setrlimit(name, (bound, bound))


def _confine(jail: Jail, processes: int) -> None:
    """Into a user namespace of its own, without a capability in it or anywhere."""
    with contextlib.suppress(PermissionError):  # an ordinary user's fork server may not
        os.setgroups([])
    os.setresgid(jail.user, jail.user, jail.user)
    os.setresuid(jail.user, jail.user, jail.user)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or its own /proc/self would not be its own
    kernel.unshare(kernel.CLONE_NEWUSER)
    _tell("setgroups", "deny")
    _tell("uid_map", f"{INNER_ID} {jail.user} 1")
    _tell("gid_map", f"{INNER_ID} {jail.user} 1")
    _set_limit(resource.RLIMIT_NPROC, processes)  # counted in this namespace alone from here on
    kernel.drop_capabilities()
    seccomp.install(jail.filter)


def _tell(name: str, text: str) -> None:
    """Write what the kernel asks of this process. Without pathlib: an object used is a page copied after a fork."""
    descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
    os.write(descriptor, text.encode())
    os.close(descriptor)
