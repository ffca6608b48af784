"""A copy-on-write database: episodes share the base, and records are copied when they are edited.

A deep copy of the airline's data takes a quarter of a second; an episode edits a handful of records.
"""

import copy
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

Record = dict[str, Any]


class Table(ChainMap[str, Record]):
    """Records by id. Records obtained by reading are immutable by convention; `edit` returns a writable copy."""

    def __init__(self, base: Mapping[str, Record]) -> None:
        super().__init__({}, dict(base))

    def edit(self, key: str) -> Record:
        """The episode's own copy of a record. Raises KeyError if there is none."""
        own, base = self.maps
        if key not in own:
            own[key] = copy.deepcopy(base[key])
        return own[key]

    def changes(self) -> dict[str, Record]:
        own, base = self.maps
        return {key: record for key, record in own.items() if base.get(key) != record}


class Database(dict[str, Table]):
    """One episode's tables over a shared base."""

    def __init__(self, base: Mapping[str, Mapping[str, Record]]) -> None:
        super().__init__({name: Table(records) for name, records in base.items()})

    def changes(self) -> dict[str, dict[str, Record]]:
        """The differences from the base. Two databases over one base are equal if and only if these are."""
        return {name: changed for name, table in self.items() if (changed := table.changes())}
