"""The part of the configuration that a command uses, as YAML and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any, get_type_hints

import yaml
from rich.table import Table

from verl.config.commands import Command
from verl.config.schema import Config


def as_yaml(config: Config, command: Command) -> str:
    tree: dict[str, Any] = {}
    for key, _, value in leaves(config):
        *groups, name = key.split(".")
        if command.has(key):
            reduce(lambda place, group: place.setdefault(group, {}), groups, tree)[name] = value
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return text


def key_table(command: Command) -> Table:
    table = Table("key", "type", "default", box=None, pad_edge=False)
    for key, kind, _ in leaves(Config()):
        if command.has(key):
            kind_name = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")
            default = command.default_of(key)
            table.add_row(key, kind_name, "" if default is None else str(default))
    return table


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, type, value) of every setting."""
    types = get_type_hints(type(group))
    for item in fields(group):
        value, key = getattr(group, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, types[item.name], value
