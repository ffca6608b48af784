"""Allowlist of system calls for untrusted code; all others fail with ENOSYS, as on a kernel without them.

A classic BPF filter over `struct seccomp_data` (Documentation/userspace-api/seccomp_filter.rst of Linux). Excluded are
calls outside of namespaces (keyrings, flock, file watches, asynchronous I/O), resources without a limit (memfd, SysV
memory, pages gifted to a pipe), attack surface, and future calls. Libraries take ENOSYS for an older kernel and fall
back. A call of a foreign architecture kills the process.
"""

import ctypes
import errno
import fcntl
import mmap
import platform
import resource
import socket
import struct
from collections.abc import Sequence

from . import kernel

Program = tuple[tuple[int, int, int, int], ...]  # instructions: code, jump if true, jump if false, k

# name: numbers on x86_64 and aarch64, None where it does not exist
# fmt: off
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # files
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "access": (21, None), "pipe": (22, None), "select": (23, None),
    "dup": (32, 23), "dup2": (33, None), "sendfile": (40, 71), "fcntl": (72, 25), "fsync": (74, 82),
    "fdatasync": (75, 83), "truncate": (76, 45), "ftruncate": (77, 46), "getdents": (78, None), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None),
    "creat": (85, None), "link": (86, None), "unlink": (87, None), "symlink": (88, None), "readlink": (89, None),
    "chmod": (90, None), "fchmod": (91, 52), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "umask": (95, 166), "utime": (132, None), "mknod": (133, None), "statfs": (137, 43), "fstatfs": (138, 44),
    "readahead": (187, 213), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "getxattr": (191, 8),
    "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12),
    "flistxattr": (196, 13), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "getdents64": (217, 61), "fadvise64": (221, 223), "utimes": (235, None), "openat": (257, 56),
    "mkdirat": (258, 34), "mknodat": (259, 33), "fchownat": (260, 54), "futimesat": (261, None),
    "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "linkat": (265, 37),
    "symlinkat": (266, 36), "readlinkat": (267, 78), "fchmodat": (268, 53), "faccessat": (269, 48),
    "pselect6": (270, 72), "ppoll": (271, 73), "splice": (275, 76), "tee": (276, 77), "sync_file_range": (277, 84),
    "utimensat": (280, 88), "fallocate": (285, 47), "dup3": (292, 24), "pipe2": (293, 59), "preadv": (295, 69),
    "pwritev": (296, 70), "renameat2": (316, 276), "copy_file_range": (326, 285), "preadv2": (327, 286),
    "pwritev2": (328, 287), "statx": (332, 291), "close_range": (436, 436), "openat2": (437, 437),
    "faccessat2": (439, 439), "fchmodat2": (452, 452), "ioctl": (16, 29),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "msync": (26, 227), "mincore": (27, 232), "madvise": (28, 233), "mlock": (149, 228), "munlock": (150, 229),
    "mlockall": (151, 230), "munlockall": (152, 231), "mlock2": (325, 284),
    # processes
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95), "getpid": (39, 172),
    "getppid": (110, 173), "gettid": (186, 178), "getpgid": (121, 155), "setpgid": (109, 154), "getpgrp": (111, None),
    "getsid": (124, 156), "setsid": (112, 157), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "prctl": (157, 167), "arch_prctl": (158, None), "set_tid_address": (218, 96), "set_robust_list": (273, 99),
    "get_robust_list": (274, 100), "futex": (202, 98), "futex_waitv": (449, 449), "futex_wake": (454, 454),
    "futex_wait": (455, 455), "futex_requeue": (456, 456), "rseq": (334, 293), "membarrier": (324, 283),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "prlimit64": (302, 261), "getrusage": (98, 165),
    "times": (100, 153), "uname": (63, 160), "sysinfo": (99, 179), "getcpu": (309, 168), "sched_yield": (24, 124),
    "sched_setparam": (142, 118), "sched_getparam": (143, 121), "sched_setscheduler": (144, 119),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "sched_rr_get_interval": (148, 127), "sched_setaffinity": (203, 122), "sched_getaffinity": (204, 123),
    "sched_setattr": (314, 274), "sched_getattr": (315, 275), "getpriority": (140, 141), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "ioprio_get": (252, 31), "restart_syscall": (219, 128),
    # users
    "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "setuid": (105, 146),
    "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143), "getgroups": (115, 158),
    "setgroups": (116, 159), "setresuid": (117, 147), "getresuid": (118, 148), "setresgid": (119, 149),
    "getresgid": (120, 150), "setfsuid": (122, 151), "setfsgid": (123, 152), "capget": (125, 90), "capset": (126, 91),
    # signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigqueueinfo": (129, 138), "rt_sigsuspend": (130, 133),
    "rt_tgsigqueueinfo": (297, 240), "sigaltstack": (131, 132), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "pause": (34, None), "signalfd": (282, None), "signalfd4": (289, 74),
    # time
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "gettimeofday": (96, 169), "time": (201, None),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "getitimer": (36, 102), "setitimer": (38, 103),
    "alarm": (37, None), "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108),
    "timer_getoverrun": (225, 109), "timer_delete": (226, 111), "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
    # events and sockets
    "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "eventfd": (284, None), "eventfd2": (290, 19),
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242),
    "bind": (49, 200), "listen": (50, 201), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "sendmmsg": (307, 269), "recvmmsg": (299, 243), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "setsockopt": (54, 208), "getsockopt": (55, 209),
    # random
    "getrandom": (318, 278),
}
# fmt: on
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # machine: its AUDIT_ARCH, the column in ALLOWED

