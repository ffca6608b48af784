"""The results of bench/gpu/short.py as a Markdown table, and as the file from which the pages are written.

    python bench/gpu/table.py OUT/results.jsonl [--json docs/assets/gpu.json] && python scripts/pages.py

The last line of a measurement counts. Rehearsals are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench.gpu.measurements import OK, Row
from bench.gpu.rows import read_rows
from verl.errors import DataError
from verl.host.files import replacing

ASSET = ROOT / "docs/assets/gpu.json"


def markdown(rows: Sequence[Row]) -> str:
    """A row per figure, and one per measurement without any; below, the machines and versions."""
    lines = ["| measurement | what | value |", "| --- | --- | --- |"]
    for row in rows:
        if row["state"] != OK:
            lines.append(f"| {row['name']} | {row['state']} | {_cell(row['reason'])} |")
        lines += [f"| {row['name']} | {_cell(what)} | {shown(value)} |" for what, value in row["figures"].items()]
    places = dict.fromkeys(place(row) for row in rows if row["figures"])
    return "\n".join([*lines, *([""] if places else []), *(f"{each}  " for each in places)])


def shown(value: float | str | None) -> str:
    return _cell(value) if isinstance(value, str) else "not finite" if value is None else f"{value:,.4g}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def place(row: Mapping[str, Any]) -> str:
    """Device and versions in one line."""
    return ", ".join([row["device"], *(f"{name} {number}" for name, number in row["versions"].items())])


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last line of each measurement."""
    return list({row["name"]: row for row in rows}.values())


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--json", type=Path, default=ASSET)
    arguments = parser.parse_args()
    try:
        rows = latest(read_rows(arguments.results))
    except DataError as error:
        raise SystemExit(str(error)) from error
    if not any(row["state"] == OK for row in rows):
        raise SystemExit(f"{arguments.results}: no results; {arguments.json} is unchanged")
    if any(row["rehearsal"] for row in rows):
        raise SystemExit(f"{arguments.results} is of a rehearsal, which measures nothing")
    with replacing(arguments.json) as unfinished:
        unfinished.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
