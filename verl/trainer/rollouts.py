"""Where a step's groups come from: prompts in flight, as many as the allowed staleness has slots for.

Slots, not queues, bound the work: a step's fresh prompts, and those of as many more steps as the depth, which is 1 and
grows while the trainer waits, up to what max_reuse leaves of max_staleness. A slot is taken when its prompt is drawn
and is free again once the weights that were trained on it are published; a prompt whose responses the filters drop
gives
its place to the next one at once. A step takes what has landed, but lets nothing be overtaken that could then not be
trained on before it is too old; taken in their order, all of them can. With max_staleness=0 that is the synchronous
loop: a step's own prompts, all of them, in their order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.algorithms.algorithm import Algorithm
from verl.data.tasks import TaskStream
from verl.errors import ConfigError, VerlError
from verl.rollout.group import GroupRollout
from verl.trainer.collection import StepGroups, apply_overlong_penalty
from verl.trainer.depth import LookaheadController
from verl.types import Task, TrajectoryGroup
from verl.utils.reward_score.rewards import Rewards

_log = logging.getLogger(__name__)
_SHOWN_FAULTS = 3


class RewardFaultError(VerlError, RuntimeError):
    """The reward failed on more responses than the run may lose."""


@dataclass(frozen=True, slots=True)
class RolloutManagerConfig:
    """How much is drawn, and how far ahead."""

    prompts_per_step: int
    rollouts_per_prompt: int
    max_staleness: int = 0  # weight versions that the oldest token of a sample may be behind the policy
    max_reuse: int = 1  # steps that a group may be trained in, as far as its staleness allows
    max_fault_share: float = 0.1  # of a step's responses that may go unscored
    seed: int | None = 0  # of the requests; None: the engine draws from its own stream of random numbers


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt of the stream: what it takes to draw it again."""

    drawn: Sequence[int]  # tasks that the stream had drawn of each file before
    attempt: int = 1  # prompts drawn in this place, those included that filters dropped

    @property
    def number(self) -> int:
        """Its place among all draws of the run."""
        return sum(self.drawn)


@dataclass(frozen=True, eq=False)
class _Slot:
    """A prompt in flight, or landed and not yet trained on."""

    draw: Draw
    policy_version: int  # version of the weights that were published then
    work: asyncio.Task[TrajectoryGroup]


@dataclass(eq=False)
class _Used:
    """A group that has been trained on, and may be once more."""

    group: TrajectoryGroup
    policy_version: int
    uses: int = 1


