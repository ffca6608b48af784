"""Lines of a transcript as rollouts, where all that is shown of them has its type."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from toolrl.analysis.report.folder import RunFolder, parsed
from toolrl.analysis.report.rows import is_rollout
from toolrl.analysis.samples.sample_files import KeptSample


def rollout_of(line: bytes) -> dict[str, Any] | None:
    """None if the line is damaged: no JSON, a number that is not finite, or a field of another type."""
    row = parsed(line, finite=True)
    return row if row is not None and is_rollout(row) else None


def is_of(sample: KeptSample, rollout: Mapping[str, Any]) -> bool:
    """Whether the line of the sample holds its rollout: someone may have filtered the file."""
    return (rollout.get("task_id"), rollout.get("index")) == (sample.task_id, sample.index)


def rollouts_at(run: RunFolder, step: int, lines: Container[int | None]) -> dict[int, dict[str, Any]]:
    """The rollouts of some lines of a step's transcript, by line; damaged ones are missing."""
    rollouts = ((number, rollout_of(text)) for number, text in enumerate(run.transcript(step)) if number in lines)
    return {number: row for number, row in rollouts if row is not None}
