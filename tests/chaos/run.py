"""The training command, made to stand still at one point of its run: python -m tests.chaos.run [key=value ...]

CHAOS_DIR names a folder; CHAOS_POINT and CHAOS_STEP set where to stop. There the process writes `reached.json`, the
process ids of every target, and goes on once the file `go` exists. The package knows nothing of this: the
functions where the points lie are wrapped here, in the controller alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.processes import below, children, sandboxes, scorers

WAIT_S = 300.0  # for the harness; one that is gone must not leave a run behind


class Stop:
    """The one point at which this run stands still."""

    def __init__(self, folder: Path, point: str, step: int) -> None:
        self._folder, self._point, self._step = folder, point, step
        self._met = False
        self.fit: Any = None
        self.workers: Any = None

    def due(self, point: str, next_step: bool = True) -> bool:
        """Whether it is this point's turn; true once. next_step: the step's number is not counted up yet there."""
        if self._met or point != self._point:
            return False
        if point not in ("start", "shutdown") and self.fit.trainer.step + next_step != self._step:
            return False
        self._met = True
        return True

    def stand(self) -> None:
        """Write the process ids of all targets, and wait."""
        unfinished = self._folder / "reached.part"
        unfinished.write_text(json.dumps(self._pids()))
        unfinished.rename(self._folder / "reached.json")
        deadline = time.monotonic() + WAIT_S
        while not (self._folder / "go").exists():
            if time.monotonic() > deadline:
                os._exit(99)
            time.sleep(0.005)

    def _pids(self) -> dict[str, list[int]]:
        """By target. The first is the process itself, more are those in which it does its work."""
        me, engines = os.getpid(), self.workers.engines.pids
        return {
            "controller": [me],
            "rank": self.workers.trainer.pids,
            "engine": engines,
            "engine core": [each["pid"] for pid in engines for each in below(pid) if "EngineCore" in each["name"]],
            "scorer": scorers(me),
            "sandbox worker": sandboxes(me),
            "raylet": [each["pid"] for each in children(me) if each["name"] == "raylet"],
        }


def before(stop: Stop, owner: Any, name: str, point: str, next_step: bool = True) -> None:
    """Stand still when `owner.name` is called."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if stop.due(point, next_step):
            stop.stand()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def during(stop: Stop, owner: Any, name: str, point: str, after_s: float) -> None:
    """Stand still while the coroutine `owner.name` waits for its answer."""
    original = getattr(owner, name)

    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not stop.due(point):
            return await original(*args, **kwargs)
        work = asyncio.ensure_future(original(*args, **kwargs))
        await asyncio.sleep(after_s)
        stop.stand()
        return await work

    setattr(owner, name, wrapped)


def keep(owner: Any, name: str, put: Callable[[Any], None]) -> None:
    """Hand what `owner.name` returns to `put`, too."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        put(made)
        return made

    setattr(owner, name, wrapped)


def wrap(stop: Stop) -> None:
    """Find the points in the command."""
    from toolrl.envs.agent.launcher import FunctionLauncher
    from toolrl.envs.openenv.remote import RemoteEnv
    from verl.build import run as build
    from verl.build.workers import Workers
    from verl.checkpoint import checkpoint
    from verl.envs.tools.runner import ToolRunner
    from verl.rollout.pool import EnginePool
    from verl.scoring.pool import ScoringPool
    from verl.trainer import loop
    from verl.trainer.learner import Learner
    from verl.trainer.validate import Validator
    from verl.trainer.weight_sync import WeightSync

    def started(workers: Any) -> None:
        stop.workers = workers

    @contextmanager
    def building(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with built(*args, **kwargs) as made:
            stop.fit = made
            yield made

    built = build.start_run
    build.start_run = building
    keep(build, "start_workers", started)
    before(stop, loop.TrainingRun, "run", "start")
    during(stop, EnginePool, "generate", "rollout", 0.05)
    during(stop, ToolRunner, "run", "tool call", 0.15)
    during(stop, RemoteEnv, "step", "tool call", 0.15)
    during(stop, FunctionLauncher, "run", "tool call", 0.15)
    during(stop, ScoringPool, "score", "score", 0.02)
    before(stop, Learner, "learn", "update")
    before(stop, EnginePool, "load_weights", "weight sync")
    before(stop, WeightSync, "_canary", "canary")
    before(stop, checkpoint.Unfinished, "write_state", "checkpoint write", next_step=False)
    before(stop, checkpoint, "_swap_in", "manifest rename", next_step=False)
    before(stop, Validator, "rollouts", "validation", next_step=False)
    before(stop, Workers, "close", "shutdown")


def take_ports() -> None:
    """Be quicker than the ranks: listen on every port that they have found free to meet at."""
    from verl.single_controller.ray import RayGroup

    taken: list[socket.socket] = []

    def take(addresses: list[tuple[str, int]]) -> None:
        taken.extend(socket.create_server(("", port)) for _, port in addresses if not taken)

    keep(RayGroup, "addresses", take)


def main() -> int:
    """The command, with the wraps that the environment asks for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a terminal starts a command
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "CHAOS_POINT" in os.environ:
        wrap(Stop(Path(os.environ["CHAOS_DIR"]), os.environ["CHAOS_POINT"], int(os.environ["CHAOS_STEP"])))
    if "CHAOS_TAKE_PORTS" in os.environ:
        take_ports()
    from verl.trainer.main_ppo import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
