"""Triton kernels on small shapes against float64, forward and backward: this project's and liger-kernel's.

Without a GPU Triton's interpreter runs them:

    TRITON_INTERPRET=1 python -m pytest -m gpuset tests/workers/test_kernels.py
"""

from __future__ import annotations

import copy
import importlib
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from tests.workers.test_fused import KINDS, assert_as_exact, outcome, small_model
from verl.workers import logprobs
from verl.workers.fused import FusedModules, fuse
from verl.workers.logprobs import token_logprobs

pytestmark = [
    pytest.mark.gpuset,
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
    ),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """What liger-kernel gets on a GPU, but not in the interpreter: scalars as float32, and libdevice's rsqrt."""
    norms = pytest.importorskip("liger_kernel.ops.rms_norm")
    if DEVICE == "cuda":
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    convert = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), language.float32)
        return language.core.tensor(handle, language.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    rsqrt = importlib.import_module("tests.support.interpreted").rsqrt
    for module in (norms, importlib.import_module("liger_kernel.ops.fused_add_rms_norm")):
        monkeypatch.setattr(module, "rsqrt", rsqrt)


@pytest.mark.parametrize(("kind", "counts"), KINDS)
def test_models_with_kernels_of_liger_equal_float64(
    kind: type[PretrainedConfig], counts: tuple[int, int, int, int], liger: None
) -> None:
    model = small_model(kind).to(DEVICE)
    exact = copy.deepcopy(model).double()
    assert fuse(model) == FusedModules(*counts)
    with torch.device(DEVICE):
        expected = outcome(exact)
        assert_as_exact(outcome(model), expected, 1e-5)
        with torch.no_grad():
            assert_as_exact([model(torch.arange(9)[None], use_cache=False).logits], expected[:1], 1e-5)


def with_gradients(
    hidden: Tensor, head: Tensor, target: Tensor, temperature: float, of_entropy: bool, **options: int
) -> list[Tensor]:
    inputs = [each.detach().requires_grad_() for each in (hidden, head)]
    values, entropy = token_logprobs(*inputs, target, temperature, True, **options)
    assert entropy is not None
    weight = torch.linspace(-1, 2, len(target), device=hidden.device)
    loss = (weight * values).sum() + (0.3 * (weight * entropy).sum() if of_entropy else 0.0)
    return [values, entropy, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("of_entropy", [False, True])
@pytest.mark.parametrize("at_once", [40, 10**6])  # chunks of a token and slices of 8 entries; everything at once
@pytest.mark.parametrize("kept_bytes", [0, 4 * 5 * 45])  # logits computed again in the backward, or kept
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_logprobs_equal_float64(
    dtype: torch.dtype,
    rel: float,
    at_once: int,
    kept_bytes: int,
    of_entropy: bool,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bfloat16 logits are rounded by the matrix product, so values are compared with those of rounded logits."""
    monkeypatch.setattr(pytest.importorskip("verl.workers.loss_kernels"), "_BLOCK", 16)
    monkeypatch.setitem(logprobs.LOGITS_AT_ONCE, DEVICE, at_once)
    torch.manual_seed(0)
    hidden, head = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((5, 12), (45, 12)))
    target = torch.tensor([0, 9, 44, 30, 8], device=DEVICE)
    found = with_gradients(hidden, head, target, temperature, of_entropy, fused=True, kept_bytes=kept_bytes)
    eager = with_gradients(hidden, head, target, temperature, of_entropy)
    exact = with_gradients(hidden.double(), head.double(), target, temperature, of_entropy)
    assert [each.dtype for each in found] == [torch.float32, torch.float32, dtype, dtype]
    assert_as_exact(found[:2], eager[:2], 1e-5)
    assert_as_exact(found, exact, rel)


def test_large_logits_and_a_certain_token_have_finite_gradients() -> None:
    kernels = pytest.importorskip("verl.workers.loss_kernels")
    logits = torch.tensor([[300.0, -300.0, 0.0, 1.0], [5.0, 5.0, 5.0, 5.0]], device=DEVICE)
    target = torch.tensor([0, 2], device=DEVICE)
    values, normalizers, entropies = kernels.statistics(logits, target, 1.0)
    assert values.tolist() == pytest.approx([0.0, -np.log(4)])
    assert normalizers.tolist() == pytest.approx([300.0, 5 + np.log(4)])
    assert entropies.tolist() == pytest.approx([0.0, np.log(4)], abs=1e-6)
    ones = torch.ones(2, device=DEVICE)
    kernels.gradient(logits, target, normalizers, entropies, ones, ones, 0, 1.0)
    assert logits.tolist() == [[0.0] * 4, pytest.approx([-0.25, -0.25, 0.75, -0.25], abs=1e-6)]
