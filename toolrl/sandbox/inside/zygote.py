"""The fork server: preloads common imports of untrusted code, then forks a supervisor per received channel.

Standard input is a socket to the pool. A channel arrives as a descriptor with one byte. This process exits with the
pool; with isolation, the end of its pid namespace kills all descendants.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import kernel, processes, seccomp
from .child import NUM_FILES_OF_PROGRAMS, Jail
from .kernel import MIB
from .supervisor import supervise

UNCOUNTED_MIB = 1 << 22  # address space of programs, which reserve more than they use
# Some are lazy imports of others, which are slow and may exceed the limit on open files.
PRELOAD = (
    "traceback", "linecache", "tokenize", "encodings.idna", "collections", "itertools", "functools", "heapq", "bisect",
    "math", "cmath", "random", "statistics", "fractions", "decimal", "datetime", "re", "string", "json", "copy",
    "typing", "subprocess", "tempfile", "concurrent.futures.thread", "multiprocessing",
)  # fmt: skip
FILES = {
    "/etc/passwd": "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/tmp/work:/bin/bash\n",
    "/etc/group": "root:x:0:\nuser:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}


def main() -> None:
    """Serve until the pool closes its end. Argument: JSON, see ForkServer."""
    settings = json.loads(sys.argv[1])
    with contextlib.suppress(OSError):  # already done by an owner that is root
        processes.spare(os.getpid())
    control = socket.socket(fileno=os.dup(0))
    for number, handling in ((signal.SIGINT, signal.SIG_DFL), (signal.SIGCHLD, signal.SIG_IGN)):
        signal.signal(number, handling)  # init of a pid namespace ignores signals without a handler
    _preload((*PRELOAD, *settings["preload"]))
    if settings["isolated"]:
        finish_root(settings["bound"])
    else:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    jail = make_jail(settings["isolated"], settings["counted"])
    if settings["programs"]:
        kept = [path for path in settings["bound"] if path.startswith("/tmp/")]
        own = seccomp.program(counted=settings["counted"], for_programs=True)
        jail = replace(jail, filter=own, virtual_mib=UNCOUNTED_MIB, num_files=NUM_FILES_OF_PROGRAMS, kept=kept)
    control.send(b"!")
    _serve(control, jail)


def _preload(names: Sequence[str]) -> None:
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection in a child would touch every page
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        if "w" in rights and inode == "0":  # anonymous memory
            kernel.in_large_pages(*(int(each, 16) for each in addresses.split("-")))


def finish_root(bound: Sequence[str]) -> None:
    """Write files that programs expect, make parents of bound folders accessible, remount read-only.

    The mount of our own modules, loaded by now, reveals a path of the host. Supervisors start with copies of mounts.
    """
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.unmount(str(Path(__file__).parent))
    device = Path("/").stat().st_dev
    for path in bound:
        for folder in Path(path).parents:
            if folder.stat().st_dev == device:
                folder.chmod(0o755)
    Path("/etc").chmod(0o755)
    for name, text in FILES.items():
        Path(name).write_text(text)
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("", "/", flags=flags)


def make_jail(isolated: bool, counted: bool) -> Jail:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    virtual_mib = pages * resource.getpagesize() // MIB + 1
    if not isolated:
        return Jail(isolated=False, user=-1, filter=b"", virtual_mib=virtual_mib)
    users = [int(line.split()[0]) for line in Path("/proc/self/uid_map").read_text().splitlines()]  # 0, unprivileged
    return Jail(isolated=True, user=max(users), filter=seccomp.program(counted=counted), virtual_mib=virtual_mib)


def _serve(control: socket.socket, jail: Jail) -> None:
    own = os.open("/proc/self/ns/pid", os.O_RDONLY) if jail.isolated else -1
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        channel = socket.socket(fileno=descriptors[0])
        if jail.isolated:
            kernel.unshare(kernel.CLONE_NEWPID)  # the next child is init of a pid namespace
        if os.fork() == 0:
            _become_supervisor(channel, control, own, jail)
        if jail.isolated:
            kernel.setns(own, kernel.CLONE_NEWPID)  # required before the next unshare
        channel.close()


def _become_supervisor(channel: socket.socket, control: socket.socket, own: int, jail: Jail) -> None:
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        gc.enable()
        control.close()
        if own >= 0:
            os.close(own)
        supervise(channel, jail)
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(0)
