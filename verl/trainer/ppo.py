"""The training step: one for every algorithm.

tasks -> rollout -> samples -> score -> advantages -> updates -> publish
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm, KLPlacement, OldLogprobs
from verl.algorithms.kl import AdaptiveKL
from verl.data.samples import to_samples
from verl.data.tasks import TaskStream
from verl.errors import VerlError
from verl.rollout.group import GroupRollout
from verl.tracking.timers import PhaseTimer
from verl.trainer import metrics as tell
from verl.trainer.collection import Collection, penalised
from verl.trainer.experience import Experience, build_experience, rows_with_signal, with_selected
from verl.trainer.metrics import Meter, Metrics
from verl.trainer.policy import Critic, Policy
from verl.trainer.record import Lesson
from verl.trainer.weights import Publisher
from verl.types import Sample, Task, TrajectoryGroup
from verl.utils.reward_score.base import GroupReward

_log = logging.getLogger(__name__)
_SHOWN_FAULTS = 3


class RewardFaultError(VerlError, RuntimeError):
    """The reward failed on more replies than the run may lose."""


def prompt_length(task: Task) -> int:
    """Characters of all messages: enough to tell long prompts from short ones before they are tokenised."""
    return sum(len(message.content) for message in task.prompt)


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The batch arithmetic of a step."""

    prompts_per_step: int
    rollouts_per_prompt: int
    minibatches_per_step: int = 1
    critic_warmup: int = 0  # first steps, in which the critic alone learns
    max_fault_share: float = 0.1  # of a step's replies that may go unscored
    train_on_observations: bool = False  # on what the environment said, too
    seed: int = 0


class Learning:
    """What of a step needs no engine: from samples to updated weights. Subclasses are dataclasses with these fields."""

    settings: StepSettings
    algorithm: Algorithm
    policy: Policy
    reference: Policy | None
    critic: Critic | None
    kl_control: AdaptiveKL | None
    timer: PhaseTimer
    step: int

    def __post_init__(self) -> None:
        needs_reference = self.algorithm.kl.placement is not KLPlacement.NONE
        assert needs_reference == (self.reference is not None), "a reference is built if and only if KL is paid for"
        assert self.algorithm.needs_critic == (self.critic is not None), "a critic is built if and only if it is needed"

    def learn(self, lesson: Lesson) -> tuple[Metrics, list[Sample]]:
        """Score, estimate advantages, update: the same for the same lesson, weights and step. Leaves the step's number.

        Returns what the update tells of itself, and the samples that it computed.
        """
        samples = lesson.samples
        with self.timer.phase("score"):
            old, ref, values = self._scores(samples)
        with self.timer.phase("advantage"):
            experience = build_experience(samples, old, self._algorithm_now(), ref, values, lesson.baselines)
        with self.timer.phase("score"):
            experience = self._with_old_logprobs(experience)
        with self.timer.phase("update"):
            learned = self._update(experience)
        computed = [samples[row] for row in rows_with_signal(experience, self.algorithm)]
        return {**learned, **self._kl_metrics(samples, old, ref)}, computed

    def _scores(self, samples: Sequence[Sample]) -> list[list[Tensor] | None]:
        """Old and reference log-probs and values, as far as the advantages ask for them, in one layout of packs."""
        needs_old = self.algorithm.kl.placement is KLPlacement.REWARD and self._of_trainer
        models = (self.policy if needs_old else None, self.reference, self.critic)
        layout = self.policy.laid_out(samples) if any(models) else None
        return [None if model is None or layout is None else model.score(layout) for model in models]

    def _with_old_logprobs(self, experience: Experience) -> Experience:
        """With the policy's log-probs before the first of several updates, of the samples that will be computed.

        With one optimizer step per batch the policy's own log-probs in the update are the old ones, unless tokens are
        chosen by them before it.
        """
        known = "old_logprobs" in experience.columns
        needed = self.settings.minibatches_per_step > 1 or self.algorithm.selection is not None
        if known or not needed or not self._of_trainer:
            return experience
        rows = rows_with_signal(experience, self.algorithm)
        scored = iter(self.policy.score(self.policy.laid_out([experience.samples[row] for row in rows])))
        computed = set(rows)
        return experience.having(
            "old_logprobs",
            [
                next(scored) if row in computed else torch.zeros(len(sample.token_ids))
                for row, sample in enumerate(experience.samples)
            ],
        )

    @property
    def _of_trainer(self) -> bool:
        return self.algorithm.old_logprobs is OldLogprobs.TRAINER

    def _update(self, experience: Experience) -> Metrics:
        """Critic and policy on every mini-batch."""
        of_policy, of_critic = [], []
        num_parts = self.settings.minibatches_per_step
        for number, part in enumerate(experience.split(num_parts)):
            minibatch = with_selected(part, self.algorithm, self._first_seed(num_parts) + number)
            if self.critic:
                of_critic.append(self.critic.update(minibatch))
            if self.step >= self.settings.critic_warmup:
                of_policy.append(self.policy.update(minibatch, self._algorithm_now()))
                if len(of_policy) > 1 and not self._of_trainer:  # the policy is no longer the one that was sampled from
                    of_policy[-1] = {name: value for name, value in of_policy[-1].items() if "engine_" not in name}
        metrics = {**tell.update_metrics("actor", of_policy), **tell.update_metrics("critic", of_critic)}
        if self.critic:
            self.critic.rest()
            metrics["critic/explained_variance"] = tell.explained_variance(experience)
        return metrics

    def _algorithm_now(self) -> Algorithm:
        """The algorithm with the KL coefficient of this moment."""
        if self.kl_control is None:
            return self.algorithm
        return replace(self.algorithm, kl=replace(self.algorithm.kl, coefficient=self.kl_control.coefficient))

    def _kl_metrics(
        self, samples: Sequence[Sample], old: Sequence[Tensor] | None, ref: Sequence[Tensor] | None
    ) -> Metrics:
        if ref is None or self.algorithm.kl.placement is not KLPlacement.REWARD:
            return {}
        sampled = [torch.tensor(sample.rollout_logprobs) for sample in samples] if old is None else old
        divergence = tell.reference_kl(samples, sampled, ref)
        coefficient = self._algorithm_now().kl.coefficient
        if self.kl_control is not None:
            self.kl_control.observe(divergence, len(samples))
        return {"kl/reference": divergence, "kl/coefficient": coefficient}

    def _first_seed(self, per_step: int) -> int:
        """The first of this step's seeds, where each step has as many."""
        return (self.settings.seed << 40) + self.step * per_step


