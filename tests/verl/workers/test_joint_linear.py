"""Linear layers of one input: outputs and gradients as torch's, without additions of gradients."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from toolrl.check.plan.cost import CostCounter
from verl.workers.fused import _joint
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


class Projections(nn.Module):
    """With adapters on some of them, whose second factors are not the zeros of the start."""

    def __init__(self, adapted: tuple[str, ...], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, width, biased in (("q", 8, True), ("k", 2, False), ("v", 3, True)):
            setattr(self, name, nn.Linear(6, width, bias=biased, dtype=dtype))
        inject_adapter_in_model(LoraConfig(r=2, lora_alpha=5, target_modules=list(adapted)), self)
        for name, parameter in self.named_parameters():
            parameter.data = torch.randn_like(parameter, dtype=dtype)
            parameter.requires_grad_("lora_" in name)


@pytest.mark.parametrize("adapted", [("q", "k", "v"), ("q", "v"), ("k",)])
@pytest.mark.parametrize("input_is_trained", [True, False])  # the first layer's is not, where embeddings are frozen
def test_adapters_are_peft_s(adapted: tuple[str, ...], input_is_trained: bool) -> None:
    module = Projections(adapted)
    hidden = torch.randn(1, 5, 6, dtype=torch.float64, requires_grad=input_is_trained)
    inputs = [*([hidden] if input_is_trained else []), *(each for each in module.parameters() if each.requires_grad)]
    outcomes = []
    for outputs in (_joint(module, ("q", "k", "v"), hidden), [each(hidden) for each in (module.q, module.k, module.v)]):
        loss = sum((each**2).sum() for each in outputs)
        outcomes.append([*outputs, *torch.autograd.grad(loss, inputs)])  # type: ignore[arg-type]
    assert "JointAdapted" in str(_joint(module, ("q", "k", "v"), hidden)[0].grad_fn)
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_an_adapter_costs_products_alone() -> None:
    """Of the input: one for all first factors, and one for their gradients."""
    module = Projections(("q", "k", "v"), torch.float32).to("meta")
    hidden = torch.empty(1, 5, 6, device="meta", requires_grad=True)
    with CostCounter() as counter:
        sum(each.sum() for each in _joint(module, ("q", "k", "v"), hidden)).backward()  # type: ignore[union-attr]
    assert counter.kernels["aten::add"] == 3 and not counter.kernels["aten::add_"]  # of the sums
    products = 3 * 5 * 6 * (8 + 2 + 3) - 5 * 6 * (8 + 2 + 3)  # of outputs and input; frozen weights have no gradient
    products += 3 * 5 * 2 * (3 * 6 + 8 + 2 + 3)
    assert counter.gemm_flops == 2 * products


def test_what_is_in_another_dtype_keeps_its_own_forward() -> None:
    module = Projections(("q", "v"), torch.bfloat16)
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    hidden = torch.randn(1, 5, 6, dtype=torch.bfloat16)
    for one, name in zip(_joint(module, ("q", "k", "v"), hidden), ("q", "k", "v"), strict=True):
        assert torch.equal(one, module.get_submodule(name)(hidden))
