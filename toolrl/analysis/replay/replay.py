"""Replay of a training step from its record, by the same ranks, weights and arithmetic."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolrl.analysis.replay.record import Record, made_by, read_record, record_path, recorded_steps
from verl.build.algorithm import algorithm_of
from verl.build.ranks import rank_pool, start_ranks
from verl.build.run import build_learner
from verl.checkpoint.manifest import verify
from verl.config.foreign_code import named_code
from verl.config.load import restored_config
from verl.config.schema import Config
from verl.errors import ConfigError, DataError
from verl.single_controller.ray import Cluster
from verl.tracking.timers import PhaseTimer
from verl.trainer.learner import Learner
from verl.workers.rank import TrainingRank

_ARITHMETIC_KEYS = (
    "actor.",
    "critic.",
    "model.",
    "algorithm.",
    "rollout.temperature",
    "data.train_batch_size",
    "rollout.max_staleness",
    "data.max_response_length",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.critic_warmup",
    "trainer.seed",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replay:
    recorded: Mapping[str, float]
    replayed: Mapping[str, float]
    device: str  # cpu or cuda

    def differing(self) -> list[str]:
        """Names of the metrics that are not bit-equal; NaN equals NaN."""
        return [name for name, value in self.replayed.items() if not _same(value, self.recorded.get(name))]


@dataclass(frozen=True)
class ReplayPlan:
    """The checkpoint to start from (None: the initial model), and the records after it."""

    start: Path | None
    records: Sequence[Path]  # the last is that of the step itself


def plan_replay(folder: Path, step: int) -> ReplayPlan:
    """The shortest replay. Raises DataError if it needs a missing record."""
    recorded = recorded_steps(folder)
    if step not in recorded:
        known = _ranges(recorded) if recorded else "none; trainer.record=true writes them"
        raise DataError(f"has no record of step {step}", f"one of the recorded steps: {known}", file=str(folder))
    first, start = 0, None
    for path in sorted((folder / "checkpoints").glob("step-*"), reverse=True):
        after = int(path.name.removeprefix("step-"))
        if after >= step:
            continue
        try:
            verify(path, hashes=True)
        except DataError as error:
            _log.warning("checkpoint skipped: %s", error)
        else:
            first, start = after, path
            break
    if missing := sorted(set(range(first + 1, step)) - set(recorded)):
        nearest = "the initial model" if start is None else start.name
        raise DataError(
            f"cannot replay step {step}: the nearest start is {nearest}, and there is no record of step "
            f"{_ranges(missing)}",
            hint="Keep more checkpoints (trainer.save_freq, trainer.keep_last), or record from the first step on",
            file=str(folder),
        )
    return ReplayPlan(start, [record_path(folder, each) for each in range(first + 1, step + 1)])


def replay(folder: Path, step: int, user_code: bool = False) -> Replay:
    """In new processes. Raises DataError or ConfigError if that is impossible, or, without user_code, if it would run
    code that the record names: the folder may be a colleague's."""
    plan = plan_replay(folder, step)
    target = read_record(plan.records[-1])
    config = replayed_config(target, user_code)
    run, join = config.trainer, config.trainer.nnodes > 1
    with Cluster.start(2 * config.num_ranks, None, run.stall_timeout_s, join, run.health_timeout_s) as cluster:
        return replay_from(plan, target, config, cluster)


def replayed_config(record: Record, user_code: bool) -> Config:
    """The settings of a record. Raises ConfigError for code that they name and a replay runs, unless user_code."""
    of_algorithm = {key: value for key, value in record.settings.items() if key.startswith("algorithm.")}
    code = [each for key, value in of_algorithm.items() for each in named_code(key, value)]
    if code and not user_code:
        raise ConfigError(f"the record of step {record.step} names code, which --user-code runs: {', '.join(code)}")
    return restored_config(record.settings)


def replay_from(plan: ReplayPlan, target: Record, config: Config, cluster: Cluster) -> Replay:
    """target: the last record"""
    with learner_before(plan, target, config, cluster) as learner:
        return Replay(target.metrics, replay_step(learner, target), str(target.made_by["device"]))


@contextmanager
def learner_before(plan: ReplayPlan, target: Record, config: Config, cluster: Cluster) -> Iterator[Learner]:
    """The learner as it was before the step of the last record, `target`, and with its KL coefficient.

    Logs a warning if settings, machine or code differ from those of the record: so may rounding.
    """
    device, total_steps = str(target.made_by["device"]), int(target.made_by["total_steps"])
    _log_differences("here", made_by(config, device, total_steps), target.made_by)
    algorithm = algorithm_of(config)
    ranks = start_ranks(config, cluster, *rank_pool(config, cluster, device), algorithm, device, total_steps)
    try:
        if plan.start is not None:
            ranks.call(TrainingRank.load, plan.start)
        learner = build_learner(config, algorithm, ranks, PhaseTimer())
        for path in plan.records[:-1]:
            record = read_record(path)
            _log_differences(f"in step {record.step}", _arithmetic(record), _arithmetic(target))
            replay_step(learner, record)
        learner.restore(target.coefficients)
        yield learner
    finally:
        ranks.close()


def replay_step(learner: Learner, record: Record) -> dict[str, float]:
    """Replay the step on the current weights. Returns its metrics."""
    learner.restore(record.coefficients)
    learner.timer.start()
    return learner.learn(record.batch, record.step - 1).metrics


def _arithmetic(record: Record) -> dict[str, Any]:
    chosen = {key: value for key, value in record.settings.items() if key.startswith(_ARITHMETIC_KEYS)}
    return {**chosen, **record.made_by}


def _log_differences(where: str, actual: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    keys = [key for key in sorted({*actual, *recorded}) if actual.get(key) != recorded.get(key)]
    if keys:
        shown = "; ".join(f"{key} is {actual.get(key)} {where}, but {recorded.get(key)} in the record" for key in keys)
        _log.warning("%s: the result may differ", shown)


def _same(one: float, other: float | None) -> bool:
    return one == other or (other is not None and math.isnan(one) and math.isnan(other))


def _ranges(steps: Sequence[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return ", ".join("-".join(map(str, run)) for run in runs)
