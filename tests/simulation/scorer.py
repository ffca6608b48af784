"""A stand-in for a scoring process: its answers take time, and it can be killed or stopped."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.workers import Process, digest
from tests.simulation.world import World
from verl.scoring.process import Call, ProcessDiedError, ScoringLimits
from verl.types import Score, Task, Trajectory

START_S, SCORE_S = 0.3, 0.02
LARGEST_PRIME = 16_777_213  # below 2**24, the integers that float32 has


class DigestReward:
    """A reward that differs for every response in float32, so that no advantage is zero."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        value = digest(trajectory.response) % LARGEST_PRIME / LARGEST_PRIME
        return Score(value, {"value": value})


@dataclass(eq=False)
class Scorer:
    """A scoring process of the world."""

    world: World
    limits: ScoringLimits
    process: Process
    scored: list[tuple[str, int, int]] = field(default_factory=list)  # (task, index, step)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def cause_of_death(self) -> str | None:
        return None if self.process.alive else self.process.reason or "SIGKILL"

    def wait_until_ready(self) -> None:
        self._work(START_S)

    def score(self, call: Call) -> Score:
        trajectory, task, step = call
        self._work(SCORE_S * self.world.delay(0.5, 1.5))
        self.scored.append((task.id, trajectory.index, step))
        return DigestReward().score(trajectory, task, step)

    def _work(self, seconds: float) -> None:
        done: list[bool] = []
        self.process.later(seconds, lambda: done.append(True))
        self.world.wait(lambda: bool(done) or not self.process.alive)
        if not self.process.alive:
            raise ProcessDiedError(self.process.reason or "SIGKILL", crashed=False)

    def stop(self, seconds: float) -> None:
        """Like the watch of a scoring process: killed after the health timeout."""
        self.process.stop(seconds)

        def give_up() -> None:
            if self.process.stopped:
                self.process.reason = f"was stopped for {self.limits.health_timeout_s:g} s and then killed"
                self.process.die()

        self.world.after(self.limits.health_timeout_s + 0.25, give_up)

    def kill(self) -> None:
        self.process.die()

    def close(self) -> None:
        self.process.die()
