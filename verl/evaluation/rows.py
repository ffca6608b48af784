"""Any data file of training as a benchmark: every row in its own words, judged by ToolRL's reward."""

from __future__ import annotations

from pathlib import Path

from verl.data.tasks import TaskSet
from verl.evaluation.base import Benchmark, Category, Play


def rows_benchmark(path: str) -> Benchmark:
    """Rows of a file, each a prompt and one reply. The figure is the share of replies with ToolRL's highest reward."""
    name = Path(path).stem
    play = Play("rlla", handled=False)
    return Benchmark(
        name,
        (Category(name, lambda: TaskSet(path), play, metric="exact"),),
        notes=(f"{name}: rows of {path}, scored by rlla",),
    )
