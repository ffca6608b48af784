"""The device's own speeds, and its kernels beside float64.

Errors of kernels are relative to the largest exact value. Gradients of a model are compared one by one, by the norm of
the difference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from bench.gpu.inputs import seconds, shape
from bench.gpu.measurements import Figures, UnexpectedError
from bench.gpu.place import Place
from bench.gpu.trainer import alone, build, is_fused, minibatch, packs_of
from bench.local import PLAIN_GRPO
from toolrl.check.plan.cost import pack_of_groups
from verl.batch.packed import Segment
from verl.batch.token_batch import TokenBatch
from verl.workers.attention import by_segments, packed_attention
from verl.workers.delta_net import ByLevels, fla_kernels
from verl.workers.logprobs import token_logprobs
from verl.workers.policy_worker import policy_loss
from verl.workers.state import BySegments

HEADS, KEY_HEADS = 12, 2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KERNEL_BOUNDS = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
GRADIENT_BOUND, ROUNDING = 2e-2, 1.25  # or that much of what bfloat16 itself costs transformers' modules
Outputs = tuple[Tensor, ...]


class Exactness:
    """Needs no engine."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def ceilings(self) -> Figures:
        """What this device reaches at best, for comparison with the speeds that the plan assumes."""
        scale, device = (64 if self.place.rehearse else 1), self.place.device
        source = torch.empty(2**31 // scale, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        figures: Figures = {"a copy: TB/s": 2e-12 * source.numel() / seconds(lambda: target.copy_(source), self.place)}
        for sizes in ((8192, 8192, 8192), (15168, 1536, 8960)):
            rows, inner, columns = (each // scale for each in sizes)
            left, right = (torch.randn(*each, device=device).bfloat16() for each in ((rows, inner), (inner, columns)))
            flops = 2e-12 * rows * inner * columns
            name = " x ".join(map(str, sizes))
            figures[f"a product of {name} in bfloat16: TFLOP/s"] = flops / seconds(
                partial(torch.mm, left, right), self.place
            )
        return figures

    def gradients(self) -> Figures:
        """Of two groups' loss, by a trainer rank as in a run, and by transformers in float64, sample by sample."""
        place, config = self.place, shape(self.place, layers=2)
        batch = minibatch(place, 2, config.vocab_size)
        with ExitStack() as stack:
            stack.enter_context(alone(place))
            torch.manual_seed(1)
            with torch.device(place.device):
                weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
            dtype = torch.float32 if place.rehearse else torch.bfloat16
            engine = build(place, config, weights, dtype)
            engine.backward(packs_of(batch), partial(policy_loss, algorithm=PLAIN_GRPO, temperature=1.0))
            ours = {name: _whole(each.grad) for name, each in engine.module.model.named_parameters()}
        exact = by_transformers(place, config, weights, batch, torch.float64)
        plain = by_transformers(place, config, weights, batch, dtype)
        errors = {name: _distance(ours[name], exact[name]) for name in exact}
        worst = max(errors, key=errors.__getitem__)
        rounding = max(_distance(plain[name], exact[name]) for name in exact)
        figures: Figures = {
            "largest relative L2 of a gradient": errors[worst],
            "of": worst,
            "mean over gradients": sum(errors.values()) / len(errors),
            "largest by transformers' own modules in the same precision": rounding,
            "fused": "yes" if is_fused(place) else "no",
        }
        bound = max(GRADIENT_BOUND, ROUNDING * rounding)
        if not errors[worst] <= bound:
            raise UnexpectedError(f"the gradient of {worst} is off by {errors[worst]:.3g}, bound {bound:.3g}", figures)
        return figures

    def kernels(self) -> Figures:
        """Attention of a pack with shared prompts."""
        return checked(attention(self.place))

    def losses(self) -> Figures:
        """Log-probs and entropy over the whole vocabulary. In bfloat16 the error is that of the rounded logits."""
        return checked(loss(self.place))

    def delta_nets(self) -> Figures:
        """A layer of Qwen3.5-0.8B's sizes over a pack with shared prompts, by kernels and segment by segment."""
        return checked(delta_net(self.place))


def by_transformers(
    place: Place, config: PretrainedConfig, weights: Mapping[str, Tensor], batch: TokenBatch, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gradients of -sum(advantage * weight * log-prob), which is GRPO's where the policy is the one that sampled."""
    with torch.device(place.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.load_state_dict(weights)
    for packed in packs_of(batch, shared=False):
        packed = packed.to(torch.device(place.device))
        logits = model(packed.token_ids[None], use_cache=False).logits.squeeze(0)[packed.source]
        logprobs = logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)
        logprobs = logprobs.gather(-1, packed.target[:, None]).squeeze(-1)
        (-(packed.advantages * packed.loss_weights * logprobs).sum()).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def with_gradients(compute: Callable[..., Outputs], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of `compute` and the gradients of their weighted sum."""
    inputs = [each.detach().requires_grad_() for each in inputs]
    outputs = compute(*inputs)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(each.shape, generator=generator).to(each.device, each.dtype) for each in outputs]
    total = sum((weight * each).sum() for weight, each in zip(weights, outputs, strict=True))
    return [*(each.detach() for each in outputs), *torch.autograd.grad(total, inputs)]  # type: ignore[arg-type]


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest over all tensors of max |found - exact| / max |exact|."""
    pairs = zip(found, exact, strict=True)
    return max(float((ours.double() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def checked(found: Iterator[tuple[str, torch.dtype, float, float]]) -> Figures:
    """Errors and milliseconds by label. Raises UnexpectedError for an error beyond its bound."""
    figures, beyond = Figures(), []
    for label, dtype, wrong, ms in found:
        figures |= {f"{label}: error": wrong, f"{label}: ms": ms}
        if not wrong <= KERNEL_BOUNDS[dtype]:
            beyond.append(f"{label} is off by {wrong:.3g}, bound {KERNEL_BOUNDS[dtype]}")
    if beyond:
        raise UnexpectedError("; ".join(beyond), figures)
    return figures


def attention(place: Place) -> Iterator[tuple[str, torch.dtype, float, float]]:
    lengths = (1, *place.lengths) if place.rehearse else (2, *place.lengths)
    segments = pack_of_groups(*lengths).segments
    for size, (name, dtype), window in product((64, 128), DTYPES.items(), (None, 8 if place.rehearse else 512)):
        torch.manual_seed(0)
        shapes = [(1, heads, segments[-1].end, size) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        inputs = [torch.randn(each, device=place.device).to(dtype) for each in shapes]
        scale = size**-0.5

        def ours(*qkv: Tensor, window: int | None = window, scale: float = scale) -> Outputs:
            found, _ = packed_attention(nn.Module(), *qkv, None, scale, sliding_window=window, segments=segments)
            return (found,)

        def exact(*qkv: Tensor, window: int | None = window, scale: float = scale) -> Outputs:
            return (by_segments(*qkv, segments, scale, window),)

        expected = with_gradients(exact, [each.double() for each in inputs])
        wrong = error(with_gradients(ours, inputs), expected)
        ms = 1000 * seconds(partial(with_gradients, ours, inputs), place)
        yield f"attention, {name}, head size {size}, window {window or 'none'}", dtype, wrong, ms


def loss(place: Place) -> Iterator[tuple[str, torch.dtype, float, float]]:
    tokens, width, vocabulary = (16, 32, 512) if place.rehearse else (2048, 1536, 151_936)
    for (name, dtype), kept in product(DTYPES.items(), (0, 2**40)):
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device=place.device).to(dtype)
        head = (torch.randn(vocabulary, width, device=place.device) * width**-0.5).to(dtype)
        target = torch.randint(vocabulary, (tokens,), device=place.device)

        def ours(hidden: Tensor, head: Tensor, target: Tensor = target, kept: int = kept) -> Outputs:
            logprobs, entropy = token_logprobs(hidden, head, target, 0.7, True, not place.rehearse, kept)
            assert entropy is not None
            return logprobs, entropy

        def exact(hidden: Tensor, head: Tensor, target: Tensor = target) -> Outputs:
            logprobs = (hidden @ head.T / 0.7).log_softmax(-1)
            return logprobs.gather(-1, target[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)

        expected = with_gradients(exact, [hidden.double(), head.double()])
        wrong = error(with_gradients(ours, [hidden, head]), expected)
        ms = 1000 * seconds(partial(with_gradients, ours, [hidden, head]), place)
        yield (
            f"loss with entropy, {name}, logits {'kept' if kept else 'computed again'}, {tokens} tokens",
            dtype,
            wrong,
            ms,
        )


def delta_net(place: Place) -> Iterator[tuple[str, torch.dtype, float, float]]:
    lengths = (1, *place.lengths) if place.rehearse else (2, *place.lengths)
    segments = pack_of_groups(*lengths).segments
    sizes = {
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2 if place.rehearse else 16,
    }
    heads, width = sizes["linear_num_key_heads"], 64 if place.rehearse else 1024
    config = Qwen3_5TextConfig(hidden_size=width, linear_num_value_heads=heads, **sizes)
    torch.manual_seed(0)
    module = Qwen3_5GatedDeltaNet(config, 0).to(place.device, torch.bfloat16)
    hidden = torch.randn(1, segments[-1].end, width, device=place.device).bfloat16()
    loop = BySegments(module, "cache_params")
    at_once = loop if place.rehearse else ByLevels(module, "cache_params", fla_kernels())
    exact = BySegments(copy.deepcopy(module).float(), "cache_params")
    expected = _over(exact, segments, hidden.float())
    for label, layer in (("at once", at_once), ("segment by segment", loop)):
        wrong = error(_over(layer, segments, hidden), expected)
        ms = 1000 * seconds(partial(_over, layer, segments, hidden), place)
        yield f"gated delta net, bfloat16, {label}", torch.bfloat16, wrong, ms


def _over(layer: BySegments, segments: Sequence[Segment], hidden: Tensor) -> list[Tensor]:
    layer.segments = segments
    return with_gradients(lambda hidden: (layer(hidden),), [hidden])
