"""One seed: a training with faults, restarted until it is done, and what must hold then.

python -m tests.simulation.run SEED [SEED ..]    # replay: prints the faults, the ends and the trace
"""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.simulation.disk import Disk, no_space
from tests.simulation.faults import Fault, chosen
from tests.simulation.parts import BATCH, MINI, MODES, ROLLOUTS, STEPS, Mode, Shelves, inputs
from tests.simulation.scorer import Scorer
from tests.simulation.workers import Engine, Group, Process, Rank, Ranks, Trained, digest
from tests.simulation.world import ControllerKilledError, NoProgressError, World, WorldLoop, WorldThreads
from verl.algorithms.algorithm import Algorithm
from verl.build.run import Processes, start_run
from verl.build.scorer import scoring_limits
from verl.build.transport import WeightTransport
from verl.build.workers import Workers
from verl.checkpoint.checkpoint import read_state
from verl.checkpoint.crash import crash_reported
from verl.config.schema import Config
from verl.host.daemon import run_async
from verl.host.exits import exit_code_of
from verl.host.signals import Ended, ending_on_signals, exit_code
from verl.host.timer import PROCESSOR, raising_after
from verl.scoring.pool import ScoringPool
from verl.scoring.process import ScoringLimits
from verl.tracking.console import Display
from verl.tracking.jsonl import read_jsonl
from verl.trainer.loop import TrainingRun
from verl.trainer.stall import StalledError, StallInterrupt

UPDATES = BATCH // MINI  # of a step
KILLED = -9
MAX_STARTS = 12
HUNG_S = 60.0  # of the processor, for a run that takes half of one
LIMIT_S, MAX_EVENTS = 6 * 3600.0, 400_000  # of a start
_OF_TIMES = ("time", "memory/", "perf/", "tools/", "rollout/engine_restarts", "rollout/requests_retried")
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class End:
    """How a start of the command ended."""

    code: int
    message: str = ""


@dataclass
class Result:
    """Of a seed, after the last start."""

    left: list[str]  # files that should not be there
    ends: list[End]
    rows: list[dict[str, Any]]
    state: dict[str, Any]
    weights: int
    history: list[list[Trained]]
    seconds: float  # virtual
    changes: int  # of the disk
    trace: list[tuple[float, str]]


class Machine:
    """The processes of one start."""

    def __init__(self, world: World, mode: Mode, history: list[list[Trained]], folder: Path) -> None:
        self.world, self.mode, self.folder = world, mode, folder
        self.shelves = Shelves(world)
        self.shared = Ranks(world, digest("initial"), history=history)
        self.asked: list[tuple[int, int]] = []
        self.scorers: list[Scorer] = []
        self.trainer: Group | None = None
        self.engines: Group | None = None

    @contextmanager
    def started(
        self, config: Config, algorithm: Algorithm, total_steps: int, folder: Path, display: Display
    ) -> Iterator[Processes]:
        world, timeouts_s = self.world, (config.trainer.stall_timeout_s, config.trainer.health_timeout_s)

        def rank(number: int, process: Process) -> Rank:
            return Rank(self.shared, number, config.num_ranks, process)

        def engine(number: int, process: Process) -> Engine:
            return Engine(world, process, ROLLOUTS, config.trainer.seed << 40, self.asked)

        def scorer(name: str, options: str, limits: ScoringLimits) -> Scorer:
            self.scorers.append(Scorer(world, limits, Process("scorer", 3000 + len(self.scorers), world)))
            return self.scorers[-1]

        self.trainer = Group(world, "trainer", config.num_ranks, rank, timeouts_s)
        self.engines = Group(world, "rollout", config.num_engines, engine, timeouts_s)
        transport = WeightTransport([None] * config.num_ranks, [[0]] * config.num_engines)
        workers = Workers(self.trainer, self.engines, transport)
        limits, threads = scoring_limits(config), WorldThreads(world)
        with (
            crash_reported(folder),
            ScoringPool("digest", {}, config.reward.num_workers, limits, scorer, threads) as pool,
        ):
            yield Processes(workers, pool, "cpu")


