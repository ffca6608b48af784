"""Rollout management: keeps prompts in flight, in as many slots as the allowed staleness permits.

Slots, not queues, bound the work: the fresh prompts of one step, plus those of `depth` further steps. The depth starts
at 1 and grows while the trainer waits, up to what max_reuse leaves of max_staleness. A slot is taken when its prompt is
drawn, and freed by the weight sync after the step that trained on it; if the filters drop all responses of a prompt,
the next prompt takes over its slot (dynamic sampling). A step takes groups as they finish, unless a later group would
overtake one that would then exceed max_staleness. With max_staleness=0 this is the synchronous, on-policy loop: a
step's own prompts, all of them, in order.

Episodes are scored as they finish, for the update that comes next. If another one trains them, a reward that reads the
step scores them again then, so that the step of a schedule is always that of the update.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.algorithms.algorithm import Algorithm
from verl.config.schema import Config
from verl.data.tasks import TaskStream
from verl.episodes.collection import StepGroups, apply_overlong_penalty
from verl.episodes.group import GroupRollout
from verl.episodes.lookahead import LookaheadController
from verl.errors import ConfigError, VerlError
from verl.scoring.rewards import Rewards
from verl.text import counted
from verl.types import Task, TrajectoryGroup

_log = logging.getLogger(__name__)
_SHOWN_FAULTS = 3
_OF_RESPONSE = re.compile(r"^.*?, response \d+: ")


class RewardFaultError(VerlError, RuntimeError):
    """The reward failed on more responses than max_fault_share allows."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt's position in the task stream, from which it can be drawn again."""

    drawn: Sequence[int]  # by file: number of tasks drawn before this one
    attempt: int = 1  # prompts drawn for this slot, including those that filters dropped

    @property
    def number(self) -> int:
        """Index among all draws of the run."""
        return sum(self.drawn)


_Rolled = tuple[TrajectoryGroup, TrajectoryGroup | None]  # a prompt's rollouts, and its greedy one for a baseline


@dataclass(frozen=True, eq=False)
class _Slot:
    """A prompt in flight, or finished and not yet trained on."""

    draw: Draw
    policy_version: int  # weight version at its start
    work: asyncio.Task[_Rolled]


@dataclass(eq=False)
class _Used:
    """A group that has been trained on and may be reused."""

    group: TrajectoryGroup
    policy_version: int
    uses: int = 1


