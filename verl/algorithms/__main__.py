"""List the components of every algorithm: toolrl algorithms"""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from verl.algorithms.table import COLUMNS, presets, row
from verl.system.arguments import Arguments

_FILE_WIDTH = 160  # characters, where the output is not a terminal


def arguments() -> Arguments:
    return Arguments("toolrl algorithms", __doc__)


def main(argv: Sequence[str]) -> int:
    arguments().read(argv)
    table = Table(title="algorithm.name (docs/algorithms.md)", show_lines=True)
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name in ("name", "paper"))
    for each in presets():
        table.add_row(*row(each))
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
