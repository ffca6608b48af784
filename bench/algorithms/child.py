"""Trains one run after another in this process, with the packages loaded once: a side of bench/algorithms/study.py.

Request: {"overrides": [..]}; answer: {"scores": {validation set: [reward of every row, in their order]}, "rewards":
[mean of every step], "cpu_s": ..}, or {"failed": ..} if the run has ended without a policy.
"""

from __future__ import annotations

import gc
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench.common import answer, requests
from tests.support.local_run import Here, OneProcess
from verl.algorithms.algorithm import Algorithm
from verl.build.run import Inputs, Processes, load_inputs, start_run
from verl.build.workers import start_workers
from verl.config.load import load_config
from verl.config.schema import Config
from verl.errors import DataError, VerlError
from verl.host.daemon import run_async
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.single_controller.group import WorkerContext
from verl.tracking.console import Display
from verl.tracking.jsonl import read_jsonl


class _Unseeded(Here):
    """An engine that batches its requests: one with a seed is decoded alone. The process has one seed instead."""

    async def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        unseeded = [replace(each, seed=None) if isinstance(each, Sampling) else each for each in args]
        return await super().submit(rank, function, *unseeded)


class _BatchingProcess(OneProcess):
    def group(self, role: str, make: Callable[[WorkerContext], Any], *_: Any, **__: Any) -> Here:
        made = super().group(role, make)
        return _Unseeded(made._worker) if role == "rollout" else made


@contextmanager
def in_this_process(
    inputs: Inputs, config: Config, algorithm: Algorithm, total_steps: int, _: Path, display: Display
) -> Iterator[Processes]:
    workers = start_workers(config, _BatchingProcess(), algorithm, "cpu", total_steps)  # type: ignore[arg-type]
    try:
        yield Processes(workers, DirectScorer(inputs.rewards), "cpu")
    finally:
        gc.collect()
        dist.destroy_process_group()


def train(overrides: Sequence[str]) -> dict[str, Any]:
    began = time.process_time()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        folder.mkdir()
        config = load_config([*overrides, f"trainer.default_local_dir={parent}", "trainer.experiment_name=run"])
        torch.manual_seed(config.trainer.seed)
        inputs = load_inputs(config)
        display = Display(None, Console(file=io.StringIO()))
        with start_run(config, inputs, folder, display, partial(in_this_process, inputs)) as run:
            try:
                run_async(run.run())
            except VerlError as error:
                return {"failed": str(error)}
        rows = [each for file in sorted((folder / "validation").glob("*.jsonl")) for each in read_jsonl(file)]
        metrics = list(read_jsonl(folder / "metrics.jsonl"))
    scores: dict[str, dict[int, float]] = {}
    for row in rows:
        scores.setdefault(row["set"], {})[int(row["task_id"].rpartition("#")[2])] = round(row["reward"], 4)
    if lacking := [name for name, by_row in scores.items() if max(by_row) >= len(by_row)]:
        raise DataError(f"validation of {', '.join(lacking)}: not every row has a reward")
    rewards = [round(each["reward/total"], 4) for each in metrics if "reward/total" in each]
    ordered = {name: [by_row[row] for row in sorted(by_row)] for name, by_row in scores.items()}
    return {"scores": ordered, "rewards": rewards, "cpu_s": round(time.process_time() - began, 1)}


def main() -> None:
    for request in requests():
        answer(train(request["overrides"]))


if __name__ == "__main__":
    main()
