"""Ways out of a sandbox, each as code that prints ESCAPED or BLOCKED. `host` tells it what there is outside.

`outside`: who gets out without isolation, which shows that a probe would notice: anyone, root, or never tried there,
because it would do harm or needs what a test machine may lack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PRELUDE = """
import ctypes, os, resource, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = libc.syscall(host["numbers"][name], *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result
def tcp(*address):
    return socket.create_connection(address, timeout=2).getpeername()
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
    Probe("udp to a service of the host", "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))"),
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
