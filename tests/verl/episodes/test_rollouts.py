"""Prompts in flight: how old what is trained on may be, and that nothing of it is lost or taken twice."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.every import every
from tests.support.local_run import local_fit, local_trainer
from tests.support.metric_names import known
from tests.support.tiny import run_overrides, save_tiny_model
from tests.verl.episodes.test_collection import group
from toolrl.analysis.collapse.collapse import CollapseWatch
from toolrl.analysis.replay.record import Recorder
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.losses.dapo import DAPO
from verl.batch.packing import Sharding
from verl.batch.token_batch import Floats, TokenBatch
from verl.checkpoint.checkpoint import CheckpointStore
from verl.config.load import load_config
from verl.config.schema import Config, DataConfig, EnvConfig, RewardConfig, RolloutConfig
from verl.data.tasks import TaskCursor, TaskStream
from verl.episodes.collection import NoTrainableGroupsError, StepGroups
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.episodes.lookahead import LookaheadController
from verl.episodes.manager import RewardFaultError, RolloutManager, describe_faults
from verl.rollout.engine import Sampling
from verl.trainer.loop import TrainingRun
from verl.trainer.policy import Policy, PolicyUpdate
from verl.trainer.ppo import PPOTrainer, TrainStepResult
from verl.trainer.weight_sync import WeightSync
from verl.transfer.bucket import NUM_SLOTS
from verl.transfer.stream import Address, Outlet
from verl.types import Message, Task, TrajectoryGroup

TASKS = [Task(f"t{number}", (Message("user", "w" * (number % 5 + 1)),), "a", "s") for number in range(7)]
DYNAMIC = replace(DAPO, overlong=None, max_resample_rounds=3)


@dataclass
class Latent:
    """Rollouts that take a random number of turns of the event loop, some with no spread, some with faults."""

    chance: random.Random
    dull: float = 0.0
    started: list[tuple[int, int]] = field(default_factory=list)  # (seed, update that it is scored for)
    running: int = 0
    most_running: int = 0

    async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int) -> TrajectoryGroup:
        self.started.append((first_seed, step))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(self.chance.choice((0, 1, 3, 60))):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        rewards = (1.0, 1.0) if self.chance.random() < self.dull else (0.0, 1.0)
        faults = ("down",) if self.chance.random() < 0.1 else ()
        return replace(group(rewards, name=str(first_seed)), task=replace(task, id=str(first_seed)), faults=faults)

    async def close(self) -> None:
        """Nothing to end."""


def rollouts(
    engine: Latent, algorithm: Any, cursor: TaskCursor | None = None, prompts_per_step: int = 1, **of: Any
) -> RolloutManager:
    config = Config(
        data=DataConfig(train_batch_size=prompts_per_step),
        rollout=RolloutConfig(name="hf", n=2, **of),
        reward=RewardConfig(max_fault_share=1.0),
    )
    return RolloutManager(config, algorithm, TaskStream([TASKS], cursor=cursor), engine)  # type: ignore[arg-type]


async def steps(source: RolloutManager, first: int, last: int) -> list[StepGroups]:
    """What each step took; a step that had nothing is left out."""
    taken = []
    for step in range(first, last):
        with suppress(NoTrainableGroupsError):
            taken.append(await source.take(step))
        for _ in range(source.rollout.chance.choice((0, 5))):  # type: ignore[attr-defined]
            await asyncio.sleep(0)  # the update
    return taken


def seeds(groups: Sequence[TrajectoryGroup]) -> list[int]:
    return [int(each.task.id) for each in groups]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    staleness=st.integers(0, 4),
    prompts=st.integers(1, 4),
    dynamic=st.booleans(),
    reuse=st.integers(1, 3),
)
def test_staleness_is_bounded_and_nothing_is_lost_or_trained_twice(
    seed: int, staleness: int, prompts: int, dynamic: bool, reuse: int
) -> None:
    reuse = min(reuse, staleness + 1)
    algorithm = DYNAMIC if dynamic else GRPO
    of = {"prompts_per_step": prompts, "max_staleness": staleness, "max_reuse": reuse}
    chance = random.Random(seed)

    async def killed_half_way() -> tuple[list[StepGroups], list[tuple[int, int]], list[list[int]]]:
        taken: list[StepGroups] = []
        runs: list[tuple[int, int]] = []
        pending: list[list[int]] = []
        state: dict[str, Any] | None = None
        step = 0
        for steps_of_run in (chance.randint(1, 5), chance.randint(1, 5)):
            engine = Latent(chance, dull=0.4)
            cursor = TaskCursor(**state["data"]) if state else None
            source = rollouts(engine, algorithm, cursor, **of)
            if state:
                source.restore(state)
            taken += await steps(source, step, step + steps_of_run)
            step += steps_of_run
            state = json.loads(json.dumps(source.state()))
            runs += engine.started
            assert engine.most_running <= (staleness + 1) * prompts
            await source.close()
            assert engine.running == 0
            pending.append([2 * sum(draw["drawn"]) for draw in state["pending"]])
        return taken, runs, pending

    taken, runs, (pending_at_kill, pending) = asyncio.run(killed_half_way())
    assert taken or dynamic
    assert not taken or every(0 <= age <= staleness for each in taken for age in each.staleness)
    times = Counter(seed for each in taken for seed in seeds(each.kept))
    drawn = Counter(seed for each in taken for seed in seeds(each.drawn))
    assert max(times.values(), default=0) <= reuse and max(drawn.values(), default=0) <= 1
    if not dynamic:  # else what a step without any signal had drawn is not returned
        assert sorted([*drawn, *pending]) == list(range(0, 2 * (len(drawn) + len(pending)), 2))
        assert all(len(each.kept) == prompts for each in taken)
    started = Counter(seed for seed, _ in runs)
    assert drawn.keys() <= started.keys()
    assert max(started.values()) <= 2
    started_twice = {seed for seed, count in started.items() if count == 2}
    assert started_twice <= set(pending_at_kill) if staleness else not started_twice


@dataclass
class Bounded(Latent):
    """Notes the limit of turns that it has for each update."""

    limit: int | None = None
    limits: list[tuple[int, int | None]] = field(default_factory=list)

    def within(self, max_turns: int) -> Bounded:
        return replace(self, limit=max_turns)

    async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int) -> TrajectoryGroup:
        self.limits.append((step, self.limit))
        return group((0.0, 1.0), name=str(first_seed))


def test_turns_grow_by_their_schedule() -> None:
    engine = Bounded(random.Random(0))
    source = rollouts(engine, GRPO)
    env = EnvConfig(tool_call_format="native", turn_schedule=[[2, 3], [4, 5]])
    source.config = replace(source.config, env=env)
    asyncio.run(steps(source, 0, 5))
    assert engine.limits == [(1, None), (2, 3), (3, 3), (4, 5), (5, 5)]


def test_a_schedule_never_raises_the_limit_of_turns() -> None:
    runner: Any = EpisodeRunner(None, None, EpisodeLimits(max_turns=4))  # type: ignore[arg-type]
    whole = GroupRollout(None, None, Sampling(8), runner)  # type: ignore[arg-type]
    assert [whole.within(turns).episode_runner.limits.max_turns for turns in (2, 9)] == [2, 4]
    assert whole.episode_runner.limits.max_turns == 4


def test_without_staleness_it_is_the_plain_loop() -> None:
    """A step's prompts at once, long ones first, all of them waited for, in the order of the stream."""

    async def plain(engine: Latent, step: int, stream: TaskStream) -> list[int]:
        tasks = [next(stream) for _ in range(3)]
        order = sorted(range(3), key=lambda number: -len(tasks[number].prompt[0].content))
        done = await asyncio.gather(*(engine.run(tasks[n], 2, step + 1, 2 * (3 * step + n)) for n in order))
        return sorted(seeds(done))

    async def both() -> None:
        ours, theirs = Latent(random.Random(0)), Latent(random.Random(0))
        source, stream = rollouts(ours, GRPO, prompts_per_step=3), TaskStream([TASKS])
        for step in range(4):
            collected = await source.take(step)
            assert seeds(collected.kept) == await plain(theirs, step, stream)
            assert ours.started == theirs.started and collected.staleness == [0, 0, 0]
            assert source.state()["pending"] == []

    asyncio.run(both())


