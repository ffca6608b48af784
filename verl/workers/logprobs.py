"""Log-probs and entropy of trained tokens from their hidden states, without materializing the [A, V] logits.

The forward iterates over chunks of tokens and keeps one number per token, the log-normalizer of the softmax. With it
the backward can iterate over slices of the vocabulary: each slice's gradient of the head is written exactly once, and
only the small gradient of the hidden states is accumulated. Logits that a GPU has room for are kept instead, so that
the backward does not compute them again.

Shape legend: A trained tokens, E hidden size, V vocabulary, C tokens of a chunk, S vocabulary entries of a slice, K
tokens in place of a trained one.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

# Elements: to fit a CPU's cache, to need few launches on a GPU (and on meta tensors, which stand for one).
LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**28, "meta": 2**28}
_ALIGNED = 64  # entries: rows of a slice's logits begin at multiples of 128 bytes, whatever the number of tokens
_KEPT_SHARE = 1 / 32  # share of a GPU's memory: 8,700 tokens of a vocabulary of 152,000 in bf16 on 80 GiB


def max_kept_bytes(device_bytes: float) -> int:
    """Bytes of logits that a pass may keep for its backward, on a GPU of that size."""
    return int(_KEPT_SHARE * device_bytes)


def token_logprobs(
    hidden_AE: Tensor,
    head_VE: Tensor,
    target_A: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    fused: bool = False,
    kept_bytes: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """([A] log p(target), [A] entropy or None) of softmax(hidden @ head^T / temperature), in float32 or better.

    fused: whether each pass over the logits is one Triton kernel (`loss_kernels.py`), which needs a GPU
    kept_bytes: fused logits of at most this size are kept for the backward; none without one
    """
    apply: Any = _TokenLogprobs.apply
    kept = kept_bytes if torch.is_grad_enabled() else 0  # needs_input_grad is also set without a backward
    logprobs_A, entropy_A = apply(hidden_AE, head_VE, target_A, temperature, with_entropy, fused, kept)
    return logprobs_A, entropy_A if with_entropy else None


def top_tokens(
    hidden_AE: Tensor, head_VE: Tensor, k: int, num_ids: int | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """([A, K] the k likeliest tokens, of the first `num_ids` or all, and [A, K] their log-probs), without gradients."""
    ids, logprobs = [], []
    for rows in _slices(len(hidden_AE), len(head_VE), hidden_AE.device):
        logits_CV = (hidden_AE[rows] @ head_VE.T).float().div_(temperature)
        values_CK, ids_CK = logits_CV[:, :num_ids].topk(k, dim=-1)
        ids.append(ids_CK)
        logprobs.append(values_CK - logits_CV.logsumexp(-1, keepdim=True))
    empty = hidden_AE.new_empty(0, k)
    return torch.cat([empty.long(), *ids]), torch.cat([empty.float(), *logprobs])


def logprobs_of(
    ids_AK: Tensor, hidden_AE: Tensor, head_VE: Tensor, target_A: Tensor, logprobs_A: Tensor, temperature: float
) -> Tensor:
    """[A, K] log-probs of these tokens, from those of the targets: log p(k) = log p(target) + z_k - z_target."""
    apply: Any = _LogitsOf.apply
    logits_AK = apply(hidden_AE, head_VE, torch.cat([ids_AK, target_A[:, None]], dim=1)) / temperature
    found_AK: Tensor = logprobs_A[:, None] + logits_AK[:, :-1] - logits_AK[:, -1:]
    return found_AK


class _LogitsOf(torch.autograd.Function):
    """[A, K] logits of K tokens each, in float32 or better. The rows of the head that they need are copied in chunks of
    tokens, and not kept."""

    @staticmethod
    def forward(ctx: Any, hidden_AE: Tensor, head_VE: Tensor, ids_AK: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden_AE.dtype, torch.float32)
        logits_AK = hidden_AE.new_empty(ids_AK.shape, dtype=dtype)
        for rows in _slices(len(ids_AK), ids_AK.shape[1] * hidden_AE.shape[1], hidden_AE.device):
            logits_AK[rows] = (head_VE[ids_AK[rows]].to(dtype) @ hidden_AE[rows, :, None].to(dtype)).squeeze(-1)
        ctx.save_for_backward(hidden_AE, head_VE, ids_AK)
        return logits_AK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_AK,), (hidden_AE, head_VE, ids_AK) = grads, ctx.saved_tensors
        grad_hidden_AE = torch.empty_like(hidden_AE, dtype=grad_AK.dtype)
        grad_head_VE = torch.zeros_like(head_VE, dtype=grad_AK.dtype) if ctx.needs_input_grad[1] else None
        for rows in _slices(len(ids_AK), ids_AK.shape[1] * hidden_AE.shape[1], hidden_AE.device):
            chosen_CKE = head_VE[ids_AK[rows]].to(grad_AK.dtype)
            grad_hidden_AE[rows] = (grad_AK[rows, None] @ chosen_CKE).squeeze(1)
            if grad_head_VE is not None:
                of_rows_CKE = grad_AK[rows, :, None] * hidden_AE[rows, None].to(grad_AK.dtype)
                grad_head_VE.index_add_(0, ids_AK[rows].flatten(), of_rows_CKE.flatten(0, 1))
        of_head = None if grad_head_VE is None else grad_head_VE.to(head_VE.dtype)
        return grad_hidden_AE.to(hidden_AE.dtype), of_head, None


class _TokenLogprobs(torch.autograd.Function):
    """With z = hidden @ head^T / temperature, p = softmax(z) and H the entropy of p:

    d log p(target) / dz = onehot(target) - p        dH / dz = -p * (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_AE: Tensor,
        head_VE: Tensor,
        target_A: Tensor,
        temperature: float,
        with_entropy: bool,
        fused: bool,
        kept_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_AE.dtype, torch.float32)
        logprobs_A = hidden_AE.new_empty(len(hidden_AE), dtype=dtype)
        entropy_A, normalizer_A = torch.zeros_like(logprobs_A), torch.empty_like(logprobs_A)
        size = len(hidden_AE) * len(head_VE) * hidden_AE.element_size()
        keep = fused and size <= kept_bytes
        # In the slices of a score, whose matrix products round in the same way.
        ctx.logits_AV = hidden_AE.new_empty(len(hidden_AE), len(head_VE)) if keep else None
        for rows in _slices(len(hidden_AE), len(head_VE), hidden_AE.device):
            if fused:
                kept_CV = None if ctx.logits_AV is None else ctx.logits_AV[rows]
                logits_CV = torch.mm(hidden_AE[rows], head_VE.T, out=kept_CV)
                statistics = logit_statistics(logits_CV, target_A[rows], temperature)
                logprobs_A[rows], normalizer_A[rows], entropy_A[rows] = statistics
                continue
            logits_CV = (hidden_AE[rows] @ head_VE.T).to(dtype).div_(temperature)
            normalizer_C = logits_CV.logsumexp(-1)
            logprobs_A[rows] = logits_CV.gather(-1, target_A[rows, None]).squeeze(-1) - normalizer_C
            normalizer_A[rows] = normalizer_C
            if with_entropy:
                logits_CV -= normalizer_C[:, None]
                entropy_A[rows] = -(logits_CV.exp() * logits_CV).sum(-1)
        ctx.save_for_backward(hidden_AE, head_VE, target_A, normalizer_A, entropy_A)
        ctx.temperature, ctx.fused = temperature, fused
        ctx.set_materialize_grads(False)  # an entropy without a gradient (only logged) costs nothing in the backward
        return logprobs_A, entropy_A

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_AE, head_VE, target_A, normalizer_A, entropy_A = ctx.saved_tensors
        of_logprobs_A, of_entropy_A = grads
        if of_logprobs_A is None:
            of_logprobs_A = torch.zeros_like(normalizer_A)
        grad_hidden_AE = torch.zeros_like(hidden_AE, dtype=normalizer_A.dtype)
        grad_head_VE = torch.empty_like(head_VE)
        kept_AV, ctx.logits_AV = ctx.logits_AV, None  # overwritten below
        for entries in _slices(len(head_VE), len(hidden_AE), hidden_AE.device, whole=kept_AV is not None):
            logits_AS = hidden_AE @ head_VE[entries].T if kept_AV is None else kept_AV
            columns = (target_A, normalizer_A, entropy_A, of_logprobs_A, of_entropy_A)
            if ctx.fused:
                logit_gradient_(logits_AS, *columns, entries.start, ctx.temperature)
                narrow_AS = logits_AS
            else:
                narrow_AS = _logit_gradient(logits_AS, *columns, entries.start, ctx.temperature).to(hidden_AE.dtype)
            grad_hidden_AE += narrow_AS @ head_VE[entries]
            torch.mm(narrow_AS.T, hidden_AE, out=grad_head_VE[entries])
        return grad_hidden_AE.to(hidden_AE.dtype), grad_head_VE, None, None, None, None, None


