"""The device's own kernels beside float64: errors relative to the largest exact value, and times.

    bash bench/gpu/first_hour.sh kernels

Attention is that of a pack with shared prompts, 12 query and 2 key heads, in bfloat16 and in float32, with and without
a sliding window. The loss is log-probs and entropy over a vocabulary of 151,936, as a run computes them: by Triton's
kernels on a GPU, logits kept for the backward or computed again. The last piece is a model of two layers with
liger-kernel's modules in float32, on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from piece import Piece, seconds, shape, start
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from verl.kit.plan.cost import pack_of_groups
from verl.workers.attention import by_segments, packed_attention
from verl.workers.fused import fuse
from verl.workers.logprobs import token_logprobs

HEADS, KEY_HEADS = 12, 2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Outputs = tuple[Tensor, ...]


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


def attention(piece: Piece) -> Iterator[tuple[str, float]]:
    lengths = (1, 20, 6, 2) if piece.rehearse else (2, 900, 250, 4)
    segments = pack_of_groups(*lengths).segments
    for size, (name, dtype), window in product((64, 128), DTYPES.items(), (None, 8 if piece.rehearse else 512)):
        torch.manual_seed(0)
        shapes = [(1, heads, segments[-1].end, size) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        inputs = [torch.randn(each, device=piece.device).to(dtype) for each in shapes]
        scale = size**-0.5

        def ours(*qkv: Tensor, window: int | None = window, scale: float = scale) -> Outputs:
            found, _ = packed_attention(nn.Module(), *qkv, None, scale, sliding_window=window, segments=segments)
            return (found,)

        def exact(*qkv: Tensor, window: int | None = window, scale: float = scale) -> Outputs:
            return (by_segments(*qkv, segments, scale, window),)

        label = f"attention, {name}, head size {size}, window {window or 'none'}"
        expected = with_gradients(exact, [each.double() for each in inputs])
        yield f"{label}: error", error(with_gradients(ours, inputs), expected)
        yield f"{label}: ms", 1000 * seconds(partial(with_gradients, ours, inputs), piece.device)


def loss(piece: Piece) -> Iterator[tuple[str, float]]:
    """In bfloat16 the error is that of the logits, which the matrix product rounds."""
    tokens, width, vocabulary = (16, 32, 512) if piece.rehearse else (2048, 1536, 151_936)
    for (name, dtype), kept in product(DTYPES.items(), (0, 2**40)):
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device=piece.device).to(dtype)
        head = (torch.randn(vocabulary, width, device=piece.device) * width**-0.5).to(dtype)
        target = torch.randint(vocabulary, (tokens,), device=piece.device)

        def ours(hidden: Tensor, head: Tensor, target: Tensor = target, kept: int = kept) -> Outputs:
            logprobs, entropy = token_logprobs(hidden, head, target, 0.7, True, not piece.rehearse, kept)
            assert entropy is not None
            return logprobs, entropy

        def exact(hidden: Tensor, head: Tensor, target: Tensor = target) -> Outputs:
            logprobs = (hidden @ head.T / 0.7).log_softmax(-1)
            return logprobs.gather(-1, target[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)

        expected = with_gradients(exact, [hidden.double(), head.double()])
        label = f"loss with entropy, {name}, logits {'kept' if kept else 'computed again'}"
        yield f"{label}: error", error(with_gradients(ours, [hidden, head]), expected)
        work = partial(with_gradients, ours, [hidden, head])
        yield f"{label}, {tokens} tokens: ms", 1000 * seconds(work, piece.device)


def fused_model(piece: Piece) -> Iterator[tuple[str, float]]:
    """Logits and the gradients of all weights."""
    config = shape("tiny")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(piece.device)
    exact = copy.deepcopy(model).double()
    if not piece.rehearse:
        fuse(model)
    tokens = torch.arange(64, device=piece.device)[None]

    def outcome(model: nn.Module) -> list[Tensor]:
        logits = model(tokens, use_cache=False).logits
        grads = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        return [logits.detach(), *grads]

    yield "a model with fused modules, float32: error", error(outcome(model), outcome(exact))


if __name__ == "__main__":
    piece, _ = start(__doc__)
    piece.write({**dict(attention(piece)), **dict(loss(piece)), **dict(fused_model(piece))})
