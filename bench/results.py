"""The scoreboard of docs/benchmarks.md from the benchmarks' JSON lines.

    python bench/results.py LINES.jsonl [--page docs/benchmarks.md]

Rewrites what stands between the page's two markers and nothing else. Of a row that was measured twice the last counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs/benchmarks.md"
BEGIN, END = "<!-- scoreboard: written by bench/run_all.sh -->", "<!-- scoreboard ends -->"
HEAD = ("row", "what", "ratio", "asked for", "met", "ours", "theirs", "where")


def read(path: Path) -> list[dict[str, Any]]:
    """The results in the order of their rows; lines that are none, or were cut off, are left out."""
    lines = (parsed(line) for line in path.read_text().splitlines())
    found = {(each["row"], each["name"]): each for each in lines if {"row", "name", "ratio", "target"} <= each.keys()}
    return sorted(found.values(), key=lambda each: each["row"])


def parsed(line: str) -> dict[str, Any]:
    """A line's JSON object, {} where there is none."""
    with suppress(json.JSONDecodeError):
        value = json.loads(line)
        return value if isinstance(value, dict) else {}
    return {}


def scoreboard(results: Sequence[Mapping[str, Any]]) -> str:
    """A table of all rows, and below it machines and versions."""
    places = list(dict.fromkeys(place(each) for each in results))
    rows = [HEAD, ("---",) * len(HEAD), *(cells(each, places.index(place(each))) for each in results)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return table + "\n\n" + "\n".join(f"({letter(number)}) {each}  " for number, each in enumerate(places))


def cells(result: Mapping[str, Any], number: int) -> tuple[str, ...]:
    """One row of the table."""
    lower = result.get("lower_is_better", False)
    reached = result["ratio"] <= result["target"] if lower else result["ratio"] >= result["target"]
    name = result["name"].replace("|", "\\|") + (f" ({result['note']})" if result.get("note") else "")
    limits = [
        f"{what} {figure(value)}, <= {figure(bound)}" for what, (value, bound) in result.get("limits", {}).items()
    ]
    return (
        str(result["row"]),
        "; ".join([name, *limits]),
        f"**{figure(result['ratio'])}**",
        f"{'<=' if lower else '>='} {figure(result['target'])}",
        "yes" if result.get("met", reached) else "no",
        side(result.get("ours", {})),
        side(result.get("theirs", {})),
        letter(number),
    )


def place(result: Mapping[str, Any]) -> str:
    """Machine and versions in a line; the load of that moment is left out."""
    machine = result.get("machine", {})
    hardware = f"{machine.get('cpu', 'machine not told')}, {machine.get('cores', '?')} cores"
    memory = f"{machine.get('memory_gib', '?')} GiB"
    return ", ".join([hardware, memory, *(f"{name} {number}" for name, number in result.get("versions", {}).items())])


def side(figures: Any) -> str:
    """A side's figures in a cell."""
    if not isinstance(figures, Mapping):
        return str(figures)
    return ", ".join(f"{name} {figure(value)}" for name, value in figures.items())


def figure(value: Any) -> str:
    """Three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def letter(number: int) -> str:
    """a, b, c ..."""
    return chr(ord("a") + number)


def main() -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    results = read(arguments.lines)
    if not results:
        raise SystemExit(f"{arguments.lines} holds no results; the page stays as it is")
    page = arguments.page.read_text()
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"{arguments.page} needs the lines {BEGIN!r} and {END!r} once each")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    arguments.page.write_text(f"{before}{BEGIN}\n{scoreboard(results)}\n{END}{after}")


if __name__ == "__main__":
    main()
