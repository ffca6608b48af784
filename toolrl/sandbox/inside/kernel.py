"""System calls missing from Python 3.11: namespaces, mounts, capabilities."""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct

MIB = 1 << 20

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1 << bit for bit in (0, 1, 2, 3, 5, 12, 14, 18)
)

MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
LARGE_PAGE = 2 << 20
MADV_COLLAPSE = 25
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move to fresh namespaces of these kinds; CLONE_NEWPID applies to the next child."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(descriptor: int, kind: int) -> None:
    _check(_libc.setns(descriptor, kind), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    names = (name.encode() or None for name in (source, target, kind))
    _check(_libc.mount(*names, ctypes.c_ulong(flags), data.encode() or None), f"mount on {target}")


def unmount(target: str) -> None:
    """umount2(2) with MNT_DETACH, also for busy mounts."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount of {target}")


def in_large_pages(start: int, end: int) -> None:
    """Ask the kernel for 2 MiB pages between two addresses: a fork then copies less."""
    first, last = -(-start // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
    if last > first:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)


def prctl(option: int, value: int = 0, pointer: int | None = None) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_void_p(pointer), 0, 0), f"prctl({option})")


def raise_loopback() -> None:
    """Make the loopback interface of this network namespace usable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def drop_capabilities() -> None:
    """Drop all capabilities for good, including those from setuid programs."""
    with contextlib.suppress(OSError):  # past the last capability
        for capability in range(64):
            prctl(PR_CAPBSET_DROP, capability)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
