"""Floating-point operations of a decoder, and model FLOPs utilization (MFU).

A multiply-add is two operations. With N non-embedding parameters, K layers of attention width H, a segment of L
computed tokens after a cached prefix of P tokens, and logits at R positions of a head with V parameters, a forward pass
costs

    2 N L                          the matrices
    + 4 K H (L P + L (L + 1) / 2)  scores and weighted values of causal attention
    + 2 V R                        the head

and a backward pass twice that. Recomputation for gradient checkpointing is not counted. Norms, rotary embeddings and
activations are neglected: less than a percent.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRAINING = 3  # cost of forward and backward, in forward passes


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, by NVIDIA's data sheets: dense bf16 FLOP/s, memory bandwidth in bytes/s, GiB visible to torch."""

    flops: float
    bytes_per_s: float
    memory_gib: float


DEVICES = {  # the first entry whose terms are all in the device's name matches
    "H200": Device(989e12, 4.8e12, 139.8),
    "H100 PCIe": Device(756e12, 2.0e12, 79.1),
    "H100 NVL": Device(835e12, 3.9e12, 93.1),
    "H100": Device(989e12, 3.35e12, 79.1),
    "A100 40GB": Device(312e12, 1.555e12, 39.4),
    "A100": Device(312e12, 2.039e12, 79.2),
}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The formula's parameters of a dense decoder."""

    parameters: int  # without embeddings and output head
    layers: int
    hidden: int  # width of attention: heads times head size
    head_parameters: int = 0  # hidden size times vocabulary, tied or not


def forward_flops(shape: DecoderShape, segments: Iterable[tuple[int, int]], num_logits: int = 0) -> float:
    """Of segments of (computed tokens L, prefix tokens P), by the formula above."""
    total = 2.0 * shape.head_parameters * num_logits
    for length, prefix in segments:
        pairs = length * prefix + length * (length + 1) / 2
        total += 2.0 * shape.parameters * length + 4.0 * shape.layers * shape.hidden * pairs
    return total


def find_device(name: str | None) -> Device | None:
    """The device by torch's name for it, or an informal one (h100-pcie); None if unknown."""
    terms = set(re.split(r"[^a-z0-9]+", (name or "").lower()))
    return next((device for known, device in DEVICES.items() if set(known.lower().split()) <= terms), None)


def peak_flops(device: str | None) -> float | None:
    """FLOP/s of a device by torch's name for it; None on CPU and for unknown devices."""
    known = find_device(device)
    return None if known is None else known.flops


def mfu(flops: float, seconds: float, peak: float | None, num_devices: int = 1) -> dict[str, float]:
    """{"perf/mfu": share of the peak of all devices}, or {} if the peak is unknown."""
    return {} if peak is None or seconds <= 0 else {"perf/mfu": flops / (seconds * peak * num_devices)}
