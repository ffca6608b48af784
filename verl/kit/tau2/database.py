"""A copy-on-write database: episodes share the base, and records are copied when they are edited.

A deep copy of the airline's data takes a quarter of a second; an episode edits a handful of records.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

Record = dict[str, Any]


class Table(Mapping[str, Record]):
    """Records by id. Records obtained by reading are immutable by convention; `edit` returns a writable copy."""

    def __init__(self, base: Mapping[str, Record]) -> None:
        self._base = base
        self._own: dict[str, Record] = {}

    def __getitem__(self, key: str) -> Record:
        return self._own[key] if key in self._own else self._base[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._base
        yield from (key for key in self._own if key not in self._base)

    def __len__(self) -> int:
        return len(self._base) + sum(key not in self._base for key in self._own)

    def __contains__(self, key: object) -> bool:
        return key in self._own or key in self._base

    def edit(self, key: str) -> Record:
        """The episode's own copy of a record. Raises KeyError if there is none."""
        if key not in self._own:
            self._own[key] = copy.deepcopy(self._base[key])
        return self._own[key]

    def add(self, key: str, record: Record) -> None:
        assert key not in self
        self._own[key] = record

    def changes(self) -> dict[str, Record]:
        return {key: record for key, record in self._own.items() if self._base.get(key) != record}


class Database:
    """One episode's tables over a shared base."""

    def __init__(self, base: Mapping[str, Mapping[str, Record]]) -> None:
        self._tables = {name: Table(records) for name, records in base.items()}

    def __getitem__(self, name: str) -> Table:
        return self._tables[name]

    def changes(self) -> dict[str, dict[str, Record]]:
        """The differences from the base. Two databases over one base are equal if and only if these are."""
        return {name: found for name, table in self._tables.items() if (found := table.changes())}
