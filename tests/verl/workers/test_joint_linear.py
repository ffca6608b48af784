"""Linear layers of one input: outputs and gradients as torch's, without additions of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolrl.check.plan.cost import CostCounter
from verl.workers.joint_linear import joint_linear


@pytest.mark.parametrize("biased", [(True, True, True), (False, True, False)])
def test_outputs_and_gradients_are_those_of_the_modules(biased: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(6, width, bias=bias).double() for width, bias in zip((8, 2, 3), biased, strict=True)]
    hidden = torch.randn(1, 5, 6, dtype=torch.float64, requires_grad=True)
    inputs = [hidden, *(each for module in modules for each in module.parameters())]
    weights = [torch.randn(1, 5, module.out_features, dtype=torch.float64) for module in modules]

    def outcome(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        loss = sum((each * weight).sum() for each, weight in zip(outputs, weights, strict=True))
        return [*outputs, *torch.autograd.grad(loss, inputs)]  # type: ignore[arg-type]

    found = outcome(joint_linear(hidden, modules))
    for one, other in zip(found, outcome(tuple(module(hidden) for module in modules)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_the_input_needs_products_alone() -> None:
    """Three matrix products each for outputs, input and weights."""
    modules = [nn.Linear(6, width, bias=False, device="meta") for width in (8, 2, 3)]
    hidden = torch.empty(1, 5, 6, device="meta", requires_grad=True)
    with CostCounter() as counter:
        sum(each.sum() for each in joint_linear(hidden, modules)).backward()  # type: ignore[union-attr]
    products = sum(counter.kernels[name] for name in ("aten::mm", "aten::addmm_"))
    assert products == 9 and counter.gemm_flops == 3 * 2 * 5 * 6 * (8 + 2 + 3)
    assert counter.kernels["aten::add"] == 3  # of the sums
