"""Chunks of data in the page: compressed JSON, which the browser decodes when it is looked at."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Chunks:
    """texts: base64 of zlib streams, which holds no character that HTML interprets"""

    texts: list[str] = field(default_factory=list)
    size: int = 0

    def add(self, text: str) -> int:
        """The number of the added chunk."""
        self.texts.append(text)
        self.size += len(text)
        return len(self.texts) - 1


def encoded(value: Any) -> str:
    """Non-finite numbers are null, and what JSON has no form for is text. Lone surrogates are escaped as ASCII."""
    try:
        text = json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(value), default=str)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def spread_order(count: int) -> list[int]:
    """0 .. count - 1, so that any first part is spread evenly: both ends, the middle, the quarters and so on."""
    order = [0, count - 1][:count]
    seen = set(order)
    spans: Sequence[tuple[int, int]] = [(0, count - 1)] if count > 2 else []
    while spans:
        halves = []
        for low, high in spans:
            middle = (low + high) // 2
            if middle not in seen:
                seen.add(middle)
                order.append(middle)
            if high - low > 2:
                halves += [(low, middle), (middle, high)]
        spans = [(low, high) for low, high in halves if high - low > 1]
    return order
