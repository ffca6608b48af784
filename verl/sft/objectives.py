"""What `toolrl sft` minimizes: -log p of demonstrations, or DPO's loss of preference pairs.

An objective makes one optimizer step on a batch of examples, and measures the loss of all validation examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.dpo import Preferences, preferences
from verl.batch.samples import Sample, batch_of
from verl.batch.token_batch import TokenBatch
from verl.tracking.metric import combined
from verl.trainer.metrics import Metrics
from verl.trainer.policy import Policy

Example = TypeVar("Example")


class Objective(Protocol, Generic[Example]):
    name: str  # of the validation set, in metrics

    def prepared(self, policy: Policy, examples: Sequence[Example]) -> Sequence[Example]:
        """The examples with what the policy before its training knows of them."""

    def step(self, policy: Policy, examples: Sequence[Example]) -> Metrics:
        """One optimizer step."""

    def measured(self, policy: Policy, examples: Sequence[Example]) -> Metrics:
        """Means over the examples, `loss` among them."""

    def num_tokens(self, examples: Sequence[Example]) -> int:
        """Tokens in the update, prompts included."""


class Likelihood(Objective[Sample]):
    """The mean of -log p over the trained tokens of demonstrations."""

    name = "demonstrations"

    def prepared(self, policy: Policy, examples: Sequence[Sample]) -> Sequence[Sample]:
        return examples

    def step(self, policy: Policy, examples: Sequence[Sample]) -> Metrics:
        return combined([policy.sft_step(batch_of(examples))])

    def measured(self, policy: Policy, examples: Sequence[Sample]) -> Metrics:
        scored_A = policy.score(policy.shard_for_scoring(batch_of(examples)))
        return {"loss": -float(torch.from_numpy(scored_A).mean())}

    def num_tokens(self, examples: Sequence[Sample]) -> int:
        return sum(len(sample.token_ids) for sample in examples)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two responses to one prompt. reference: log p of both by the policy before its training"""

    chosen: Sample
    rejected: Sample
    reference: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class DPO(Objective[Pair]):
    """DPO's loss: one pass for the log-probs of a batch, which its weights need, and one update."""

    beta: float
    name = "pairs"

    def prepared(self, policy: Policy, examples: Sequence[Pair]) -> Sequence[Pair]:
        if not examples:
            return examples
        of_pairs = response_logprobs(policy, _batch(examples)).view(-1, 2).tolist()
        return [replace(pair, reference=tuple(each)) for pair, each in zip(examples, of_pairs, strict=True)]

    def step(self, policy: Policy, examples: Sequence[Pair]) -> Metrics:
        batch, compared = _batch(examples), self._compared(policy, examples)
        learned = combined([policy.sft_step(batch, compared.weights().float().numpy())])
        metrics = compared.metrics()
        loss = metrics.pop("loss")
        return {**learned, "actor/loss": loss, **{f"dpo/{name}": value for name, value in metrics.items()}}

    def measured(self, policy: Policy, examples: Sequence[Pair]) -> Metrics:
        return self._compared(policy, examples).metrics()

    def num_tokens(self, examples: Sequence[Pair]) -> int:
        return int(_batch(examples).num_tokens.sum())

    def _compared(self, policy: Policy, examples: Sequence[Pair]) -> Preferences:
        reference_B = torch.tensor([pair.reference for pair in examples], dtype=torch.float64).flatten()
        return preferences(response_logprobs(policy, _batch(examples)), reference_B, self.beta)


def _batch(pairs: Sequence[Pair]) -> TokenBatch:
    return batch_of(list(chain.from_iterable((pair.chosen, pair.rejected) for pair in pairs)))


def response_logprobs(policy: Policy, batch: TokenBatch) -> Tensor:
    """[B] the sum of the log-probs of each sample's trained tokens, in float64."""
    scored_A = policy.score(policy.shard_for_scoring(batch))
    sample_A = np.arange(len(batch)).repeat(batch.num_trained)
    return torch.from_numpy(np.bincount(sample_A, weights=scored_A, minlength=len(batch)))