def _logit_gradient(
    logits_AS: Tensor,
    target_A: Tensor,
    normalizer_A: Tensor,
    entropy_A: Tensor,
    of_logprobs_A: Tensor,
    of_entropy_A: Tensor | None,
    first: int,
    temperature: float,
) -> Tensor:
    """[A, S] gradient of the logits of a slice of the vocabulary that starts at `first`."""
    grad_AS = logits_AS.to(normalizer_A.dtype).div_(temperature)
    grad_AS -= normalizer_A[:, None]  # log p, which now turns into the gradient of the logits in place
    if of_entropy_A is None:
        grad_AS.exp_().mul_(-of_logprobs_A[:, None])
    else:
        factor_AS = (grad_AS + entropy_A[:, None]).mul_(-of_entropy_A[:, None]).sub_(of_logprobs_A[:, None])
        grad_AS.exp_().mul_(factor_AS)
    # Adds zeros for the targets in other slices: to leave those out, the host would have to wait for a GPU.
    here_A = (target_A >= first) & (target_A < first + grad_AS.shape[1])
    entry_A = (target_A - first).clamp(0, grad_AS.shape[1] - 1)
    grad_AS.scatter_add_(1, entry_A[:, None], torch.where(here_A, of_logprobs_A, 0.0)[:, None])
    return grad_AS.div_(temperature)


