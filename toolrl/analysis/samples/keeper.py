"""Keeps the tokens of some rollouts of every step, with all that training knew about them (sample_files.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolrl.analysis.samples.kept import ChosenSample, choose_rollouts, loss_scale, step_samples
from toolrl.analysis.samples.sample_files import SampleFiles, StepSamples
from verl.algorithms.algorithm import Algorithm
from verl.batch.trace import Trace
from verl.config.schema import Config
from verl.trainer.learner import Learned
from verl.types import TrajectoryGroup


@dataclass(frozen=True)
class Keeper:
    """See SampleKeeper. limit: rollouts of a step; minibatches: of a step"""

    limit: int
    algorithm: Algorithm
    minibatches: int
    files: SampleFiles

    def choose(self, groups: Sequence[TrajectoryGroup]) -> list[ChosenSample]:
        return choose_rollouts(groups, self.limit)

    def collect(
        self,
        groups: Sequence[TrajectoryGroup],
        logged: Sequence[TrajectoryGroup],
        chosen: Sequence[ChosenSample],
        outcome: Learned,
        trace: Trace,
    ) -> StepSamples:
        scale = loss_scale(outcome.batch, self.algorithm, self.minibatches) if chosen else None
        return step_samples(groups, logged, chosen, outcome, trace, scale)

    def write(self, step: int, samples: StepSamples) -> None:
        self.files.write(step, samples)

    def truncate_after(self, step: int) -> None:
        self.files.truncate_after(step)


def build_keeper(
    config: Config, algorithm: Algorithm, run_folder: Path, decode: Callable[[list[int]], str]
) -> Keeper | None:
    """None if no samples are kept. decode: from token ids to text"""
    if not config.trainer.samples_kept:
        return None
    files = SampleFiles(run_folder, decode)
    return Keeper(config.trainer.samples_kept, algorithm, config.minibatches_per_step, files)
