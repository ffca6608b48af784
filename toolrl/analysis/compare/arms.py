"""Runs by what was set: an arm has the runs of one setting, one per seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from toolrl.analysis.compare.paired import Difference, Scores, difference, holm
from toolrl.analysis.report.folder import RunFolder
from verl.errors import ConfigError

_SEED = "trainer.seed"
_PLACES = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name", "trainer.logger")
_REPORTS = ("trainer.samples_kept", "trainer.record", "trainer.save_freq", "trainer.keep_last", "trainer.keep_best")
_NO_ARM = (_SEED, *_PLACES, *_REPORTS)  # settings that change nothing of what is learned, but for the seed


@dataclass(frozen=True, slots=True)
class Arm:
    """settings: those in which the arms differ"""

    settings: Mapping[str, Any]
    runs: Mapping[int, RunFolder]  # by seed

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "all runs"


def arms_of(runs: Sequence[RunFolder]) -> list[Arm]:
    """In the order of their first run. Raises ConfigError for a run without settings, or two of one arm and seed."""
    for run in runs:
        if not isinstance(run.settings.get(_SEED), int):
            raise ConfigError(f"{run.folder}: config.yaml has no {_SEED}: {'; '.join(run.notes) or 'it is missing'}")
    chosen = [{key: value for key, value in run.settings.items() if key not in _NO_ARM} for run in runs]
    keys = sorted({key for each in chosen for key in each})
    differing = [key for key in keys if any(each.get(key) != chosen[0].get(key) for each in chosen)]
    arms: list[tuple[dict[str, Any], dict[int, RunFolder]]] = []
    for run, all_settings in zip(runs, chosen, strict=True):
        own = {key: all_settings.get(key) for key in differing}
        members = next((members for settings, members in arms if settings == own), None)
        if members is None:
            arms.append((own, members := {}))
        seed = run.settings[_SEED]
        if seed in members:
            raise ConfigError(
                f"{members[seed].folder} and {run.folder} have the same settings and the same seed {seed}"
            )
        members[seed] = run
    return [Arm(*arm) for arm in arms]


def last_common_step(runs: Sequence[RunFolder]) -> int:
    """The last step at which all runs were validated. Raises ConfigError if there is none but that before training."""
    steps = set.intersection(*(set(run.validated_steps()) for run in runs))
    if not max(steps, default=0):
        each = ", ".join(f"{run.name}: {run.validated_steps() or 'none'}" for run in runs)
        raise ConfigError(f"the runs have no validation after one number of steps; validated steps: {each}")
    return max(steps)


def scores(run: RunFolder, step: int, exact: bool) -> dict[str, dict[str, float]]:
    """{validation set: {task: mean over its responses}} of the reward; exact: of whether it is the highest."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in run.validation(step):
        value = row.get("exact", row["score"]["total"] > 0) if exact else row["score"]["total"]
        found.setdefault(str(row.get("set")), {}).setdefault(str(row.get("task_id")), []).append(float(value))
    return {name: {task: fmean(values) for task, values in tasks.items()} for name, tasks in found.items()}


@dataclass(frozen=True, slots=True)
class Line:
    """An arm on a validation set. difference: to the first arm, over the seeds that both have; None with fewer than two

    p: of the difference, corrected for the number of arms
    """

    arm: Arm
    by_seed: Mapping[int, float]
    difference: Difference | None
    p: float | None


def compare(arms: Sequence[Arm], step: int, exact: bool = False) -> dict[str, list[Line]]:
    """By validation set, a line per arm. Raises ConfigError if a run has no validation there, or one on other rows."""
    for run in (run for arm in arms for run in arm.runs.values()):
        if step not in run.validated_steps():
            known = ", ".join(map(str, run.validated_steps())) or "none"
            raise ConfigError(f"{run.folder} has no validation after step {step}; validated steps: {known}")
    read = [{seed: scores(run, step, exact) for seed, run in arm.runs.items()} for arm in arms]
    first = next(iter(read[0].values()))
    for arm, by_seed in zip(arms, read, strict=True):
        for seed, sets in by_seed.items():
            if {name: tasks.keys() for name, tasks in sets.items()} != {name: first[name].keys() for name in first}:
                raise ConfigError(f"{arm.runs[seed].folder} was validated on other rows than {_first(arms).folder}")
    return {name: _lines(arms, [{seed: sets[name] for seed, sets in each.items()} for each in read]) for name in first}


def _first(arms: Sequence[Arm]) -> RunFolder:
    return next(iter(arms[0].runs.values()))


def _lines(arms: Sequence[Arm], read: Sequence[Mapping[int, Scores]]) -> list[Line]:
    differences = [None, *(_difference(each, read[0]) for each in read[1:])]
    corrected = iter(holm([each.p for each in differences if each is not None]))
    return [
        Line(
            arm,
            {seed: fmean(tasks.values()) for seed, tasks in sorted(by_seed.items())},
            found,
            None if found is None else next(corrected),
        )
        for arm, by_seed, found in zip(arms, read, differences, strict=True)
    ]


def _difference(ours: Mapping[int, Scores], base: Mapping[int, Scores]) -> Difference | None:
    seeds = sorted(ours.keys() & base.keys())
    enough = len(seeds) > 1 and len(base[seeds[0]]) > 1
    return difference([ours[seed] for seed in seeds], [base[seed] for seed in seeds]) if enough else None
