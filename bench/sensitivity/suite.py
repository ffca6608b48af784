"""Does a fast test notice each mistake in the trainer, and each mutant of its formulas?

    python bench/sensitivity/suite.py                  all; half an hour to an hour on one core
    python bench/sensitivity/suite.py late_mask ..     some of them
    python bench/sensitivity/suite.py --mutants        the mutants alone
    python bench/sensitivity/suite.py --list

Each is planted in a copy of the packages, in which the tests of the folders concerned run; those that need real data
are skipped, so that the result is the same everywhere. The exit code is 1 if a mistake makes no test fail, and 2 if one
of these tests fails without any mistake.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench.sensitivity.mistakes import MISTAKES
from bench.sensitivity.mutants import MUTANTS
from bench.sensitivity.planting import Mistake, plant

_LIMIT_S = 900.0  # of the tests of one mistake
_SHOWN = 5  # failing tests, after which the others are not run
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class NoResultError(RuntimeError):
    """The tests did not run."""


def failing(mistake: Mistake | None, tests: Sequence[str]) -> list[str]:
    """The first tests that fail in a copy with this mistake. Raises NoResultError if they cannot be run."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkout"
        plant(mistake, root)
        environment = {**os.environ, "PYTHONPATH": str(root), "TOOLRL_TEST_DATA": str(Path(folder) / "no data")}
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", f"--maxfail={_SHOWN}", *tests]
        try:
            ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return [f"no end within {_LIMIT_S:g} s"]
    if ran.returncode not in (0, 1):
        raise NoResultError(ran.stdout[-2000:] + ran.stderr[-2000:])
    return _FAILED.findall(ran.stdout)


def chosen(names: Sequence[str], mutants_alone: bool) -> list[Mistake]:
    """Those with these names; all without any. Raises SystemExit for an unknown name."""
    every = {each.name: each for each in (*(() if mutants_alone else MISTAKES), *MUTANTS)}
    if unknown := [name for name in names if name not in every]:
        raise SystemExit(f"unknown: {', '.join(unknown)}; --list prints all names")
    return [every[name] for name in names or every]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--mutants", action="store_true", help="the mutants alone")
    parser.add_argument("--list", action="store_true", help="print names and sentences")
    args = parser.parse_args(arguments)
    mistakes = chosen(args.names, args.mutants)
    if args.list:
        print("\n".join(f"{each.name:30} {each.wrong}" for each in mistakes))
        return 0
    if found := failing(None, list(dict.fromkeys(path for each in mistakes for path in each.tests))):
        print("fail without any mistake:", *found, sep="\n  ")
        return 2
    unnoticed = []
    for mistake in mistakes:
        found = failing(mistake, mistake.tests)
        print(f"{mistake.name}: {mistake.wrong}", *(found or ["NO TEST FAILS"]), sep="\n  ", flush=True)
        if not found:
            unnoticed.append(mistake.name)
    print(f"\n{len(mistakes) - len(unnoticed)} of {len(mistakes)} are noticed; not:", *(unnoticed or ["none"]))
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
