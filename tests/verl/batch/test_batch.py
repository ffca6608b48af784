"""The batch between rollouts and ranks: no token is lost or moved, and none is a Python object."""

from __future__ import annotations

import pickle
from array import array
from dataclasses import fields, replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.verl.batch.test_packing import random_samples
from toolrl.check.preflight.local_group import LocalGroup
from verl.algorithms.algorithm import KLTerm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages
from verl.algorithms.estimators.grpo import GRPO
from verl.batch import token_batch
from verl.batch.experience import with_advantages
from verl.batch.packed import PackedBatch
from verl.batch.packing import assign, make_units, pack
from verl.batch.samples import batch_of, to_batch
from verl.batch.token_batch import TokenBatch
from verl.tracking.metric import Max, Mean, combined
from verl.trainer.policy import PackSettings, ShardedModel
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

group_sizes = st.lists(st.integers(1, 6), min_size=1, max_size=8).map(tuple)


def numbered(seed: int, sizes: tuple[int, ...]) -> TokenBatch:
    """Random samples whose trained tokens are numbered in the column of advantages."""
    batch = batch_of(random_samples(seed, sizes))
    count = int(batch.num_trained.sum())
    weights = np.arange(len(batch), dtype=np.float32)
    return replace(batch, advantages=np.arange(count, dtype=np.float32), loss_weights=weights)


