"""Fused kernels of liger-kernel in a loaded model: RMS norms, residual additions, rotary embeddings and gated MLPs.

Linear layers with the same input have one gradient of it (`joint_linear.py`).

Transformers computes each of these by several operations, which all read and write whole tensors. A module is given the
kernel only if its own forward, on small random inputs, gives what the kernel's formula gives; others keep theirs, such
as norms with an offset. Instances are changed, no class and no module of transformers.

Bytes moved per element of c bytes:

    norm          forward 2 c, backward 4 c (gradient read, input read, zeroed and written); eager 12 + 8 c, 36 + 8 c
    with a sum    forward 2 c, backward 4 c: a layer's norm, whose input is the residual, too; its gradient is added
                  within the kernel (`norm_kernels.py`), which costs 3 c more otherwise
    addition      forward 2 c (a copy, nothing without gradients): of attention or MLP to the residual, by the matrix
                  product of the last projection; eager 3 c
    rotary        forward 2 c, backward 2 c, in place; eager 10 c, 10 c
    gate * up     forward 3 c (per element of one factor), backward 5 c, in place; eager 5 c, 8 c

Saved for the backward per element: a norm's input (c), both factors of an MLP (2 c), nothing of the rotary embedding.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear, silu

from verl.errors import ConfigError
from verl.lora import factors_of
from verl.workers.functions import with_functions
from verl.workers.joint_linear import Part, joint_adapted, joint_linear
from verl.workers.pre_norm import Branch, PreNormLayer, is_pre_norm_layer

_TESTED = SpecifierSet(">=0.8.5,<0.9")  # some of the functions called are internal to liger-kernel
_log = logging.getLogger(__name__)
_ROTARY = "apply_rotary_pos_emb"  # the global function that attention modules of transformers call
_QKV = ("q_proj", "k_proj", "v_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "act_fn")


class FusedModules(NamedTuple):
    """Modules of each kind that use a fused kernel."""

    norms: int
    rotary: int
    mlps: int
    layers: int


def is_wanted(setting: str) -> bool:
    """Whether to fuse, by model.fused_kernels: not with an untested release, whose kernels may compute something else.

    Raises ConfigError if liger-kernel is required and there is no tested one.
    """
    if setting == "none":
        return False
    try:
        version = importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        version = ""  # a nightly build is another distribution
    tested = version != "" and Version(version) in _TESTED
    if setting == "liger" and not tested:
        what = f"{version} is installed, and {_TESTED} is tested" if version else "is not installed"
        raise ConfigError(f"model.fused_kernels=liger, but liger-kernel {what}: pip install 'liger-kernel{_TESTED}'")
    if not tested:
        _log.warning("liger-kernel is not used (%s; supported: %s)", version or "not installed", _TESTED)
    return tested


def fuse(model: nn.Module, ops: Any = None) -> FusedModules:
    """Let the model's modules use the kernels, in place. They need tensors on a GPU.

    ops: stand-ins for liger_kernel.ops, for tensors without data; may have a `norm_gradient`, too
    """
    ops = ops or importlib.import_module("liger_kernel.ops")
    counts = {"norms": 0, "rotary": 0, "mlps": 0, "layers": 0}
    for module in model.modules():
        forward: Callable[..., Any]
        if is_rms_norm(module):
            kind, forward = "norms", partial(_norm, ops.LigerRMSNormFunction.apply, module)
        elif is_gated_mlp(module):
            kind, forward = "mlps", partial(_gated_mlp, ops.LigerSiLUMulFunction.apply, module)
        elif is_pre_norm_layer(module) and all(is_rms_norm(module.get_submodule(name)) for name in _NORMS):
            selects = isinstance(module.forward, PreNormLayer) and module.forward.selects
            kind, forward = "layers", FusedLayer(module, ops, selects)
        elif calls_rotary(module):
            rotated = with_rotary(module, partial(_rotary, ops.LigerRopeFunction.apply))
            kind, forward = "rotary", partial(_attention, rotated, module)
        else:
            continue
        module.forward = forward
        counts[kind] += 1
    return FusedModules(**counts)


class FusedLayer(PreNormLayer):
    """A layer whose norms and additions are fused, and whose parts leave their last projection to the addition."""

    def __init__(self, module: Any, ops: Any, selects: bool) -> None:
        super().__init__(module, selects)
        self.ops = ops

    def normalize(self, norm: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        apply: Any = _NormWithSum.apply
        normalized: tuple[Tensor, Tensor] = apply(self.ops, hidden, norm.weight, norm.variance_epsilon)
        return normalized

    def attend(self, normalized: Tensor, **options: Any) -> Branch:
        attention = self.module.self_attn
        if not _uses(attention, _attention) or not hasattr(attention, "o_proj"):
            return super().attend(normalized, **options)
        branch: Branch = attention(hidden_states=normalized, leaves_projection=True, **options)
        return branch

    def feed_forward(self, normalized: Tensor) -> Branch:
        mlp = self.module.mlp
        if not _uses(mlp, _gated_mlp):
            return super().feed_forward(normalized)
        return Branch(mlp.down_proj, mlp(normalized, leaves_projection=True))

    def add(self, branch: Branch, residual: Tensor) -> Tensor:
        """By the matrix product of the projection, in place without gradients.

        What a layer returns may be no view, on which FSDP's hook before the backward could be lost.
        """
        projection, hidden = branch
        if projection is None:
            return super().add(branch, residual)
        if type(projection) is not nn.Linear or projection.bias is not None:
            return super().add(Branch(None, projection(hidden)), residual)
        flat_TE = residual.flatten(0, -2)
        total_TE = flat_TE.clone() if torch.is_grad_enabled() else flat_TE
        total_TE.addmm_(hidden.flatten(0, -2), projection.weight.T)
        total: Tensor = torch.ops.aten._unsafe_view(total_TE, residual.shape)  # as `linear` returns its product
        return total


def _uses(module: Any, forward: Callable[..., Any]) -> bool:
    return getattr(getattr(module, "forward", None), "func", None) is forward


class _NormWithSum(torch.autograd.Function):
    """hidden -> (norm(hidden), hidden), with one gradient for both."""

    @staticmethod
    def forward(ctx: Any, ops: Any, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        normalized, _, rstd, *_ = ops.rms_norm_forward(hidden, weight, eps, 0.0, "llama", None)
        ctx.save_for_backward(hidden, weight, rstd)
        ctx.gradient = getattr(ops, "norm_gradient", norm_gradient)
        return normalized, hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        contiguous = (each.contiguous() for each in grads)
        grad, grad_weight = ctx.gradient(*contiguous, *ctx.saved_tensors)
        return None, grad, grad_weight, None


@torch.library.custom_op("verl::norm_gradient", mutates_args=())
def norm_gradient(
    grad: Tensor, grad_sum: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """As `norm_kernels.gradient`, of hidden states of any number of dimensions; an operator, for meta tensors."""
    rows = (each.flatten(0, -2) for each in (grad, grad_sum, hidden))
    kernels = importlib.import_module("verl.workers.norm_kernels")  # imports triton
    of_hidden, of_weight = kernels.gradient(*rows, weight, rstd)
    return of_hidden.view_as(hidden), of_weight


@norm_gradient.register_fake
def _norm_gradient_of_meta(grad: Tensor, grad_sum: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor) -> Any:
    return torch.empty_like(hidden), torch.empty_like(weight)


def _norm(kernel: Any, module: Any, hidden: Tensor) -> Tensor:
    """Not in place: the gradient of an output that is added to others may be theirs, too."""
    normalized: Tensor = kernel(hidden, module.weight, module.variance_epsilon, 0.0, "llama", False)
    return normalized


def _gated_mlp(kernel: Any, module: Any, hidden: Tensor, leaves_projection: bool = False) -> Tensor:
    gate, up = _joint(module, _PROJECTIONS[:2], hidden)
    product = kernel(gate, up)
    projected: Tensor = product if leaves_projection else module.down_proj(product)
    return projected


def _attention(
    own: Callable[..., Any],
    module: Any,
    hidden_states: Tensor,
    *args: Any,
    leaves_projection: bool = False,
    **options: Any,
) -> Any:
    """The module's own forward, `own`, with its three projections computed together.

    leaves_projection: return a `Branch`, which leaves out the last projection if that gives the module's output
    """
    parts: dict[str, Callable[[Tensor], Tensor]] = {}
    if all(hasattr(module, name) for name in _QKV):
        for name, found in zip(_QKV, _joint(module, _QKV, hidden_states), strict=True):
            parts[name] = partial(_computed, getattr(module, name), hidden_states, found)
    if not leaves_projection:
        return own(_WithParts(module, parts), hidden_states, *args, **options)
    attended: list[Tensor] = []

    def leave_out(each: Tensor) -> Tensor:
        attended.append(each)
        return each

    output, _ = own(_WithParts(module, {**parts, "o_proj": leave_out}), hidden_states, *args, **options)
    if attended and output is attended[0]:
        return Branch(module.o_proj, output)
    return Branch(None, _attention(own, module, hidden_states, *args, **options)[0])


class _WithParts:
    """A module some of whose parts are replaced."""

    def __init__(self, module: nn.Module, parts: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self.wrapped, self._parts = module, parts

    def __getattr__(self, name: str) -> Any:
        return self._parts.get(name) or getattr(self.wrapped, name)


def _computed(part: nn.Module, expected: Tensor, computed: Tensor, hidden: Tensor) -> Any:
    """What the part gives for the expected input was found already."""
    return computed if hidden is expected else part(hidden)


def _joint(module: nn.Module, names: Sequence[str], hidden: Tensor) -> Sequence[Tensor]:
    """The outputs of the module's parts."""
    parts = [module.get_submodule(name) for name in names]
    plain = [each for each in parts if type(each) is nn.Linear]
    if len(plain) == len(parts):
        return joint_linear(hidden, plain)
    frozen = [found for each in parts if (found := _frozen_part(each, hidden.dtype)) is not None]
    return joint_adapted(hidden, frozen) if len(frozen) == len(parts) else [each(hidden) for each in parts]


