"""Self-distillation: the policy teaches itself, with a demonstration in the prompt of the teacher.

SDFT (arXiv 2601.19897), OPSD, SDPO (arXiv 2601.20802): what a policy writes with a demonstration before its eyes, it
learns to write without one. The teacher is the policy before the step's updates. It reads what was sampled after
another prompt, so only the tokens before the first trained one differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from verl.batch.packing import Sharding
from verl.batch.token_batch import Floats, Ints, TokenBatch
from verl.trainer.policy import Policy
from verl.types import TrajectoryGroup

Demonstration = tuple[Sequence[int], Sequence[int]]  # tokens of a prompt without and with it
Demonstrate = Callable[[TrajectoryGroup], Sequence[Demonstration | None]]  # [G] None: a rollout without one


@dataclass(frozen=True, slots=True)
class SelfTeacher:
    """Scores samples like a `Policy`, by the prompts with demonstrations (`TokenBatch.hint_ids`)."""

    policy: Policy

    def score(self, sharding: Sharding) -> Floats:
        """[A] the log-probs of the trained tokens."""
        return self.policy.score(self._hinted(sharding))

    def top(self, sharding: Sharding, k: int) -> npt.NDArray[np.void]:
        """[A] the k likeliest tokens in place of the trained ones, and their log-probs (`top_type`)."""
        return self.policy.top(self._hinted(sharding), k)

    def _hinted(self, sharding: Sharding) -> Sharding:
        """A pack holds the longest sample, too, which is longer by its demonstration."""
        batch, packing = hinted(sharding.batch), self.policy.packing
        most = max(packing.max_tokens_per_pack, int(batch.num_tokens.max(initial=0)))
        return replace(self.policy, packing=replace(packing, max_tokens_per_pack=most)).shard_for_scoring(batch)


def with_hints(batch: TokenBatch, groups: Sequence[TrajectoryGroup], demonstrate: Demonstrate) -> TokenBatch:
    """The batch with the teacher's prompts. groups: those of the batch, in its order

    A sample has one if it begins with the prompt of its task, as the first segment of an episode does.
    """
    found = [
        both
        for group in groups
        for both, trajectory in zip(demonstrate(group), group.trajectories, strict=True)
        for _ in trajectory.segments
    ]
    hints: list[Ints] = []
    for (low, high), both in zip(pairwise(batch.bounds.tokens.tolist()), found, strict=True):
        place = low + _first(batch.action_mask[low:high])
        fits = both is not None and np.array_equal(batch.token_ids[low:place], both[0])
        hints.append(np.array(both[1] if both is not None and fits else (), dtype=np.int32))
    num_hints = np.array(list(map(len, hints)), dtype=np.int64)
    return replace(batch, hint_ids=np.concatenate([*hints, np.empty(0, np.int32)]), num_hints=num_hints)


def hinted(batch: TokenBatch) -> TokenBatch:
    """The tokens and masks of the samples, with `hint_ids` in place of all before the first trained token."""
    assert batch.hint_ids is not None and batch.num_hints is not None
    ids, masks = [], []
    ends = np.cumsum(batch.num_hints)
    for row, (low, high) in enumerate(pairwise(batch.bounds.tokens.tolist())):
        hint = batch.hint_ids[ends[row] - batch.num_hints[row] : ends[row]]
        own = low + (_first(batch.action_mask[low:high]) if len(hint) else 0)
        ids += [hint, batch.token_ids[own:high]]
        masks += [np.zeros(len(hint), dtype=np.bool_), batch.action_mask[own:high]]
    num_tokens = np.array([len(one) + len(two) for one, two in zip(ids[::2], ids[1::2], strict=True)], dtype=np.int64)
    joined = np.concatenate(ids), np.concatenate(masks)
    return replace(
        batch, token_ids=joined[0], action_mask=joined[1], num_tokens=num_tokens, hint_ids=None, num_hints=None
    )


def _first(mask: npt.NDArray[np.bool_]) -> int:
    """The first trained token; without any, the end."""
    return int(mask.argmax()) if mask.any() else len(mask)