@dataclass
class RolloutManager:
    """Draws prompts and returns their rollouts, one step at a time."""

    config: Config
    algorithm: Algorithm
    tasks: TaskStream
    rollout: GroupRollout
    rewards: Rewards | None = None  # shape the rewards within a group, and may read the step; None: neither
    shaping_state: Mapping[str, Any] = field(default_factory=dict)  # by the reward's name
    clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()  # seconds
    depth: LookaheadController = field(init=False)
    _slots: list[_Slot] = field(default_factory=list)  # oldest first
    _used: list[_Used] = field(default_factory=list)  # newest last
    _pending: list[Draw] = field(default_factory=list)  # to be drawn again after a resume or rollback
    _finished: asyncio.Future[None] | None = None
    _failed: asyncio.Task[_Rolled] | None = None

    def __post_init__(self) -> None:
        rollout = self.config.rollout
        kept_for_reuse = rollout.max_reuse - 1  # versions; prompts started earlier would be too stale for reuse
        self.depth = LookaheadController(rollout.max_staleness - kept_for_reuse)

    async def take(self, step: int) -> StepGroups:
        """Groups for the step that trains version `step` of the weights, which the engines hold.

        Raises RewardFaultError if too many responses were not scored, NoTrainableGroupsError if no group is left.
        """
        n, waited = self.config.rollout.n, 0.0
        min_group_size = 2 if n > 1 and self.algorithm.needs_group else 1
        collected = StepGroups(self.algorithm, min_group_size, depth=self.depth.steps_ahead)
        self._add_reused(collected, step)
        wanted = left = self.config.data.train_batch_size - len(collected.reused)
        await self._draw(wanted + self.depth.steps_ahead * self._fresh_per_step - len(self._slots), step)
        while left > 0:
            started = self.clock()
            slot = await self._next_finished(step, left)
            waited += self.clock() - started
            self._slots.remove(slot)
            group = await self._group(slot, step)
            kept = self._add(collected, slot, group, step, wanted)
            if not kept and slot.draw.attempt < self.algorithm.max_resample_rounds:
                await self._draw(1, step, slot.draw.attempt + 1)
            else:
                left -= 1
        self.depth.update(step, waited, self.clock())
        faults = self._checked_faults(collected, step)
        collected.check(faults)
        if faults:
            _log.warning("%s", faults)
        if self.algorithm.max_resample_rounds > 1 and len(collected.fresh) < wanted:
            counts = (step + 1, len(collected.fresh), wanted, collected.resample_rounds)
            _log.warning("step %d: %d of %d groups after %d resample rounds", *counts)
        return collected

    async def restart(self) -> None:
        """Drop all rollouts of discarded weights; prompts that were not trained on are drawn again first."""
        await self._cancel_all()
        await self.rollout.engine.interrupt()  # abandoned requests would slow down the next ones
        self._pending[:0] = [slot.draw for slot in self._slots]
        self._slots, self._used, self._failed = [], [], None
        self.depth.reset()

    async def close(self) -> None:
        """Cancel rollouts in flight, and close resources shared by episodes."""
        await self._cancel_all()
        await self.rollout.close()

    async def _cancel_all(self) -> None:
        for slot in self._slots:
            slot.work.cancel()
        await asyncio.gather(*(slot.work for slot in self._slots), return_exceptions=True)

    @property
    def _fresh_per_step(self) -> int:
        """Groups per step that are not reused, once there are groups to reuse."""
        return -(-self.config.data.train_batch_size // self.config.rollout.max_reuse)

    def _add_reused(self, collected: StepGroups, step: int) -> None:
        """Add groups of earlier steps, newest first."""
        most, oldest = self.config.rollout.max_reuse, step - self.config.rollout.max_staleness
        self._used = [used for used in self._used if used.uses < most and used.policy_version >= oldest]
        count = self.config.data.train_batch_size - self._fresh_per_step
        for used in self._used[::-1][:count]:
            used.uses += 1
            collected.add_reused(used.group, step - used.policy_version)

    async def _draw(self, count: int, version: int, attempt: int = 1) -> None:
        """Start `count` prompts: first those left by an interrupted run, then the next of the stream."""
        draws = [self._pending.pop(0) if self._pending else self._next_draw(attempt) for _ in range(count)]
        tasks = [self.tasks.at(draw.drawn) for draw in draws]
        lengths = [sum(len(message.content) for message in task.prompt) for task in tasks]  # in characters
        started: list[_Slot] = []
        # Longest first: the engine starts them in this order, and a long prompt at the end would delay the step.
        for _, draw, task in sorted(zip(lengths, draws, tasks, strict=True), key=lambda each: -each[0]):
            work = asyncio.ensure_future(self._roll(task, version, self._seed(draw)))
            work.add_done_callback(self._on_done)
            started.append(_Slot(draw, version, work))
            await asyncio.sleep(0)  # lets the engine start on this prompt while the next ones are tokenized
        self._slots += sorted(started, key=lambda slot: slot.draw.number)

    def _next_draw(self, attempt: int) -> Draw:
        drawn = self.tasks.cursor.drawn
        next(self.tasks)
        return Draw(drawn, attempt)

    def _seed(self, draw: Draw) -> int | None:
        """Seed of the prompt's first rollout; the others count up from it."""
        seed = self.config.rollout_seed
        return None if seed is None else (seed << 40) + draw.number * self.config.rollout.n

    async def _roll(self, task: Task, version: int, seed: int | None) -> _Rolled:
        """One prompt's rollouts, scored for the first update that can train them."""
        update = version + 1
        turns = self.config.env.turns_at(update)
        rollout = self.rollout if turns is None else self.rollout.within(turns)
        rolled = rollout.run(task, self.config.rollout.n, update, seed)
        if not self.algorithm.greedy_baseline:
            return await rolled, None
        greedy = replace(rollout, sampling=replace(rollout.sampling, temperature=0.0))
        return await asyncio.gather(rolled, greedy.run(task, 1, update, seed))

    async def _group(self, slot: _Slot, step: int) -> TrajectoryGroup:
        """A slot's rollouts, scored for the update that follows `step` others; an empty group without its baseline."""
        group, greedy = slot.work.result()
        if slot.policy_version != step and self.rewards is not None and self.rewards.reads_step(group.task):
            group = await self.rollout.rescored(group, step + 1)
            greedy = greedy and await self.rollout.rescored(greedy, step + 1)
        if greedy is None:
            return group
        lost = (*group.lost_uses, *greedy.lost_uses)
        if not greedy.trajectories:
            return TrajectoryGroup(group.task, (), (), (), (*group.faults, *greedy.faults), lost)
        greedy = apply_overlong_penalty(greedy, self.algorithm.overlong)
        return replace(group, baseline=greedy.rewards[0], lost_uses=lost)

    def _on_done(self, work: asyncio.Task[_Rolled]) -> None:
        """Wake `_next_finished`."""
        if not work.cancelled() and work.exception() is not None:
            self._failed = work
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    async def _next_finished(self, step: int, left: int) -> _Slot:
        """The next finished slot for this step. Raises the error of any failed slot."""
        while (slot := self._ready(step, left)) is None:
            self._finished = asyncio.get_running_loop().create_future()
            await self._finished
        return slot

    def _ready(self, step: int, left: int) -> _Slot | None:
        """The oldest finished slot, unless taking it would make an older slot exceed max_staleness.

        left: number of slots that this step still takes
        """
        if self._failed is not None:
            self._failed.result()
        for place, slot in enumerate(self._slots):
            steps_to_spare = slot.policy_version + self.config.rollout.max_staleness - step
            if slot.work.done():
                return slot
            if steps_to_spare == 0 or place + 1 > left - 1 + steps_to_spare * self._fresh_per_step:
                return None
        return None

    def _add(self, collected: StepGroups, slot: _Slot, group: TrajectoryGroup, step: int, wanted: int) -> bool:
        """Add a slot's group to the collection. Returns whether the filters kept any response.

        wanted: number of fresh groups of this step
        """
        check_turn_rewards(group, self.algorithm)
        if self.rewards is not None:
            group, self.shaping_state = self.rewards.shaped(group, self.shaping_state)
        kept = collected.add(group, slot.draw.attempt, step - slot.policy_version)
        if kept is not None:
            self._used.append(_Used(kept, slot.policy_version))
        if len(collected.drawn) >= wanted:  # fewer are not representative
            self._checked_faults(collected, step)
        return kept is not None

    def _checked_faults(self, collected: StepGroups, step: int) -> str:
        """The number of faults and the first ones; empty without any. Raises RewardFaultError for too many."""
        faults = [fault for group in collected.drawn for fault in group.faults]
        total = len(collected.drawn) * (self.config.rollout.n + self.algorithm.greedy_baseline)
        shown, limit = describe_faults(faults), self.config.reward.max_fault_share
        message = f"step {step + 1}: {len(faults)} of {total} responses could not be scored:\n{shown}"
        if len(faults) > limit * total:
            raise RewardFaultError(f"{message}\nMore than reward.max_fault_share={limit:g}: fix the cause and resume")
        return message if faults else ""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as plain JSON: the stream's cursor, prompts not yet trained on, lookahead depth."""
        cursor = self.tasks.cursor
        pending = (*(slot.draw for slot in self._slots), *self._pending)
        return {
            "data": {"drawn": list(cursor.drawn), "made_of": cursor.made_of},
            "pending": [{"drawn": list(draw.drawn), "attempt": draw.attempt} for draw in pending],
            "depth": self.depth.steps_ahead,
            "shaping": dict(self.shaping_state),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore `state`, except for the cursor, with which the caller creates the task stream."""
        self._pending = [Draw(**draw) for draw in state["pending"]]
        self.depth.steps_ahead = min(state["depth"], self.depth.max_steps_ahead)
        self.shaping_state = state["shaping"]


def describe_faults(faults: Sequence[str]) -> str:
    """The distinct causes with their numbers of responses, the most frequent first; then the first fault in full.

    Many equal tracebacks differ in their first lines alone, which name the response; the cause is the last one.
    """
    causes = Counter(_OF_RESPONSE.sub("", fault).strip().splitlines()[-1] for fault in faults)
    lines = [f"  {count} x {cause}" for cause, count in causes.most_common(_SHOWN_FAULTS)]
    if (left := len(causes) - len(lines)) > 0:
        lines.append(f"  and {counted(left, 'other cause')}")
    return "\n".join([*lines, *(f"  the first: {fault}" for fault in faults[:1])])


def check_turn_rewards(group: TrajectoryGroup, algorithm: Algorithm) -> None:
    """Raises ConfigError for turn-level rewards if the algorithm does not support them."""
    given = any(turn.reward is not None for trajectory in group.trajectories for turn in trajectory.turns)
    if given and not algorithm.takes_turn_rewards:
        raise ConfigError(
            f"the environment of {group.task.id} returns turn-level rewards (StepResult.reward), but "
            f"algorithm.name={algorithm.name} supports only one reward per episode; choose matchtir, gigpo or ppo, add "
            "algorithm.adv_estimator=matchtir, or let the environment return one score at the end (`judge`)"
        )
