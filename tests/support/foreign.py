"""Environments of packages whose pins do not fit ours: built once per requirements file, then kept."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

BUILD_S = 1200.0


def foreign_python(requirements: Path) -> Path:
    """The interpreter of an environment with these packages. Skips the test if it cannot be built."""
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"toolrl-{requirements.parent.name}-{digest}")
    python = folder / "bin" / "python"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(folder)], requirements)
            _run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)], requirements)
            (folder / "complete").touch()
    return python


def _run(command: list[str], requirements: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode:
        pytest.skip(
            f"the packages of {requirements.parent.name}/{requirements.name} cannot be installed: {done.stderr[-300:]}"
        )
