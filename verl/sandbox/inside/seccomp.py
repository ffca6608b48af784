"""System calls that untrusted code has no use for are refused: what namespaces do not cover, and surface to attack.

A filter in classic BPF over `struct seccomp_data` (Documentation/userspace-api/seccomp_filter.rst of Linux). What is
refused fails with EPERM, so that programs go on; a call of a foreign architecture ends the process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator

from . import kernel

# name: numbers on x86_64 and aarch64, None where it does not exist
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # keyrings belong to the user, not to a namespace
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # memory that no limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    # the machine
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    # where kernels were broken before
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
}
# Memory that only a cgroup counts, refused where there is none: vmsplice; setsockopt of the size of a buffer; mmap of
# memory that is shared without a file. Numbers on x86_64 and aarch64.
UNCOUNTED = {"vmsplice": (278, 75), "setsockopt": (54, 208), "mmap": (9, 222)}
SOL_SOCKET, SO_SNDBUF = 1, 7
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
# machine: its AUDIT_ARCH, the column in REFUSED, and the calls of which arguments decide: clone, socket, prlimit64
MACHINES = {"x86_64": (0xC000003E, 0, (56, 41, 302)), "aarch64": (0xC00000B7, 1, (220, 198, 261))}
CLONE3 = 435  # its flags lie in memory that a filter cannot read; libc falls back to clone
X32 = 0x40000000  # the numbers of another ABI of x86_64

NEW_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)
FAMILIES = (1, 2, 10)  # unix, IPv4, IPv6: others (vsock, netlink, packet) are not all confined by a network namespace

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, ARGUMENT_AT = 0, 4, 16  # offsets in seccomp_data; the low word comes first on both machines
ALLOW, KILL = 0x7FFF0000, 0x80000000


def _refuse(number: int = errno.EPERM) -> tuple[int, int, int, int]:
    return (RETURN, 0, 0, 0x00050000 | number)


def instructions(machine: str, *, counted: bool) -> Iterator[tuple[int, int, int, int]]:
    """The filter as (code, jump if true, jump if false, k). KeyError for a machine whose numbers are not known.

    counted: a cgroup counts all memory
    """
    arch, column, (clone, socket, prlimit64) = MACHINES[machine]
    allow = (RETURN, 0, 0, ALLOW)
    yield from ((LOAD, 0, 0, ARCH_AT), (JUMP_EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT))
    yield from ((JUMP_AT_LEAST, 0, 1, X32), _refuse())
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            yield from ((JUMP_EQUAL, 0, 1, numbers[column] or 0), _refuse())
    if not counted:
        yield from _refuse_uncounted(column)
    yield from ((JUMP_EQUAL, 0, 1, CLONE3), _refuse(errno.ENOSYS))
    yield from ((JUMP_EQUAL, 0, 4, clone), (LOAD, 0, 0, ARGUMENT_AT), (JUMP_ANY_BIT, 0, 1, NEW_NAMESPACES))
    yield from (_refuse(), allow)
    yield from ((JUMP_EQUAL, 0, 4, prlimit64), (LOAD, 0, 0, ARGUMENT_AT), (JUMP_EQUAL, 1, 0, 0))  # 0: of itself
    yield from (_refuse(), allow)
    rest = len(FAMILIES)
    yield from ((JUMP_EQUAL, 0, rest + 3, socket), (LOAD, 0, 0, ARGUMENT_AT))
    yield from ((JUMP_EQUAL, rest - number, 0, family) for number, family in enumerate(FAMILIES))
    yield from (_refuse(errno.EAFNOSUPPORT), allow)
    yield allow


def _refuse_uncounted(column: int) -> Iterator[tuple[int, int, int, int]]:
    vmsplice, setsockopt, mmap = (UNCOUNTED[name][column] for name in ("vmsplice", "setsockopt", "mmap"))
    level, option, flags = (ARGUMENT_AT + 8 * index for index in (1, 2, 3))
    yield from ((JUMP_EQUAL, 0, 1, vmsplice), _refuse())
    yield from ((JUMP_EQUAL, 0, 6, setsockopt), (LOAD, 0, 0, level), (JUMP_EQUAL, 0, 3, SOL_SOCKET))
    yield from ((LOAD, 0, 0, option), (JUMP_EQUAL, 0, 1, SO_SNDBUF), _refuse(), (RETURN, 0, 0, ALLOW))
    yield from ((JUMP_EQUAL, 0, 5, mmap), (LOAD, 0, 0, flags), (JUMP_ANY_BIT, 0, 2, MAP_SHARED))
    yield from ((JUMP_ANY_BIT, 0, 1, MAP_ANONYMOUS), _refuse(), (RETURN, 0, 0, ALLOW))


def program(machine: str = platform.machine(), *, counted: bool = True) -> bytes:
    """The filter as the kernel reads it."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions(machine, counted=counted))


def install(filter_: bytes) -> None:
    """Filter this process and all it starts, for good. It must have given up its privileges before."""
    buffer = ctypes.create_string_buffer(filter_, len(filter_))
    head = struct.pack("@HP", len(filter_) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    head_buffer = ctypes.create_string_buffer(head, len(head))
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.addressof(head_buffer))
