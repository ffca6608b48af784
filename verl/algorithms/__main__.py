"""What every algorithm is made of: python -m verl.algorithms [--markdown]"""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from verl.utils.versions import missing_package

_FILE_WIDTH = 160  # characters, where the output is no terminal


def main(words: Sequence[str]) -> int:
    """The table on the terminal, or the page docs/algorithms.md."""
    if list(words) in (["-h"], ["--help"]):
        Console().print(__doc__, markup=False)
        return 0
    if list(words) not in ([], ["--markdown"]):
        known = "there is --markdown alone"
        Console(stderr=True, emoji=False).print(f"unknown arguments {' '.join(words)}; {known}", markup=False)
        return 2
    try:
        from verl.algorithms.table import COLUMNS, markdown, presets, row  # needs torch
    except ModuleNotFoundError as error:
        problem = missing_package(error)
        if problem is None:
            raise
        Console(stderr=True, emoji=False).print(f"ConfigError: {problem}", markup=False, soft_wrap=True)
        return 2
    if words:
        sys.stdout.write(markdown())
        return 0
    table = Table(title="algorithm.name (docs/algorithms.md)", show_lines=True)
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name in ("name", "paper"))
    for each in presets():
        table.add_row(*row(each))
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
