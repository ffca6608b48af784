"""A command that kills itself: python -m tests.chaos.killed MODULE [word ..]

CHAOS_OUT names a folder, or the beginning of a path: what the command writes there is counted (a file or folder that is
made, opened to be written, renamed or removed). Before the CHAOS_KILL-th of these the process sends itself SIGKILL; at
its end their number is written to CHAOS_COUNT. Whatever a command writes, this finds the moments between two writes.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")


def watch(out: str, kill: int, count: Path) -> None:
    """Count, and kill. kill: 0 for never"""
    met = 0
    own = os.getpid()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal met
        writes = event in _CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR))
        if not writes or os.getpid() != own:
            return
        paths = [os.fsdecode(each) for each in args if isinstance(each, str | bytes | os.PathLike)]
        if any(os.path.abspath(each).startswith(out) for each in paths):  # noqa: PTH100  within the hook no Path's calls
            met += 1
            if met == kill:
                os.kill(own, signal.SIGKILL)

    sys.addaudithook(hook)
    atexit.register(lambda: count.write_text(str(met)))


def main() -> None:
    watch(os.environ["CHAOS_OUT"], int(os.environ["CHAOS_KILL"]), Path(os.environ["CHAOS_COUNT"]))
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
