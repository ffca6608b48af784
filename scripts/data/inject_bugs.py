"""Tasks from any tested package: bugs injected into its functions, each with the tests that notice it.

    python scripts/swe/prepare.py --output dataset/swe/environments/pytest --install pytest
    python scripts/data/inject_bugs.py --package inflection==0.5.1 --package toolz==1.2.0 \\
        --environment dataset/swe/environments/pytest --output dataset/swe/injected.jsonl --validate

--package takes a source distribution from PyPI, --repo a folder. A mutation (scripts/data/mutations.py) is a task
if it breaks some tests, at most --max-failing, and leaves others. Of the tests only those that call the mutated
function are run; tests that do not pass twice before are dropped and listed. The statement has the documentation of the
function, if it has one, and the error of a failing test, whose file is hidden. PASS_TO_PASS are the other tests that
call a function of the mutated file, or, without any, all others.

--validate scores each task's fix (must be 1), the bug, both twice, and an idle session (must be 0); flaky tests
are dropped and listed. Mutations are tried in an order drawn by --seed. FILE.tried keeps what was tried, so that the
same command goes on where it was stopped; FILE.report has the outcome by kind.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from scripts.data.mutants import COMPILED, Baseline, Trial, measure_baseline, try_mutations
from scripts.data.mutations import InjectedBug, differs, mutations
from scripts.data.validation import Journal, diff, validate_row
from toolrl.swe.local import LocalRuntimes
from toolrl.swe.runtime import Runtimes
from toolrl.swe.tasks import Repository, SweTask
from verl.errors import ConfigError, VerlError
from verl.host.exits import write_error
from verl.host.files import ending_in, replacing

BATCH = 8  # mutations that a worker tries before it validates what it found
DOCUMENTED = """`{function}` in `{path}` does not do what its documentation states:

{docstring}

"""
SYMPTOM = """{count} that passed before {verb} now. One of them, `{test}`, prints:

    {error}

Find the mistake and correct it. Tests and interfaces stay as they are."""


@dataclass(frozen=True)
class Candidate:
    """A mutation of a file."""

    path: str
    before: str
    mutation: InjectedBug

    @property
    def key(self) -> str:
        """The same in every run of the script."""
        return hashlib.sha256(f"{self.path}\0{self.mutation.source}".encode()).hexdigest()[:16]


def candidates(folder: Path, per_function: int, seed: int) -> Iterator[Candidate]:
    """In random order, at most `per_function` of each function."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder)
        if not any(part.startswith(("test", "conftest", "setup", "doc", ".")) for part in path.parts):
            before = file.read_bytes().decode()
            found += [Candidate(str(path), before, each) for each in mutations(before)]
    random.Random(seed).shuffle(found)
    counts: Counter[tuple[str, str]] = Counter()
    for each in found:
        function = each.path, each.mutation.function
        if counts[function] < per_function and differs(each.before, each.mutation.source):
            counts[function] += 1
            yield each


def fetch(package: str, folder: Path) -> Path:
    """The unpacked source distribution of a package. Raises ConfigError."""
    target = folder / package.replace("==", "-")
    if not target.exists():
        with tempfile.TemporaryDirectory() as downloads:
            options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", downloads]
            command = [sys.executable, "-m", "pip", "download", *options, package]
            done = subprocess.run(command, capture_output=True, text=True)
            archives = list(Path(downloads).glob("*.tar.gz"))
            if done.returncode or not archives:
                raise ConfigError(f"--package {package}: {(done.stderr or 'no .tar.gz').strip()[-500:]}")
            with tarfile.open(archives[0]) as tar:
                tar.extractall(Path(downloads) / "tree", filter="data")
            target.parent.mkdir(parents=True, exist_ok=True)
            next((Path(downloads) / "tree").iterdir()).rename(target)
    return target


