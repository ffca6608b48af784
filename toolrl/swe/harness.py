"""Tasks for agent programs (env.name=agent): a runtime for a program's commands, and the verdict on what it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolrl.swe.deployments import runtimes_at
from toolrl.swe.runtime import CommandFailedError, CommandResult, Runtime, Runtimes
from toolrl.swe.scoring import PatchOutcome, PatchVerdict, collect_patch, score_patch
from toolrl.swe.tasks import SweTask, check_environment, read_swe_task
from verl.host.services import check_services
from verl.types import Score


class TaskSession:
    """One episode: a runtime with a fresh copy of the repository or the working folder."""

    def __init__(self, task: SweTask, runtime: Runtime, runtimes: Runtimes) -> None:
        self._task, self._runtimes = task, runtimes
        self._runtime: Runtime | None = runtime

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        """A command in its shell. Raises CommandFailedError while another one runs, RuntimeLostError."""
        if self._runtime is None:
            raise CommandFailedError("the task is over")
        return await self._runtime.run(command, timeout_s)

    async def verdict(self) -> Score:
        """Of the patch that the runtime holds, judged in another one; this one ends. Raises RuntimeLostError."""
        assert self._runtime is not None
        try:
            patch = await collect_patch(self._runtime, self._task)
        except CommandFailedError as error:  # the program left no work tree that git can read
            return PatchVerdict(PatchOutcome.PATCH_FAILED, detail=str(error)).score
        finally:
            await self.close()
        return (await score_patch(self._runtimes, self._task, patch)).score

    async def close(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await runtime.close()


class TaskRuntimes:
    """Where the tasks of all episodes run; the options are those of env.name=swe."""

    def __init__(
        self, urls: Sequence[str] = (), deployment: Mapping[str, Any] | None = None, prepared: str = ""
    ) -> None:
        """Raises ConfigError."""
        self._prepared, self._runs_images = Path(prepared) if prepared else None, bool(deployment)
        self._runtimes = runtimes_at(urls, deployment)

    def read(self, row: Mapping[str, Any]) -> SweTask:
        """The task of a row. Raises DataError."""
        check_environment(row, self._prepared)
        return read_swe_task(row, self._prepared, remote=self._runs_images)

    async def open(self, row: Mapping[str, Any]) -> TaskSession:
        """A started runtime. Raises RuntimeLostError and DataError."""
        task = self.read(row)
        return TaskSession(task, await self._runtimes.start(task), self._runtimes)

    async def check_services(self) -> None:
        await check_services([self._runtimes])

    async def close(self) -> None:
        await self._runtimes.close()
