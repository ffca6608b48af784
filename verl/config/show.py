"""The part of the configuration that a command uses, as YAML and as the text of --help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from typing import Any, get_type_hints

import yaml

from verl.config.commands import Command
from verl.config.meanings import meanings
from verl.config.schema import Config


def as_yaml(config: Config, command: Command) -> str:
    tree: dict[str, Any] = {}
    for key, _, value in leaves(config):
        *groups, name = key.split(".")
        if command.has(key):
            reduce(lambda place, group: place.setdefault(group, {}), groups, tree)[name] = value
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return text


def key_help(command: Command) -> str:
    """Two lines per key: its default and type, and what it means; a blank line between groups."""
    lines, group = list[str](), ""
    for key, kind, default, meaning in described(command):
        if key.partition(".")[0] != group:
            group = key.partition(".")[0]
            lines.append("")
        written = json.dumps(default) if default is None or isinstance(default, bool) else default
        lines += [f"{key}={written}  ({kind})", f"    {meaning}"]
    return "\n".join(lines[1:])


def described(command: Command) -> Iterator[tuple[str, str, Any, str]]:
    """(key, type, default, meaning) of every key that the command uses."""
    for key, kind, _ in leaves(Config()):
        if command.has(key):
            kind_name = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")
            yield key, kind_name, command.default_of(key), meanings()[key]


_types_of = cache(get_type_hints)


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, type, value) of every setting."""
    kind: type = type(group)
    types = _types_of(kind)
    for item in fields(group):
        value, key = getattr(group, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, types[item.name], value
