"""What the cases of faults have in common: a place with a folder for outputs, and how a run has to end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.harness import MAX_LINES, STEPS, TRACEBACK, Baseline, Ended, Result, differing, place
from tests.chaos.outcome import metrics, newest, weights
from tests.chaos.place import Place


@contextmanager
def outputs(shm_mib: int = 2048) -> Iterator[tuple[Place, Path]]:
    with place(shm_mib) as where:
        out = where.tmp.with_suffix(".out")
        try:
            yield where, out
        finally:
            shutil.rmtree(out, ignore_errors=True)


def check_whole(result: Result, ended: Ended, out: Path, unbroken: Baseline, where: Place) -> None:
    """It ended well, as if nothing had been."""
    check_reported(result, ended)
    result.need(ended.code == 0, f"exit {ended.code}: {last(ended)}")
    result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
    if ended.code == 0:
        check_equal(result, out, unbroken)


def check_equal(result: Result, out: Path, unbroken: Baseline) -> None:
    equal = newest(out) == STEPS and weights(out) == unbroken.weights and metrics(out) == unbroken.rows
    result.facts["bit_equal"] = equal
    result.need(equal, f"the end is not bit-equal: {differing(metrics(out), unbroken.rows)}")


def check_refused(result: Result, ended: Ended, codes: Sequence[int], *texts: str) -> None:
    """It ended with one of the codes, in few lines that hold all these texts."""
    check_reported(result, ended)
    result.need(ended.code in codes, f"exit {ended.code}, not {codes}: {last(ended)}")
    lacking = [word for word in texts if word not in ended.text]
    result.need(not lacking, f"the report lacks {lacking}: {last(ended)}")
    result.need(len(ended.after) <= MAX_LINES, f"{len(ended.after)} lines after the crash")


def check_reported(result: Result, ended: Ended) -> None:
    result.facts |= {"exit": ended.code, "seconds": round(ended.seconds, 1), "lines": len(ended.after)}
    result.need(TRACEBACK not in ended.text, "a traceback on the console")


def last(ended: Ended) -> str:
    return " | ".join(line for _, line in ended.lines[-4:])[-400:]
