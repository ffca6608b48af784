"""The chaos suite: `pytest -m chaos`. cases.py lists the cases and what is expected, harness.py checks it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.cases import CASES, FAULTS, Case
from tests.chaos.faults import run_fault
from tests.chaos.harness import Lab, Result, run_case
from tests.chaos.results import FOLDER, commit, note, passed
from tests.conftest import need_vllm

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's namespaces")]
_PARAMETERS = [
    pytest.param(case, id=case.name, marks=[pytest.mark.chaos_short] if case.short else []) for case in CASES
]


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a suite that is ended leaves nothing
    yield Lab(FOLDER / commit())
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("case", _PARAMETERS)
def test_signal(case: Case, lab: Lab, request: pytest.FixtureRequest) -> None:
    if case.setup == "vllm":
        need_vllm()
    _run(case.name, lambda: run_case(lab, case), request)


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, lab: Lab, request: pytest.FixtureRequest) -> None:
    if "vllm" in name:
        need_vllm()
    _run(name, lambda: run_fault(lab, name), request)


def _run(name: str, run: Callable[[], Result], request: pytest.FixtureRequest) -> None:
    """Run a case unless it has passed before, and note what came of it."""
    results: Path = request.config.getoption("--chaos-results")
    if passed(results, name) and not request.config.getoption("--chaos-again"):
        pytest.skip("passed at this commit (--chaos-again)")
    began = time.monotonic()
    try:
        result = run()
    except Exception as error:  # noqa: BLE001  noted like any other
        result = Result([f"{type(error).__name__}: {str(error)[-600:]}"])
    note(results, name, result.problems, {**result.facts, "took_s": round(time.monotonic() - began, 1)})
    assert not result.problems, "\n".join(result.problems)
