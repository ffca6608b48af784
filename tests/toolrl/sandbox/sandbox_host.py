"""Whether this machine can run the sandbox's tests, and how a test gets a pool."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

import pytest

from tests.support.programs import lacks

REQUIRED = bool(os.environ.get("CI") or os.environ.get("VERL_REQUIRE_SANDBOX") == "1")


def why_not() -> str:
    """Why bubblewrap does not work here; empty where it does."""
    if shutil.which("bwrap") is None:
        return lacks("bwrap")
    command = ["bwrap", "--unshare-all", "--unshare-user", "--cap-add", "ALL", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"bubblewrap does not work here: {tried.stderr.strip()}" if tried.returncode else ""


def need_bubblewrap() -> None:
    """Skip where it cannot work; fail where it must (CI or VERL_REQUIRE_SANDBOX=1 is set)."""
    if reason := why_not():
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)


def foreign_call(number: int) -> str:
    """Code that makes the call of this number of 32-bit x86 by int 0x80. Skips the test on any other machine."""
    if platform.machine() != "x86_64":
        pytest.skip("32-bit calls by int 0x80 are of x86_64")
    instructions = b"\xb8" + number.to_bytes(4, "little") + b"\xcd\x80\xc3"  # mov eax, number; int 0x80; ret
    return f"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write({instructions!r})
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