@pytest.mark.parametrize(("turns", "depths"), [(3, [1] * 18), (70, [1] * 3 + [2] * 5 + [3] * 10)])
def test_prompts_begin_further_ahead_only_while_steps_wait(turns: int, depths: list[int]) -> None:
    """An update lasts 30 turns of the loop. A rollout of 70 is ready in time if it begins three steps ahead."""
    now = 0

    class Clocked(Latent):
        async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int) -> TrajectoryGroup:
            for _ in range(turns):
                await asyncio.sleep(0)
            return replace(group((0.0, 1.0), name=str(first_seed)), task=replace(task, id=str(first_seed)))

    async def trained() -> tuple[list[int], list[int]]:
        nonlocal now
        source = rollouts(Clocked(random.Random(0)), GRPO, prompts_per_step=2, max_staleness=4)
        source.clock = lambda: float(now)

        async def tick() -> None:
            nonlocal now
            while True:
                now += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        depths, staleness = [], []
        for step in range(18):
            collected = await source.take(step)
            depths.append(int(collected.staleness_metrics()["staleness/depth"]))
            staleness.append(max(collected.staleness))
            for _ in range(30):
                await asyncio.sleep(0)
        ticking.cancel()
        await source.close()
        return depths, staleness

    found, staleness = asyncio.run(trained())
    assert found == depths
    assert max(staleness) == staleness[-1] == depths[-1]  # no sample is older than it has to be


