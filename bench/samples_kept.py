"""Seconds that the kept samples (trainer.samples_kept=16) cost a step, against the step without them.

    python bench/samples_kept.py [--rounds 12]

One step of the embedded default (128 rollouts) with the transformers engine in this process. Its update is run in turns
with and without the trace, on the same batch; collecting and writing the file are timed on their own.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.local_run import local_trainer
from verl.config.load import load_config
from verl.tracking.samples import SampleFiles, samples_path
from verl.trainer.kept import choose_rollouts, step_samples

_WORDS = ("recipe=mini_grpo", "rollout.name=hf", "trainer.device=cpu", "trainer.num_threads=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, local_trainer(load_config(_WORDS)) as trained:
        result = asyncio.run(trained.train_step())
        rows = {each.row for each in choose_rollouts(result.groups, 16)}
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * rounds + 2):
            traced = number % 2 == 1
            started = time.perf_counter()
            outcome = trained.learner.learn(result.batch, 0, rows if traced else None)
            if number > 1:
                seconds[traced].append(time.perf_counter() - started)
            learned = outcome if traced else None
        assert learned is not None
        files, writing = SampleFiles(Path(folder), trained.rollouts.rollout.episode_runner.chat.tokenizer.decode), []
        for step in range(1, rounds + 1):
            started = time.perf_counter()
            chosen = choose_rollouts(result.groups, 16)
            files.write(step, step_samples(result.groups, result.groups, chosen, learned))
            writing.append(time.perf_counter() - started)
        size = samples_path(Path(folder), 1).stat().st_size
    step_s = result.metrics["time/step_s"]
    without_s, with_s = min(seconds[False]), min(seconds[True])  # the fastest: others are slowed down by other programs
    write_s = statistics.median(writing)
    print(f"update: {without_s:.3f} s without, {with_s:.3f} s with trace; file: {1e3 * write_s:.1f} ms, {size} bytes")
    print(f"{(with_s - without_s + write_s) / step_s:.2%} of a step of {step_s:.2f} s")


if __name__ == "__main__":
    main()
