"""vLLM's real Python on a machine without a GPU: its CUDA platform, which answers as a given card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Card:
    name: str
    memory: int  # bytes
    capability: tuple[int, int]
    processors: int = 132
    count: int = 8


H200 = Card("NVIDIA H200", 150_000_000_000, (9, 0))
H100 = Card("NVIDIA H100 80GB HBM3", 85_000_000_000, (9, 0))
B200 = Card("NVIDIA B200", 191_000_000_000, (10, 0), 148)
RTX4090 = Card("NVIDIA GeForce RTX 4090", 25_400_000_000, (8, 9), 128, 1)


@contextmanager
def pretend(card: Card) -> Iterator[None]:
    """torch and vLLM see `card.count` of these; no kernel can run. Modules of vLLM imported inside keep seeing them."""
    import vllm.platforms as platforms

    properties = SimpleNamespace(
        total_memory=card.memory,
        multi_processor_count=card.processors,
        major=card.capability[0],
        minor=card.capability[1],
        name=card.name,
        uuid="GPU-0",
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: card.count,
        "get_device_capability": lambda *_: card.capability,
        "get_device_properties": lambda *_, **__: properties,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platforms, "_current_platform", platform(card))
        patch.setattr(torch.accelerator, "device_count", lambda: card.count)
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        yield


def platform(card: Card) -> Any:
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    answers: dict[str, Any] = {
        "get_device_capability": DeviceCapability(*card.capability),
        "get_device_name": card.name,
        "get_device_total_memory": card.memory,
        "is_fully_connected": True,
        "get_device_uuid": "GPU-0",
        "num_compute_units": card.processors,
    }
    methods = {name: classmethod(lambda *_, value=value, **__: value) for name, value in answers.items()}
    return type("PretendedPlatform", (NonNvmlCudaPlatform,), methods)()
