"""Whether this machine can run the sandbox's tests, and how a test gets a pool."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

REQUIRED = bool(os.environ.get("CI") or os.environ.get("VERL_REQUIRE_SANDBOX") == "1")


def why_not() -> str:
    """Why bubblewrap does not work here; empty where it does."""
    if shutil.which("bwrap") is None:
        return "no program `bwrap`: apt-get install bubblewrap"
    command = ["bwrap", "--unshare-all", "--unshare-user", "--cap-add", "ALL", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"bubblewrap does not work here: {tried.stderr.strip()}" if tried.returncode else ""


def need_bubblewrap() -> None:
    """Skip where it cannot work; fail where it must (CI or VERL_REQUIRE_SANDBOX=1 is set)."""
    if reason := why_not():
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