def row_of(base: Baseline, candidate: Candidate, trial: Trial, environment: str) -> dict[str, Any]:
    """The row of a task (toolrl/swe/tasks.py)."""
    mutation, path = candidate.mutation, candidate.path
    before, after = {path: candidate.before}, {path: mutation.source}
    others = [[test for test in tests if test not in trial.failing] for tests in (base.of_file(path), base.passing)]
    hidden = {name: (base.folder / name).read_text() for name in {test.partition("::")[0] for test in trial.failing}}
    return {
        "instance_id": f"{base.folder.name}-{candidate.key}",
        "repository": str(base.folder),
        "environment": environment,
        "problem_statement": statement(candidate, trial),
        "FAIL_TO_PASS": list(trial.failing),
        "PASS_TO_PASS": others[0] or others[1],
        "hidden_tests": json.dumps(hidden),
        "bug_patch": diff(before, after),
        "patch": diff(after, before),
        "kind": mutation.kind,
    }


def statement(candidate: Candidate, trial: Trial) -> str:
    """What the policy reads: the documentation, and the error of a test."""
    mutation, text, failing = candidate.mutation, "", trial.failing
    if mutation.docstring:
        lines = mutation.docstring.split("\n\n")[0].splitlines()
        quoted = "\n".join(f"    {line}" for line in lines)
        text = DOCUMENTED.format(function=mutation.function, path=candidate.path, docstring=quoted)
    count = f"{len(failing)} test{'s' if len(failing) > 1 else ''}"
    test, verb = failing[0].rpartition("::")[2], "fail" if len(failing) > 1 else "fails"
    return text + SYMPTOM.format(count=count, verb=verb, test=test, error=trial.error)


@dataclass(frozen=True)
class Search:
    """How tasks are looked for. tasks: of a repository. compiled: a folder for Baseline.compiled"""

    runtimes: Runtimes
    compiled: Path
    journal: Journal
    environment: str
    tasks: int
    max_failing: int
    per_function: int
    seed: int
    concurrent: int
    validate: bool

    async def of(self, folder: Path) -> list[dict[str, Any]]:
        """The records of a repository, in the order of its candidates. Raises ConfigError."""
        repository = Repository(str(folder))
        task = SweTask(folder.name, "", ("test::unused",), repository=repository, environment=self.environment)
        runtime = await self.runtimes.start(task)
        base = await measure_baseline(runtime, folder, self.compiled / folder.name)
        await runtime.close()
        seconds = sum(base.seconds.values())
        sys.stderr.write(f"{folder.name}: {len(base.passing)} tests pass, in {seconds:.1f} s\n")
        sys.stderr.writelines(f"{folder.name}: flaky and dropped: {test}\n" for test in base.flaky)
        found: list[dict[str, Any]] = []
        waiting = candidates(folder, self.per_function, self.seed)
        await asyncio.gather(*(self._work(task, base, waiting, found) for _ in range(self.concurrent)))
        return sorted(found, key=lambda record: int(record["number"]))

    async def _work(
        self, task: SweTask, base: Baseline, waiting: Iterator[Candidate], found: list[dict[str, Any]]
    ) -> None:
        """Try candidates in one runtime, until there are enough tasks."""
        runtime = await self.runtimes.start(task)
        try:
            await runtime.upload(base.compiled, COMPILED)
            while sum(not record["reason"] for record in found) < self.tasks and (
                batch := list(islice(waiting, BATCH))
            ):
                numbers = range(len(found), len(found) + len(batch))
                places: list[dict[str, Any]] = [{"number": number, "reason": "unfinished"} for number in numbers]
                found += places
                new = [each for each in batch if self._key(each, base) not in self.journal.found]
                pairs = [(each.path, each.mutation) for each in new]
                trials = await try_mutations(runtime, base, pairs, self.max_failing)
                for candidate, trial in zip(new, trials, strict=True):
                    self.journal.add(await self._record(base, candidate, trial))
                for place, candidate in zip(places, batch, strict=True):
                    place.update(self.journal.found[self._key(candidate, base)])
        finally:
            await runtime.close()

    async def _record(self, base: Baseline, candidate: Candidate, trial: Trial) -> dict[str, Any]:
        record = {"key": self._key(candidate, base), "kind": candidate.mutation.kind, "reason": trial.reason}
        if trial.reason:
            return record
        row, flaky = row_of(base, candidate, trial, self.environment), ()
        if self.validate:
            row, checked = await validate_row(self.runtimes, row, base.compiled)
            flaky, problems = checked.flaky, "; ".join(checked.problems)
            record["reason"] = f"not valid: {problems}" if problems else ""
        return {**record, "flaky": flaky, "row": row}

    def _key(self, candidate: Candidate, base: Baseline) -> str:
        """Another one for other settings, which may have another outcome."""
        parts = [candidate.key, str(base.folder), base.passing, self.environment, self.max_failing, self.validate]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def report(records: Sequence[Mapping[str, Any]], seconds: float) -> str:
    """What became of the mutations: a line for each kind, then the tasks that are not valid and the flaky tests."""
    tasks = [record for record in records if not record["reason"]]
    lines = [f"{len(tasks)} tasks of {len(records)} mutations; {seconds:.0f} s in this run"]
    for kind in sorted({record["kind"] for record in records}):
        reasons = Counter(record["reason"].partition(":")[0] or "task" for record in records if record["kind"] == kind)
        lines.append(f"  {kind}: {', '.join(f'{count} {reason}' for reason, count in reasons.most_common())}")
    for record in records:
        if record["reason"].startswith("not valid"):
            lines.append(f"  {record['row']['instance_id']}: {record['reason']}")
        lines += [f"  {record['row']['instance_id']}: flaky and dropped: {test}" for test in record.get("flaky", ())]
    return "\n".join(lines) + "\n"