def _frozen_part(layer: nn.Module, dtype: torch.dtype) -> Part | None:
    """None for a layer that is trained itself, is of another kind (in four bits), or computes in another dtype."""
    found = factors_of(layer)
    base = layer if found is None else found[0]
    if type(base) is not nn.Linear or base.weight.requires_grad:
        return None
    part = Part(base.weight, base.bias) if found is None else Part(base.weight, base.bias, *found[1:])
    tensors = [each for each in part[:-1] if each is not None]
    return part if all(each.dtype == dtype for each in tensors) else None


def _rotary(kernel: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Of the first part of each head, where cos and sin are narrower than it."""
    width = cos.shape[-1]
    query_part, key_part = kernel(query[..., :width], key[..., :width], cos, sin)
    if width == query.shape[-1]:
        return query_part, key_part
    return torch.cat([query_part, query[..., width:]], dim=-1), torch.cat([key_part, key[..., width:]], dim=-1)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether the module is Llama's RMS norm: computed in float32, rounded, then weighted; of one input, no gate."""
    parameters, eps = dict(module.named_parameters()), getattr(module, "variance_epsilon", None)
    if list(parameters) != ["weight"] or parameters["weight"].ndim != 1 or eps is None:
        return False
    if len(signature(type(module).forward).parameters) != len(("self", "hidden_states")):
        return False
    hidden, weight = (each.bfloat16() for each in _random((3, 8), (8,)))
    wide = hidden.float()
    normalized = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).bfloat16()
    output = _called(module, {"weight": weight}, hidden)
    return output is not None and torch.equal(output, weight * normalized)


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether the module is down(silu(gate(x)) * up(x)), with or without biases."""
    if not all(hasattr(module, name) for name in _PROJECTIONS):
        return False
    hidden, gate, up, down, narrow, wide = _random((3, 4), (6, 4), (6, 4), (4, 6), (4,), (6,))
    tried = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
    tried |= {"gate_proj.bias": wide, "up_proj.bias": wide, "down_proj.bias": narrow}
    weights = {name: tried.get(name, torch.zeros(())) for name, _ in module.named_parameters()}
    bias = {name.removesuffix("_proj.bias"): each for name, each in weights.items() if name.endswith("bias")}
    product = silu(linear(hidden, gate, bias.get("gate"))) * linear(hidden, up, bias.get("up"))
    output = _called(module, weights, hidden)
    return output is not None and torch.allclose(output, linear(product, down, bias.get("down")))


def _called(module: nn.Module, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor | None:
    """None if the module needs further arguments, or returns more."""
    try:
        output = functional_call(module, dict(weights), (hidden,))
    except TypeError:
        return None
    return output if isinstance(output, Tensor) else None


def calls_rotary(module: nn.Module) -> bool:
    """Whether the module's forward rotates query and key by Llama's rotary embedding: halves, not pairs."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or forward.__closure__ or _ROTARY not in forward.__code__.co_names:
        return False
    query, key, half, other = _random((1, 3, 5, 8), (1, 2, 5, 8), (1, 5, 4), (1, 5, 4))
    cos, sin = (torch.cat([each, each], dim=-1) for each in (half, other))
    expected = [
        each * cos[:, None] + torch.cat([-each[..., 4:], each[..., :4]], dim=-1) * sin[:, None] for each in (query, key)
    ]
    rotated = forward.__globals__[_ROTARY](query, key, cos, sin)
    return all(torch.allclose(one, other) for one, other in zip(rotated, expected, strict=True))


def with_rotary(module: nn.Module, rotary: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the module's class with another function for the rotary embedding, in a copy of its globals."""
    own = type(module).forward
    assert isinstance(own, FunctionType)
    return with_functions(own, {_ROTARY: rotary})


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]
