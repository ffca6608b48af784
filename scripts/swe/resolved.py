"""Prints the shares of a run's validation tasks that were resolved before and after training, with 95 % intervals.

python scripts/swe/resolved.py METRICS.jsonl TEST.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from toolrl.benchmarks.runner.stats import wilson

RESOLVED = "val/test/swe/resolved"


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for the first and the last validation."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("metrics", type=Path, metavar="METRICS.jsonl", help="of the run")
    options.add_argument("tasks", type=Path, metavar="TEST.jsonl", help="its validation tasks")
    arguments = options.parse_args(argv)
    count = len(arguments.tasks.read_text().splitlines())
    rows = [json.loads(line) for line in arguments.metrics.read_text().splitlines()]
    shares = [row[RESOLVED] for row in rows if RESOLVED in row]
    for name, share in (("before", shares[0]), ("after", shares[-1])):
        low, high = (100 * bound for bound in wilson(share, count))
        print(f"resolved {name:6} {100 * share:5.1f} % of {count} unseen bugs, 95 % interval {low:.1f} to {high:.1f}")


if __name__ == "__main__":
    main()