@pytest.mark.parametrize(("staleness", "reuse", "depth"), [(1, 2, 0), (2, 2, 1), (3, 2, 1), (3, 3, 1)])
async def test_rollouts_started_ahead_stay_within_the_reuse_limit(staleness: int, reuse: int, depth: int) -> None:
    class Steady(Latent):
        async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int) -> TrajectoryGroup:
            await asyncio.sleep(0)
            return replace(group((0.0, 1.0)), task=task)

    fresh = 6 // reuse
    of = {"prompts_per_step": 6, "max_staleness": staleness, "max_reuse": reuse}
    source = rollouts(Steady(random.Random(0)), GRPO, **of)
    source.clock = iter(range(10**6)).__next__  # no step waits: an answer takes a second, an update a thousand
    found = []
    for step in range(8):
        collected = await source.take(step)
        found.append((len(collected.fresh), len(collected.reused), len(source.state()["pending"])))
        for _ in range(1000):
            source.clock()
    await source.close()
    reported = found
    assert reported[0] == (6, 0, depth * fresh)  # the second step's begin with the first one's
    assert reported[reuse:] == [(fresh, 6 - fresh, depth * fresh)] * (8 - reuse)


def test_a_new_depth_is_judged_after_its_added_episodes_were_used() -> None:
    depth, found = LookaheadController(max_steps_ahead=3), []
    for step, waited in enumerate((10, 0.5, 0.6, 5, 5, 0.3, 0.3, 0.3, 0.1, 0.4, 0.7)):  # of ten seconds
        depth.update(step, waited, 10.0 * step)
        found.append(depth.steps_ahead)
    # The first cannot but wait, 1 and 2 do so 5.5 % of their time, 3 and 4 began one step ahead, the others wait less.
    assert found == [1, 1, *[2] * 9]
    assert LookaheadController(max_steps_ahead=0).steps_ahead == 0


def test_a_depth_that_saves_no_waiting_is_reverted() -> None:
    depth = LookaheadController(max_steps_ahead=3)

    def over(steps: range, share: float) -> list[int]:
        found = []
        for step in steps:
            depth.update(step, 10 * share, 10.0 * step)
            found.append(depth.steps_ahead)
        return found

    assert over(range(3), 0.4) == [1, 1, 2]
    assert over(range(3, 8), 0.3) == [2, 2, 2, 2, 3]  # a quarter less
    assert over(range(8, 15), 0.25) == [3, 3, 3, 3, 3, 3, 2]  # a sixth less is not worth a version
    assert over(range(15, 67), 0.25) == [2] * 51 + [3]  # tried once more, in case that episodes have changed


def test_groups_are_taken_in_the_order_in_which_they_end() -> None:
    """One prompt never lands by itself: the others are trained on until its turn has come."""
    held = asyncio.Event()

    class Held(Latent):
        async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int) -> TrajectoryGroup:
            if first_seed == 0:
                await held.wait()
            return await super().run(task, num_rollouts, step, first_seed)

    async def trained() -> list[list[int]]:
        source = rollouts(Held(random.Random(1)), GRPO, prompts_per_step=2, max_staleness=2)
        taken = [seeds((await source.take(step)).kept) for step in range(2)]
        waiting = asyncio.ensure_future(source.take(2))
        await asyncio.sleep(0.01)
        assert not waiting.done()  # it is two versions old, and no step may go without it
        held.set()
        taken.append(seeds((await waiting).kept))
        await source.close()
        return taken

    taken = asyncio.run(trained())
    assert 0 not in taken[0] + taken[1] and taken[2][0] == 0


