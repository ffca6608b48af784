"""Row 9: share of a step's wall time without worker activity, 512 prompts x 4 responses with Ray, lower is better.

    python bench/controller.py [--rounds 3] [key=value ...]

Runs the embedded GRPO experiment at that size and times every call to a worker (trainer ranks, engines, rewards). The
wall time of a step without a running call is the controller's own: packing, advantages, overhead. There is no second
side: the ratio is the share of the step.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import Result, report
from rich.console import Console

from verl.build.run import load_inputs, start_run
from verl.config.load import load_config
from verl.rollout.pool import EnginePool
from verl.single_controller.group import WorkerGroup
from verl.tracking.console import Display
from verl.trainer.ppo import PPOTrainer

MAX_SHARE, MAX_SECONDS = 0.03, 0.2
SIZE = (
    "recipe=mini_grpo",
    "data.train_batch_size=512",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=512",
    "data.max_response_length=32",
)


@dataclass
class Watch:
    """Wall time during which at least one call was running."""

    busy_s: float = 0.0
    _running: int = 0
    _since: float = 0.0

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call."""
        if self._running == 0:
            self._since = time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self.busy_s += time.perf_counter() - self._since


@dataclass(frozen=True)
class Watched:
    """A worker group with timed calls."""

    group: WorkerGroup
    watch: Watch = field(compare=False)

    @property
    def size(self) -> int:
        return self.group.size

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        with self.watch.call():
            return self.group.call(function, *args)

    def scatter(self, function: Callable[..., Any], shards: Iterable[Any], *args: Any) -> list[Any]:
        made = list(shards)  # by the controller, before the workers have anything to do
        with self.watch.call():
            return self.group.scatter(function, made, *args)

    async def submit(self, rank: int, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        with self.watch.call():
            return await self.group.submit(rank, function, *args)

    def close(self) -> None:
        self.group.close()


@dataclass(frozen=True)
class WatchedScorer:
    """A scorer with timed calls."""

    scorer: Any
    watch: Watch

    async def score(self, *args: Any) -> Any:
        with self.watch.call():
            return await self.scorer.score(*args)

    def close(self) -> None:
        self.scorer.close()


def measure(overrides: Sequence[str], steps: int) -> list[tuple[float, float]]:
    """[(wall seconds, seconds without a running call)] of every step but the first."""
    config = load_config([*SIZE, *overrides])
    watch = Watch()
    with (
        tempfile.TemporaryDirectory() as folder,
        start_run(config, load_inputs(config), Path(folder), Display(None, Console(quiet=True))) as run,
    ):
        trainer = run.trainer
        trainer.learner.policy = replace(trainer.learner.policy, workers=Watched(trainer.learner.policy.workers, watch))
        pool: EnginePool = trainer.rollouts.rollout.engine  # type: ignore[assignment]
        engine = EnginePool(Watched(pool._workers, watch), pool._sources)
        scorer = WatchedScorer(trainer.rollouts.rollout.scorer, watch)
        trainer.rollouts.rollout = replace(trainer.rollouts.rollout, engine=engine, scorer=scorer)
        trainer.weight_sync = replace(trainer.weight_sync, policy=trainer.learner.policy, engine=engine)
        return asyncio.run(run_steps(trainer, watch, steps + 1))[1:]


async def run_steps(trainer: PPOTrainer, watch: Watch, steps: int) -> list[tuple[float, float]]:
    """[(wall seconds, seconds without a running call)] of every step."""
    await trainer.weight_sync.sync(0)
    figures = []
    for _ in range(steps):
        watch.busy_s, started = 0.0, time.perf_counter()
        await trainer.train_step()
        wall = time.perf_counter() - started
        figures.append((wall, wall - watch.busy_s))
    return figures


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measured steps, after one warm-up step")
    parser.add_argument("overrides", nargs="*", help=f"key=value over {' '.join(SIZE)}")
    arguments = parser.parse_args()
    figures = measure(arguments.overrides, arguments.rounds)
    idle = statistics.median(idle for _, idle in figures)
    report(
        Result(
            row=9,
            name=" ".join(["the controller's share of a step, 512 prompts x 4", *arguments.overrides]),
            ratio=statistics.median(idle / wall for wall, idle in figures),
            target=MAX_SHARE,
            ours={"step s": statistics.median(wall for wall, _ in figures), "controller s": idle},
            theirs={},
            lower_is_better=True,
            limits={"controller s": (idle, MAX_SECONDS)},
        )
    )


if __name__ == "__main__":
    main()
