"""Writes the generated part of docs/algorithms.md and docs/metrics.md: all that follows the line MARK.

python scripts/pages.py [--check]    --check: writes nothing; the exit code is 1 if a page is out of date
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from verl.algorithms import ALGORITHMS  # noqa: E402
from verl.algorithms.table import COLUMNS, presets, row  # noqa: E402
from verl.tracking.names import METRICS  # noqa: E402

MARK = "<!-- written by scripts/pages.py -->\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def algorithms() -> str:
    """The components of every preset, and the docstring of its module."""
    modules = {name: import_module(location.partition(":")[0]) for name, location in ALGORITHMS.items()}
    sections = [f"\n## {name}\n\n{inspect.getdoc(module)}\n" for name, module in modules.items()]
    return "\n" + table(COLUMNS, map(row, presets())) + "".join(sections)


def metrics() -> str:
    """Name, unit and meaning of every metric."""
    return "\n" + table(("name", "unit", "meaning"), ((f"`{each.name}`", each.unit, each.meaning) for each in METRICS))


PAGES = {ROOT / "docs" / "algorithms.md": algorithms, ROOT / "docs" / "metrics.md": metrics}


def main(argv: Sequence[str]) -> int:
    """Write the pages, or check them."""
    stale = []
    for path, generate in PAGES.items():
        text = path.read_text(encoding="utf-8")
        wanted = text.partition(MARK)[0] + MARK + generate()
        if wanted != text and "--check" in argv:
            stale.append(path)
        elif wanted != text:
            path.write_text(wanted, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date: run python scripts/pages.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
