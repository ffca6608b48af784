"""A task for an agent program (env.name=agent): a runtime for its commands, and the verdict on what it leaves there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.kit.swe.deployments import runtimes_at
from verl.kit.swe.runtime import Runtime, Runtimes
from verl.kit.swe.scoring import collect_patch, score_patch
from verl.kit.swe.tasks import SweTask, read_swe_task


@dataclass(frozen=True, slots=True)
class TaskSession:
    """runtime: where the agent's commands run, in a fresh copy of the repository or the working folder"""

    task: SweTask
    runtime: Runtime
    runtimes: Runtimes

    async def reward(self) -> dict[str, Any]:
        """{reward, parts} of the patch, scored in another runtime; this one ends. Raises RuntimeLostError: a fault."""
        patch = await collect_patch(self.runtime, self.task)
        await self.runtime.close()
        score = (await score_patch(self.runtimes, self.task, patch)).score
        return {"reward": score.total, "parts": dict(score.parts)}


@asynccontextmanager
async def open_task(
    row: Mapping[str, Any],
    urls: Sequence[str] = (),
    deployment: Mapping[str, Any] | None = None,
    prepared: str = "",
) -> AsyncIterator[TaskSession]:
    """A session with a row, which an agent gets as `task["extra"]`; the options are those of `env.name=swe`.

    Raises DataError for a row that is none, RuntimeLostError if no runtime starts.
    """
    task = read_swe_task(row, Path(prepared) if prepared else None, remote=bool(deployment))
    runtimes = runtimes_at(urls, deployment)
    try:
        yield TaskSession(task, await runtimes.start(task), runtimes)
    finally:
        await runtimes.close()
