"""The lab on tasks of repositories: the fix must score 1, and each cheat of toolrl/swe/cheats.py 0."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from toolrl.envs.swe.env import SweFactory
from toolrl.swe.cheats import CHEATS, INHERENT, try_cheats
from toolrl.swe.scoring import score_patch
from verl.types import Task

SAMPLE = 3  # tasks, without eval.limit: each takes a minute or two


@dataclass
class CheatReport:
    """scores: cheat -> its score on each task. unfixed: tasks whose fix does not score 1. held: shares of the fixes"""

    scores: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    unfixed: list[str] = field(default_factory=list)
    held: list[float] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.unfixed and not any(any(scores) for scores in self.scores.values())

    def table(self) -> Table:
        table = Table("cheat", "tasks", "resist", "", title="Cheats")
        for name, scores in self.scores.items():
            resist = sum(score == 0 for score in scores)
            style = None if resist == len(scores) else "red"
            note = "inherent: detected" if name in INHERENT and resist else "inherent" if name in INHERENT else ""
            table.add_row(name, str(len(scores)), str(resist), note, style=style)
        return table


async def try_tasks(options: Mapping[str, Any], tasks: Iterable[Task], names: Collection[str] = CHEATS) -> CheatReport:
    """options: of env.name=swe. names: of cheats. Raises DataError, RuntimeLostError."""
    report = CheatReport()
    factory = SweFactory(**options)
    try:
        for task in tasks:
            swe = factory.swe_task(task)
            fixed = await score_patch(factory.runtimes, swe, swe.gold_patch)
            report.held.append(fixed.held)
            if fixed.score.total < 1:
                report.unfixed.append(f"{task.id}: the fix scores {fixed.outcome}: {fixed.detail[-300:]}")
            async for name, verdict in try_cheats(factory.runtimes, swe, names):
                report.scores[name].append(verdict.score.total)
    finally:
        await factory.close()
    return report
