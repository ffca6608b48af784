"""Writes the results of the first hour on a GPU into docs/benchmarks.md, between two markers.

python bench/gpu/table.py [FOLDER=outputs/first_hour] [--page docs/benchmarks.md]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- first hour on a GPU: written by bench/gpu/table.py -->", "<!-- first hour ends -->"


def read(folder: Path) -> list[dict[str, Any]]:
    """The pieces in the order in which they ended."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text()) for path in files]


def table(pieces: Sequence[Mapping[str, Any]]) -> str:
    """A row per figure; below, the machines and versions."""
    rows = [
        f"| {piece['piece']} | {name} | {value if isinstance(value, str) else f'{value:,.4g}'} |"
        for piece in pieces
        for name, value in piece["figures"].items()
    ]
    places = dict.fromkeys(place(piece) for piece in pieces)
    return "\n".join(["| piece | what | value |", "| --- | --- | --- |", *rows, "", *(f"{each}  " for each in places)])


def place(piece: Mapping[str, Any]) -> str:
    machine, versions = piece["machine"], piece["versions"]
    numbers = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{piece['device']}; {machine['cores']} cores, {machine['memory_gib']} GiB; {numbers}"


def main() -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "outputs/first_hour")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/benchmarks.md")
    arguments = parser.parse_args()
    if not (pieces := read(arguments.folder)):
        raise SystemExit(f"{arguments.folder}: no results; the page is unchanged")
    page = arguments.page.read_text()
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"{arguments.page} must contain the lines {BEGIN!r} and {END!r} exactly once")
    before, _, rest = page.partition(BEGIN)
    arguments.page.write_text(f"{before}{BEGIN}\n{table(pieces)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
