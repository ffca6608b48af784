"""Runs between the fork and the first line of untrusted code: drops all privileges."""

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
from .kernel import MIB

INNER_ID = 1000  # uid and gid inside the user namespace
NUM_FILES = 256  # open files per process of code
NUM_FILES_OF_PROGRAMS = 1024  # the usual limit
CELLS = 3  # the descriptor on which a session receives its cells
IGNORED_IN_BACKGROUND = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # set by a shell or nohup
FREE = 64  # descriptors from here on are unused
ARGUMENT_BYTES = 1 << 17  # per program argument, with its NUL: Linux's MAX_ARG_STRLEN
RUN_SCRIPT = 'IFS= read -rd "" <&{0}; exec {0}<&-; eval "$REPLY"'  # bash code from a descriptor; words: allowed
REFUSED = "refused: "  # prefix of a report about an invalid request


class RefusedError(Exception):
    """A request whose files cannot be written."""


@dataclass(frozen=True)
class Jail:
    """The confinement of executions, the same for all of a fork server."""

    isolated: bool
    user: int  # uid of untrusted code, outside of its own user namespace
    filter: bytes  # seccomp program, in the kernel's format
    virtual_mib: int  # address space of the fork server, inherited by every child
    num_files: int = NUM_FILES
    kept: Sequence[str] = ()  # visible paths of the host below /tmp, which is private


def become(jail: Jail, limits: dict[str, Any], request: int, descriptors: Sequence[int], report: int) -> Never:
    """Turn this process, just forked, into the one that runs a request's code; does not return.

    request: a file with the request
    descriptors: of standard input, output, error and, for a session, its cells
    report:  receives an error message; closed without one when all privileges are dropped
    """
    try:
        parsed = marshal.loads(frames.contents(request))  # noqa: S302  written by the owner, with the same interpreter
        _write(parsed["files"], jail)
        _drop_privileges(jail, limits, descriptors, report)
    except BaseException as error:  # noqa: BLE001  a forked process must never return to its parent's code
        blame = REFUSED if isinstance(error, RefusedError) else f"{type(error).__name__}: "
        os.write(report, f"{blame}{error}".encode(errors="replace"))
        os._exit(1)
    os.close(report)
    try:
        _run(parsed)
    except BaseException as error:  # noqa: BLE001  as above
        os.write(2, f"{error}\n".encode(errors="replace"))
        os._exit(126)


def _write(files: dict[str, bytes], jail: Jail) -> None:
    try:
        for name, data in files.items():
            path = Path(name)
            for folder in reversed(path.parents[:-1]):
                if not folder.is_dir():
                    folder.mkdir()
                    os.chown(folder, jail.user, jail.user)
            path.write_bytes(data)
            os.chown(path, jail.user, jail.user)
    except OSError as error:  # no space left
        raise RefusedError(str(error)) from error


def _drop_privileges(jail: Jail, limits: dict[str, Any], descriptors: Sequence[int], report: int) -> None:
    os.setsid()
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE) for descriptor in (*descriptors, report)]
    for number, descriptor in enumerate(above[:-1]):
        os.dup2(descriptor, number)
    os.dup2(above[-1], report)
    os.closerange(len(descriptors), report)
    os.closerange(report + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    restrict(jail, limits)


def restrict(jail: Jail, limits: dict[str, Any]) -> None:
    """Give up all privileges of this process, for good."""
    _set_limits(jail, limits)
    if jail.isolated:
        _confine(jail, limits["processes"])


def _run(request: dict[str, Any]) -> Never:
    for number in IGNORED_IN_BACKGROUND:
        signal.signal(number, signal.SIG_DFL)
    if request["language"] == "program":
        _run_program(request["code"])
    if request["language"] == "bash":
        _run_bash(os.fsencode(request["code"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["language"] == "session":
        interpreter.run_cells(socket.socket(fileno=CELLS))
    os._exit(interpreter.run_program(request["code"]))


def _run_program(request: dict[str, Any]) -> Never:
    """request: argv, cwd and env, all of its variables"""
    _restore_signals()
    os.chdir(request["cwd"])
    os.execvpe(request["argv"][0], request["argv"], request["env"])


def _restore_signals() -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)


def _run_bash(code: bytes) -> Never:
    _restore_signals()
    if len(code) >= ARGUMENT_BYTES and b"\0" not in code:
        script = tempfile.TemporaryFile()  # noqa: SIM115  read by the exec'ed program
        script.write(code)
        script.seek(0)
        os.set_inheritable(script.fileno(), True)
        code = RUN_SCRIPT.format(script.fileno()).encode()
    os.execv("/bin/bash", [b"bash", b"-c", code])


def _set_limits(jail: Jail, limits: dict[str, Any]) -> None:
    """Per-process limits; the supervisor enforces the totals of time and memory."""
    bounds = {
        resource.RLIMIT_AS: (jail.virtual_mib + limits["memory_mib"]) * MIB,
        resource.RLIMIT_FSIZE: limits["file_mib"] * MIB,
        resource.RLIMIT_NOFILE: jail.num_files,
        resource.RLIMIT_CORE: 1,  # at 0, a core pattern that pipes to a program would start it
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_SIGPENDING: 1024,  # the kernel counts them per user
    }
    for name, bound in bounds.items():
        _set_limit(name, bound)
    with contextlib.suppress(OSError):  # may be forbidden on a hardened machine
        _write_proc("oom_score_adj", "1000")  # the first victim of the OOM killer


def _set_limit(name: int, bound: int) -> None:
    most = resource.getrlimit(name)[1]
    bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
    resource.setrlimit(name, (bound, bound))


def _confine(jail: Jail, processes: int) -> None:
    """Enter a new user namespace, without any capability inside or outside."""
    with contextlib.suppress(PermissionError):  # not permitted to an unprivileged fork server
        os.setgroups([])
    os.setresgid(jail.user, jail.user, jail.user)
    os.setresuid(jail.user, jail.user, jail.user)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or /proc/self would belong to root
    kernel.unshare(kernel.CLONE_NEWUSER)
    _write_proc("setgroups", "deny")
    _write_proc("uid_map", f"{INNER_ID} {jail.user} 1")
    _write_proc("gid_map", f"{INNER_ID} {jail.user} 1")
    _set_limit(resource.RLIMIT_NPROC, processes)  # counted per namespace from here on
    kernel.drop_capabilities()
    seccomp.install(jail.filter)


def _write_proc(name: str, text: str) -> None:
    """Write a file of /proc/self. Without pathlib: each object used costs a page copy after a fork."""
    descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
    os.write(descriptor, text.encode())
    os.close(descriptor)
