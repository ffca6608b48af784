"""YAML that others wrote: by aliases, a few lines hold a value without end, or one that doubles with each line."""

from __future__ import annotations

from typing import Any

import yaml

MAX_VALUES = 20_000  # a value that others refer to counts each time


def load_yaml(text: str) -> Any:
    """The value. Raises ValueError beyond MAX_VALUES, yaml.YAMLError."""
    tree = yaml.safe_load(text)  # aliases are references, not copies
    left, count = [tree], 0
    while left:
        value = left.pop()
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"it holds over {MAX_VALUES} values")
        if isinstance(value, dict | list):
            left.extend(value.values() if isinstance(value, dict) else value)
    return tree
