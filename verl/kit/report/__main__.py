"""Show a run: toolrl report RUN [RUN ..] [--out report.html]

RUN is the folder of a run, finished or not. The report is one HTML file that opens without a network: curves, times,
validation, every rollout that fits in, and the tokens of some (docs/report.md). Several runs are compared.
Exit code 0: written. 2: a folder is not that of a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.checkpoint.crash import exit_code_of
from verl.errors import VerlError
from verl.kit.report.page import write_report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="toolrl report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="the file; default: report.html in the folder of the first run")
    options = parser.parse_args(argv)
    out = options.out or options.runs[0] / "report.html"
    try:
        notes = write_report(options.runs, out)
    except VerlError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return exit_code_of(error)
    sys.stdout.writelines(f"note: {note}\n" for note in notes)
    sys.stdout.write(f"{out} ({out.stat().st_size / 1e6:.1f} MB)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
