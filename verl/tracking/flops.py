"""Floating-point operations of a decoder, and how well a device was used (MFU).

A multiply-add is two operations. With N parameters that every token is multiplied with, K layers of attention width H,
a segment of L computed tokens behind a prefix of P tokens that are kept, and logits at R positions of a head with V
parameters, a forward costs

    2 N L                          the matrices
    + 4 K H (L P + L (L + 1) / 2)  scores and weighted values of causal attention
    + 2 V R                        the head

and a backward twice that. Recomputation for gradient checkpointing is no useful work and not counted. Norms, rotary
embeddings and activations are left out: less than a percent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TRAINING = 3  # what a forward and its backward cost, in forwards
# dense bf16 FLOP/s by NVIDIA's data sheets; the first name that the device's name contains counts
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the formula needs of a dense decoder.

    parameters: without embeddings and without the output head
    hidden: width of attention, which is heads times head size
    head_parameters: hidden size times vocabulary, tied or not
    """

    parameters: int
    layers: int
    hidden: int
    head_parameters: int = 0


def forward_flops(shape: DecoderShape, segments: Iterable[tuple[int, int]], num_logits: int = 0) -> float:
    """FLOPs of one forward over segments of (computed tokens L, prefix tokens P); see the formula above."""
    total = 2.0 * shape.head_parameters * num_logits
    for length, prefix in segments:
        pairs = length * prefix + length * (length + 1) / 2
        total += 2.0 * shape.parameters * length + 4.0 * shape.layers * shape.hidden * pairs
    return total


def peak_flops(device: str | None, given: float | None = None) -> float | None:
    """FLOP/s of a device by its name as torch tells it, or what the user gives; None on CPU and for unknown devices."""
    if given is not None:
        return given
    return next((peak for name, peak in PEAK_FLOPS.items() if device is not None and name in device), None)


def mfu(flops: float, seconds: float, peak: float | None, num_devices: int = 1) -> dict[str, float]:
    """{"perf/mfu": share of the peak of all devices}, or {} where the peak is unknown."""
    return {} if peak is None or seconds <= 0 else {"perf/mfu": flops / (seconds * peak * num_devices)}
