"""Results of the chaos suite: a line of JSON for each case that was run, and the table that docs show of them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cases import CASES, FAULTS, Case
from verl.host.files import replacing
from verl.tracking.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "outputs" / "chaos"
BEGIN, END = "<!-- chaos table: begin -->", "<!-- chaos table: end -->"
_RUN = ("verl", "toolrl", "tests")  # what decides a result
_HEAD = ("case", "expected", "result", "exit", "reported after", "lines", "resumed from", "bit-equal", "commit", "on")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos", "the chaos suite (pytest -m chaos)")
    group.addoption("--chaos-results", type=Path, default=FOLDER / "results.jsonl", help="where each case is noted")
    group.addoption("--chaos-again", action="store_true", help="run what has passed at this commit, too")
    group.addoption("--chaos-table", type=Path, help="a page whose table is written anew from the results")


def pytest_configure(config: pytest.Config) -> None:
    page = config.getoption("--chaos-table")
    if page is not None and not (page.is_file() and {BEGIN, END} <= set(page.read_text().splitlines())):
        raise pytest.UsageError(f"--chaos-table {page}: no page with the lines {BEGIN!r} and {END!r}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):  # one of several processes
        return
    page, results = session.config.getoption("--chaos-table"), session.config.getoption("--chaos-results")
    if page is not None and results.exists():
        write_table(page, read_jsonl(results))


@cache
def commit() -> str:
    """`described` of this checkout, as it was when it was first asked."""
    return described(ROOT)


def described(checkout: Path) -> str:
    """The commit that is checked out, and a hash of what differs from it or is new in what the suite runs."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, check=True).stdout

    name = git("rev-parse", "--short=12", "HEAD").decode().strip()
    changed = git("diff", "--binary", "HEAD", "--", *_RUN)
    new = git("ls-files", "-z", "--others", "--exclude-standard", "--", *_RUN).decode().split("\0")[:-1]
    for path in new:
        content = (checkout / path).read_bytes() if (checkout / path).is_file() else b""
        changed += f"{path}\0{len(content)}\0".encode() + content
    return f"{name}+{sha256(changed).hexdigest()[:8]}" if changed else name


def passed(results: Path, name: str) -> bool:
    """Whether the case's last run at this commit passed."""
    rows = [row for row in _rows(results) if row["case"] == name and row["commit"] == commit()]
    return bool(rows) and not rows[-1]["problems"]


def note(results: Path, name: str, problems: list[str], facts: Mapping[str, Any]) -> None:
    """Append a case's result."""
    row = {
        "case": name,
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "problems": problems,
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _rows(results: Path) -> list[dict[str, Any]]:
    return read_jsonl(results) if results.exists() else []


def write_table(page: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace what is between the page's two marks. A case without a result keeps its row, with the commit of then."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    found, end, after = rest.partition(END)
    assert begin and end, page
    with replacing(page) as unfinished:
        unfinished.write_text(f"{before}{BEGIN}\n\n{table(rows, found.splitlines())}\n{END}{after}")


def table(rows: Iterable[Mapping[str, Any]], known: Iterable[str] = ()) -> str:
    """Every case with its last result, in the order of cases.py. known: rows of a table, for cases without a result"""
    last = {row["case"]: row for row in rows}
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in known if line.count(" | ") + 1 >= len(_HEAD)}
    lines = []
    for name, title, expected in _listed():
        row = last.get(name)
        lines.append(kept[title] if row is None and title in kept else _line(_cells(title, expected, row)))
    results = [line.split(" | ")[2] for line in lines]
    good, missing = results.count("passed"), results.count("not run")
    summary = f"{good} of {len(lines)} cases passed, {len(lines) - good - missing} failed, {missing} not run."
    return "\n".join([summary, "", _line(_HEAD), _line(["---"] * len(_HEAD)), *lines, ""])


def _listed() -> Iterator[tuple[str, str, str]]:
    """(name, title, what is expected) of every case."""
    for case in CASES:
        yield case.name, _title(case), str(case.expected)
    for name, expected in FAULTS.items():
        yield name, name.replace("_", " "), expected


def _title(case: Case) -> str:
    return f"{case.target}, {case.signal}, {case.point} ({case.setup})"


def _cells(title: str, expected: str, row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return [title, expected, "not run", *[""] * (len(_HEAD) - 3)]
    result = "passed" if not row["problems"] else "**failed**: " + row["problems"][0][:100].replace("|", "/")
    seconds = row.get("reported_s")
    from_step = row.get("resumed_from")
    return [
        title,
        expected,
        result,
        str(row.get("exit", "")),
        "" if seconds is None else f"{seconds:g} s",
        str(row.get("lines", "")),
        "" if from_step is None else f"step {from_step}",
        {True: "yes", False: "no", None: ""}[row.get("bit_equal")],
        row["commit"],
        row["time"][:10],
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