NEW_NAMESPACES = sum(flag for name, flag in vars(kernel).items() if name.startswith("CLONE_NEW"))
TYPE_BITS = 0xF  # bits of a socket's type, below SOCK_NONBLOCK and SOCK_CLOEXEC
TTY_REQUESTS = (0x5412, 0x541C, 0x541D)  # TIOCSTI, TIOCLINUX, TIOCCONS: inject terminal input
F_SETLEASE, F_NOTIFY = fcntl.F_SETLEASE, fcntl.F_NOTIFY  # blocks other openers of a file; watches a folder
PR_SCHED_CORE = 62  # reserves the sibling hyperthread of a core
ANY_BIT = 0xFFFFFFFF

LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16  # offsets in seccomp_data; the low word comes first on both machines


def _fail(number: int) -> Program:
    """Fail the call with an errno; 0: succeed without effect."""
    return ((RETURN, 0, 0, 0x00050000 | number),)


ALLOW: Program = ((RETURN, 0, 0, 0x7FFF0000),)
KILL: Program = ((RETURN, 0, 0, 0x80000000),)
REFUSE = _fail(errno.ENOSYS)


def _load(argument: int, *, high: bool = False) -> tuple[int, int, int, int]:
    return (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument + 4 * high)


def _one_of(argument: int, values: Sequence[int], then: Program, otherwise: Program, bits: int = ANY_BIT) -> Program:
    """Branch on whether the low word of an argument, masked by `bits`, is one of the values."""
    last = len(values) - 1
    jumps = [(JUMP_EQUAL, last - place + len(otherwise), 0, value) for place, value in enumerate(values)]
    return (_load(argument), (AND, 0, 0, bits), *jumps, *otherwise, *then)


def _any_bit(argument: int, bits: int, then: Program, otherwise: Program, *, high: bool = False) -> Program:
    """Branch on whether the low (or high) word of an argument has any of the bits."""
    return (_load(argument, high=high), (JUMP_ANY_BIT, 0, len(then), bits), *then, *otherwise)


