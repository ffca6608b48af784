"""Writes the scoreboard of docs/benchmarks.md from the benchmarks' JSON lines.

    python bench/results.py LINES.jsonl [--page docs/benchmarks.md]

Rewrites only the part between the page's two markers. If a row was measured twice, the last one counts.
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
HEAD = ("row", "what", "ratio", "target", "met", "where")


def read(path: Path) -> list[dict[str, Any]]:
    """The results by row; invalid and truncated lines are skipped."""
    lines = (parsed(line) for line in path.read_text().splitlines())
    found = {(each["row"], each["name"]): each for each in lines if {"row", "name", "ratio", "target"} <= each.keys()}
    return sorted(found.values(), key=lambda each: each["row"])


def parsed(line: str) -> dict[str, Any]:
    """A line's JSON object, {} if it has none."""
    with suppress(json.JSONDecodeError):
        value = json.loads(line)
        return value if isinstance(value, dict) else {}
    return {}


def scoreboard(results: Sequence[Mapping[str, Any]]) -> str:
    """A table of all rows, the figures of each, and the machines and versions."""
    places = list(dict.fromkeys(place(each) for each in results))
    rows = [HEAD, ("---",) * len(HEAD), *(cells(each, places.index(place(each))) for each in results)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    figures = "\n".join(filter(None, map(details, results)))
    where = "\n".join(f"({letter(number)}) {each}  " for number, each in enumerate(places))
    return "\n\n".join(filter(None, [table, figures, where]))


def cells(result: Mapping[str, Any], number: int) -> tuple[str, ...]:
    """One row of the table."""
    lower = result.get("lower_is_better", False)
    reached = result["ratio"] <= result["target"] if lower else result["ratio"] >= result["target"]
    return (
        str(result["row"]),
        result["name"].replace("|", "\\|"),
        f"**{figure(result['ratio'])}**",
        f"{'<=' if lower else '>='} {figure(result['target'])}",
        "yes" if result.get("met", reached) else "no",
        letter(number),
    )


def details(result: Mapping[str, Any]) -> str:
    """A list item with the values of both sides, the limits and the note; empty without any."""
    limits = (
        f"{what} {figure(value)}, <= {figure(bound)}" for what, (value, bound) in result.get("limits", {}).items()
    )
    parts = {
        "Ours": side(result.get("ours", {})),
        "Theirs": side(result.get("theirs", {})),
        "Limits": "; ".join(limits),
        "Note": result.get("note", ""),
    }
    lines = [f"  {label}: {text}." for label, text in parts.items() if text]
    return "\n".join([f"- **{result['row']}** {result['name']}.", *lines]) if lines else ""


def place(result: Mapping[str, Any]) -> str:
    """Machine and versions as one line, without the load."""
    machine = result.get("machine", {})
    hardware = f"{machine.get('cpu', 'unknown machine')}, {machine.get('cores', '?')} cores"
    memory = f"{machine.get('memory_gib', '?')} GiB"
    return ", ".join([hardware, memory, *(f"{name} {number}" for name, number in result.get("versions", {}).items())])


def side(figures: Any) -> str:
    """A side's values as text."""
    if not isinstance(figures, Mapping):
        return str(figures)
    return ", ".join(f"{name} {figure(value)}" for name, value in figures.items())


def figure(value: Any) -> str:
    """A number with three significant digits."""
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
        raise SystemExit(f"{arguments.lines}: no results; the page is unchanged")
    page = arguments.page.read_text()
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"{arguments.page} must contain the lines {BEGIN!r} and {END!r} exactly once")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    arguments.page.write_text(f"{before}{BEGIN}\n{scoreboard(results)}\n{END}{after}")


if __name__ == "__main__":
    main()
