"""`all`, for sources that must hold something."""

from __future__ import annotations

from collections.abc import Iterable


def every(items: Iterable[object]) -> bool:
    """Whether all items are true. No item is an AssertionError: what yields nothing has proven nothing."""
    seen = list(items)
    assert seen, "nothing to check: the source is empty"
    return all(seen)
