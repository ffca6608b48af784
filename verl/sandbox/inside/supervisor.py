"""One execution or session: a process that starts untrusted code, watches it, ends it and says what came of it.

The answer goes through a socket that the code's processes never hold. With isolation this process is the first of a pid
namespace of its own: nobody in there can signal or trace it, and its end is theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import frames, kernel, processes
from .child import Jail, become

LOOK_S = 0.1  # between two looks at what the processes use
CHUNK = 1 << 16


class Output:
    """What comes out of a pipe, up to a bound; the rest is read and dropped."""

    def __init__(self, descriptor: int, bound: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.bound = bound
        self.kept = bytearray()

    def read(self) -> bool:
        """Take a chunk; False where there is none now."""
        try:
            chunk = os.read(self.descriptor, CHUNK)
        except BlockingIOError:
            return False
        self.kept += chunk[: self.bound - len(self.kept)]
        return bool(chunk)

    def take(self) -> str:
        """All that is there, as text."""
        for _ in range(self.bound // CHUNK + 2):  # a writer that goes on cannot hold us
            if not self.read():
                break
        text, self.kept = self.kept.decode(errors="replace"), bytearray()
        return text


@dataclass(frozen=True)
class End:
    """Why a wait is over."""

    status: str  # exit, answer (of a session's cell), timeout, error
    code: int | None = None  # of an answer
    reason: str = ""  # of a kill


class Child:
    """The process that runs untrusted code, and our ends of what it holds."""

    def __init__(self, jail: Jail, request: dict[str, Any]) -> None:
        limits = request["limits"]
        bound = limits["output_kib"] * 1024
        self.cells: socket.socket | None = None
        self.token = self.heard = b""
        given = [sealed(request["stdin"].encode(errors="replace"))]
        ours = []
        for _ in range(2):
            reads, writes = os.pipe()
            given.append(writes)
            ours.append(Output(reads, bound))
        if request["language"] == "session":
            self.cells, theirs = socket.socketpair()
            self.cells.setblocking(False)
            given.append(theirs.detach())
        reported, report = os.pipe()
        self.isolated = jail.isolated
        self.alive = True
        self.pid = os.fork()
        if self.pid == 0:
            become(jail, request, given, report)
        for descriptor in (*given, report):
            os.close(descriptor)
        if problem := os.read(reported, CHUNK):
            raise OSError(problem.decode())
        os.close(reported)
        self.stdout, self.stderr = ours
        self.descriptor = os.pidfd_open(self.pid)

    def watch(self, limits: dict[str, Any], owner: socket.socket) -> dict[str, Any]:
        """What comes of the code from now until it ends, answers or passes a limit."""
        started, cpu_before = time.monotonic(), processes.usage().cpu_s if self.cells else 0.0
        end = _wait(self, limits, owner, started + limits["wall_s"], cpu_before)
        code = end.code
        if end.status != "answer":
            wait_status = self.end()
            code = os.waitstatus_to_exitcode(wait_status) if end.status == "exit" else None
        by_code = "finished" if code == 0 else "error"
        return {
            "status": by_code if end.status in ("exit", "answer") else end.status,
            "return_code": code,
            "seconds": time.monotonic() - started,
            "stdout": self.stdout.take(),
            "stderr": self.stderr.take() + (f"killed: {end.reason}\n" if end.reason else ""),
            "alive": self.alive,
        }

    def ask(self, code: str, patience_s: float) -> None:
        """Give a session its next cell, with a word that the answer must begin with: no other is taken for it."""
        assert self.cells
        self.token, self.heard = os.urandom(8).hex().encode(), b""
        self.cells.settimeout(patience_s)
        with contextlib.suppress(OSError):  # it does not listen, which `watch` will find
            frames.send(self.cells, {"code": code, "token": self.token.decode()})
        self.cells.setblocking(False)

    def listen(self) -> bool:
        """Take in what a session says; False where it has closed its end."""
        assert self.cells
        try:
            said = self.cells.recv(CHUNK)
        except ConnectionResetError:  # closed before it had read all
            said = b""
        self.heard = (self.heard + said)[-CHUNK:]
        return bool(said)

    def answer(self) -> int | None:
        """The exit code of the cell that was asked for, once it has been told."""
        told = self.heard.partition(self.token)[2]
        return told[0] if told else None

    def end(self) -> int:
        """Kill it with all that it has started; its wait status."""
        self.alive = False
        return processes.end_all(self.pid, isolated=self.isolated)

    def pause(self, number: int) -> None:
        """Nothing of a session runs between its cells."""
        processes.signal_all(number, isolated=self.isolated)


def _wait(child: Child, limits: dict[str, Any], owner: socket.socket, deadline: float, cpu_before: float) -> End:
    """Take in what it says until it is over."""
    outputs = {child.stdout.descriptor: child.stdout, child.stderr.descriptor: child.stderr}
    with selectors.DefaultSelector() as selector:
        for descriptor in (child.descriptor, owner.fileno(), *outputs):
            selector.register(descriptor, selectors.EVENT_READ)
        if child.cells:
            selector.register(child.cells.fileno(), selectors.EVENT_READ)
        next_look = time.monotonic() + LOOK_S
        while (now := time.monotonic()) < deadline:
            if now >= next_look:
                if excess := _excess(limits, cpu_before):
                    return excess
                next_look = time.monotonic() + LOOK_S
            ready = {key.fd for key, _ in selector.select(max(0.0, min(deadline, next_look) - now))}
            for descriptor in ready & outputs.keys():
                if not outputs[descriptor].read():
                    selector.unregister(descriptor)
            if owner.fileno() in ready:
                return End("error", reason="nobody waits for it any more")
            if child.cells and child.cells.fileno() in ready:
                if not child.listen():
                    selector.unregister(child.cells.fileno())  # the code has closed it, and most likely ends now
                elif (code := child.answer()) is not None:
                    return End("answer", code)
            if child.descriptor in ready:
                return End("exit")
    return End("timeout", reason=f"more than {limits['wall_s']:g} s of time")


def _excess(limits: dict[str, Any], cpu_before: float) -> End | None:
    """The limit that all processes together have passed, if any."""
    used = processes.usage()
    if used.cpu_s - cpu_before > limits["cpu_s"]:
        return End("timeout", reason=f"more than {limits['cpu_s']:g} s of CPU time")
    if used.memory_mib > limits["memory_mib"]:
        return End("error", reason=f"more than {limits['memory_mib']} MiB of memory")
    if used.processes > limits["processes"]:
        return End("error", reason=f"more than {limits['processes']} processes")
    return None


def sealed(data: bytes) -> int:
    """A descriptor to read the data from; nobody can write there."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def supervise(owner: socket.socket, jail: Jail) -> None:
    """Serve the one who holds the other end, until that is closed. Tells him where this machine does not play along."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (request := frames.receive(owner)):
        return
    try:
        with _scratch(jail, request["limits"]) as scratch:
            work = scratch / "work"
            os.chdir(work)
            os.environ |= {"HOME": str(work), "TMPDIR": str(scratch), "PWD": str(work)}
            _write(work, frames.unpack_files(request["files"]), jail)
            _serve(Child(jail, request), request, owner, work)
    except OSError as error:
        frames.send(owner, {"broken": str(error)})


def _serve(child: Child, request: dict[str, Any], owner: socket.socket, work: Path) -> None:
    try:
        if child.cells:
            _serve_cells(child, owner, work)
        else:
            answer = child.watch(request["limits"], owner)
            frames.send(owner, answer | {"files": _collect(work, request["fetch"])})
    finally:
        child.end()


def _serve_cells(child: Child, owner: socket.socket, work: Path) -> None:
    assert child.cells
    while request := frames.receive(owner):
        if "fetch" in request:
            child.end()
            frames.send(owner, {"files": _collect(work, request["fetch"])})
            continue
        child.pause(signal.SIGCONT)
        child.ask(request["code"], request["limits"]["wall_s"])
        frames.send(owner, child.watch(request["limits"], owner) | {"files": {}})
        child.pause(signal.SIGSTOP)


@contextlib.contextmanager
def _scratch(jail: Jail, limits: dict[str, Any]) -> Any:
    """The folder that holds all that the code writes, with the working folder in it."""
    if jail.isolated:
        _isolate(limits["file_mib"])
        scratch = Path("/tmp")
    else:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        scratch = Path(tempfile.mkdtemp(prefix="verl-sandbox-")).resolve()
    work = scratch / "work"
    work.mkdir()
    os.chown(work, jail.user, jail.user)
    try:
        yield scratch
    finally:
        if not jail.isolated:
            shutil.rmtree(scratch, ignore_errors=True)


def _isolate(file_mib: int) -> None:
    """Fresh namespaces, and in them a private /tmp, /dev/shm and /proc. The pid namespace is fresh already.

    This /proc has processes alone, and of them those that the reader may trace: the supervisor is not there.
    """
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    socket.sethostname("sandbox")
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    private = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", "/tmp", "tmpfs", private, f"size={file_mib}m,nr_inodes=16k,mode=1777")
    kernel.mount("/tmp", "/dev/shm", flags=kernel.MS_BIND)
    kernel.mount("proc", "/proc", "proc", private | kernel.MS_NOEXEC, "subset=pid,hidepid=ptraceable")


def _write(work: Path, files: dict[str, bytes], jail: Jail) -> None:
    """Put the request's files where the code finds them. Nothing untrusted has run yet."""
    for name, data in files.items():
        path = work / name
        for folder in reversed(path.relative_to(work).parents[:-1]):
            if not (work / folder).is_dir():
                (work / folder).mkdir()
                os.chown(work / folder, jail.user, jail.user)
        path.write_bytes(data)
        os.chown(path, jail.user, jail.user)


def _collect(work: Path, names: list[str]) -> dict[str, str]:
    """Files that the code left. All of its processes are gone, so what a path leads to does not change any more."""
    found = {}
    for name in names:
        with contextlib.suppress(OSError):  # missing, a loop of links
            path = (work / name).resolve(strict=True)
            if path.is_relative_to(work) and path.is_file():
                found[name] = path.read_bytes()
    return frames.pack_files(found)