# IPv4 and IPv6: TCP and UDP only, since other protocols make the kernel load modules.
_INTERNET = _one_of(
    1,
    (socket.SOCK_STREAM, socket.SOCK_DGRAM),
    _one_of(2, (0, socket.IPPROTO_TCP, socket.IPPROTO_UDP), ALLOW, _fail(errno.EPROTONOSUPPORT)),
    _fail(errno.ESOCKTNOSUPPORT),
    TYPE_BITS,
)
# Other families (vsock, netlink, packet): not all are confined by a network namespace.
_NOT_UNIX = _one_of(0, (socket.AF_INET, socket.AF_INET6), _INTERNET, _fail(errno.EAFNOSUPPORT))
_SOCKET = _one_of(0, (socket.AF_UNIX,), ALLOW, _NOT_UNIX)
# The core file limit is kept: at 0, a core pattern that pipes to a program would start it.
_KEEP_LIMIT = _fail(0)
_CORE_LIMIT = _any_bit(2, ANY_BIT, _KEEP_LIMIT, _any_bit(2, ANY_BIT, _KEEP_LIMIT, ALLOW, high=True))
_OWN_LIMIT = _one_of(1, (resource.RLIMIT_CORE,), _CORE_LIMIT, ALLOW)
# Calls that depend on their arguments.
RULES = {
    "clone": _any_bit(0, NEW_NAMESPACES, _fail(errno.EPERM), ALLOW),
    "socket": _SOCKET,
    "socketpair": _one_of(0, (socket.AF_UNIX,), ALLOW, _fail(errno.EAFNOSUPPORT)),
    "ioctl": _one_of(1, TTY_REQUESTS, _fail(errno.EPERM), ALLOW),
    "fcntl": _one_of(1, (F_SETLEASE, F_NOTIFY), _fail(errno.EPERM), ALLOW),
    "prctl": _one_of(0, (PR_SCHED_CORE,), _fail(errno.EPERM), ALLOW),
    "setrlimit": _one_of(0, (resource.RLIMIT_CORE,), _KEEP_LIMIT, ALLOW),
    "prlimit64": _one_of(0, (0,), _OWN_LIMIT, _fail(errno.EPERM)),  # 0: the calling process
}

# In addition without a memory cgroup: anonymous shared memory, and socket buffers above the default.
UNCOUNTED = {
    "mmap": _any_bit(3, mmap.MAP_SHARED, _any_bit(3, mmap.MAP_ANONYMOUS, _fail(errno.EPERM), ALLOW), ALLOW),
    "setsockopt": _one_of(1, (socket.SOL_SOCKET,), _one_of(2, (socket.SO_SNDBUF,), _fail(errno.EPERM), ALLOW), ALLOW),
}


# In addition for programs of others, some of which do not start without: a lock that is none, not even of own files.
FLOCK = (73, 32)
LOCKS_NOTHING = {"flock": _fail(0)}


def instructions(machine: str, *, counted: bool = True, for_programs: bool = False) -> Program:
    """The filter. Raises KeyError for an unknown machine. counted: a cgroup accounts all memory"""
    arch, column = MACHINES[machine]
    rules = RULES | ({} if counted else UNCOUNTED) | (LOCKS_NOTHING if for_programs else {})
    calls = ALLOWED | ({"flock": FLOCK} if for_programs else {})
    numbers = {name: pair[column] for name, pair in calls.items()}
    known = {number: rules.get(name, ALLOW) for name, number in numbers.items() if number is not None}
    runs: list[tuple[int, Program]] = []  # first number, action from there on
    for number in range(max(known) + 2):
        verdict = known.get(number, REFUSE)
        if not runs or runs[-1][1] != verdict:
            runs.append((number, verdict))
    head = ((LOAD, 0, 0, ARCH_AT), (JUMP_EQUAL, 1, 0, arch), *KILL, (LOAD, 0, 0, NUMBER_AT))
    return head + _search(runs)


def _search(runs: Sequence[tuple[int, Program]]) -> Program:
    """Binary search: the kernel tries every number when the filter is installed."""
    if len(runs) == 1:
        return runs[0][1]
    middle = len(runs) // 2
    below = _search(runs[:middle])
    return ((JUMP_AT_LEAST, len(below), 0, runs[middle][0]), *below, *_search(runs[middle:]))


def program(machine: str = platform.machine(), *, counted: bool = True, for_programs: bool = False) -> bytes:
    assembled = instructions(machine, counted=counted, for_programs=for_programs)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in assembled)


def install(filter_: bytes) -> None:
    """Filter this process and all it starts, for good, after it has given up its privileges."""
    buffer = ctypes.create_string_buffer(filter_, len(filter_))
    head = struct.pack("@HP", len(filter_) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    head_buffer = ctypes.create_string_buffer(head, len(head))
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.addressof(head_buffer))