@dataclass
class PPOTrainer(Learning):
    """Owns the step counter; everything else is given."""

    settings: StepSettings
    algorithm: Algorithm
    tasks: TaskStream
    rollout: GroupRollout
    policy: Policy
    publisher: Publisher
    reference: Policy | None = None
    critic: Critic | None = None
    kl_control: AdaptiveKL | None = None
    shaping: GroupReward | None = None
    shaping_state: Mapping[str, Any] = field(default_factory=dict)
    meter: Meter | None = None
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    step: int = 0
    groups: Sequence[TrajectoryGroup] = ()  # all that the last step drew, for metrics and transcripts
    lesson: Lesson = field(default_factory=Lesson)  # what the last step learned from, for its record

    async def train_step(self) -> Metrics:
        """One step: generate, score, learn, publish. Returns its metrics."""
        self.timer.start()
        with self.timer.phase("rollout"):
            collected = await self._generate()
            await self.rollout.engine.sleep()
        self.groups = collected.drawn
        samples = [
            sample
            for number, group in enumerate(collected.kept)
            for sample in to_samples(group, number, self.settings.train_on_observations)
        ]
        baselines = [collected.kept[sample.group].baseline for sample in samples]
        self.lesson = Lesson(samples, baselines, self.kl_control.coefficient if self.kl_control else None)
        learned, computed = self.learn(self.lesson)
        with self.timer.phase("publish"):
            learned["engine/canary_gap"] = await self.publisher.publish(self.step + 1)
        self.step += 1
        return {
            **tell.rollout_metrics(self.groups),
            **tell.tool_metrics(self.groups),
            **collected.metrics(),
            "reward/infrastructure_faults": sum(len(group.faults) for group in self.groups),
            **learned,
            **self._timings(samples, computed),
        }

    def _timings(self, samples: Sequence[Sample], computed: Sequence[Sample]) -> Metrics:
        """computed: by the update"""
        timings = self.timer.metrics()
        used = self.meter.mfu(computed, self.policy.packing, timings["time/update_s"]) if self.meter else {}
        return {**timings, **tell.throughput(self.groups, samples, computed, timings), **used}

    async def _generate(self) -> Collection:
        """Prompts are drawn until the filters have left enough groups, each time as many as are missing.

        Raises RewardFaultError where too many replies could not be scored, NoSignalError where nothing is left.
        """
        wanted, draws, n = self.settings.prompts_per_step, self.algorithm.max_draws, self.settings.rollouts_per_prompt
        least = 2 if n > 1 and self.algorithm.compares_replies else 1
        collected = Collection(self.algorithm, least)
        asked = n + self.algorithm.greedy_baseline  # replies to each prompt
        while collected.draws < draws and len(collected.kept) < wanted:
            first = self._first_seed(wanted * draws * n) + wanted * collected.draws * n
            collected.add(await self._draw(wanted - len(collected.kept), first))
            faults = [fault for group in collected.drawn for fault in group.faults]
            self._check_faults(faults, len(collected.drawn) * asked)
        collected.check()
        if draws > 1 and len(collected.kept) < wanted:
            _log.warning("step %d: %d groups of %d after %d draws", self.step + 1, len(collected.kept), wanted, draws)
        return collected

    async def _draw(self, num_prompts: int, first_seed: int) -> list[TrajectoryGroup]:
        """The groups of the next prompts, in their order."""
        n = self.settings.rollouts_per_prompt
        tasks = list(islice(self.tasks, num_prompts))
        # All are in flight at once; the engine starts them as they come, and a long one that starts last is waited for.
        longest_first = sorted(range(num_prompts), key=lambda number: -prompt_length(tasks[number]))
        finished = await asyncio.gather(*(self._roll(tasks[each], first_seed + each * n) for each in longest_first))
        groups = [group for _, group in sorted(zip(longest_first, finished, strict=True), key=lambda pair: pair[0])]
        return [self._shaped(group) if group.trajectories else group for group in groups]

    async def _roll(self, task: Task, seed: int) -> TrajectoryGroup:
        """One prompt's rollouts; none of them where the greedy one that they are to be compared with is missing."""
        rolled = self.rollout.run(task, self.settings.rollouts_per_prompt, self.step, seed)
        if not self.algorithm.greedy_baseline:
            return await rolled
        greedy = replace(self.rollout, sampling=replace(self.rollout.sampling, temperature=0.0))
        group, lone = await asyncio.gather(rolled, greedy.run(task, 1, self.step, seed))
        lost = (*group.lost_uses, *lone.lost_uses)
        if lone.faults:
            return TrajectoryGroup(task, (), (), (), (*group.faults, *lone.faults), lost)
        return replace(group, baseline=penalised(lone, self.algorithm.overlong).rewards[0], lost_uses=lost)

    def _shaped(self, group: TrajectoryGroup) -> TrajectoryGroup:
        if self.shaping is None:
            return group
        rewards, self.shaping_state = self.shaping.shape(group, self.shaping_state)
        return replace(group, rewards=rewards)

    def _check_faults(self, faults: Sequence[str], replies: int) -> None:
        shown = "\n".join(f"  {fault}" for fault in faults[:_SHOWN_FAULTS])
        said = f"step {self.step + 1}: {len(faults)} of {replies} replies could not be scored:\n{shown}"
        if len(faults) > self.settings.max_fault_share * replies:
            limit = self.settings.max_fault_share
            raise RewardFaultError(f"{said}\nMore than reward.max_fault_share={limit:g}: mend what failed, then resume")
        if faults:
            _log.warning("%s", said)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of the controller, as plain JSON."""
        cursor = self.tasks.cursor
        coefficient = None if self.kl_control is None else self.kl_control.coefficient
        return {
            "step": self.step,
            "data": {"drawn": list(cursor.drawn), "made_of": cursor.made_of},
            "kl_coefficient": coefficient,
            "shaping": dict(self.shaping_state),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; the task stream is made with its cursor by who builds it."""
        self.step = state["step"]
        self.shaping_state = state["shaping"]
        if self.kl_control is not None and state["kl_coefficient"] is not None:
            self.kl_control.coefficient = state["kl_coefficient"]
