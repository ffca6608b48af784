"""A place where patches are judged: runtimes of this machine and the task of the small repository."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import pytest

from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import GOLD, calc_task, pytest_environment
from toolrl.swe.local import LocalRuntimes
from toolrl.swe.scoring import PatchVerdict, collect_patch, score_patch
from toolrl.swe.tasks import SweTask


@dataclass
class Place:
    runner: asyncio.Runner
    runtimes: LocalRuntimes
    task: SweTask

    def score(self, patch: str, task: SweTask | None = None) -> PatchVerdict:
        return self.runner.run(score_patch(self.runtimes, task or self.task, patch))

    @cached_property
    def gold(self) -> PatchVerdict:
        return self.score(GOLD)

    def session(self, commands: str, task: SweTask | None = None) -> str:
        """The patch after these commands of an agent."""

        async def work() -> str:
            runtime = await self.runtimes.start(task or self.task)
            try:
                await runtime.run(commands)
                return await collect_patch(runtime, task or self.task)
            finally:
                await runtime.close()

        return self.runner.run(work())


@pytest.fixture(scope="module")
def place(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    need_bubblewrap()
    folder = tmp_path_factory.mktemp("swe")

    async def make() -> LocalRuntimes:
        return LocalRuntimes(folder / "runtimes")

    runtimes = runner.run(make())
    yield Place(runner, runtimes, calc_task(folder, pytest_environment(folder)))
    runner.run(runtimes.close())