# The kernels as operators of torch, so that meta tensors pass through them; triton is imported at their first use.


@torch.library.custom_op("verl::logit_statistics", mutates_args=())
def logit_statistics(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """[3, C] log p(target), log-normalizer and entropy of [C, V] logits, in float32: one pass over the logits."""
    statistics: Tensor = importlib.import_module("verl.workers.loss_kernels").statistics(logits, target, temperature)
    return statistics


@logit_statistics.register_fake
def _statistics_of_meta(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    return logits.new_empty((3, len(logits)), dtype=torch.float32)


@torch.library.custom_op("verl::logit_gradient_", mutates_args=("logits",))
def logit_gradient_(
    logits: Tensor,
    target: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
    first: int,
    temperature: float,
) -> None:
    """As `_logit_gradient`, in place of the logits: one pass."""
    columns = (target, normalizer, entropy, of_logprobs, of_entropy)
    importlib.import_module("verl.workers.loss_kernels").gradient(logits, *columns, first, temperature)


def _slices(length: int, width: int, device: torch.device, whole: bool = False) -> list[slice]:
    """Slices of `length` such that slice * `width` is at most LOGITS_AT_ONCE; whole: a single one"""
    size = length if whole else max(1, LOGITS_AT_ONCE[device.type] // max(1, width))
    if _ALIGNED < size < length:
        size -= size % _ALIGNED
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
