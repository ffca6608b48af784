"""Weight sync: the policy's weights are sent to the engines, and a canary checks that they arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verl.batch.samples import batch_of, sample_from_completion
from verl.batch.token_batch import Floats, TokenBatch
from verl.errors import VerlError
from verl.host.daemon import run_in_daemon_thread
from verl.rollout.engine import RolloutEngine, Sampling, WeightTarget
from verl.trainer.not_finite import NotFiniteError
from verl.trainer.policy import Policy
from verl.transfer.bucket import BucketLayout
from verl.types import Completion, FinishReason


class StaleEngineError(VerlError, RuntimeError):
    """The rollout engine does not hold the weights of the last weight sync."""


@dataclass(kw_only=True)
class WeightSync:
    """Sends weights to the engines and probes them after each weight sync.

    Calls to the ranks run in a thread, because episodes may be in flight.

    probes: prompts that each engine continues by a few tokens; the trainer recomputes their log-probs
    tolerance: maximum mean abs(logp_engine - logp_trainer), in nats; above it the run fails
    """

    policy: Policy
    engine: RolloutEngine
    layouts: Sequence[BucketLayout]  # buckets of one weight sync
    probes: Sequence[tuple[int, ...]]
    sampling: Sampling
    tolerance: float
    version: int | None = None  # version of the last weight sync
    merged_share: float | None = None  # of the adapter's update, in the weights that it sent; None: none was merged
    ranks: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the trainer ranks are in use

    async def sync(self, version: int) -> float:
        """Send the weights as `version`. Returns the canary's mean log-prob difference. The caller holds `ranks`.

        Raises StaleEngineError if the difference exceeds the tolerance.
        """
        await self.engine.replace_lost()
        with self.engine.paused():
            await self.push(version)
            diffs = await self._canary(self.engine, version)
        diffs += await self._to_lost(version)
        self.merged_share = await run_in_daemon_thread(self.policy.end_weight_sync)
        return self._checked(diffs, version)

    async def restore(self) -> None:
        """Replace lost engines and send them the weights that the others have, once the ranks are free."""
        async with self.ranks:
            if self.version is None:  # before the first weight sync
                await self.engine.replace_lost()
            elif diffs := await self._to_lost(self.version):  # else a weight sync has replaced them
                await run_in_daemon_thread(self.policy.end_weight_sync)
                self._checked(diffs, self.version)

    async def push(self, version: int) -> None:
        """Send the weights without the canary check."""
        await self._push_to(self.engine, version)
        self.version = version

    async def _to_lost(self, version: int) -> list[Tensor]:
        """Replace lost engines and sync their weights, until none is lost. Returns the canary's differences."""
        diffs: list[Tensor] = []
        while (replaced := await self.engine.replace_lost()) is not None:
            with self.engine.paused():
                await self._push_to(replaced, version)
                diffs += await self._canary(replaced, version)
        return diffs

    async def _push_to(self, engines: WeightTarget, version: int) -> None:
        addresses = await run_in_daemon_thread(self.policy.begin_weight_sync)
        await engines.begin_weights([replace(each, version=version) for each in self.layouts])
        # Last: a rank would wait forever for an engine that is lost in between, but whose process does not hang up.
        keys = await engines.connect(addresses)
        send = partial(self.policy.send_weights, keys, version)
        both = [asyncio.create_task(each) for each in (engines.load_weights(), run_in_daemon_thread(send))]
        try:
            await asyncio.gather(*both)  # raises either's failure without waiting for the other
        finally:
            for each in both:
                each.cancel()
        await engines.end_weights(version)

    def _checked(self, diffs: Sequence[Tensor], version: int) -> float:
        """Mean over all tokens. Raises StaleEngineError if it exceeds the tolerance."""
        diff = float(torch.cat([*diffs]).mean())
        if not diff <= self.tolerance:
            raise StaleEngineError(
                f"weight sync check failed at version {version}: mean abs(logp_engine - logp_trainer) = {diff:.3g} > "
                f"{self.tolerance:.3g} nats; the engine has stale weights or different numerics"
            )
        return diff

    async def _canary(self, engines: WeightTarget, version: int) -> list[Tensor]:
        """[A] each, abs(logp_engine - logp_trainer) of the sampled tokens; [] if all engines were lost meanwhile.

        Raises NotFiniteError where the trainer's own log-probs are not finite: then the engine is not to blame.
        """
        try:
            answers = await asyncio.gather(*(engines.probe(prompt, self.sampling) for prompt in self.probes))
        except (VerlError, RuntimeError):
            ends = [
                (prompt[:-1], Completion(prompt[-1:], (0.0,), FinishReason.LENGTH, version)) for prompt in self.probes
            ]
            await self._scored(ends, version)
            raise
        written = [
            (prompt, completions[0]) for prompt, each in zip(self.probes, answers, strict=True) for completions in each
        ]
        if stale := {completion.weight_version for _, completion in written} - {version}:
            problem = f"the engine answers with version {sorted(stale)}"
            raise StaleEngineError(f"weight sync check failed at version {version}: {problem}")
        if not written:
            return []
        batch, scored = await self._scored(written, version)
        assert batch.rollout_logprobs is not None
        return [torch.from_numpy(batch.rollout_logprobs - scored).abs()]

    async def _scored(
        self, written: Sequence[tuple[tuple[int, ...], Completion]], version: int
    ) -> tuple[TokenBatch, Floats]:
        """The completions of these prompts as a batch, and the trainer's log-probs [A]. Raises NotFiniteError."""
        batch = batch_of([sample_from_completion(prompt, completion) for prompt, completion in written])
        scored = await run_in_daemon_thread(lambda: self.policy.score(self.policy.shard_for_scoring(batch)))
        if not np.isfinite(scored).all():
            raise NotFiniteError(
                f"the policy's log-probs are not finite at version {version} of its weights: they overflow. Lower "
                "actor.optim.lr or actor.grad_clip, and resume from the last checkpoint"
            )
        return batch, scored