async def test_an_error_in_flight_is_raised_at_once() -> None:
    class Broken(Latent):
        async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int) -> TrajectoryGroup:
            if first_seed == 4:
                raise RuntimeError("the engine is gone")
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(RuntimeError, match="the engine is gone"):
        source = rollouts(Broken(random.Random(0)), GRPO, prompts_per_step=2, max_staleness=1)
        try:
            await source.take(0)
        finally:
            await source.close()


def test_faults_are_judged_by_the_step_that_takes_them() -> None:
    class Down(Latent):
        async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int) -> TrajectoryGroup:
            return TrajectoryGroup(task, (), (), (), ("down", "down"))

    source = rollouts(Down(random.Random(0)), GRPO, prompts_per_step=2, max_staleness=1)
    source.config = replace(source.config, reward=RewardConfig(max_fault_share=0.5))
    with pytest.raises(RewardFaultError, match="4 of 4 responses"):
        asyncio.run(source.take(0))


def test_a_step_without_a_group_names_the_faults_that_took_its_responses() -> None:
    class Halved(Latent):
        async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int) -> TrajectoryGroup:
            return replace(group((1.0,), name="t"), faults=("t, response 1: the shop is closed",))

    with pytest.raises(NoTrainableGroupsError, match=r"(?s)none has 2 or more .* 1 x the shop is closed"):
        asyncio.run(rollouts(Halved(random.Random(0)), GRPO).take(0))