@dataclass
class Simulation:
    """A run of a seed."""

    seed: int
    mode: Mode
    faults: Sequence[Fault] = ()
    problems: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)  # with which starts have ended

    def run(self) -> Result:
        with tempfile.TemporaryDirectory(prefix="simulation-", dir=_SHM if _SHM.is_dir() else None) as place:
            root = Path(place)
            (root / "model").mkdir()
            self.world = World(self.seed, LIMIT_S, MAX_EVENTS)
            self.folder, self.history = root / "run", list[list[Trained]]()
            self.left = list(self.faults)
            self.disk = Disk(self.folder, self._on_change)
            self._fail_writes = 0
            ends: list[End] = []
            hung = raising_after(HUNG_S, lambda: NoProgressError("a callback does not return"), PROCESSOR)
            with self.disk.watched(), hung:
                while not ends or ends[-1].code != 0:
                    if len(ends) == MAX_STARTS:
                        self.problems.append(f"no end after {MAX_STARTS} starts: {ends[-1]}")
                        break
                    ends.append(self._start())
                    self._check_end(ends[-1])
            return self._result(ends)

    def _result(self, ends: list[End]) -> Result:
        path = self.folder / "metrics.jsonl"
        rows = read_jsonl(path) if path.exists() else []
        newest = self.folder / "checkpoints" / f"step-{STEPS:06d}"
        state = read_state(newest) if newest.exists() else {}
        world = self.world
        left = sorted(path.name for path in self.folder.rglob(".*") if path.name != ".metadata")
        weights, changes = self.machine.shared.weights, self.disk.changes
        return Result(left, ends, rows, state, weights, self.history, world.now, changes, world.trace)

    # One start of the command.

    def _start(self) -> End:
        world = self.world
        world.restart()
        self._fail_writes = 0
        self.machine = Machine(world, self.mode, self.history, self.folder)
        self.loops: list[WorldLoop] = []
        world.note("the command starts")
        with ending_on_signals(lambda number: None):  # the burial, too, restores handlers
            end = self._end_of_start()
            if end.code == KILLED or world.killed or self.problems:
                self._bury()
        first = end.message.replace(f"{self.folder.parent}", "..").partition("\n")[0]
        world.note(f"the command ends with {end.code}: {self._plain(first)}")
        return end

    def _end_of_start(self) -> End:
        config = self.mode.config(self.folder)
        made_of = inputs(self.mode, config, self.machine.shelves)
        display = Display(None, Console(file=io.StringIO()))
        try:
            self._applied: list[Fault] = []
            with start_run(config, made_of, self.folder, display, self.machine.started) as run:
                self._schedule()
                self._run(run)
            return End(0)
        except ControllerKilledError:
            return End(KILLED)
        except NoProgressError as error:
            self.problems.append(str(error))
            return End(0, str(error))
        except Ended as error:
            return End(exit_code(error.number), error.note)
        except Exception as error:  # noqa: BLE001
            self.errors.append(error)
            return End(exit_code_of(error), f"{type(error).__name__}: {error}")

    def _run(self, run: TrainingRun) -> None:
        world, stalls = self.world, run.stalls
        problems: list[str] = []

        def look() -> None:
            if (problem := stalls.check()) is None:
                world.after(stalls.period_s, look)
            else:
                problems.append(problem)
                raise StallInterrupt

        def loop() -> WorldLoop:
            self.loops.append(WorldLoop(world))
            return self.loops[-1]

        look()
        try:
            run_async(self._main(run), loop)
        except StallInterrupt as error:
            raise StalledError(problems[0]) from error

    async def _main(self, run: TrainingRun) -> None:
        await run.run()
        self._check_left()

    def _check_left(self) -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        names = sorted(str(task.get_coro().__qualname__) for task in left if not task.cancelling())  # type: ignore[union-attr]
        if names:
            self.problems.append(f"tasks left at the end: {names}")
        if self.machine.shelves.open:
            self.problems.append(f"{self.machine.shelves.open} environments left open")

    def _bury(self) -> None:
        """What a killed controller leaves: the folder as it was at that moment, and no code that still runs."""
        self.world.killed = True
        self.world.end()
        for loop in self.loops:
            for task in _tasks_of(loop):
                _close(task.get_coro())
        kept = self.folder.with_name("kept")
        if kept.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            kept.rename(self.folder)
            for path in sorted(self.folder.rglob(f".*-{os.getpid()}"), reverse=True):
                path.rename(path.with_name(path.name.replace(f"-{os.getpid()}", "-1")))  # it had another id

    def kill(self) -> None:
        """SIGKILL of the controller, now."""
        self.world.note("the controller is killed")
        if self.folder.exists():
            shutil.copytree(self.folder, self.folder.with_name("kept"))
        self.world.kill()

    # Faults.

    def _schedule(self) -> None:
        """Faults that are still to come. Those of a time that has passed happen soon: in the recovery."""
        world = self.world
        for fault in self.left:
            if fault.at_s is not None:
                after_s = fault.at_s - world.now
                world.after(after_s if after_s > 0 else fault.soon_s, lambda fault=fault: self._apply(fault))

    def _apply(self, fault: Fault) -> None:
        self.left.remove(fault)
        self._applied.append(fault)
        self.world.note(f"fault: {fault}")
        fault.apply(self)

    def _on_change(self, number: int, name: str) -> None:
        self.world.note(f"writes {self._plain(name)}")
        for fault in [each for each in self.left if each.at_change is not None and number >= each.at_change]:
            self._apply(fault)
        if self._fail_writes:
            self._fail_writes -= 1
            raise no_space(name)

    def fail_writes(self, count: int) -> None:
        self._fail_writes = count

    @staticmethod
    def _plain(name: str) -> str:
        """Without process id and time."""
        return re.sub(rf"-{os.getpid()}\b|crash-[\d-]+", "", name)

    # What must hold.

    def _check_end(self, end: End) -> None:
        """The end of a start is one that a fault explains, and the message names it."""
        if end.code == 0:
            return
        if not any(fault.explains(end.code, end.message, self) for fault in self._applied):
            self.problems.append(f"exit code {end.code} that no fault explains: {end.message!r}; {self._applied}")

    def check(self, result: Result) -> None:
        """Everything that must hold after the last start."""
        steps = [row["step"] for row in result.rows]
        if steps != list(range(STEPS + 1)):
            self.problems.append(f"steps in metrics.jsonl: {steps}")
        untrained, unvalidated = (
            sum(row.get(name, 0) for row in result.rows) for name in ("reward/infrastructure_faults", "val/val/faults")
        )
        lost = untrained + unvalidated
        whole = not untrained and not self.mode.filtered  # else a step may have one group, and one update
        if whole and len(result.history) != STEPS * UPDATES:
            self.problems.append(f"{len(result.history)} updates, not {STEPS * UPDATES}")
        if result.left:
            self.problems.append(f"left in the folder: {result.left}")
        if lost and not self._may_lose:
            self.problems.append(f"{lost:.0f} responses were lost, though no two faults met")
        self._check_ledger(result)
        late = any(fault.kind == "service slow" for fault in self.faults)  # too long a turn is the policy's fault
        if self.mode.repeatable and not lost and not late:
            self._check_equal(result, reference(self.mode))

    @property
    def _may_lose(self) -> bool:
        """Whether the faults may cost a response: one retry saves it from any single loss of an engine or scorer."""
        kinds = [fault.kind for fault in self.faults]
        engines, scorers = (sum(word in kind for kind in kinds) for word in ("engine", "scorer"))
        return engines > 1 or scorers > 1 or any("service" in kind for kind in kinds)

    def _check_ledger(self, result: Result) -> None:
        if not result.state:
            self.problems.append("no checkpoint of the last step")
            return
        rollouts = result.state["trainer"]["rollouts"]
        drawn = sum(rollouts["data"]["drawn"])
        pending = {sum(draw["drawn"]) for draw in rollouts["pending"]}
        counts = Counter((each.draw, each.index) for update in result.history for each in update)
        most = self.mode.max_reuse
        if often := {key: count for key, count in counts.items() if count > most}:
            self.problems.append(f"trained more than {most} times: {often}")
        trained = {draw for draw, _ in counts}
        if trained & pending or (trained | pending) - set(range(drawn)):
            self.problems.append(f"trained and pending at once, or never drawn: {sorted(trained & pending)}")
        lost = sum(row.get("reward/infrastructure_faults", 0) for row in result.rows)
        if not self.mode.filtered:
            missing = set(range(drawn)) - trained - pending
            short = sum(ROLLOUTS - sum((draw, index) in counts for index in range(ROLLOUTS)) for draw in trained)
            if len(missing) + short > lost:
                self.problems.append(f"lost without a count: prompts {sorted(missing)}, responses {short}, {lost}")

    def _check_equal(self, result: Result, other: Result) -> None:
        for row, wanted in zip(result.rows, other.rows, strict=False):
            if (found := _comparable(row)) != (expected := _comparable(wanted)):
                differing = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
                self.problems.append(f"step {row['step']} differs from the unbroken run in {sorted(differing)[:5]}")
                break
        if result.weights != other.weights:
            self.problems.append("the weights differ from those of the unbroken run")
        if result.history != other.history:
            self.problems.append("what was trained differs from the unbroken run")
        for key in ("trainer", "before", "after", "watch", "callbacks"):
            if result.state.get(key) != other.state.get(key):
                self.problems.append(f"state of the last checkpoint differs in {key}")