class Ranks(LocalGroup):
    """So many ranks, none of which exists."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self._size = size

    @property
    def size(self) -> int:
        return self._size


@settings(deadline=None)
@given(group_sizes, st.integers(0, 10**6), st.data())
def test_rows_are_the_samples_in_their_order(sizes: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    samples, batch = random_samples(seed, sizes), numbered(seed, sizes)
    rows = np.array(data.draw(st.lists(st.integers(0, len(batch) - 1))), dtype=np.int64)
    chosen = batch.rows(rows)
    assert chosen.token_ids.tolist() == [token for row in rows for token in samples[row].token_ids]
    assert chosen.action_mask.tolist() == [own for row in rows for own in samples[row].action_mask]
    bounds = batch.bounds.trained
    assert chosen.advantages is not None and chosen.loss_weights is not None
    assert chosen.advantages.tolist() == [place for row in rows for place in range(bounds[row], bounds[row + 1])]
    assert chosen.loss_weights.tolist() == rows.tolist() and chosen.old_logprobs is None


@settings(deadline=None)
@given(group_sizes, st.integers(0, 10**6), st.integers(80, 300), st.booleans(), st.integers(1, 9))
def test_ranks_pack_what_the_controller_would(
    sizes: tuple[int, ...], seed: int, max_tokens: int, share: bool, num_ranks: int
) -> None:
    """Their packs are those of the whole batch, and their scores come back to the place of each token."""
    batch = numbered(seed, sizes)
    sharding = ShardedModel(Ranks(num_ranks), PackSettings(max_tokens, share)).shard(batch)
    expected = assign(make_units(batch, share, max_tokens), max_tokens, num_ranks)
    scores = []
    for rank, shard in enumerate(sharding.shards()):
        packs = list(shard)
        for ours, units in zip(packs, expected[rank::num_ranks], strict=True):
            same(ours, pack(units, batch))
        scores.append(np.concatenate([column(packed.advantages) for packed in packs]))
    assert sharding.gathered(scores).tolist() == column(batch.advantages).tolist()


def same(one: PackedBatch, other: PackedBatch) -> None:
    """All but the rows of the samples, which count from the start of the shard."""
    for field in fields(PackedBatch):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if field.name == "sample":
            first, second = (each.unique(return_inverse=True)[1] if len(each) else each for each in (first, second))
            assert first.unique().tolist() == second.unique().tolist()
        elif isinstance(first, Tensor):
            assert first.dtype == second.dtype and first.tolist() == second.tolist()
        else:
            assert first == second


def column(values: object) -> np.ndarray:
    assert values is not None
    return np.asarray(values)


def test_values_of_some_samples_are_spread_over_all() -> None:
    batch = numbered(3, (2, 1, 2))
    rows = np.array([3, 0, 1])
    flat = batch.spread(
        [(rows[:1], column(batch.rows(rows[:1]).advantages)), (rows[1:], column(batch.rows(rows[1:]).advantages))]
    )
    kept = np.repeat(np.isin(np.arange(5), rows), batch.num_trained)
    np.testing.assert_array_equal(flat, np.where(kept, column(batch.advantages), np.nan))


def turn(context: tuple[int, ...], written: tuple[int, ...], reward: float | None = None) -> Turn:
    logprobs = array("f", [-float(token) for token in written])
    completion = Completion(array("i", written), logprobs, FinishReason.STOP, 0)
    return Turn(array("i", context), completion, Message("assistant", ""), (), reward)


@pytest.mark.parametrize("observed", [False, True])
def test_a_batch_of_groups_by_hand(observed: bool) -> None:
    """Two turns with an observation between them, paid for the first turn and at the end; then one that only begins."""
    task = Task("t", (), "", "s")
    episodes = [(turn((1, 2), (3, 4), 0.5), turn((5,), (6,))), (turn((1, 2), (7,)), turn((), ())), ()]
    played = tuple(Trajectory(task, n, turns, StopReason.STOP, Outcome.SCORED) for n, turns in enumerate(episodes))
    group = TrajectoryGroup(task, played, (Score(1.0, {}),) * 3, (1.0, 2.0, 3.0), baseline=0.25)
    batch = to_batch([group], observed)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 7] and batch.token_ids.dtype == np.int32
    assert batch.action_mask.tolist() == [False, False, True, True, observed, True, False, False, True]
    assert (batch.num_tokens.tolist(), batch.num_trained.tolist()) == ([6, 3], [3 + observed, 1])
    unknown = [float("nan")] * observed
    np.testing.assert_equal(column(batch.rollout_logprobs).tolist(), [-3.0, -4.0, *unknown, -6.0, -7.0])
    assert column(batch.rewards).tolist() == [0.0, 0.5, *[0.0] * observed, 1.0, 2.0]
    assert column(batch.baselines).tolist() == [0.25, 0.25]
    assert to_batch([replace(group, baseline=None)]).baselines is None


def test_every_token_of_a_group_has_the_advantage_of_its_own_reward() -> None:
    """Rewards of 1 to 4 in each of six groups: -1.5 to 1.5, divided by their unbiased standard deviation, 1.29."""
    samples = random_samples(7, group_sizes=(4,) * 6)
    rewarded = [replace(each, reward=1.0 + place % 4) for place, each in enumerate(samples)]
    batch = with_advantages(batch_of(rewarded), replace(GRPO, kl=KLTerm()))
    of_samples = np.array([-1.5, -0.5, 0.5, 1.5] * 6) / (5 / 3) ** 0.5
    np.testing.assert_allclose(column(batch.advantages), of_samples.repeat(batch.num_trained), rtol=1e-5)


def test_parts_of_scores_by_hand() -> None:
    """0 where a score lacks one; the estimator gets them by episode. They arrive as they were sent."""
    task, scores = Task("t", (), "", "s"), [{"format": 1.0}, {"length": 0.5, "format": 0.25}]
    episodes = [(turn((1,), (3, 4)), replace(turn((5,), (6,)), segment=1)), (turn((1, 2), (7,)),)]
    played = tuple(Trajectory(task, n, turns, StopReason.STOP, Outcome.SCORED) for n, turns in enumerate(episodes))
    batch = to_batch([TrajectoryGroup(task, played, tuple(Score(0.0, each) for each in scores), (0.0, 0.0))])
    assert batch.parts is not None and batch.parts.dtype.names == ("format", "length")
    assert batch.parts.tolist() == [(1.0, 0.0), (1.0, 0.0), (0.25, 0.5)]
    seen: list[AdvantageInputs] = []

    def spy(rollouts: AdvantageInputs) -> Advantages:
        seen.append(rollouts)
        return GRPO.advantage(rollouts)

    with_advantages(batch, replace(GRPO, advantage=spy, kl=KLTerm()))
    by_name = {name: part.tolist() for name, part in seen.pop().parts.items()}
    assert by_name == {"format": [1.0, 0.25], "length": [0.0, 0.5]}
    arrived = pickle.loads(pickle.dumps(batch.rows(np.array([2])), protocol=5))
    assert arrived.parts.dtype == batch.parts.dtype and arrived.parts.tolist() == [(0.25, 0.5)]


def test_a_shard_travels_as_bytes_of_its_arrays() -> None:
    """What is pickled for a rank: four bytes a token, one for its mask, four per trained token and column."""
    batch = numbered(5, (8,) * 200)
    (shard,) = ShardedModel(Ranks(1), PackSettings()).shard(batch).shards()
    num_tokens, num_trained = int(batch.num_tokens.sum()), int(batch.num_trained.sum())
    columns = 2 * 4 * num_trained  # log-probs of the engine, advantages; rewards stay
    rest = len(pickle.dumps(shard, protocol=5)) - 5 * num_tokens - columns
    assert 0 < rest < 50 * len(batch)


@settings(deadline=None)
@given(
    group_sizes,
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.integers(2, 5),
    st.booleans(),
    st.sampled_from([0, 100, 1 << 16]),
)
def test_a_shard_arrives_as_it_was_sent(
    sizes: tuple[int, ...], seed: int, num_ranks: int, protocol: int, in_band: bool, small: int
) -> None:
    """Bit for bit and aligned, of any types, also where a rank has no sample."""
    batch = replace(numbered(seed, sizes), metric_weight=0.1, sampled_weight=0.2)
    batch = replace(
        batch, selected=column(batch.advantages) % 3 == 0, values=column(batch.advantages).astype(np.float64)
    )
    for shard in ShardedModel(Ranks(num_ranks), PackSettings()).shard(batch).shards():
        outside: list[pickle.PickleBuffer] | None = None if in_band or protocol < 5 else []
        with patch.object(token_batch, "_SMALL", small):
            sent = pickle.dumps(shard, protocol, buffer_callback=None if outside is None else outside.append)
        arrived = pickle.loads(sent, buffers=outside)
        assert arrived.packs == shard.packs
        for field in fields(TokenBatch):
            before, after = getattr(shard.batch, field.name), getattr(arrived.batch, field.name)
            assert type(before) is type(after)
            if isinstance(before, np.ndarray):
                assert before.dtype == after.dtype and before.tobytes() == after.tobytes() and after.flags.aligned
            else:
                assert before == after


def test_ranks_do_not_receive_what_only_advantages_need() -> None:
    parts = np.ones(4, dtype=[("format", np.float32)])
    batch = replace(numbered(1, (2, 2)), baselines=np.ones(4, dtype=np.float32), parts=parts)
    for shard in ShardedModel(Ranks(2), PackSettings()).shard(batch).shards():
        assert shard.batch.rewards is None and shard.batch.baselines is None and shard.batch.parts is None


def test_metrics_of_several_updates_are_combined_by_their_own_rule() -> None:
    updates = [{"a": Mean(1.0), "b": Max(3.0)}, {"a": Mean(2.0), "b": Max(-1.0)}, {"a": Mean(6.0)}]
    assert combined(updates) == {"a": 3.0, "b": 3.0} and combined([]) == {}
