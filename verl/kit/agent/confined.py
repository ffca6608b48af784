"""Commands of agents in a sandbox whose only network is the gateway.

Bubblewrap gives the command namespaces of its own. Inside, `inside/forward.py` listens on the gateway's port of the
loopback interface, and passes connections to a Unix socket of the gateway.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from verl.errors import ConfigError
from verl.kit.agent.inside import forward, programs
from verl.kit.sandbox.fork_server import SYSTEM, check_isolation

# Read-only; names and certificates, no secrets.
_CONFIGURATION = ("/etc/ssl", "/etc/pki", "/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf")
_PATH = "/usr/local/bin:/usr/bin:/bin"


class Confinement:
    """readable: files and folders that a command sees, read-only, besides the system, its interpreter and the working
    folder. It writes to the episode's folder and to a /tmp of its own. Other episodes' folders are not there, and the
    socket, which they share, cannot be removed.
    """

    def __init__(self, readable: Sequence[str]) -> None:
        """Raises ConfigError."""
        check_isolation("bubblewrap")
        for path in readable:
            if not Path(path).exists():
                raise ConfigError(f"env.options.readable: there is no {path!r}")
        self._readable = [str(each) for path in map(Path, readable) for each in (path.absolute(), path.resolve())]
        self._folder = tempfile.TemporaryDirectory(prefix="gateway-", dir=os.environ.get("TMPDIR"))
        self.socket = Path(self._folder.name, "socket")  # where the gateway listens, too

    def close(self) -> None:
        self._folder.cleanup()

    @staticmethod
    def environment(variables: Mapping[str, str]) -> dict[str, str]:
        """All that a confined command sees. Not in its command line, which any user of the machine may read."""
        return {"PATH": _PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **variables}

    def check(self, program: str, files: Sequence[str]) -> None:
        """Raises ConfigError for a file that the program would not find in the sandbox."""
        shown = [*SYSTEM, *_CONFIGURATION, *self._own(program), *self._readable]
        for each in (Path(name) for name in (program, *files) if Path(name).is_file()):
            for path in {each.absolute(), each.resolve()}:
                if not any(map(path.is_relative_to, shown)):
                    raise ConfigError(f"env.options.sandbox=true hides {path}: add it to env.options.readable")

    def command(self, arguments: Sequence[str], folder: Path, variables: Mapping[str, str]) -> list[str]:
        """The command line that runs `arguments` confined, in this environment."""
        program = shutil.which(arguments[0]) or arguments[0]
        port = str(urlsplit(variables["OPENAI_BASE_URL"]).port)
        own = self._own(program)
        binds = [each for path in (*SYSTEM, *_CONFIGURATION, *own) for each in ("--ro-bind-try", path, path)]
        episodes = folder.resolve().parent
        if any(Path(path) in episodes.parents for path in own):  # the other episodes' folders are not shown
            binds += ["--tmpfs", str(episodes)]
        binds += [each for path in self._readable for each in ("--ro-bind-try", path, path)]
        binds += ["--ro-bind", str(self.socket), str(self.socket), "--bind", str(folder), str(folder)]
        namespaces = ("--unshare-all", "--die-with-parent", "--dev", "/dev", "--proc", "/proc")
        confined = [*namespaces, "--tmpfs", "/tmp", *binds, "--chdir", str(Path.cwd()), "--"]
        inner = [sys.executable, "-I", "-S", forward.__file__, str(self.socket), port, program, *arguments[1:]]
        return [shutil.which("bwrap") or "bwrap", *confined, *inner]

    @staticmethod
    def _own(program: str) -> list[str]:
        """What a program needs: interpreters, the working folder, and our two files."""
        return [
            *_prefixes(sys.executable),
            *_prefixes(program),
            *(str(Path.cwd()), forward.__file__, programs.__file__),
        ]


def _prefixes(program: str) -> list[str]:
    """The folders of an installed program and of what its links lead to, such as the base of a virtual environment."""
    found = Path(program).absolute()
    bins = []
    while found.is_symlink():
        bins.append(found.parent)
        found = Path(os.path.normpath(found.parent / found.readlink()))
    return [str(each.parent) for each in (*bins, found.parent) if each.name == "bin" and each.parent != Path("/")]
