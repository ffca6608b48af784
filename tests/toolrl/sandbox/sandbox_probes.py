"""Ways out of a sandbox, each as code that prints ESCAPED or BLOCKED. `host` holds what there is outside.

`outside`: who gets out without isolation, which shows that a probe would notice: anyone, root, or never tried there,
because it would do harm or needs what a test machine may lack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Calls that must not be there: numbers on x86_64 and aarch64, None where a call does not exist.
# fmt: off
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "sethostname": (170, 161), "setdomainname": (171, 162),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "fanotify_init": (300, 262),
    "personality": (135, 92), "clone3": (435, 435), "flock": (73, 32), "semop": (65, 193), "semctl": (66, 191),
    "shmctl": (31, 195), "shmdt": (67, 197), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "semtimedop": (220, 192), "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183), "mq_notify": (244, 184), "mq_getsetattr": (245, 185), "io_setup": (206, 0),
    "io_destroy": (207, 1), "io_submit": (209, 2), "io_getevents": (208, 4), "io_cancel": (210, 3),
    "io_pgetevents": (333, 292), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27), "inotify_rm_watch": (255, 28), "fanotify_mark": (301, 263), "vmsplice": (278, 75),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "get_mempolicy": (239, 236), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "set_mempolicy_home_node": (450, 450), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "seccomp": (317, 277), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446), "pkey_mprotect": (329, 288),
    "pkey_alloc": (330, 289), "pkey_free": (331, 290), "remap_file_pages": (216, 234), "sync": (162, 81),
    "syncfs": (306, 267), "vhangup": (153, 58), "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42),
    "cachestat": (451, 451), "map_shadow_stack": (453, 453), "statmount": (457, 457), "listmount": (458, 458),
    "lsm_get_self_attr": (459, 459), "lsm_set_self_attr": (460, 460), "lsm_list_modules": (461, 461),
    "mseal": (462, 462), "setxattrat": (463, 463), "getxattrat": (464, 464), "listxattrat": (465, 465),
    "removexattrat": (466, 466), "open_tree_attr": (467, 467), "file_getattr": (468, 468), "file_setattr": (469, 469),
}
# fmt: on

PRELUDE = """
import ctypes, errno, fcntl, os, resource, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = libc.syscall(host["numbers"][name], *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result
def tcp(*address):
    return socket.create_connection(address, timeout=2).getpeername()
def udp(*address):
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.connect(address)
        for _ in range(2):  # the second one shows whether the first was refused
            client.send(b"x")
            time.sleep(0.05)
def flock(path, kind):
    first, second = open(path), open(path)
    fcntl.flock(first, kind | fcntl.LOCK_NB)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "locked"
    raise OSError("a lock without effect")
def unix(address):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
def read(path):
    return open(path, "rb").read(100)
def processes():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield int(pid), open(f"/proc/{pid}/cmdline").read()
        except OSError:
            pass
def find(text):
    for pid, command in processes():
        if text in command and pid != os.getpid():
            return pid
    raise ProcessLookupError(text)
def ours(program):
    done = subprocess.run(program, shell=True, capture_output=True, stdin=subprocess.DEVNULL, text=True)
    if done.returncode:
        raise OSError(done.stderr)
    return done.stdout
def refused(*actions):
    for place, action in enumerate(actions):
        try:
            return print("ESCAPED", place, action())
        except (OSError, ValueError, MemoryError) as error:
            last = error
    print("BLOCKED", repr(last))
def attempt(action):
    try:
        print("ESCAPED", action())
    except (OSError, ValueError, MemoryError) as error:
        print("BLOCKED", repr(error))
"""


@dataclass(frozen=True)
class Probe:
    """code: an expression that raises where the way is closed, or statements that print what came of it"""

    name: str
    code: str
    outside: Literal["anyone", "root", "never"] = "anyone"

    def program(self, host: dict[str, object]) -> str:
        """All of the code."""
        body = self.code if "\n" in self.code else f"attempt(lambda: {self.code})"
        return f"host = {host!r}\n{PRELUDE}\n{body}\n"


PROBES = (
    # network
    Probe("tcp to the internet", "tcp('1.1.1.1', 80)", "never"),
    Probe("names of the internet", "socket.getaddrinfo('example.com', 80)", "never"),
    Probe("tcp to a service of the host", "tcp('127.0.0.1', host['tcp'])"),
    Probe("udp to a service of the host", "udp('127.0.0.1', host['udp'])"),
    Probe("udp broadcast", "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('224.0.0.1', 9))", "never"),
    Probe("abstract unix socket of the host", "unix('\\0' + host['abstract'])"),
    Probe("unix socket in a folder of the host", "unix(host['folder'] + '/socket')"),
    Probe("vsock to the hypervisor", "socket.socket(40, socket.SOCK_STREAM)", "never"),
    Probe("raw packets", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "root"),
    Probe("raw ip", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "root"),
    Probe("netlink", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    # files
    Probe("password hashes", "read('/etc/shadow')", "root"),
    Probe("a file of another user", "read(host['folder'] + '/secret')"),
    Probe("files of the project", "read(host['project'])"),
    Probe("writing to the interpreter's packages", "os.open(ctypes.__file__, os.O_WRONLY)", "root"),
    Probe("writing to the sandbox's own code", "os.open('/sandbox/inside/zygote.py', os.O_WRONLY)", "never"),
    Probe("writing to the system", "os.open('/usr/lib/os-release', os.O_WRONLY)", "root"),
    Probe("writing to the root folder", "os.mkdir('/probe') or os.rmdir('/probe')", "root"),
    Probe("writing to /etc", "os.open('/etc/hosts', os.O_WRONLY)", "root"),
    Probe("a link out of the working folder", "os.symlink(host['folder'] + '/secret', 'link') or read('link')"),
    Probe(
        "making a device node", "os.mknod('node', 0o600 | 0o060000, os.makedev(254, 0)) or os.unlink('node')", "root"
    ),
    Probe("kernel messages by device", "os.open('/dev/kmsg', os.O_RDONLY | os.O_NONBLOCK)", "root"),
    Probe("memory by device", "os.open('/dev/mem', os.O_RDONLY)", "never"),
    Probe("pseudo terminals", "os.openpty()"),
    Probe("/sys", "os.listdir('/sys/kernel')"),
    Probe("/proc/sys", "os.open('/proc/sys/kernel/hostname', os.O_WRONLY)", "root"),
    Probe("core pattern", "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)", "root"),
    Probe("sysrq", "os.open('/proc/sysrq-trigger', os.O_WRONLY)", "never"),
    Probe("chroot", "os.chroot('.')", "root"),
    Probe("mounting", "libc.mount(b'x', b'/tmp/work', b'tmpfs', 0, None) and call('mount', 0, 0, 0, 0, 0)", "never"),
    Probe("uncovering what is below a mount", "call('umount2', b'/tmp', 2)", "never"),
    Probe("opening a file by its handle", "call('open_by_handle_at', -1, 0, 0)", "never"),
    # other processes
    Probe("processes of the host", "find(host['marker'])"),
    Probe("an execution beside this one", "os.kill(find('victim'), 0)"),
    Probe("files of an execution beside this one", "read('/tmp/victim-secret')"),
    Probe("shared memory of an execution beside this one", "read('/dev/shm/victim-secret')"),
    Probe("abstract unix socket of an execution beside this one", "unix('\\0victim-socket')"),
    Probe("unix socket of an execution beside this one", "unix('/tmp/victim-socket')"),
    Probe("environment of the supervisor", "read(f'/proc/{os.getppid()}/environ')"),
    Probe("memory of the supervisor", "os.open(f'/proc/{os.getppid()}/mem', os.O_RDONLY)"),
    Probe("descriptors of the supervisor", "os.listdir(f'/proc/{os.getppid()}/fd')"),
    Probe("limits of the supervisor", "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)"),
    Probe("tracing the supervisor", "call('ptrace', 0x4206, os.getppid(), 0, 0)", "root"),
    Probe("a descriptor out of the supervisor", "call('pidfd_getfd', os.pidfd_open(os.getppid()), 1, 0)", "root"),
    Probe(
        "killing the supervisor",
        "for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):\n"
        "    try: os.kill(os.getppid(), number)\n"
        "    except PermissionError: pass\n"
        "time.sleep(0.2)\n"
        "print('BLOCKED', 'the supervisor answers')",
        "never",
    ),
    Probe(
        "killing everybody",
        "try: os.kill(-1, signal.SIGKILL)\nexcept (ProcessLookupError, PermissionError): pass\nprint('BLOCKED')",
        "never",
    ),
    Probe("namespaces of the supervisor", "os.open(f'/proc/{os.getppid()}/ns/mnt', os.O_RDONLY)", "root"),
    # privileges
    Probe("becoming root", "os.setuid(0)", "root"),
    Probe("a setuid program", "ours('su -c id root')", "root"),
    Probe("a user namespace by unshare", "call('unshare', 0x10000000)"),
    Probe("a user namespace by a program", "ours('unshare --user --map-root-user id')"),
    Probe("a user namespace by clone", "call('clone', 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0) or os._exit(0)"),
    Probe("a user namespace by clone3", "call('clone3', struct.pack('8Q', 0x10000000, *[0] * 7), 64)", "never"),
    Probe("entering a namespace", "call('setns', os.open('/proc/self/ns/net', os.O_RDONLY), 0)", "root"),
    Probe("changing the host's name", "socket.sethostname('probe')", "never"),
    Probe("setting the clock", "time.clock_settime(time.CLOCK_REALTIME, time.time())", "never"),
    Probe("real-time priority", "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", "root"),
    Probe("a better priority", "os.nice(-5)", "root"),
    Probe("raising a limit", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "never"),
    Probe("keyrings", "call('keyctl', 0, -3, 1)"),
    Probe("kernel log", "call('syslog', 10, 0, 0)", "root"),
    Probe("loading a kernel module", "call('init_module', 0, 0, 0)", "never"),
    Probe("bpf", "call('bpf', 0, 0, 0)", "never"),
    Probe("performance counters", "call('perf_event_open', 0, 0, 0, 0, 0)", "never"),
    Probe("io_uring", "call('io_uring_setup', 1, ctypes.create_string_buffer(120))", "root"),
    Probe("userfaultfd", "call('userfaultfd', 1)"),
    # memory and disk that no limit would count
    Probe("memory in an unnamed file", "os.memfd_create('x')"),
    Probe("memory in a SysV segment", "call('shmctl', call('shmget', 0, 1 << 20, 0o1600), 0, 0)"),
    Probe("memory in a message queue", "call('mq_open', b'probe', os.O_CREAT | os.O_RDWR, 0o600, 0)", "never"),
    Probe(
        "filling the disk",
        "try:\n"
        "    for number in range(8): open(f'{number}', 'wb').write(bytes(8 << 20))\n"
        "    print('ESCAPED')\n"
        "except OSError as error: print('BLOCKED', error)",
    ),
    Probe(
        "filling the disk with empty files",
        "try:\n"
        "    for number in range(20_000): os.close(os.open(f'{number}', os.O_CREAT))\n"
        "    print('ESCAPED')\n"
        "except OSError as error: print('BLOCKED', error)",
    ),
    Probe("more memory than allowed", "len(bytearray(2 << 30))", "never"),
    Probe(
        "a fork bomb",
        "count = 0\n"
        "try:\n"
        "    while count < 500:\n"
        "        if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "        count += 1\n"
        "    print('ESCAPED', count)\n"
        "except OSError as error: print('BLOCKED', count, error)",
        "never",
    ),
    # calls by their numbers
    Probe(
        "12 x32 call numbers; numbers with high bits, -1",
        "x32 = [0x40000000 | number for number in (0, 1, 2, 41, 56, 59, 101, 165, 512, 520, 521, 547)]\n"
        "for number in (*x32, 1 << 31, 1 << 30 | 1 << 29, 0xFFFF0000, -1):\n"
        "    if libc.syscall(ctypes.c_long(number), -1, -1, -1, -1, -1, -1) != -1: print('ESCAPED', number)\n"
        "print('BLOCKED')",
        "never",
    ),
    Probe(
        "clone with each NEW* flag, with high bits too; clone3 NEWTIME; unshare NEWTIME",
        "flags = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)\n"
        "def clone(flag): return call('clone', ctypes.c_long(flag | signal.SIGCHLD), 0, 0, 0, 0) or os._exit(0)\n"
        "refused(\n"
        "    *[lambda flag=flag, high=high: clone(flag | high) for flag in flags for high in (0, 1 << 40)],\n"
        "    lambda: call('clone3', struct.pack('8Q', 0x80, *[0] * 7), 64),\n"
        "    lambda: call('unshare', 0x80),\n"
        ")",
        "never",
    ),
    Probe(
        "open_tree_attr, open_tree, mount_setattr, fsopen, pivot_root, umount2, chroot, setns",
        "refused(\n"
        "    lambda: call('open_tree_attr', -100, b'/', 0, 0, 0),\n"
        "    lambda: call('open_tree', -100, b'/', 1),\n"
        "    lambda: call('mount_setattr', -100, b'/', 0, 0, 0),\n"
        "    lambda: call('fsopen', b'tmpfs', 0),\n"
        "    lambda: call('pivot_root', b'/tmp', b'/tmp'),\n"
        "    lambda: call('umount2', b'/tmp', 2),\n"
        "    lambda: call('chroot', b'/tmp'),\n"
        "    lambda: call('setns', os.open('/proc/self/ns/net', os.O_RDONLY), 0),\n"
        ")",
        "never",
    ),
    Probe(
        "add_key, request_key, keyctl; /proc/keys",
        "refused(\n"
        "    lambda: call('add_key', b'user', b'probe', b'x', 1, -3),\n"
        "    lambda: call('request_key', b'user', b'probe', 0, 0),\n"
        "    lambda: call('keyctl', 0, -3, 1),\n"
        "    lambda: read('/proc/keys'),\n"
        ")",
    ),
    Probe(
        "msgget, semget, shmget; mq_open, mq_unlink",
        "refused(\n"
        "    lambda: call('msgget', 0, 0o1600),\n"
        "    lambda: call('semget', 0, 1, 0o1600),\n"
        "    lambda: call('shmget', 0, 4096, 0o1600),\n"
        "    lambda: call('mq_open', b'probe', os.O_CREAT | os.O_RDWR, 0o600, 0),\n"
        "    lambda: call('mq_unlink', b'probe'),\n"
        ")",
        "never",
    ),
    Probe(
        "setpriority, SCHED_IDLE, affinity, ioprio, SIGSTOP, sigqueue, pidfd signal at the supervisor",
        "above = os.getppid()\n"
        "refused(\n"
        "    lambda: os.setpriority(os.PRIO_PROCESS, above, 19),\n"
        "    lambda: os.sched_setscheduler(above, os.SCHED_IDLE, os.sched_param(0)),\n"
        "    lambda: os.sched_setaffinity(above, [0]),\n"
        "    lambda: call('ioprio_set', 1, above, 3 << 13),\n"
        ")\n"
        "for send in (\n"
        "    lambda: os.kill(above, signal.SIGSTOP),\n"
        "    lambda: call('rt_sigqueueinfo', above, signal.SIGTERM, struct.pack('3i116x', signal.SIGTERM, 0, -1)),\n"
        "    lambda: signal.pidfd_send_signal(os.pidfd_open(above), signal.SIGKILL),\n"
        "):\n"
        "    try: send()\n"
        "    except OSError: pass\n"
        "time.sleep(0.1)",
        "never",
    ),
    Probe(
        "seccomp listener without a reader",
        "call('seccomp', 1, 8, struct.pack('HP', 1, ctypes.addressof(ctypes.create_string_buffer(8))))",
        "never",
    ),
    Probe(
        "process_madvise, process_mrelease, cachestat, listmount, statmount, mseal, io_setup, mbind, move_pages",
        "names = 'process_madvise process_mrelease cachestat listmount statmount mseal io_setup mbind move_pages '\n"
        "names += 'landlock_create_ruleset open_tree_attr file_getattr'\n"
        "for name in names.split():\n"
        "    libc.syscall(host['numbers'][name], -1, -1, -1, -1, -1, -1)\n"
        "    if ctypes.get_errno() != errno.ENOSYS: print('ESCAPED', name)\n"
        "print('BLOCKED')",
        "never",
    ),
    # what the host and other executions share
    Probe("flock on a program of the system", "flock('/usr/bin/env', fcntl.LOCK_EX)"),
    Probe("flock on the interpreter's modules", "flock(os.__file__, fcntl.LOCK_SH)"),
    Probe(
        "a lease on a file of the system", "fcntl.fcntl(open('/usr/bin/env'), fcntl.F_SETLEASE, fcntl.F_RDLCK)", "root"
    ),
    Probe("all of the machine's asynchronous I/O", "call('io_setup', 16, ctypes.create_string_buffer(8))"),
    Probe("inotify on /usr", "call('inotify_init1', 0)"),
    Probe(
        "dnotify on /usr",
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "attempt(lambda: fcntl.fcntl(os.open('/usr', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS))",
    ),
    Probe(
        "socketpair of netlink, vsock, tipc, bluetooth, alg and packet",
        "for family in (16, 40, 30, 31, 38, 17):\n"
        "    result = libc.socketpair(family, socket.SOCK_DGRAM, 0, (ctypes.c_int * 2)())\n"
        "    if (result, ctypes.get_errno()) != (-1, errno.EAFNOSUPPORT): print('ESCAPED', family)\n"
        "print('BLOCKED')",
        "never",
    ),
    Probe(
        "sockets of MPTCP, UDPLITE, SCTP, DCCP and ICMP",
        "for kind, protocol in ((1, 262), (2, 136), (1, 132), (5, 132), (6, 33), (2, 1), (3, 255)):\n"
        "    for family in (socket.AF_INET, socket.AF_INET6):\n"
        "        libc.socket(family, kind, protocol)\n"
        "        if ctypes.get_errno() not in (errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT):\n"
        "            print('ESCAPED', kind, protocol, ctypes.get_errno())\n"
        "print('BLOCKED')",
        "never",
    ),
    Probe("input to a terminal", "fcntl.ioctl(0, 0x5412, b'x')", "never"),
    Probe(
        "a core file for the host's program",
        "for bound in ((0, 0), (0, 1), (-1, -1)):\n"
        "    try: resource.setrlimit(resource.RLIMIT_CORE, bound)\n"
        "    except (OSError, ValueError): pass\n"
        "kept = resource.getrlimit(resource.RLIMIT_CORE) == (1, 1)\n"
        "print('BLOCKED' if kept else 'ESCAPED', resource.getrlimit(resource.RLIMIT_CORE))",
        "never",
    ),
    Probe(
        "pages given to a pipe",
        "page = ctypes.create_string_buffer(4096)\n"
        "vector = struct.pack('PN', ctypes.addressof(page), 4096)\n"
        "attempt(lambda: call('vmsplice', os.pipe()[1], vector, 1, 0))",
    ),
    Probe(
        "hard links, xattrs, 16 k inodes",
        "def link():\n"
        "    open('file', 'w').close()\n"
        "    for number in range(20_000): os.link('file', f'link{number}')\n"
        "def attribute():\n"
        "    for number in range(20_000): os.setxattr('/tmp/work', f'user.{number}', bytes(4000))\n"
        "def create():\n"
        "    for number in range(20_000): os.close(os.open(f'{number}', os.O_CREAT))\n"
        "refused(link, attribute, create)",
        "never",
    ),
    Probe(
        "queued signals without number",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])\n"
        "information = struct.pack('3i116x', signal.SIGRTMIN, 0, -1)\n"
        "def fill():\n"
        "    for _ in range(5000): call('rt_sigqueueinfo', os.getpid(), signal.SIGRTMIN, information)\n"
        "refused(fill)",
        "never",
    ),
    Probe(
        "reading its own pipe",
        "refused(lambda: os.read(1, 1), lambda: os.open('/proc/self/fd/1', os.O_RDONLY))",
        "never",
    ),
    # the answer
    Probe(
        "forging the answer",
        "frame = b'\\0\\0\\0\\2{}'\n"
        "written = []\n"
        "for number in [0, *range(3, 2000)]:\n"
        "    try: written.append((number, os.write(number, frame)))\n"
        "    except OSError: pass\n"
        "print('ESCAPED' if written else 'BLOCKED', written)",
        "never",
    ),
    Probe(
        "secrets in the environment",
        "print('ESCAPED' if host['secret'] in str(dict(os.environ)) else 'BLOCKED')\n",
        "never",
    ),
)
