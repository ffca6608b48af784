"""What SWE-ReX asks of `docker`, with bubblewrap in place of the engine: no image is pulled, no container made.

FOLDER/images/IMAGE is the image's /testbed; FOLDER/containers/NAME is that of a running container, and its pid
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc", "/opt")


def main(folder: Path, binds: list[str], command: str, *arguments: str) -> None:
    if command == "inspect":
        sys.exit(0 if (folder / "images" / arguments[-1]).is_dir() else 1)
    if command == "kill":
        container = folder / "containers" / arguments[0]
        os.kill(int((container / "pid").read_text()), signal.SIGKILL)
        shutil.rmtree(container)
        return
    assert command == "run"
    port = arguments[arguments.index("-p") + 1].partition(":")[0]
    start = arguments.index("--name") + 1
    name, image, *inner = arguments[start:]
    container = folder / "containers" / name
    shutil.copytree(folder / "images" / image, container, symlinks=True)
    (container / "pid").write_text(str(os.getpid()))
    seen = [each for path in (*SYSTEM, *binds) if Path(path).exists() for each in ("--ro-bind", path, path)]
    confined = ["bwrap", "--unshare-pid", "--die-with-parent", "--tmpfs", "/", "--proc", "/proc", "--dev", "/dev"]
    confined += ["--tmpfs", "/tmp", *seen, "--chdir", "/"]
    for own in (folder / "images" / image).iterdir():
        confined += ["--bind", str(container / own.name), f"/{own.name}"]
    inner[-1] = inner[-1].replace("swerex-remote ", f"swerex-remote --port {port} ", 1)
    os.execvp("bwrap", [*confined, *inner])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(":"), *sys.argv[3:])