class AsksTheLoop:
    """A policy whose every answer waits until the event loop has done something else."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.asked = loop, 0

    def _answer(self) -> None:
        turned = threading.Event()
        self.loop.call_soon_threadsafe(turned.set)
        assert turned.wait(10), "the event loop stands still"
        self.asked += 1

    def begin_weight_sync(self) -> dict[int, Address]:
        self._answer()
        self.outlet = Outlet("127.0.0.1", NUM_SLOTS)
        return {0: self.outlet.address}

    def send_weights(self, keys: Mapping[int, Sequence[bytes]], version: int) -> None:
        self._answer()
        self.outlet.send(keys[0], [])

    def end_weight_sync(self) -> None:
        self._answer()

    def shard_for_scoring(self, batch: TokenBatch) -> TokenBatch:
        return batch

    def score(self, batch: TokenBatch) -> Floats:
        self._answer()
        return np.zeros(int(batch.num_trained.sum()), dtype=np.float32)


async def test_episodes_are_answered_during_weight_sync() -> None:
    policy, engine = AsksTheLoop(asyncio.get_running_loop()), ScriptedEngine(lambda ids, number: (1, 2))
    weight_sync = WeightSync(
        policy=policy, engine=engine, layouts=[], probes=[(1,)], sampling=Sampling(4), tolerance=0.0
    )  # type: ignore[arg-type]
    assert await weight_sync.sync(1) == 0.0 and policy.asked == 4


async def test_faults_are_judged_beside_groups_that_are_used_again() -> None:
    class Failing(Latent):
        async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int) -> TrajectoryGroup:
            if first_seed < 8:
                return replace(group((0.0, 1.0)), task=task)
            return TrajectoryGroup(task, (), (), (), ("down", "down"))

    source = rollouts(Failing(random.Random(0)), GRPO, prompts_per_step=4, max_staleness=1, max_reuse=2)
    source.config = replace(source.config, reward=RewardConfig(max_fault_share=0.5))
    await source.take(0)
    with pytest.raises(RewardFaultError, match="step 2: 4 of 4 responses"):
        await source.take(1)
    source.config = replace(source.config, reward=RewardConfig(max_fault_share=1.0))
    with pytest.raises(NoTrainableGroupsError, match="all 2 groups filtered out: none has 2 or more"):
        await source.take(1)


async def test_requests_without_seeds_still_draw_every_prompt_once() -> None:
    asked: list[int | None] = []

    class Unseeded(Latent):
        async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int | None) -> TrajectoryGroup:
            asked.append(first_seed)
            return replace(group((0.0, 1.0)), task=task)

    source = rollouts(Unseeded(random.Random(0)), GRPO, prompts_per_step=4)
    source.config = replace(source.config, rollout=RolloutConfig(name="vllm", n=2))
    collected = await source.take(0)
    assert len({each.task.id for each in collected.kept}) == 4
    assert asked == [None] * 4


@pytest.mark.long
@pytest.mark.parametrize("on_weight_sync", ["continue", "finish", "abort_and_retry"])
def test_a_training_whose_rollouts_go_on_while_it_learns(on_weight_sync: str, tmp_path: Path) -> None:
    overrides = [
        *run_overrides(save_tiny_model(tmp_path / "model"), tmp_path, "hf", 1),
        "rollout.max_staleness=1",
        f"rollout.on_weight_sync={on_weight_sync}",
    ]
    config = load_config([*overrides, "data.train_batch_size=2", "rollout.n=2", "data.max_response_length=6"])

    async def train(trained: PPOTrainer) -> list[TrainStepResult]:
        await trained.weight_sync.sync(0)
        try:
            return [await trained.train_step() for _ in range(4)]
        finally:
            await trained.rollouts.close()

    with local_trainer(config) as trained:
        steps = asyncio.run(train(trained))
    assert [each.metrics["staleness/max"] for each in steps] == [0, 1, 1, 1]
    assert all(known(name) for each in steps for name in each.metrics)
    for rolled in steps[-1].groups:
        for trajectory in rolled.trajectories:
            versions = trajectory.turns[0].completion.versions
            assert list(versions) == sorted(versions) and versions[0] >= 2


@pytest.mark.long
def test_the_event_loop_turns_while_a_run_learns_saves_records_and_scores_its_canary(tmp_path: Path) -> None:
    """Else the time of every tool that is being waited for would run out, although it had answered."""
    overrides = [*run_overrides(save_tiny_model(tmp_path / "model"), tmp_path, "hf", 2), "rollout.max_staleness=1"]
    config = load_config([*overrides, "trainer.record=true", "trainer.num_threads=1"])
    turned, waited = threading.Event(), Counter[str]()

    def wait(doing: str) -> None:
        turned.clear()
        assert turned.wait(20), f"the loop stands still during {doing}"
        waited[doing] += 1

    class Store(CheckpointStore):
        def latest(self, hashes: bool = False) -> Path | None:
            wait("saving")
            return super().latest(hashes)

    class Patient(Recorder):
        def write(self, *arguments: Any) -> None:
            wait("recording")
            super().write(*arguments)

    class Slow(Policy):
        def score(self, sharding: Sharding) -> Floats:
            wait("scoring")
            return super().score(sharding)

        def update(self, *arguments: Any) -> PolicyUpdate:
            wait("learning")
            return super().update(*arguments)

    async def run(fit: TrainingRun) -> None:
        async def turn() -> None:
            while True:
                turned.set()
                await asyncio.sleep(0.001)

        turning = asyncio.create_task(turn())
        await fit.run()
        turning.cancel()

    with local_trainer(config) as trained:
        policy = Slow(trained.learner.policy.workers, trained.learner.policy.packing)
        trained.learner.policy = policy
        trained.weight_sync = replace(trained.weight_sync, policy=policy)
        recorder = Patient(tmp_path / "run", {}, {})
        fit = local_fit(trained, config, CollapseWatch(), recorder)
        fit.checkpointing.store = Store(tmp_path / "run" / "checkpoints", 2, 0)
        asyncio.run(run(fit))
    assert waited == {"learning": 4, "saving": 1, "recording": 2, "scoring": 5}


def test_many_equal_tracebacks_are_one_cause() -> None:
    traceback = "the program failed:\nTraceback (most recent call last):\n  File x\nBadRequestError: no thoughts"
    faults = [f"calls.jsonl#{row}, response {index}: {traceback}" for row in range(2) for index in range(4)]
    lines = describe_faults([*faults, "a: b#3, response 0: timed out"]).splitlines()
    assert lines[:2] == ["  8 x BadRequestError: no thoughts", "  1 x timed out"]
    assert lines[2] == "  the first: calls.jsonl#0, response 0: the program failed:" and len(lines) == 6


def test_more_causes_than_fit_are_counted() -> None:
    lines = describe_faults([f"t#{number}, response 0: cause {number % 5}" for number in range(9)]).splitlines()
    assert lines[:4] == ["  2 x cause 0", "  2 x cause 1", "  2 x cause 2", "  and 2 other causes"]
    assert describe_faults([]) == "" and describe_faults(["of no form"]).startswith("  1 x of no form")
