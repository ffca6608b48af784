"""Triton kernels on small shapes against float64, forward and backward: this project's and liger-kernel's.

Run on a GPU with -m gpu. Without one Triton's interpreter runs them:

    TRITON_INTERPRET=1 python -m pytest -m gpuset tests/verl/workers/test_kernels.py
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PretrainedConfig

from tests.verl.workers.test_fused import KINDS, assert_as_exact, outcome, small_model
from toolrl.check.plan import liger_cost
from toolrl.check.plan.cost import CostCounter
from verl.workers import logprobs
from verl.workers.fused import FusedModules, _NormWithSum, fuse
from verl.workers.logprobs import logit_gradient_, logit_statistics, token_logprobs

pytestmark = [
    pytest.mark.gpuset,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
    ),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
in_the_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="accesses are recorded in Triton's interpreter")


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


@in_the_interpreter
@given(
    tokens=st.integers(1, 40), width=st.sampled_from([8, 24, 33]), programs=st.integers(1, 9), seed=st.integers(0, 99)
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_backward_of_a_norm_with_its_sum_equals_ligers(
    tokens: int, width: int, programs: int, seed: int, liger: None
) -> None:
    """For any number of tokens and programs, of which some have none."""
    theirs, ours = (
        pytest.importorskip(name) for name in ("liger_kernel.ops.fused_add_rms_norm", "verl.workers.norm_kernels")
    )
    random = torch.Generator().manual_seed(seed)
    grad, grad_sum, hidden = (torch.randn(tokens, width, generator=random) for _ in range(3))
    weight, rstd = torch.randn(width, generator=random), torch.rsqrt(hidden.pow(2).mean(-1) + 1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "_num_programs", lambda _: programs)
        found = ours.gradient(grad, grad_sum, hidden, weight, rstd)
    block = importlib.import_module("triton").next_power_of_2(width)
    arguments = (grad, grad_sum, hidden, weight, rstd, 0.0, 0, block, 4, 2, False)
    of_hidden, _, of_weight = theirs.fused_add_rms_norm_backward(*arguments)
    torch.testing.assert_close(found, (of_hidden, of_weight), rtol=1e-5, atol=1e-5)


class Accesses:
    """Bytes that kernels load and store in Triton's interpreter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._accessed: list[tuple[np.ndarray[Any, Any], int]] = []  # addresses, bytes at each
        builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
        for name, place_of_mask in (("create_masked_load", 1), ("create_masked_store", 2)):
            monkeypatch.setattr(builder, name, self._recorded(getattr(builder, name), place_of_mask))

    def _recorded(self, access: Callable[..., Any], place_of_mask: int) -> Callable[..., Any]:
        def recorded(builder: Any, pointers: Any, *args: Any) -> Any:
            itemsize = pointers.get_element_ty().primitive_bitwidth // 8
            self._accessed.append((pointers.data[args[place_of_mask - 1].data.astype(bool)], itemsize))
            return access(builder, pointers, *args)

        return recorded

    def take(self, once: list[Tensor]) -> int:
        """Since the last call. Tensors in `once` count at most once: a cache holds what every program reads of them."""
        total, of_once = 0, [0] * len(once)
        for addresses, itemsize in self._accessed:
            inside = [(addresses >= each.data_ptr()) & (addresses < each.data_ptr() + each.nbytes) for each in once]
            of_once = [so_far + itemsize * int(each.sum()) for so_far, each in zip(of_once, inside, strict=True)]
            total += itemsize * int((~np.any([*inside, np.zeros(addresses.shape, bool)], axis=0)).sum())
        self._accessed.clear()
        return total + sum(min(read, each.nbytes) for read, each in zip(of_once, once, strict=True))


class Moved(NamedTuple):
    """A function of liger_kernel.ops, called as in `fused.py`."""

    call: Callable[..., Any]  # with the module's functions first
    shapes: list[tuple[int, ...]]
    read_by_all: int = 0  # the last inputs, of which every program reads the same
    beside: int = 0  # bytes that torch moves beside the backward's kernel


TOKENS, WIDTH, ANGLES = (1, 6, 8), (8,), (1, 6, 4)
MOVED = {
    "norm": Moved(
        lambda ops, hidden, weight: ops.LigerRMSNormFunction.apply(hidden, weight, 1e-6, 0.0, "llama", False),
        [TOKENS, WIDTH],
        read_by_all=1,
        beside=4 * 6 * 8,  # zeros for the gradient
    ),
    "norm with sum": Moved(
        lambda ops, hidden, weight: _NormWithSum.apply(ops, hidden, weight, 1e-6),  # type: ignore[no-untyped-call]
        [TOKENS, WIDTH],
        read_by_all=1,
    ),
    "gate * up": Moved(lambda ops, gate, up: ops.LigerSiLUMulFunction.apply(gate, up), [TOKENS, TOKENS]),
    "rotary": Moved(
        lambda ops, query, key, cos, sin: ops.LigerRopeFunction.apply(
            query.transpose(1, 2), key.transpose(1, 2), cos.detach(), sin.detach()
        ),
        [(1, 6, 2, 4), (1, 6, 1, 4), ANGLES, ANGLES],
    ),
}


def traffic(counter: CostCounter, accesses: Accesses, device: str, once: list[Tensor]) -> float:
    return accesses.take(once) if device == "cpu" else counter.cost().traffic


@in_the_interpreter
@pytest.mark.parametrize("name", MOVED)
def test_kernels_of_liger_load_and_store_what_is_counted(
    name: str, liger: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    accesses, case = Accesses(monkeypatch), MOVED[name]
    found: dict[str, list[float]] = {}
    for device, ops in (("meta", liger_cost), ("cpu", importlib.import_module("liger_kernel.ops"))):
        inputs = [torch.ones(each, device=device).requires_grad_() for each in case.shapes]
        once = inputs[len(inputs) - case.read_by_all :]
        with CostCounter() as counter:
            outputs = case.call(ops, *inputs)
            found[device] = [traffic(counter, accesses, device, once)]
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.grad(outputs, inputs[:2], [torch.empty_like(each) for each in outputs])
            found[device].append(traffic(counter, accesses, device, once))
    forward, backward = found["cpu"]
    assert [forward, backward + case.beside] == found["meta"]


@in_the_interpreter
@pytest.mark.parametrize("of_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_logprobs_load_and_store_what_is_counted(
    dtype: torch.dtype, of_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits once forward and twice backward, in 3 blocks per token, of which each reads the token's numbers."""
    monkeypatch.setattr(pytest.importorskip("verl.workers.loss_kernels"), "_BLOCK", 16)
    accesses, found = Accesses(monkeypatch), {}
    for device in ("meta", "cpu"):
        logits, target = torch.ones(5, 45, dtype=dtype, device=device), torch.arange(5).to(device)
        columns = [torch.ones(5, device=device) for _ in range(4)]
        with CostCounter() as counter:
            logit_statistics(logits, target, 1.0)
            forward = traffic(counter, accesses, device, [])
            logit_gradient_(logits, target, *columns[:3], columns[3] if of_entropy else None, 0, 1.0)
            found[device] = [forward, traffic(counter, accesses, device, [target, *columns])]
    forward, backward = found["cpu"]
    chosen, entropies = 5 * dtype.itemsize, 0 if of_entropy else 4 * 5  # read again, not read
    assert [forward - chosen, backward + entropies] == found["meta"]
