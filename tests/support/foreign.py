"""Packages of others, in environments or folders of their own: built once per requirements file, then kept."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BUILD_S = 1200.0


def foreign_python(requirements: Path) -> Path:
    """The interpreter of an environment with these packages. Skips the test if it cannot be built."""
    with _built(requirements) as (folder, is_new):
        python = folder / "bin" / "python"
        if is_new:
            _run([sys.executable, "-m", "venv", str(folder)], requirements)
            _run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)], requirements)
    return python


def foreign_folder(requirements: Path) -> Path:
    """A folder for the path of our own environment with these packages, without their dependencies. Skips as above."""
    with _built(requirements) as (folder, is_new):
        if is_new:
            to_folder = ["--no-deps", "--target", str(folder), "-r", str(requirements)]
            _run([sys.executable, "-m", "pip", "install", "--quiet", *to_folder], requirements)
    return folder


@contextmanager
def _built(requirements: Path) -> Iterator[tuple[Path, bool]]:
    """The folder of the requirements file, and whether it is to be filled."""
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"toolrl-{requirements.parent.name}-{digest}")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_new := not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
        yield folder, is_new
        (folder / "complete").touch()


def _run(command: list[str], requirements: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode:
        pytest.skip(
            f"the packages of {requirements.parent.name}/{requirements.name} cannot be installed: {done.stderr[-300:]}"
        )
