"""The training step: one for every algorithm.

tasks -> rollout -> samples -> score -> advantages -> updates -> publish
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch

from verl.algorithms.algorithm import Algorithm, KLPlacement
from verl.data.samples import to_samples
from verl.data.tasks import TaskStream
from verl.rollout.group import GroupRollout
from verl.trainer.experience import build_experience
from verl.trainer.policy import Policy
from verl.types import TrajectoryGroup

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The batch arithmetic of a step."""

    prompts_per_step: int
    rollouts_per_prompt: int
    minibatches_per_step: int = 1
    seed: int = 0


@dataclass
class PPOTrainer:
    """Owns the step counter; everything else is given."""

    settings: StepSettings
    algorithm: Algorithm
    tasks: TaskStream
    rollout: GroupRollout
    policy: Policy
    reference: Policy | None = None
    step: int = 0
    _seconds: Metrics = field(default_factory=dict)

    def __post_init__(self) -> None:
        needs_reference = self.algorithm.kl.placement is not KLPlacement.NONE
        assert needs_reference == (self.reference is not None), "a reference is built if and only if KL is paid for"

    def train_step(self) -> Metrics:
        """One step: generate, score, learn, publish. Returns its metrics."""
        self._seconds = {}
        with self._timed("rollout"):
            groups = asyncio.run(self._generate())
        samples = [sample for number, group in enumerate(groups) for sample in to_samples(group, number)]
        with self._timed("score"):
            old = self.policy.score(samples)
            ref = self.reference.score(samples) if self.reference else None
        with self._timed("advantage"):
            experience = build_experience(samples, old, self.algorithm, ref)
        with self._timed("update"):
            minibatches = experience.split(self.settings.minibatches_per_step)
            updates = [self.policy.update(minibatch, self.algorithm) for minibatch in minibatches]
        with self._timed("publish"):
            self.rollout.engine.load_weights(self.step + 1, self.policy.weights())
        self.step += 1
        means = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        return {**reward_metrics(groups), **{f"actor/{name}": value for name, value in means.items()}, **self._seconds}

    async def _generate(self) -> list[TrajectoryGroup]:
        settings = self.settings
        first = (settings.seed << 40) + self.step * settings.prompts_per_step * settings.rollouts_per_prompt
        return await asyncio.gather(
            *(
                self.rollout.run(
                    task, settings.rollouts_per_prompt, self.step, first + n * settings.rollouts_per_prompt
                )
                for n, task in enumerate(islice(self.tasks, settings.prompts_per_step))
            )
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[f"time/{phase}_s"] = time.perf_counter() - started


def reward_metrics(groups: list[TrajectoryGroup]) -> Metrics:
    """Mean reward and parts, share of groups without a learning signal, length and truncation of replies."""
    scores = [score for group in groups for score in group.scores]
    lengths = torch.tensor(
        [len(trajectory.turns[-1].completion.token_ids) for group in groups for trajectory in group.trajectories]
    )
    flat = sum(len(set(group.rewards)) == 1 for group in groups)
    truncated = [trajectory.stop_reason == "length" for group in groups for trajectory in group.trajectories]
    parts = {name: sum(score.parts[name] for score in scores) / len(scores) for name in scores[0].parts}
    return {
        "reward/total": sum(score.total for score in scores) / len(scores),
        **{f"reward/{name}": value for name, value in parts.items()},
        "reward/zero_variance_groups": flat / len(groups),
        "reply/tokens_mean": float(lengths.float().mean()),
        "reply/truncated": sum(truncated) / len(truncated),
    }
