"""LIMR's learning impact (arXiv 2502.11886): how closely a row's success rate over the epochs follows the mean.

    s_i = 1 - sum_k (r_i^k - r_avg^k)^2 / sum_k (1 - r_avg^k)^2

r_i^k: success rate of row i in epoch k, as in the published code; r_avg^k: its mean over the rows. A row that equals
the mean has 1; a row that is always right has 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

from verl.errors import DataError
from verl.text import prompt_sha256
from verl.tracking.jsonl import read_jsonl
from verl.types import Message


@dataclass
class Epochs:
    """The rollouts of one file's rows in a run. The n-th visit of a row is epoch n."""

    rates: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # row -> success rates by epoch
    prompts: dict[int, str] = field(default_factory=dict)  # row -> digest of the prompt

    @property
    def num_epochs(self) -> int:
        """The number of epochs completed by at least half of the rows."""
        return median_low(map(len, self.rates.values()))


def learning_impact(rates: Mapping[int, Sequence[float]], num_epochs: int) -> dict[int, float]:
    """s of every row with at least `num_epochs` rates. Raises DataError if all rows were always right."""
    courses = {row: course[:num_epochs] for row, course in rates.items() if len(course) >= num_epochs}
    mean = [fmean(epoch) for epoch in zip(*courses.values(), strict=True)]
    most = sum((1 - each) ** 2 for each in mean)
    if most == 0:
        raise DataError("every row was always right, so learning impact is undefined")
    return {row: 1 - _squares(course, mean) / most for row, course in courses.items()}


def _squares(course: Sequence[float], mean: Sequence[float]) -> float:
    return sum((one - other) ** 2 for one, other in zip(course, mean, strict=True))


def read_epochs(run: Path, data: str, right_at: float | None) -> Epochs:
    """The success rates from the transcripts of a run folder, for rows of the file called `data`.

    right_at: score threshold of a correct rollout; default: its part "correct"
    Raises DataError if there are no transcripts, or no record of correctness.
    """
    epochs = Epochs()
    paths = sorted((run / "transcripts").glob("step-*.jsonl"))
    if not paths:
        raise DataError("has no transcripts", "the folder of a training run", file=str(run))
    for path in paths:
        step: dict[int, list[bool]] = defaultdict(list)
        for rollout in read_jsonl(path):
            name, _, number = str(rollout["task_id"]).rpartition("#")
            if name == data:
                step[int(number)].append(_right(rollout, right_at, path))
                prompt = tuple(Message(each["role"], each["content"]) for each in rollout["prompt"])
                epochs.prompts[int(number)] = prompt_sha256(prompt)
        for row, right in step.items():
            epochs.rates[row].append(fmean(right))
    if not epochs.rates:
        raise DataError(f"has trained on no row of {data}", hint="Pass the file that it was trained on", file=str(run))
    return epochs


def _right(rollout: Mapping[str, Any], right_at: float | None, path: Path) -> bool:
    score = rollout["score"]
    if right_at is not None:
        return bool(score["total"] >= right_at)
    if "correct" not in score["parts"]:
        parts = ", ".join(score["parts"]) or "none"
        hint = "Pass the score threshold of a correct rollout: --right-at"
        raise DataError(f"has no record of correctness (parts: {parts})", "a part `correct`", hint, str(path))
    return bool(score["parts"]["correct"] >= 1.0)
