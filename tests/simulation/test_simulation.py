"""Trainings with faults in one process and in virtual time: seeds, their replay, and deliberate defects."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.conftest import ROOT
from tests.simulation.faults import Fault
from tests.simulation.mutants import MUTANTS
from tests.simulation.parts import MODES, STEPS
from tests.simulation.run import Simulation, checked, main, of_seed, reference

SEEDS = range(200)
CHAOS_SEEDS = range(int(os.environ.get("SIMULATION_SEEDS", "5000")))
MUTANT_SEEDS = range(120)  # within which a defect is found


@pytest.fixture(scope="module", autouse=True)
def undisturbed() -> Iterator[None]:
    """One thread for small tensors, no look at the garbage of before, and no lines of runs that fail as they should."""
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    gc.freeze()
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(disabled)
    gc.unfreeze()
    torch.set_num_threads(threads)


def failing(seeds: range) -> tuple[list[str], Counter[int]]:
    """What was wrong, with the command that replays it, and how often each exit code was."""
    found, codes = list[str](), Counter[int]()
    for seed in seeds:
        simulation, result = checked(seed)
        codes.update(end.code for end in result.ends)
        if simulation.problems:
            problems = "\n  ".join(map(str, (*simulation.faults, *result.ends, *simulation.problems)))
            found.append(f"seed {seed}, python -m tests.simulation.run {seed}:\n  {problems}")
    return found, codes


def test_an_engine_that_is_killed_costs_nothing() -> None:
    mode = replace(MODES[1], engines=1)
    simulation = Simulation(1, mode, [Fault("engine killed", at_s=20.0)])
    result = simulation.run()
    simulation.check(result)
    assert simulation.problems == [] and [end.code for end in result.ends] == [0]
    assert sum(row.get("rollout/engine_restarts", 0) for row in result.rows) == 1
    assert result.weights == reference(mode).weights and len(result.rows) == STEPS + 1


def test_a_rank_that_is_stopped_ends_the_run_and_the_command_goes_on() -> None:
    simulation = Simulation(2, MODES[4], [Fault("rank stopped", at_s=25.0, target=0.9)])
    result = simulation.run()
    simulation.check(result)
    assert simulation.problems == [] and [end.code for end in result.ends] == [1, 0]
    assert "trainer rank 1 of 2" in result.ends[0].message


def test_partial_files_of_a_killed_controller_are_removed_at_the_next_start() -> None:
    simulation = Simulation(3, MODES[8], [Fault("controller killed at a write", at_change=38)])
    result = simulation.run()
    simulation.check(result)
    assert simulation.problems == [] and [end.code for end in result.ends] == [-9, 0]


def test_a_killed_controller_leaves_no_signal_handler_in_this_process() -> None:
    before = signal.getsignal(signal.SIGTERM)
    simulation = Simulation(20, MODES[8], [Fault("controller killed", at_s=20.0)])
    assert [end.code for end in simulation.run().ends] == [-9, 0]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("seed", [334, 1938, 3125])
def test_a_signal_saves_the_state_of_a_whole_step(seed: int) -> None:
    """334: in a validation, and two crashes before the next checkpoint; others: while a stopped engine owes metrics."""
    simulation, _ = checked(seed)
    assert simulation.problems == []


@pytest.mark.parametrize("seed", [3, 9, 12])
def test_a_seed_repeats_itself_event_by_event(seed: int) -> None:
    (one, first), (other, second) = checked(seed), checked(seed)
    assert len(first.trace) > 500 and first.trace == second.trace
    assert [end.code for end in first.ends] == [end.code for end in second.ends]
    assert one.problems == other.problems == []


@pytest.mark.long
def test_seeds_of_ci() -> None:
    found, codes = failing(SEEDS)
    assert found == []
    assert {0, 1, 2, -9, 143} <= codes.keys(), codes


@pytest.mark.long
def test_a_seed_repeats_itself_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the order of hashes is there."""
    assert main(["5"]) == 0
    command = [sys.executable, "-m", "tests.simulation.run", "5"]
    other = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"}
    done = subprocess.run(command, cwd=ROOT, env=other, capture_output=True, text=True, timeout=300)
    assert done.stdout == capsys.readouterr().out and f"seed 5: {of_seed(5).mode}" in done.stdout


@pytest.mark.chaos
def test_many_seeds() -> None:
    found, _ = failing(CHAOS_SEEDS)
    assert found == []


@pytest.mark.chaos
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_defect_is_found(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    for mode in MODES:
        reference(mode)  # without the defect
    for seed in MUTANT_SEEDS:
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            simulation, _ = checked(seed)
        if simulation.problems:
            return
    pytest.fail(f"none of {len(MUTANT_SEEDS)} seeds finds it")
