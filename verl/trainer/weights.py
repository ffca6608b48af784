"""Where rollout and training meet: the policy's weights go to the engines, and a canary proves that they arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from verl.daemon import in_daemon
from verl.data.samples import to_sample
from verl.errors import VerlError
from verl.rollout.engine import RolloutEngine, Sampling
from verl.rollout.pool import EnginePool
from verl.trainer.policy import Policy
from verl.transfer.bucket import Layout
from verl.types import Completion


class StaleEngineError(VerlError, RuntimeError):
    """The rollout engine does not hold the weights that were published."""


@dataclass(frozen=True)
class Publisher:
    """Publishes weights and probes the engines after each publication.

    What the ranks are asked is waited for in a thread, because episodes may go on meanwhile.

    probes: prompts to which the engines write a few tokens, whose log-probs the trainer then computes itself
    tolerance: largest mean gap between the two, in nats; a stale engine stops the run
    """

    policy: Policy
    engine: RolloutEngine
    layouts: Sequence[Layout]  # of the buckets in which the policy's weights travel
    probes: Sequence[tuple[int, ...]]
    sampling: Sampling
    tolerance: float

    async def publish(self, version: int) -> float:
        """Hand over the weights as `version`. Returns the canary's mean gap.

        Raises StaleEngineError if it is too wide.
        """
        with self.engine.held() if isinstance(self.engine, EnginePool) else nullcontext():
            await self.deliver(version)
            gap = await self._canary(version)
        await in_daemon(self.policy.end_publication)
        if not gap <= self.tolerance:
            raise StaleEngineError(
                f"after the publication of version {version} the engine's log-probs are {gap:.3g} nats from the "
                f"trainer's on average, more than {self.tolerance:.3g}: it generates with other weights, or computes "
                "another model"
            )
        return gap

    async def deliver(self, version: int) -> None:
        """Hand over the weights without looking whether they arrived."""
        await in_daemon(self.policy.begin_publication)
        await self.engine.begin_weights(self.layouts)
        await self._load()
        await self.engine.end_weights(version)

    async def _load(self) -> None:
        """Every bucket; one is gathered while the engines load the one before."""
        loading = asyncio.create_task(asyncio.sleep(0))
        try:
            for layout in self.layouts:
                gathering = asyncio.create_task(in_daemon(self.policy.offers, layout.number))
                await asyncio.wait((loading, gathering), return_when=asyncio.FIRST_EXCEPTION)
                if loading.done():
                    loading.result()  # an engine that failed is told without waiting for the ranks
                offers = await gathering
                await loading
                loading = asyncio.create_task(self.engine.load_bucket(layout, *offers))
            await loading
        finally:
            loading.cancel()

    async def _canary(self, version: int) -> float:
        written = [
            (prompt, completions[0]) for prompt in self.probes for completions in await self._from_every_engine(prompt)
        ]
        stale = {completion.weight_version for _, completion in written} - {version}
        if stale:
            raise StaleEngineError(
                f"the engine answers with version {sorted(stale)} after version {version} was published"
            )
        samples = [to_sample(prompt, completion) for prompt, completion in written]
        scored = await in_daemon(lambda: self.policy.score(self.policy.laid_out(samples)))
        gaps = [
            (torch.tensor(sample.rollout_logprobs) - scored_L)[torch.tensor(sample.action_mask)].abs()
            for sample, scored_L in zip(samples, scored, strict=True)
        ]
        return float(torch.cat(gaps).mean())

    async def _from_every_engine(self, prompt: tuple[int, ...]) -> list[tuple[Completion, ...]]:
        if isinstance(self.engine, EnginePool):
            return await self.engine.generate_everywhere(prompt, self.sampling)
        return [await self.engine.generate(prompt, self.sampling)]
