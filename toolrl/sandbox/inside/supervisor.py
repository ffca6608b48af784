"""Starts untrusted code, monitors it, kills it and reports the outcome: consecutive executions, or one session.

The answer goes through a socket that the code's processes never hold. With isolation this process is init of its own
pid namespace: no process inside can signal or trace it, and they die with it. The code's process is a fork of this one:
no code, input or output enters its memory, or else (a session, fetched files) it is not reused.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import frames, kernel, processes
from .cgroup import Cgroup
from .child import REFUSED, Jail, RefusedError, become
from .kernel import MIB

POLL_S = 0.1  # interval of usage checks
PAUSED_POLL_S = 0.25  # the same between cells, if no cgroup freezes the session
PAUSED_CPU_S = 0.1  # CPU time allowance between cells, after SIGSTOP
BEAT_S = 2.0  # heartbeat interval
CHUNK = 1 << 16
INODE_KIB = 16  # charged per file or folder of a private /tmp beyond the first 16,384
NOWHERE = 0  # standard input, which is /dev/null


class Output:
    """Moves the output of a pipe into a file, up to a bound; the rest is dropped.

    last: its end is kept, not its beginning: the file is written anew from its start, where `start` is the first byte
    """

    def __init__(self, descriptor: int, bound: int, *, last: bool) -> None:
        self.descriptor = descriptor
        self.bound = bound
        self.last = last
        self.begin(-1)

    def begin(self, file: int) -> None:
        self.file, self.room, self.full = file, self.bound, False

    @property
    def start(self) -> int:
        return self.bound - self.room if self.full else 0

    def move(self) -> bool:
        """Splice a chunk, which never enters this process's memory; False if none is available."""
        if not self.room and self.last:
            self.full, self.room = True, self.bound
            os.lseek(self.file, 0, os.SEEK_SET)
        target, most = (self.file, min(self.room, CHUNK)) if self.room else (NOWHERE, CHUNK)
        try:
            moved = os.splice(self.descriptor, target, most, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            return False
        self.room -= moved if target == self.file else 0
        return moved > 0


@dataclass(frozen=True)
class End:
    status: str  # exit, answer (from a session's cell), timeout, error
    code: int | None = None  # set for an answer
    reason: str = ""  # set for a kill


@dataclass(frozen=True)
class Post:
    """Resources for the lifetime of a supervisor. wakes: readable when a descendant has exited"""

    owner: socket.socket
    jail: Jail
    cgroup: Cgroup | None
    wakes: int


class Child:
    """The process that runs untrusted code, and our ends of its pipes and sockets."""

    def __init__(self, post: Post, task: dict[str, Any], request: int, stdin: int, *, session: bool) -> None:
        cgroup, limits = post.cgroup, task["limits"]
        self.post, self.cgroup = post, cgroup
        self.limits = limits
        self.over: End | None = None  # set if a session ended between its cells
        self.cells: socket.socket | None = None
        self.token = self.received = b""
        pipes = [os.pipe() for _ in range(2)]
        descriptors = [stdin, *(writes for _, writes in pipes)]
        if session:
            self.cells, remote = socket.socketpair()
            self.cells.setblocking(False)
            descriptors.append(remote.detach())
        reported, report = os.pipe()
        self.isolated = post.jail.isolated
        self.alive = True
        if cgroup:
            cgroup.begin(limits)
        self.cpu_before = cgroup.cpu_s() if cgroup else processes.cpu_s_of_ended()
        self.pid = os.fork()
        if self.pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become(post.jail, limits, request, descriptors, report)
        for descriptor in (*descriptors, request, report):
            os.close(descriptor)
        if problem := os.read(reported, CHUNK).decode():
            raise RefusedError(problem.removeprefix(REFUSED)) if problem.startswith(REFUSED) else OSError(problem)
        os.close(reported)
        if cgroup and session:
            cgroup.take(self.pid)
        last = "last_output" in task
        self.outputs = [Output(reads, limits["output_kib"] * 1024, last=last) for reads, _ in pipes]
        self.descriptor = os.pidfd_open(self.pid)

    def watch(self, limits: dict[str, Any], files: Sequence[int]) -> dict[str, Any]:
        """Wait until the code exits, answers or exceeds a limit; its output goes to the files."""
        for output, file in zip(self.outputs, files, strict=True):
            output.begin(file)
        started = time.monotonic()
        end = self.over or _wait(self, limits, started + limits["wall_s"])
        if end.status in ("exit", "answer") and self.cgroup and self.cgroup.out_of_memory():
            end = _too_much_memory(self.limits)
        code = end.code
        if end.status != "answer":
            wait_status = self.end()
            code = os.waitstatus_to_exitcode(wait_status) if end.status == "exit" else None
        for output, file in zip(self.outputs, files, strict=True):
            chunks = range(output.bound // CHUNK + 2)  # bounded: a persistent writer cannot block us
            all(output.move() for _ in chunks)
            os.close(file)
        by_code = "finished" if code == 0 else "error"
        return {
            "status": by_code if end.status in ("exit", "answer") else end.status,
            "return_code": code,
            "seconds": time.monotonic() - started,
            "reason": end.reason,
            "alive": self.alive,
            "starts": [output.start for output in self.outputs],
            "files": {},
            "left_out": {},
        }

    def ask(self, code: str, patience_s: float) -> None:
        """Send a session its next cell, with a token that authenticates the answer."""
        assert self.cells
        self.token, self.received = os.urandom(8).hex().encode(), b""
        self.cpu_before = self.cpu_s()
        self.cells.settimeout(patience_s)
        with contextlib.suppress(OSError):  # it has closed the socket, which `watch` detects
            frames.send(self.cells, {"code": code, "token": self.token.decode()})
        self.cells.setblocking(False)

    def listen(self) -> bool:
        """Receive data from a session; False if it has closed its end."""
        assert self.cells
        try:
            data = self.cells.recv(CHUNK)
        except ConnectionResetError:  # closed with unread data
            data = b""
        self.received = (self.received + data)[-CHUNK:]
        return bool(data)

    def answer(self) -> int | None:
        """The exit code of the current cell, once received."""
        code = self.received.partition(self.token)[2]
        return code[0] if code else None

    def end(self) -> int:
        """Kill it with all descendants; returns its wait status."""
        if not self.alive:
            return 0
        self.alive = False
        status = processes.end_all(self.pid, isolated=self.isolated)
        if self.cgroup:
            self.cgroup.end()
        return status

    def close(self) -> None:
        self.end()
        for descriptor in (self.descriptor, *(output.descriptor for output in self.outputs)):
            os.close(descriptor)

    def cpu_s(self) -> float:
        """Total CPU time, including earlier executions."""
        return self.cgroup.cpu_s() if self.cgroup else processes.usage(isolated=self.isolated).cpu_s

    def excess(self, limits: dict[str, Any]) -> End | None:
        if self.cgroup and self.cgroup.out_of_memory():
            return _too_much_memory(self.limits)
        used = None if self.cgroup else processes.usage(isolated=self.isolated)  # a cgroup enforces the other limits
        if (used.cpu_s if used else self.cpu_s()) - self.cpu_before > limits["cpu_s"]:
            return End("timeout", reason=f"more than {limits['cpu_s']:g} s of CPU time")
        if used and used.memory_mib > limits["memory_mib"]:
            return _too_much_memory(limits)
        if used and used.processes > limits["processes"]:
            return End("error", reason=f"more than {limits['processes']} processes")
        return None

    def pause(self, *, on: bool) -> None:
        """Stop all processes of a session between its cells, or let them continue."""
        if self.cgroup and self.cgroup.freezes:
            self.cgroup.freeze(on)
        else:
            processes.signal_all(signal.SIGSTOP if on else signal.SIGCONT, isolated=self.isolated)

    def wait_paused(self) -> None:
        """Wait for the owner. Code can undo SIGSTOP: it is killed if it continues to run."""
        if self.cgroup and self.cgroup.freezes:
            return
        self.cpu_before = self.cpu_s()
        while self.alive and not select.select([self.post.owner], [], [], PAUSED_POLL_S)[0]:
            self.over = self.excess(self.limits | {"cpu_s": PAUSED_CPU_S})
            if self.over:
                self.end()


def _too_much_memory(limits: dict[str, Any]) -> End:
    return End("error", reason=f"more than {limits['memory_mib']} MiB of memory")


def _wait(child: Child, limits: dict[str, Any], deadline: float) -> End:
    owner, wakes = child.post.owner, child.post.wakes
    outputs = {output.descriptor: output for output in child.outputs}
    poll = select.poll()
    for descriptor in (child.descriptor, wakes, owner.fileno(), *outputs):
        poll.register(descriptor, select.POLLIN)
    if child.cells:
        poll.register(child.cells.fileno(), select.POLLIN)
    next_poll = time.monotonic() + POLL_S
    next_beat = time.monotonic() + BEAT_S
    while (now := time.monotonic()) < deadline:
        if now >= next_poll:
            if excess := child.excess(limits):
                return excess
            next_poll = time.monotonic() + POLL_S
        if now >= next_beat:
            frames.send(owner, {"beat": True})
            next_beat = now + BEAT_S
        ready = {descriptor for descriptor, _ in poll.poll(1000 * max(0.0, min(deadline, next_poll) - now))}
        if wakes in ready:
            os.read(wakes, CHUNK)
            processes.reap_orphans(child.pid)
        for descriptor in ready & outputs.keys():
            if not outputs[descriptor].move():
                poll.unregister(descriptor)
        if owner.fileno() in ready:
            return End("error", reason="the owner has disconnected")
        if child.cells and child.cells.fileno() in ready:
            if not child.listen():
                poll.unregister(child.cells.fileno())  # closed by the code, which most likely exits now
            elif (code := child.answer()) is not None:
                return End("answer", code)
        if child.descriptor in ready:
            return End("exit")
    return End("timeout", reason=f"more than {limits['wall_s']:g} s of time")


def supervise(owner: socket.socket, jail: Jail) -> None:
    """Serve the owner of the other end until it is closed."""
    mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY) if jail.isolated else -1
    wakes = processes.wake_at_ends()
    try:
        hello, descriptors = frames.receive(owner)
        cgroup = Cgroup(hello["cgroup"], descriptors) if hello and descriptors else None  # which this process joins
        post = Post(owner, jail, cgroup, wakes)
        while True:
            if jail.isolated:  # fresh namespaces; that of pids is kept: it has no other process left
                kernel.setns(mounts, kernel.CLONE_NEWNS)  # the fork server's mounts; releases the last files
                kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
            task, descriptors = frames.receive(owner)
            if not task:
                return
            if "port" in task:
                _listen(task["port"], descriptors.pop())
            with _scratch(jail, task["limits"]) as work:
                _serve(task, descriptors, post, work)
    except RefusedError as error:
        frames.send(owner, {"refused": str(error)})
    except OSError as error:
        with contextlib.suppress(OSError):  # the owner has exited
            frames.send(owner, {"broken": str(error)})


def _listen(port: int, door: int) -> None:
    """Send the owner a socket that listens on this port of the execution's own loopback interface."""
    kernel.raise_loopback()
    with socket.socket(fileno=door) as channel, socket.create_server(("127.0.0.1", port)) as listening:
        socket.send_fds(channel, [b"!"], [listening.fileno()])


def _serve(task: dict[str, Any], descriptors: list[int], post: Post, work: Path) -> None:
    request, stdin, *files = descriptors
    child = Child(post, task, request, stdin, session=not files)
    try:
        if child.cells:
            _serve_cells(child, post.owner, work, task["limits"]["file_mib"])
        else:
            answer = child.watch(task["limits"], files)
            frames.send(post.owner, answer | _collect(work, task["fetch"], task["fetch_mib"]))
    finally:
        child.close()


def _serve_cells(child: Child, owner: socket.socket, work: Path, file_mib: int) -> None:
    while True:
        child.wait_paused()
        task, files = frames.receive(owner)
        if not task:
            return
        if "fetch" in task:
            child.end()
            frames.send(owner, _collect(work, task["fetch"], file_mib))
            continue
        child.pause(on=False)
        child.ask(task["code"], task["limits"]["wall_s"])
        frames.send(owner, child.watch(task["limits"], files))
        child.pause(on=True)


@contextlib.contextmanager
def _scratch(jail: Jail, limits: dict[str, Any]) -> Iterator[Path]:
    """The working folder, inside a folder for all files that the code writes."""
    if jail.isolated:
        scratch = Path("/tmp")
        _mount_scratch(limits["file_mib"], jail.kept)
    else:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        scratch = Path(tempfile.mkdtemp(prefix="verl-sandbox-")).resolve()
        os.environ |= {"HOME": f"{scratch}/work", "TMPDIR": str(scratch), "PWD": f"{scratch}/work"}
    work = scratch / "work"
    work.mkdir()
    os.chown(work, jail.user, jail.user)
    os.chdir(work)
    try:
        yield work
    finally:
        os.chdir("/")
        if not jail.isolated:
            _remove(scratch)


def _remove(folder: Path) -> None:
    """In a separate process: file names must not stay in memory that the next execution inherits."""
    pid = os.fork()
    if pid == 0:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _mount_scratch(file_mib: int, kept: Sequence[str]) -> None:
    """A private /tmp, /dev/shm and /proc, which lists only processes that the reader may trace.

    kept: paths of the host below /tmp that stay visible
    """
    private = kernel.MS_NOSUID | kernel.MS_NODEV
    held = [(path, os.open(path, os.O_PATH)) for path in kept]
    inodes = max(16, file_mib // INODE_KIB)
    kernel.mount("tmpfs", "/tmp", "tmpfs", private, f"size={file_mib}m,nr_inodes={inodes}k,mode=1777")
    for path, descriptor in held:  # read-only, as they were mounted
        _make_mount_point(Path(path), is_folder=stat.S_ISDIR(os.fstat(descriptor).st_mode))
        kernel.mount(f"/proc/self/fd/{descriptor}", path, flags=kernel.MS_BIND | kernel.MS_REC)
        os.close(descriptor)
    kernel.mount("/tmp", "/dev/shm", flags=kernel.MS_BIND)
    kernel.mount("proc", "/proc", "proc", private | kernel.MS_NOEXEC, "subset=pid,hidepid=ptraceable")


def _make_mount_point(path: Path, *, is_folder: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        path.mkdir(exist_ok=True)
    elif not path.exists():
        path.touch()


def _collect(work: Path, names: list[str], file_mib: int) -> dict[str, Any]:
    """Requested files, and why others are not among them; without those that are not there."""
    files, left_out, room = {}, {}, file_mib * MIB
    for name in names:
        with contextlib.suppress(OSError):  # missing, an invalid name
            (work / name).lstat()
            path = Path(os.path.realpath(work / name))
            if not path.is_relative_to(work) or not path.is_file():
                left_out[name] = "is no file of the working folder"
                continue
            if path.stat().st_size > room:  # a sparse file, or one file under several names
                left_out[name] = f"takes more than {file_mib} MiB in all"
                continue
            files[name] = path.read_bytes()
            room -= len(files[name])
    return {"files": frames.pack_files(files), "left_out": left_out}
