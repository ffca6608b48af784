"""Chunks of data in the page: compressed JSON, which the browser decodes when it is looked at."""

from __future__ import annotations

import base64
import json
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_TAG = 64  # characters of the element that holds a chunk
_SHOWN = 500  # characters of a value in the data block


@dataclass
class Chunks:
    """texts: base64 of zlib streams, which holds no character that HTML interprets

    size: characters of the page that they take, with what they add to the data block
    """

    texts: list[str] = field(default_factory=list)
    size: int = 0

    def add(self, text: str, limit: int = sys.maxsize, beside: int = 0) -> int | None:
        """The number of the added chunk; None if it exceeds the limit of the size, and is not added.

        beside: characters that it adds to the data block
        """
        size = self.size + len(text) + _TAG + beside
        if size > limit:
            return None
        self.texts.append(text)
        self.size = size
        return len(self.texts) - 1


def encoded(value: Any) -> str:
    """Non-finite numbers are null, and what JSON has no form for is text. Lone surrogates are escaped as ASCII."""
    try:
        text = json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(value), default=str)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def encoded_bound(value: Any) -> int:
    """An upper bound of the characters that a small value adds to what is encoded with it."""
    return (len(json.dumps(value)) + 2) * 4 // 3 + 1


def short(value: Any, most: int = _SHOWN) -> Any:
    """The value, or the beginning of its text where it has no form in JSON, or a long one."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError):
        text = value = str(value)
    if len(text) <= most:
        return value
    whole = value if isinstance(value, str) else text
    return f"{whole[:most]} [{max(0, len(whole) - most)} more characters]"


def fitting(items: Sequence[Any], room: int) -> list[Any]:
    """The first items, of which half are left out until they take so many characters."""
    count = len(items)
    while count and len(encoded(items[:count])) > room:
        count //= 2
    return list(items[:count])


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


def spread_part(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, spread evenly over them, in their order."""
    return [items[place] for place in sorted(spread_order(len(items))[:most])]
