"""Printing the configuration: as YAML, and as a table of all keys."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from typing import Any, get_type_hints

import yaml
from rich.table import Table


def as_yaml(config: Any) -> str:
    """All settings with their values."""
    text: str = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
    return text


def key_table(kind: type) -> Table:
    """Every key of a configuration class, its type and its default."""
    table = Table("key", "type", "default", box=None, pad_edge=False)
    _add_rows(table, kind(), "")
    return table


def _add_rows(table: Table, group: Any, prefix: str) -> None:
    types = get_type_hints(type(group))
    for item in fields(group):
        value = getattr(group, item.name)
        if is_dataclass(value):
            _add_rows(table, value, f"{prefix}{item.name}.")
        else:
            kind = types[item.name]
            kind_name = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")
            table.add_row(f"{prefix}{item.name}", kind_name, "" if value is None else str(value))
