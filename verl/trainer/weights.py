"""Where rollout and training meet: the policy's weights go to the engines, and a canary proves that they arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl.daemon import run_in_daemon_thread
from verl.data.samples import sample_from_completion
from verl.errors import VerlError
from verl.rollout.engine import RolloutEngine, Sampling
from verl.rollout.pool import EnginePool, EngineSubset
from verl.trainer.policy import Policy
from verl.transfer.bucket import BucketLayout
from verl.types import Completion


class StaleEngineError(VerlError, RuntimeError):
    """The rollout engine does not hold the weights that were published."""


@dataclass(frozen=True)
class WeightSync:
    """Publishes weights and probes the engines after each publication.

    What the ranks are asked is waited for in a thread, because episodes may go on meanwhile.

    probes: prompts to which the engines write a few tokens, whose log-probs the trainer then computes itself
    tolerance: largest mean gap between the two, in nats; a stale engine stops the run
    """

    policy: Policy
    engine: RolloutEngine
    layouts: Sequence[BucketLayout]  # of the buckets in which the policy's weights travel
    probes: Sequence[tuple[int, ...]]
    sampling: Sampling
    tolerance: float
    ranks: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by whoever uses the trainer ranks

    async def sync(self, version: int) -> float:
        """Hand over the weights as `version`. Returns the canary's mean gap. To be called with `ranks` held.

        Raises StaleEngineError if it is too wide.
        """
        pool = self.engine if isinstance(self.engine, EnginePool) else None
        if pool is not None:
            await pool.make_lost()
        with pool.paused() if pool is not None else nullcontext():
            await self.push(version)
            gaps = await self._canary(self.engine, version)
        if pool is not None:
            gaps += await self._to_lost(pool, version)
        await run_in_daemon_thread(self.policy.end_weight_sync)
        return self._checked(gaps, version)

    async def restore(self) -> None:
        """Replace engines that are lost, and hand them the weights that the others have, once the ranks are free."""
        assert isinstance(self.engine, EnginePool)
        async with self.ranks:
            if self.engine.version is None:  # the first publication is still to come
                await self.engine.make_lost()
            elif self.engine.lost:  # else a publication came first
                gaps = await self._to_lost(self.engine, self.engine.version)
                await run_in_daemon_thread(self.policy.end_weight_sync)
                self._checked(gaps, self.engine.version)

    def losses(self) -> dict[str, float]:
        """Metrics of engines that were replaced, since the last call."""
        pool = self.engine
        if not isinstance(pool, EnginePool):
            return {}
        remade, retried, pool.num_remade, pool.num_retried = pool.num_remade, pool.num_retried, 0, 0
        return {"rollout/engine_restarts": float(remade), "rollout/requests_retried": float(retried)}

    async def push(self, version: int) -> None:
        """Hand over the weights without looking whether they arrived."""
        await self._deliver(self.engine, version)

    async def _to_lost(self, pool: EnginePool, version: int) -> list[Tensor]:
        """Replace lost engines and publish to them, until none is lost. The canary's gaps."""
        gaps: list[Tensor] = []
        while ranks := await pool.make_lost():
            some = pool.only(ranks)
            with pool.paused():
                await self._deliver(some, version)
                gaps += await self._canary(some, version)
        return gaps

    async def _deliver(self, engines: RolloutEngine | EngineSubset, version: int) -> None:
        await run_in_daemon_thread(self.policy.begin_weight_sync)
        await engines.begin_weights(self.layouts)
        await self._load(engines)
        await engines.end_weights(version)

    def _checked(self, gaps: Sequence[Tensor], version: int) -> float:
        """The mean of the gaps of all tokens. Raises StaleEngineError if it is too wide."""
        gap = float(torch.cat([*gaps]).mean())
        if not gap <= self.tolerance:
            raise StaleEngineError(
                f"after the publication of version {version} the engine's log-probs are {gap:.3g} nats from the "
                f"trainer's on average, more than {self.tolerance:.3g}: it generates with other weights, or computes "
                "another model"
            )
        return gap

    async def _load(self, engines: RolloutEngine | EngineSubset) -> None:
        """Every bucket; one is gathered while the engines load the one before."""
        loading = asyncio.create_task(asyncio.sleep(0))
        try:
            for layout in self.layouts:
                gathering = asyncio.create_task(run_in_daemon_thread(self.policy.offers, layout.number))
                await asyncio.wait((loading, gathering), return_when=asyncio.FIRST_EXCEPTION)
                if loading.done():
                    loading.result()  # an engine that failed is told without waiting for the ranks
                offers = await gathering
                await loading
                loading = asyncio.create_task(engines.load_bucket(layout, *offers))
            await loading
        finally:
            loading.cancel()

    async def _canary(self, engines: RolloutEngine | EngineSubset, version: int) -> list[Tensor]:
        """[sample][A] gaps of the log-probs of trained tokens; none where all engines were lost meanwhile."""
        written = [
            (prompt, completions[0]) for prompt in self.probes for completions in await self._from_each(engines, prompt)
        ]
        stale = {completion.weight_version for _, completion in written} - {version}
        if stale:
            raise StaleEngineError(
                f"the engine answers with version {sorted(stale)} after version {version} was published"
            )
        samples = [sample_from_completion(prompt, completion) for prompt, completion in written]
        if not samples:
            return []
        scored = await run_in_daemon_thread(lambda: self.policy.score(self.policy.pack_for_scoring(samples)))
        return [
            (torch.tensor(sample.rollout_logprobs) - scored_L)[torch.tensor(sample.action_mask)].abs()
            for sample, scored_L in zip(samples, scored, strict=True)
        ]

    async def _from_each(
        self, engines: RolloutEngine | EngineSubset, prompt: tuple[int, ...]
    ) -> list[tuple[Completion, ...]]:
        if isinstance(engines, EnginePool | EngineSubset):
            return await engines.generate_everywhere(prompt, self.sampling)
        return [await engines.generate(prompt, self.sampling)]
