"""Triton kernels of the log-probs: one pass over the logits in the forward, one in the backward.

Logits are read in the dtype that the head's matrix product wrote, and computed in float32. Bytes moved per logit of b
bytes: b forward, 2 b backward (read, written in place). Importable only where triton is, as beside torch for CUDA.

Shape legend: C tokens, S vocabulary entries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits per program and iteration
_LOWEST = -1e30  # below every logit, and finite: its product with 0 is 0
_BY_TOKEN = ["target", "logprobs", "normalizers", "entropies", "of_logprobs", "of_entropies"]  # one number a program


def statistics(logits_CS: Tensor, target_C: Tensor, temperature: float) -> Tensor:
    """[3, C] log p(target), log-normalizer and entropy of softmax(logits / temperature), in float32."""
    found = torch.empty((3, len(logits_CS)), dtype=torch.float32, device=logits_CS.device)
    _statistics[(len(logits_CS),)](
        logits_CS,
        target_C,
        *found,
        logits_CS.stride(0),
        logits_CS.shape[1],
        1.0 / temperature,
        LOWEST=_LOWEST,
        BLOCK=_BLOCK,
    )
    return found


def gradient(
    logits_CS: Tensor,
    target_C: Tensor,
    normalizer_C: Tensor,
    entropy_C: Tensor,
    of_logprobs_C: Tensor,
    of_entropy_C: Tensor | None,
    first: int,
    temperature: float,
) -> None:
    """Turn the logits of a slice of the vocabulary, which starts at `first`, into their gradient."""
    width = logits_CS.shape[1]
    _gradient[(len(logits_CS), triton.cdiv(width, _BLOCK))](
        logits_CS,
        target_C,
        normalizer_C,
        entropy_C,
        of_logprobs_C.contiguous(),
        (of_logprobs_C if of_entropy_C is None else of_entropy_C).contiguous(),
        logits_CS.stride(0),
        width,
        first,
        1.0 / temperature,
        WITH_ENTROPY=of_entropy_C is not None,
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize_on_alignment=_BY_TOKEN)  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    logits, target, logprobs, normalizers, entropies, stride, width, scale, LOWEST: tl.constexpr, BLOCK: tl.constexpr
):
    """One token. Running sums of e = exp(z - peak) and of e * (z - peak) are rescaled when the peak rises."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak = LOWEST
    total = 0.0
    weighted = 0.0
    for start in range(0, width, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        inside = entries < width
        z = tl.where(inside, tl.load(logits + entries, mask=inside, other=0.0).to(tl.float32) * scale, LOWEST)
        raised = tl.maximum(peak, tl.max(z, axis=0))
        e = tl.exp(z - raised)
        shrink = tl.exp(peak - raised)
        weighted = shrink * (weighted + total * (peak - raised)) + tl.sum(e * (z - raised), axis=0)
        total = shrink * total + tl.sum(e, axis=0)
        peak = raised
    normalizer = peak + tl.log(total)
    chosen = tl.load(logits + tl.load(target + row)).to(tl.float32) * scale
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(normalizers + row, normalizer)
    tl.store(entropies + row, tl.log(total) - weighted / total)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=_BY_TOKEN)  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    target,
    normalizers,
    entropies,
    of_logprobs,
    of_entropies,
    stride,
    width,
    first,
    scale,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one token: onehot(target) * g - p * (g + h * (log p + entropy)), over the temperature."""
    row = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < width
    logits += row * stride + entries
    logp = tl.load(logits, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(normalizers + row)
    of_logprob = tl.load(of_logprobs + row)
    weight = of_logprob
    if WITH_ENTROPY:
        weight = of_logprob + tl.load(of_entropies + row) * (logp + tl.load(entropies + row))
    found = tl.where(first + entries == tl.load(target + row), of_logprob, 0.0) - tl.exp(logp) * weight
    tl.store(logits, (found * scale).to(logits.dtype.element_ty), mask=inside)
