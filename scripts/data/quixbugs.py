"""QuixBugs' 40 programs with one faulty line, as repositories with hidden tests.

    python scripts/swe/prepare.py --output dataset/swe/environments/pytest --install pytest
    python scripts/data/quixbugs.py --input quixbugs.jsonl --output dataset/swe/quixbugs.jsonl \\
        --environment dataset/swe/environments/pytest --validate

An input row has `task_id`, `files` (the faulty program), `fix`, `tests`, `fail_to_pass` and `pass_to_pass`. The output
has a row of `toolrl.swe.tasks` per program, and folders with the repositories beside it. --validate scores each
task's gold patch (must be 1), a patch that leaves the bug, both twice, and an idle session (must be 0); a task
that fails is dropped. Every model knows these programs: they are smoke data, not a benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from scripts.data.validation import Journal, Validation, diff, validate_all, write_files
from verl.data.rows import read_rows
from verl.errors import DataError, VerlError
from verl.host.exits import write_error
from verl.host.files import ending_in, replacing

STATEMENT = """`{path}` contains a bug on a single line: it gives wrong results, raises, or does not end. \
The text at the end of the file describes what it should do. Find the bug and fix it. Do not change the signature."""
TEST_TIMEOUT_S = 20.0  # some bugs loop forever


def convert(row: Mapping[str, Any], folder: Path, environment: str) -> dict[str, Any]:
    """The row of a task; writes its repository. Raises DataError."""
    try:
        name, files, fix = row["task_id"], row["files"], row["fix"]
        repository = folder / name
        write_files(repository, files)
        return {
            "instance_id": name,
            "repository": str(repository),
            "environment": environment,
            "problem_statement": STATEMENT.format(path=next(iter(fix))),
            "FAIL_TO_PASS": row["fail_to_pass"],
            "PASS_TO_PASS": row["pass_to_pass"],
            "hidden_tests": json.dumps(row["tests"]),
            "patch": diff(files, {**files, **fix}),
            "test_timeout_s": TEST_TIMEOUT_S,
            "source": row["source"],
            "license": row["license"],
        }
    except (KeyError, TypeError, StopIteration) as error:
        raise DataError(f"is not of the expected form ({error!r})", "a record of QuixBugs") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and validate; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--input", required=True, metavar="FILE.jsonl")
    options.add_argument("--output", required=True, type=ending_in(".jsonl"), metavar="FILE.jsonl")
    options.add_argument(
        "--environment", default="", metavar="FOLDER", help="with pytest; default: the system's python3"
    )
    options.add_argument("--validate", action="store_true")
    options.add_argument("--concurrent", type=int, default=2, help="validations at a time")
    arguments = options.parse_args(argv)
    folder = arguments.output.absolute().with_suffix("")
    environment = str(Path(arguments.environment).absolute()) if arguments.environment else ""
    try:
        rows = [convert(row, folder, environment) for row in read_rows(arguments.input)]
        checks = [(row, Validation()) for row in rows]
        if arguments.validate:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            journal = Journal(arguments.output.with_name(arguments.output.name + ".validated"))
            checks = asyncio.run(validate_all(rows, arguments.concurrent, journal))
        for row, found in checks:
            for problem in (*found.problems, *(f"flaky and dropped: {test}" for test in found.flaky)):
                sys.stderr.write(f"{row['instance_id']}: {problem}\n")
        kept = [row for row, found in checks if not found.problems]
        with replacing(arguments.output) as unfinished:
            unfinished.write_text("".join(json.dumps(row) + "\n" for row in kept))
    except VerlError as error:
        return write_error(error)
    checked = "validated" if arguments.validate else "not validated"
    print(f"{arguments.output}: {len(kept)} tasks, {checked}; {len(rows) - len(kept)} dropped")
    return 1 if len(kept) < len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
