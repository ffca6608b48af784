"""Compare settings by what they learn: toolrl compare RUN RUN .. [--step N] [--exact]

Runs that differ in their seed only are one arm; the first run's arm is the base of the others. A line per arm and
validation set, after the last step at which all runs were validated: mean over rows and seeds, and the difference to
the base, paired over rows and seeds, with its 95 % interval and p (Holm's correction for the number of arms).
`detectable` is the true difference that so many seeds and rows find in four of five studies. A difference needs two
common seeds.
Exit code 0: compared. 2: the runs cannot be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from verl.errors import VerlError
from verl.host.arguments import Arguments, positive_int
from verl.host.exits import write_error
from verl.text import printable

if TYPE_CHECKING:
    from toolrl.analysis.compare.arms import Line

_COLUMNS = ("setting", "seeds", "mean", "sd of seeds", "difference", "95 % interval", "p", "detectable")


def arguments() -> Arguments:
    parser = Arguments("toolrl compare", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--step", type=positive_int, help="validations after this step (default: the last common one)")
    parser.add_argument("--exact", action="store_true", help="share of exact responses, not the mean reward")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().read(argv)
    console = Console(highlight=False, emoji=False)
    try:
        return _print_comparison(options.runs, options.step, options.exact, console)
    except VerlError as error:
        return write_error(error)


def _print_comparison(folders: Sequence[Path], step: int | None, exact: bool, console: Console) -> int:
    from toolrl.analysis.compare.arms import arms_of, compare, last_common_step
    from toolrl.analysis.report.folder import read_runs

    runs = read_runs(folders)
    arms = arms_of(runs)
    step = last_common_step(runs) if step is None else step
    for name, lines in compare(arms, step, exact).items():
        table = Table(*_COLUMNS, title=f"{printable(name)} after step {step}: {'exact' if exact else 'mean reward'}")
        for line in lines:
            table.add_row(*_cells(line))
        console.print(table)
    if any(line.difference is None for line in lines[1:]):
        console.print("Without a difference: fewer than two seeds that the base has, too.", soft_wrap=True)
    for note in dict.fromkeys(f"{run.name}: {note}" for run in runs for note in run.notes):
        console.print(f"note: {printable(note)}", markup=False, soft_wrap=True)
    return 0


def _cells(line: Line) -> list[str]:
    means = list(line.by_seed.values())
    cells = [printable(line.arm.name), " ".join(map(str, line.by_seed)), f"{fmean(means):.3f}"]
    cells.append(f"{stdev(means):.3f}" if len(means) > 1 else "")
    if line.difference is None or line.p is None:
        return [*cells, "", "", "", ""]
    low, high = line.difference.interval
    found = f"{line.difference.mean:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{line.p:.2g}"
    return [*cells, *found, f"{line.difference.detectable:.3f}"]


if __name__ == "__main__":
    sys.exit(main())