@dataclass
class RolloutManager:
    """Draws prompts and hands over what came of them, a step's worth at a time."""

    settings: RolloutManagerConfig
    algorithm: Algorithm
    tasks: TaskStream
    rollout: GroupRollout
    rewards: Rewards | None = None  # which may shape those of a group; None: none does
    shaping_state: Mapping[str, Any] = field(default_factory=dict)  # by the reward's name
    clock: Callable[[], float] = time.monotonic  # seconds
    depth: LookaheadController = field(init=False)
    _slots: list[_Slot] = field(default_factory=list)  # the oldest first
    _used: list[_Used] = field(default_factory=list)  # the newest last
    _left: list[Draw] = field(default_factory=list)  # of the run that this one resumes
    _news: asyncio.Future[None] | None = None
    _failed: asyncio.Task[TrajectoryGroup] | None = None

    def __post_init__(self) -> None:
        kept_for_reuse = self.settings.max_reuse - 1  # versions; what begins further ahead is too old to be used again
        self.depth = LookaheadController(self.settings.max_staleness - kept_for_reuse)

    async def take(self, step: int) -> StepGroups:
        """Groups for the step that trains the weights of version `step`, which are published.

        Raises RewardFaultError if too many responses were not scored, NoTrainableGroupsError if no group is left.
        """
        n, waited = self.settings.rollouts_per_prompt, 0.0
        min_group_size = 2 if n > 1 and self.algorithm.needs_group else 1
        collected = StepGroups(self.algorithm, min_group_size, depth=self.depth.steps_ahead)
        self._use_again(collected, step)
        wanted = left = self.settings.prompts_per_step - len(collected.reused)
        await self._draw(wanted + self.depth.steps_ahead * self._fresh_per_step - len(self._slots), step)
        while left > 0:
            asked = self.clock()
            slot = await self._landed(step, left)
            waited += self.clock() - asked
            self._slots.remove(slot)
            if not self._add(collected, slot, step, wanted) and slot.draw.attempt < self.algorithm.max_resample_rounds:
                await self._draw(1, step, slot.draw.attempt + 1)
            else:
                left -= 1
        self.depth.update(step, waited, self.clock())
        collected.check()
        if faults := self._faults(collected):
            _log.warning("%s", self._told(step, collected, faults))
        if self.algorithm.max_resample_rounds > 1 and len(collected.fresh) < wanted:
            told = (step + 1, len(collected.fresh), wanted, collected.resample_rounds)
            _log.warning("step %d: %d groups of %d after %d draws", *told)
        return collected

    async def begin_again(self) -> None:
        """Drop what came of weights that are given up; its prompts that were not trained on come next."""
        await self._end()
        await self.rollout.engine.interrupt()  # what nobody waits for would share it with what comes next
        self._left[:0] = [slot.draw for slot in self._slots]
        self._slots, self._used, self._failed = [], [], None
        self.depth.reset()

    async def close(self) -> None:
        """End what is in flight, and what the episodes share."""
        await self._end()
        await self.rollout.close()

    async def _end(self) -> None:
        for slot in self._slots:
            slot.work.cancel()
        await asyncio.gather(*(slot.work for slot in self._slots), return_exceptions=True)

    @property
    def _fresh_per_step(self) -> int:
        """Groups of a step that no step has trained on before, once there are some to use again."""
        return -(-self.settings.prompts_per_step // self.settings.max_reuse)

    def _use_again(self, collected: StepGroups, step: int) -> None:
        """Groups of earlier steps, the newest first, beside the fresh ones."""
        most, oldest = self.settings.max_reuse, step - self.settings.max_staleness
        self._used = [used for used in self._used if used.uses < most and used.policy_version >= oldest]
        count = self.settings.prompts_per_step - self._fresh_per_step
        for used in self._used[::-1][:count]:
            used.uses += 1
            collected.add_reused(used.group, step - used.policy_version)

    async def _draw(self, count: int, version: int, attempt: int = 1) -> None:
        """Let so many prompts begin: those that an interrupted run had begun, then the stream's next."""
        draws = [self._left.pop(0) if self._left else self._next_draw(attempt) for _ in range(count)]
        tasks = [self.tasks.at(draw.drawn) for draw in draws]
        begun: list[_Slot] = []
        # The engine starts them as they come, and a long one that starts last is waited for.
        for draw, task in sorted(zip(draws, tasks, strict=True), key=lambda pair: -prompt_length(pair[1])):
            work = asyncio.ensure_future(self._roll(task, version, self._seed(draw)))
            work.add_done_callback(self._tell)
            begun.append(_Slot(draw, version, work))
            await asyncio.sleep(0)  # so that an engine has the first prompt while the others are made tokens of
        self._slots += sorted(begun, key=lambda slot: slot.draw.number)

    def _next_draw(self, attempt: int) -> Draw:
        drawn = self.tasks.cursor.drawn
        next(self.tasks)
        return Draw(drawn, attempt)

    def _seed(self, draw: Draw) -> int | None:
        """The first of the prompt's seeds, of which each rollout has one."""
        if self.settings.seed is None:
            return None
        return (self.settings.seed << 40) + draw.number * self.settings.rollouts_per_prompt

    async def _roll(self, task: Task, version: int, seed: int | None) -> TrajectoryGroup:
        """One prompt's rollouts; none of them where the greedy one that they are to be compared with is missing."""
        rolled = self.rollout.run(task, self.settings.rollouts_per_prompt, version, seed)
        if not self.algorithm.greedy_baseline:
            return await rolled
        greedy = replace(self.rollout, sampling=replace(self.rollout.sampling, temperature=0.0))
        group, lone = await asyncio.gather(rolled, greedy.run(task, 1, version, seed))
        lost = (*group.lost_uses, *lone.lost_uses)
        if lone.faults:
            return TrajectoryGroup(task, (), (), (), (*group.faults, *lone.faults), lost)
        return replace(group, baseline=apply_overlong_penalty(lone, self.algorithm.overlong).rewards[0], lost_uses=lost)

    def _tell(self, work: asyncio.Task[TrajectoryGroup]) -> None:
        """Wake up whoever waits for something to land."""
        if not work.cancelled() and work.exception() is not None:
            self._failed = work
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _landed(self, step: int, left: int) -> _Slot:
        """The next slot for this step, landed. Raises what any of them has failed with."""
        while (slot := self._ready(step, left)) is None:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return slot

    def _ready(self, step: int, left: int) -> _Slot | None:
        """The oldest that has landed, unless one before it could then not be trained on in time.

        left: slots that this step still takes
        """
        if self._failed is not None:
            self._failed.result()
        for place, slot in enumerate(self._slots):
            steps_to_spare = slot.policy_version + self.settings.max_staleness - step
            if slot.work.done():
                return slot
            if steps_to_spare == 0 or place + 1 > left - 1 + steps_to_spare * self._fresh_per_step:
                return None
        return None

    def _add(self, collected: StepGroups, slot: _Slot, step: int, wanted: int) -> bool:
        """Put what came of a slot into the collection. Returns whether the filters left anything.

        wanted: fresh groups of this step
        """
        group = slot.work.result()
        check_turn_rewards(group, self.algorithm)
        if self.rewards is not None:
            group, self.shaping_state = self.rewards.shaped(group, self.shaping_state)
        kept = collected.add(group, slot.draw.attempt, step - slot.policy_version)
        if kept is not None:
            self._used.append(_Used(kept, slot.policy_version))
        if len(collected.drawn) >= wanted:  # fewer tell little
            self._check_faults(collected, step)
        return kept is not None

    def _check_faults(self, collected: StepGroups, step: int) -> None:
        faults, limit = self._faults(collected), self.settings.max_fault_share
        if len(faults) > limit * self._num_asked(collected):
            told = self._told(step, collected, faults)
            raise RewardFaultError(f"{told}\nMore than reward.max_fault_share={limit:g}: mend what failed, then resume")

    def _num_asked(self, collected: StepGroups) -> int:
        return len(collected.drawn) * (self.settings.rollouts_per_prompt + self.algorithm.greedy_baseline)

    @staticmethod
    def _faults(collected: StepGroups) -> list[str]:
        return [fault for group in collected.drawn for fault in group.faults]

    def _told(self, step: int, collected: StepGroups, faults: Sequence[str]) -> str:
        shown = "\n".join(f"  {fault}" for fault in faults[:_SHOWN_FAULTS])
        asked = self._num_asked(collected)
        return f"step {step + 1}: {len(faults)} of {asked} replies could not be scored:\n{shown}"

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as plain JSON: the cursor, what was begun and not trained on, how far ahead."""
        cursor = self.tasks.cursor
        pending = (*(slot.draw for slot in self._slots), *self._left)
        return {
            "data": {"drawn": list(cursor.drawn), "made_of": cursor.made_of},
            "pending": [{"drawn": list(draw.drawn), "round": draw.attempt} for draw in pending],
            "depth": self.depth.steps_ahead,
            "shaping": dict(self.shaping_state),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; the task stream is made with its cursor by who builds it."""
        self._left = [Draw(**draw) for draw in state["pending"]]
        self.depth.steps_ahead = min(state["depth"], self.depth.max_steps_ahead)
        self.shaping_state = state["shaping"]


def check_turn_rewards(group: TrajectoryGroup, algorithm: Algorithm) -> None:
    """Raises ConfigError for rewards of single turns that the algorithm would add up, or lose."""
    given = any(turn.reward is not None for trajectory in group.trajectories for turn in trajectory.turns)
    if given and not algorithm.takes_turn_rewards:
        raise ConfigError(
            f"the environment of {group.task.id} gives rewards for single turns (StepResult.reward), but "
            f"algorithm.name={algorithm.name} takes one reward for an episode; choose gigpo or ppo, or let the "
            "environment give one score at the end (`judge`)"
        )


def prompt_length(task: Task) -> int:
    """Characters of all messages: enough to tell long prompts from short ones before they are tokenised."""
    return sum(len(message.content) for message in task.prompt)
