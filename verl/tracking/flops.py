"""Floating-point operations of a decoder, and model FLOPs utilization (MFU).

A multiply-add is two operations. With N non-embedding parameters, K layers with attention of width H, S multiply-adds
of a token with the states of other layers, a segment of L computed tokens after a cached prefix of P tokens, and logits
at R positions of a head with V parameters, a forward pass costs

    2 N L                          the matrices, without those that only see the R positions: 2 M R
    + 2 S L                        gated delta nets and Mamba2 (`verl/workers/state_cost.py`)
    + 4 K H (L P + L (L + 1) / 2)  scores and weighted values of causal attention
    + 2 V R                        the head

and a backward pass twice that. Recomputation for gradient checkpointing is not counted. Norms, rotary embeddings and
activations are neglected: less than a percent.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRAINING = 3  # cost of forward and backward, in forward passes
FROZEN = 2  # the same without gradients of the weights, as where an adapter is trained


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, by its vendor's data sheet: dense bf16 FLOP/s, memory bandwidth in bytes/s, GiB visible to torch.

    GiB of cards other than H100, H200 and A100 are estimates from the nominal size.
    Where a sheet gives bf16 with sparsity, half of it is dense. GeForce cards: with accumulation in fp32, at half rate.
    """

    flops: float
    bytes_per_s: float
    memory_gib: float


DEVICES = {  # the first entry whose terms are all in the device's name matches
    "B200": Device(2250e12, 8.0e12, 178.3),  # NVIDIA DGX B200 data sheet, an eighth of the system: 192 GB, 180 usable
    "H200": Device(989e12, 4.8e12, 139.8),  # NVIDIA H200 data sheet
    "H20": Device(148e12, 4.0e12, 95.1),  # NVIDIA H20 data sheet: 96 GB
    "H100 PCIe": Device(756e12, 2.0e12, 79.1),  # NVIDIA H100 data sheet
    "H100 NVL": Device(835e12, 3.9e12, 93.1),
    "H100": Device(989e12, 3.35e12, 79.1),
    "A100 40GB": Device(312e12, 1.555e12, 39.4),  # NVIDIA A100 data sheet
    "A100": Device(312e12, 2.039e12, 79.2),
    "L40S": Device(362e12, 0.864e12, 44.4),  # NVIDIA L40S data sheet; 48 GB less error correction
    "L4": Device(121e12, 0.3e12, 22.0),  # NVIDIA L4 data sheet: 242 with sparsity; 24 GB less error correction
    "A10G": Device(70e12, 0.6e12, 22.1),  # NVIDIA A10 Tensor Core GPU for AWS (A10G) data sheet; with error correction
    "RTX 5090": Device(209.5e12, 1.792e12, 31.4),  # NVIDIA RTX Blackwell architecture, appendix A
    "RTX 4090": Device(165.2e12, 1.008e12, 23.6),  # NVIDIA Ada architecture, appendix A
    "RTX 3090": Device(71e12, 0.936e12, 23.7),  # NVIDIA GA102 architecture, appendix A
    "MI300X": Device(1307.4e12, 5.3e12, 191.9),  # AMD Instinct MI300X data sheet
}
_OTHERS = {"laptop", "ti", "d", "super"}  # suffixes of cards with another chip
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?(gib|gb|g)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The formula's parameters of a dense decoder."""

    parameters: int  # without embeddings and output head
    layers: int  # with attention
    hidden: int  # width of attention: heads times head size
    head_parameters: int = 0  # hidden size times vocabulary, tied or not
    selecting: int = 0  # M, of the parameters: of matrices that are applied where logits are alone
    states: int = 0  # S, of all layers


def forward_flops(shape: DecoderShape, segments: Iterable[tuple[int, int]], num_logits: int = 0) -> float:
    """FLOPs of segments (computed tokens L, prefix tokens P), by the formula above."""
    total = 2.0 * (shape.head_parameters + shape.selecting) * num_logits
    for length, prefix in segments:
        pairs = length * prefix + length * (length + 1) / 2
        total += (
            2.0 * (shape.parameters - shape.selecting + shape.states) * length
            + 4.0 * shape.layers * shape.hidden * pairs
        )
    return total


def find_device(name: str | None) -> Device | None:
    """The device by torch's name for it, or an informal one (h100-pcie, rtx4090, 4090); None if unknown."""
    terms = set(re.findall(r"[a-z]+\d+[a-z]*|[a-z]+|\d+[a-z]*", (name or "").lower().replace("rtx", "rtx ")))
    if terms & _OTHERS:
        return None
    terms |= {"rtx"} if len(terms) == 1 else set()  # a bare number
    return next((device for known, device in DEVICES.items() if set(known.lower().split()) <= terms), None)


def find_memory(text: str) -> float | None:
    """GiB of a text such as 24GiB or 24 GB (GB means GiB, as cards are sold); None if it is no size."""
    match = _MEMORY.fullmatch(text.strip())
    return float(match[1]) if match else None


def peak_flops(device: str | None) -> float | None:
    """FLOP/s of a device by torch's name for it; None on CPU and for unknown devices."""
    known = find_device(device)
    return None if known is None else known.flops


def mfu(flops: float, seconds: float, peak: float | None, num_devices: int = 1) -> dict[str, float]:
    """{"perf/mfu": share of the peak of all devices}, or {} if the peak is unknown."""
    return {} if peak is None or seconds <= 0 else {"perf/mfu": flops / (seconds * peak * num_devices)}
