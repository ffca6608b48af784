"""Which modules get a fused kernel, and that their forwards then compute what they did: kernels by their formulas."""

from __future__ import annotations

import copy
import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, apply_rotary_pos_emb

from verl.build.ranks import fused_kernels
from verl.config.schema import ModelConfig
from verl.errors import ConfigError
from verl.workers.fused import FusedModules, fuse, is_wanted

# (norms, rotary, MLPs, layers) of two layers. Gemma 2 has norms with an offset and another activation; OLMo 2 weights
# its norms before it rounds them; both normalize what they add.
KINDS: list[tuple[type[PretrainedConfig], tuple[int, int, int, int]]] = [
    (Qwen2Config, (5, 2, 2, 2)),
    (Qwen3Config, (9, 2, 2, 2)),
    (LlamaConfig, (5, 2, 2, 2)),
    (MistralConfig, (5, 2, 2, 2)),
    (Olmo2Config, (0, 2, 2, 0)),
    (Gemma2Config, (0, 2, 0, 0)),
]


def small_model(kind: type[PretrainedConfig]) -> PreTrainedModel:
    config = kind(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def outcome(model: PreTrainedModel) -> list[Tensor]:
    """Logits, and the gradients of all weights."""
    logits = model(torch.arange(9)[None], use_cache=False).logits
    weight = torch.randn(logits.shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(logits)
    return [logits, *torch.autograd.grad((logits * weight).sum(), list(model.parameters()))]


def assert_as_exact(found: list[Tensor], expected: list[Tensor], rel: float) -> None:
    """Relative to the largest element of each tensor."""
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).abs().max().item() <= rel * other.abs().max().clamp(min=1e-3).item()


class Doubling(Qwen2Attention):
    """Attention that scales what its output projection returns."""

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Any:  # type: ignore[override]
        projections = (self.q_proj, self.k_proj, self.v_proj)
        heads = (each(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projections)
        query, key, value = heads
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return 2 * self.o_proj(attended.transpose(1, 2).flatten(2)), None


class Operators(TorchDispatchMode):
    """Names of the operators that run while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool) -> Tensor:
    assert (offset, casting, in_place) == (0.0, "llama", False)
    return weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps))


def rms_norm_forward(hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str, _: None) -> Any:
    rstd = torch.rsqrt(hidden.pow(2).mean(-1) + eps).flatten()
    return rms_norm(hidden, weight, eps, offset, casting, False), hidden, rstd, 1, 1, 0


def norm_gradient(grad: Tensor, grad_sum: Tensor, total: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    rstd = rstd.view(*total.shape[:-1], 1)
    unit, weighted = total * rstd, grad * weight
    found = rstd * (weighted - unit * (weighted * unit).mean(-1, keepdim=True)) + grad_sum
    return found, (grad * unit).flatten(0, -2).sum(0)


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return apply_rotary_pos_emb(query, key, cos, sin)


FORMULAS = SimpleNamespace(
    LigerRMSNormFunction=SimpleNamespace(apply=rms_norm),
    LigerRopeFunction=SimpleNamespace(apply=rope),
    LigerSiLUMulFunction=SimpleNamespace(apply=lambda gate, up: nn.functional.silu(gate) * up),
    rms_norm_forward=rms_norm_forward,
    norm_gradient=norm_gradient,
)


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In place of the kernels of liger-kernel and of norm_kernels.py; lists their calls."""
    calls: list[str] = []

    def counted(name: str, function: Any) -> Any:
        if hasattr(function, "apply"):
            return SimpleNamespace(apply=counted(name, function.apply))
        return lambda *args: (calls.append(name), function(*args))[1]

    names = zip(vars(FORMULAS).items(), ("norm", "rope", "mlp", "norm with sum", "its backward"), strict=True)
    ops = SimpleNamespace(**{each: counted(name, function) for (each, function), name in names})
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(ops=ops))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    return calls


@pytest.mark.parametrize(("kind", "counts"), KINDS)
def test_modules_that_compute_a_kernels_formula_use_it(
    kind: type[PretrainedConfig], counts: tuple[int, int, int, int], formulas: list[str]
) -> None:
    model, untouched = small_model(kind), small_model(kind)
    assert fuse(model) == FusedModules(*counts)
    assert_as_exact(outcome(model), outcome(untouched), 1e-5)
    norms, rotary, mlps, layers = counts
    called = [formulas.count(name) for name in ("norm", "norm with sum", "its backward", "rope", "mlp")]
    assert called == [norms - 2 * layers, 2 * layers, 2 * layers, rotary, mlps]


@pytest.mark.parametrize(("kind", "counts"), KINDS)
def test_without_gradients_projections_add_to_the_residual_itself(
    kind: type[PretrainedConfig], counts: tuple[int, int, int, int], formulas: list[str]
) -> None:
    model, untouched = small_model(kind).eval(), small_model(kind).eval()
    fuse(model)
    with torch.no_grad(), Operators() as executed:
        found = model(torch.arange(9)[None], use_cache=False).logits
        assert executed.names.count("aten::addmm_") == 2 * counts[3]
        assert "aten::clone" not in executed.names
        assert_as_exact([found], [untouched(torch.arange(9)[None], use_cache=False).logits], 1e-5)


def test_a_score_is_rounded_as_an_update() -> None:
    """In bf16, bit for bit: a ratio or a KL between equal weights is one that only weights can change."""
    model = small_model(Qwen2Config).bfloat16()
    fuse(model, FORMULAS)
    update = model(torch.arange(9)[None], use_cache=False).logits
    with torch.no_grad():
        assert torch.equal(model(torch.arange(9)[None], use_cache=False).logits, update)


def test_an_attention_that_goes_on_with_its_projection_adds_what_it_returns(formulas: list[str]) -> None:
    model = small_model(Qwen2Config)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Doubling
    untouched = copy.deepcopy(model)
    assert fuse(model) == FusedModules(norms=5, rotary=2, mlps=2, layers=2)
    assert_as_exact(outcome(model), outcome(untouched), 1e-5)
    with torch.no_grad():
        found, expected = (each(torch.arange(9)[None], use_cache=False).logits for each in (model, untouched))
    assert_as_exact([found], [expected], 1e-5)


def test_only_this_instance_changes(formulas: list[str]) -> None:
    model, other = small_model(Qwen2Config), small_model(Qwen2Config)
    names = set(model.state_dict())
    fuse(model)
    assert set(model.state_dict()) == names
    assert Qwen2Attention.forward.__globals__["apply_rotary_pos_emb"] is apply_rotary_pos_emb
    outcome(other)
    assert not formulas


def test_a_module_that_computes_something_else_keeps_its_forward(formulas: list[str]) -> None:
    model = small_model(Qwen2Config)
    model.model.layers[0].mlp.act_fn = nn.GELU()
    changed = copy.deepcopy(model)
    assert fuse(model) == FusedModules(norms=5, rotary=2, mlps=1, layers=2)
    assert_as_exact(outcome(model), outcome(changed), 1e-5)


class GatedNorm(nn.Module):
    """A norm with a further argument, as Qwen3.5 has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        return hidden * gate


def test_a_module_with_further_arguments_keeps_its_forward(formulas: list[str]) -> None:
    assert fuse(nn.Sequential(GatedNorm())) == FusedModules(0, 0, 0, 0)


def test_kernels_that_are_required_and_missing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """model.fused_kernels=liger, on a CPU or without the package."""
    with pytest.raises(ConfigError, match="fused_kernels=liger needs a GPU"):
        fused_kernels(ModelConfig(fused_kernels="liger"), "cpu")
    assert fused_kernels(ModelConfig(fused_kernels="liger"), "cuda") == "liger"

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert [is_wanted(setting) for setting in ("auto", "none")] == [False, False]
    with pytest.raises(ConfigError, match="liger-kernel is not installed: pip install 'liger-kernel"):
        is_wanted("liger")
    versions = {"liger-kernel": "0.8.5"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    assert [is_wanted(setting) for setting in ("auto", "liger", "none")] == [True, True, False]
    for untested in ("0.5.2", "0.9.0"):
        versions["liger-kernel"] = untested
        assert [is_wanted(setting) for setting in ("auto", "none")] == [False, False]
        with pytest.raises(ConfigError, match=f"liger-kernel {untested} is installed"):
            is_wanted("liger")
    with pytest.raises(ConfigError, match=r"model\.fused_kernels"):
        ModelConfig(fused_kernels="all")
