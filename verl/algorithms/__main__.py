"""List the components of every algorithm: python -m verl.algorithms"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from verl.system.packages import missing_package

_FILE_WIDTH = 160  # characters, where the output is not a terminal


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m verl.algorithms", description=__doc__).parse_args(argv)
    try:
        from verl.algorithms.table import COLUMNS, presets, row  # needs torch
    except ModuleNotFoundError as error:
        problem = missing_package(error)
        if problem is None:
            raise
        Console(stderr=True, emoji=False).print(f"ConfigError: {problem}", markup=False, soft_wrap=True)
        return 2
    table = Table(title="algorithm.name (docs/algorithms.md)", show_lines=True)
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name in ("name", "paper"))
    for each in presets():
        table.add_row(*row(each))
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