def _tasks_of(loop: WorldLoop) -> list[Any]:
    return list(asyncio.all_tasks(loop))


def _close(coroutine: Any) -> None:
    """With those that it awaits, and however often it awaits something in a `finally`: Python would report that."""
    while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
        _close(coroutine.cr_await)
        with suppress(BaseException):
            coroutine.close()


def _comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(_OF_TIMES)}


@cache
def reference(mode: Mode) -> Result:
    """The run without faults."""
    simulation = Simulation(0, mode)
    result = simulation.run()
    assert not simulation.problems, simulation.problems
    return result


def of_seed(seed: int) -> Simulation:
    source = random.Random(seed)
    mode = source.choice(MODES)
    whole = reference(mode)
    return Simulation(seed, mode, chosen(source, mode, whole.seconds, whole.changes))


def checked(seed: int) -> tuple[Simulation, Result]:
    simulation = of_seed(seed)
    result = simulation.run()
    if not simulation.problems:
        simulation.check(result)
    return simulation, result


def main(seeds: Sequence[str]) -> int:
    logging.basicConfig(level=logging.CRITICAL)
    failed = 0
    for seed in map(int, seeds):
        simulation, result = checked(seed)
        for when, what in result.trace:
            sys.stdout.write(f"{when:12.6f} {what}\n")
        sys.stdout.write(f"\nseed {seed}: {simulation.mode}\n")
        sys.stdout.writelines(f"  {each}\n" for each in (*simulation.faults, *result.ends, *simulation.problems))
        failed += bool(simulation.problems)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
