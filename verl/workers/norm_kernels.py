"""Triton kernel of an RMS norm's backward that also adds the gradient of the norm's input, which goes on as well.

One compilation serves packs of every size. liger-kernel's kernel for the same is compiled for a number of rows per
program, which nearly every pack changes. Bytes moved per element of c bytes: 4 c. Importable only where triton is.

Shape legend: T tokens, E hidden size, P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def gradient(
    grad_TE: Tensor, grad_sum_TE: Tensor, hidden_TE: Tensor, weight_E: Tensor, rstd_T: Tensor
) -> tuple[Tensor, Tensor]:
    """([T, E] gradient of the hidden states, [E] of the weight). All tensors are contiguous.

    grad: of the normalized states; grad_sum: of the states themselves; rstd: 1 / root mean square, in float32
    """
    tokens, width = hidden_TE.shape
    programs, block = _num_programs(hidden_TE.device), triton.next_power_of_2(width)
    found_TE = torch.empty_like(hidden_TE)
    parts_PE = torch.empty((programs, width), dtype=torch.float32, device=hidden_TE.device)
    _gradient[(programs,)](
        grad_TE,
        grad_sum_TE,
        hidden_TE,
        weight_E,
        rstd_T,
        found_TE,
        parts_PE,
        tokens,
        width,
        BLOCK=block,
        num_warps=min(16, max(4, block // 256)),
    )
    return found_TE, parts_PE.sum(0).to(weight_E.dtype)


def _num_programs(device: torch.device) -> int:
    """One per processor: each adds up its own part of the weight's gradient."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    grads, grads_of_sum, hidden, weight, rstds, found, parts, tokens, width, BLOCK: tl.constexpr
):
    """Every P-th token: rstd * (m - u * mean(m * u)) + h with m = g * w, u = x * rstd (rounded for the weight)."""
    program = tl.program_id(0).to(tl.int64)  # so that offsets are 64 bits wide
    entries = tl.arange(0, BLOCK)
    inside = entries < width
    w = tl.load(weight + entries, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for token in range(program, tokens, tl.num_programs(0)):
        row = token * width + entries
        g = tl.load(grads + row, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(hidden + row, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + token)
        u = x * rstd
        of_weight += g * u.to(hidden.dtype.element_ty).to(tl.float32)
        m = g * w
        of_hidden = rstd * (m - u * (tl.sum(m * u, axis=0) / width))
        of_hidden += tl.load(grads_of_sum + row, mask=inside, other=0.0).to(tl.float32)
        tl.store(found + row, of_hidden.to(found.dtype.element_ty), mask=inside)
    tl.store(parts + program * width + entries, of_weight, mask=inside)
