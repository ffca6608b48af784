"""Share of a step's CPU time that the kept samples (trainer.samples_kept=16) take in the embedded run.

    python bench/samples_kept.py [--rounds 15] [--steps 3]

Steps of recipe=mini_grpo (128 rollouts) with the transformers engine in this process, one thread, none kept: the time
of a step. Then, on the batch of the last one, its second half in turns without and with the samples: the update and its
trace, what is collected, and the file. CPU time of the process; the share is the median of the differences by round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import alternate

from tests.support.local_run import local_trainer
from toolrl.analysis.samples.kept import choose_rollouts, loss_scale, step_samples
from toolrl.analysis.samples.sample_files import SampleFiles, samples_path
from verl.config.load import load_config
from verl.trainer.ppo import PPOTrainer, TrainStepResult

_OVERRIDES = ("recipe=mini_grpo", "rollout.name=hf", "trainer.device=cpu", "trainer.num_threads=1")
_NONE = "trainer.samples_kept=0"
_KEPT = 16
_TARGET = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="steps whose time is measured, after one that is not")
    options = parser.parse_args()
    results: list[TrainStepResult] = []
    with tempfile.TemporaryDirectory() as folder, local_trainer(load_config([*_OVERRIDES, _NONE])) as trained:
        steps = [cpu_time(lambda: results.append(asyncio.run(trained.train_step()))) for _ in range(options.steps + 1)]
        files = SampleFiles(Path(folder), trained.rollouts.rollout.episode_runner.chat.tokenizer.decode)
        last = results[-1]
        sides = {"without": lambda: trained.learner.learn(last.batch, 1), "with": lambda: keep(trained, last, files)}
        times = alternate(sides, options.rounds, cpu_time)
        size = samples_path(Path(folder), 1).stat().st_size
    step_s = statistics.median(steps[1:])
    extra = np.subtract(times["with"], times["without"])
    low, middle, high = np.quantile(extra, (0.25, 0.5, 0.75)) / step_s
    print(
        f"a step without samples: {step_s:.3f} s of CPU time; its update: {statistics.median(times['without']):.3f} s"
    )
    print(f"kept samples: {1e3 * middle * step_s:.1f} ms, {size} bytes")
    print(f"{middle:.2%} of the step (quartiles {low:.2%} and {high:.2%}), target under {_TARGET:.0%}")


def cpu_time(work: Callable[[], object]) -> float:
    """Seconds of all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def keep(trained: PPOTrainer, result: TrainStepResult, files: SampleFiles) -> None:
    """The update, and all that a step does for the samples that it keeps."""
    chosen = choose_rollouts(result.groups, _KEPT)
    policy, batch = trained.learner.policy, replace(result.batch, numbers=np.arange(len(result.batch)))
    policy.start_trace({each.row for each in chosen})
    outcome, trace = trained.learner.learn(batch, 1), policy.end_trace()
    algorithm, minibatches = trained.learner.algorithm, trained.learner.config.minibatches_per_step
    scale = loss_scale(outcome.batch, algorithm, minibatches)
    files.write(1, step_samples(result.groups, result.groups, chosen, outcome, trace, scale))


if __name__ == "__main__":
    main()
