"""These tests need vLLM's build for CUDA, as `bash scripts/gpuset.sh` installs it, and no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.gpuset.cards import H200, pretend
from toolrl.check.doctor.versions import find_installed

HOW = "run bash scripts/gpuset.sh"


@pytest.fixture(scope="session", autouse=True)
def h200() -> Iterator[None]:
    """For all tests of this folder: modules of vLLM keep the platform that they were imported with."""
    if "vllm" not in find_installed(["vllm"]):
        pytest.skip(f"vLLM's build for CUDA is not installed; {HOW}")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip(f"no libcuda.so.1; {HOW}")
    with pretend(H200):
        yield