def check_environment(environment: str, folder: Path) -> None:
    """Raises ConfigError if the environment has the repository's packages: the policy could read the fix there."""
    for packages in Path(environment).glob("lib/python*/site-packages") if environment else ():
        for found in packages.iterdir():
            same = [side / found.name for side in (folder, folder / "src")]
            if any((each.suffix == ".py" and each.is_file()) or any(each.glob("*.py")) for each in same):
                raise ConfigError(f"--environment {environment} has {found.name} without the bug: remove it")


async def _main(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    output: Path = arguments.output
    output.parent.mkdir(parents=True, exist_ok=True)
    folders = [fetch(package, output.absolute().with_suffix("")) for package in arguments.package]
    folders += [folder.absolute() for folder in arguments.repo]
    environment = str(arguments.environment.absolute()) if arguments.environment else ""
    for folder in folders:
        check_environment(environment, folder)
    journal = Journal(output.with_name(output.name + ".tried"))
    runtimes = LocalRuntimes()
    try:
        search = Search(
            runtimes, runtimes.episodes / "compiled", journal, environment, arguments.tasks, arguments.max_failing,
            arguments.per_function, arguments.seed, arguments.concurrent, arguments.validate,
        )  # fmt: skip
        found = [await search.of(folder) for folder in folders]
    finally:
        await runtimes.close()
    rows = [row for records in found for row in _rows(records)[: arguments.tasks]]
    with replacing(output) as unfinished:
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report([record for records in found for record in records], time.monotonic() - began)
    output.with_name(output.name + ".report").write_text(text)
    sys.stderr.write(text)
    print(f"{output}: {len(rows)} tasks, {'validated' if arguments.validate else 'not validated'}")
    return 0 if rows else 1


def _rows(records: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [record["row"] for record in records if not record["reason"]]


def main(argv: Sequence[str] | None = None) -> int:
    """Inject bugs; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--package", action="append", default=[], metavar="NAME==VERSION")
    options.add_argument("--repo", action="append", default=[], type=Path, metavar="FOLDER")
    options.add_argument("--output", required=True, type=ending_in(".jsonl"), metavar="FILE.jsonl")
    options.add_argument(
        "--environment", type=Path, metavar="FOLDER", help="with pytest; default: the system's python3"
    )
    options.add_argument("--tasks", type=int, default=200, help="of each repository, at most")
    options.add_argument("--max-failing", type=int, default=10, help="tests that a bug may break")
    options.add_argument("--per-function", type=int, default=12, help="mutations of a function that are tried")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--concurrent", type=int, default=2)
    options.add_argument("--validate", action="store_true")
    arguments = options.parse_args(argv)
    if not arguments.package and not arguments.repo:
        options.error("give --package or --repo")
    try:
        return asyncio.run(_main(arguments))
    except VerlError as error:
        return write_error(error)


if __name__ == "__main__":
    sys.exit(main())
