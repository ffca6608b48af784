"""Any data file of training as a benchmark: every row in its own words, judged by the reward it was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.data.tasks import TaskSet
from verl.evaluation.base import Benchmark, Category, Play


def rows_benchmark(path: str, reward: str = "rlla", options: Mapping[str, Any] | None = None) -> Benchmark:
    """Rows of a file, each a prompt and one reply. The figure is the share of replies with the highest reward."""
    name = Path(path).stem
    play = Play(reward, options or {}, handled=False)
    return Benchmark(
        name,
        (Category(name, lambda: TaskSet(path), play, metric="exact"),),
        notes=(f"{name}: rows of {path}, scored by {reward}",),
    )
