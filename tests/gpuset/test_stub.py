"""The ground that the other tests of this folder stand on."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import ROOT

pytestmark = pytest.mark.gpuset


def test_the_pinned_versions_are_installed() -> None:
    import vllm

    pins = (ROOT / "scripts" / "requirements" / "gpu.txt").read_text().split()
    assert f"torch=={torch.__version__.partition('+')[0]}" in pins
    assert f"vllm=={vllm.__version__}" in pins


def test_vllm_sees_the_card() -> None:
    from vllm.platforms import current_platform

    assert current_platform.is_cuda() and not current_platform.is_cpu()
    assert current_platform.get_device_name() == "NVIDIA H200"
