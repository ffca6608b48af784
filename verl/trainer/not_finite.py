"""Names the rows whose values make an update infinite or NaN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

import numpy as np

from verl.batch.experience import sampling_logprobs
from verl.batch.token_batch import Floats, TokenBatch
from verl.errors import VerlError
from verl.trainer.policy import Policy

_SHOWN = 3  # rows


class NotFiniteError(VerlError, RuntimeError):
    """Advantages, or the log-probs of updated weights, are infinite or NaN."""


def check_advantages(batch: TokenBatch, rows: Sequence[str]) -> None:
    """Raises NotFiniteError if advantages are not finite.

    rows: id of the row of each group; empty: they are numbered
    """
    assert batch.advantages is not None
    if batch.teacher_logprobs is not None and (bad := _groups(batch, batch.teacher_logprobs)):
        raise NotFiniteError(
            f"the teacher's log-probs of {_listed(bad, rows)} are not finite. Nothing was updated in this step"
        )
    if bad := _groups(batch, batch.advantages):
        raise NotFiniteError(
            f"the advantages of {_listed(bad, rows)} are not finite, though the rewards are: the estimator has divided "
            "by zero or overflowed. Nothing was updated in this step"
        )


def is_left_out(metrics: Mapping[str, float], model: str) -> bool:
    """Whether an update of `actor` or `critic` was not finite; it is then left out (FSDPEngine.update)."""
    return not all(isfinite(metrics.get(f"{model}/{name}", 0.0)) for name in ("loss", "grad_norm"))


def describe_cause(batch: TokenBatch, policy: Policy, rows: Sequence[str]) -> str:
    """What of which rows is not finite, after an update whose gradient is not. rows: id of the row of each group"""
    logprobs_A, sampled_A = policy.score(policy.shard_for_scoring(batch)), sampling_logprobs(batch)
    with np.errstate(over="ignore"):
        ratios_A = np.exp(np.where(np.isnan(sampled_A), 0.0, logprobs_A - sampled_A))  # NaN: not sampled
    top = batch.teacher_top
    tried = {
        "reference log-probs": batch.ref_logprobs,
        "log-probs of the teacher": batch.teacher_logprobs,
        "the teacher's likeliest log-probs": None if top is None else top["logprobs"].sum(-1),
        "values": batch.values,
        "log-probs": logprobs_A,
        "importance ratios": ratios_A,
    }
    for name, values_A in tried.items():
        if values_A is not None and (bad := _groups(batch, values_A)):
            return f"{name} of {_listed(bad, rows)} are not finite"
    return "log-probs and importance ratios of all rows are finite, so the loss or its backward pass overflowed"


def _groups(batch: TokenBatch, values_A: Floats) -> list[int]:
    """The groups of the samples that have a value that is not finite."""
    group_A = batch.groups.repeat(batch.num_trained)
    return list(map(int, np.unique(group_A[~np.isfinite(values_A)])))


def _listed(groups: Iterable[int], rows: Sequence[str]) -> str:
    names = [rows[group] if rows else f"number {group}" for group in groups]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"row {', '.join(names[:_SHOWN])}{more}"
