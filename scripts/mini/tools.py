"""Tools, parameters and lookups, parsed from the tables in domains.py and new_tools.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Table = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool; its kind (values.py) determines its values."""

    name: str
    description: str
    kind: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool and its request templates."""

    domain: str
    name: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    held_out_requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lookup:
    """A parameterless tool whose result another call needs; the user refers to it by `reference`."""

    tool: ToolSpec
    reference: str
    kind: str
    fits: tuple[ToolSpec, ...]  # tools with one parameter that accepts the value


def read_tools(table: Table) -> tuple[ToolSpec, ...]:
    """The tools of a table {domain: (row, ..)}; see domains.py for the rows."""
    return tuple(_tool(domain, *row) for domain, rows in table.items() for row in rows)


def read_lookups(table: Table, tools: tuple[ToolSpec, ...]) -> tuple[Lookup, ...]:
    """The lookups of a table {domain: (row, ..)}, linked to the tools that accept their values."""
    by_name = {tool.name: tool for tool in tools}
    return tuple(_lookup(domain, by_name, *row) for domain, rows in table.items() for row in rows)


def _tool(
    domain: str, name: str, description: str, parameters: str, requests: tuple[str, ...], held_out: tuple[str, ...]
) -> ToolSpec:
    parsed = []
    for text in parameters.split():
        key, _, rest = text.partition("=")
        parsed.append(Parameter(key, *rest.split(":")))
    return ToolSpec(domain, name, description, tuple(parsed), requests, held_out)


def _lookup(
    domain: str, by_name: Mapping[str, ToolSpec], name: str, description: str, reference: str, kind: str, fits: str
) -> Lookup:
    requests, held_out = (f"ask for {reference}", f"get {reference}"), (f"find {reference}",)
    tool = ToolSpec(domain, name, description, (), requests, held_out)
    return Lookup(tool, reference, kind, tuple(by_name[fit] for fit in fits.split()))
