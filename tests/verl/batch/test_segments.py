"""Episodes of several segments: a sample of each, but the reward, advantage and loss weight of one episode."""

from __future__ import annotations

import random
from array import array
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.metric_names import known
from tests.verl.algorithms.test_algorithm_invariances import EVERY, Table, entropies, lively
from tests.verl.batch.test_packing import batch_run, tiny_model
from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.advantage import gae
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.filters import length
from verl.algorithms.losses.ppo import PPO
from verl.algorithms.names import Aggregation, KLPlacement
from verl.algorithms.overlong import Overlong
from verl.batch.experience import (
    per_episode,
    policy_minibatch,
    turns_of,
    with_advantages,
    with_loss_weights,
)
from verl.batch.packing import assign, make_units, pack
from verl.batch.samples import to_batch
from verl.batch.token_batch import TokenBatch
from verl.episodes.collection import apply_overlong_penalty
from verl.tracking.transcripts import group_rows
from verl.trainer.metrics import rollout_metrics
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
from verl.workers.policy_worker import policy_loss

SEQUENCE_RATIOS = ("gspo", "gmpo")  # of a sample, not of an episode


def turn(context: tuple[int, ...], written: tuple[int, ...], segment: int = 0, reward: float | None = None) -> Turn:
    logprobs = array("f", [-float(token) / 8 for token in written])
    completion = Completion(array("i", written), logprobs, FinishReason.STOP, 0)
    return Turn(array("i", context), completion, Message("assistant", ""), (), reward, segment=segment)


def group(*episodes: tuple[tuple[Turn, ...], float], name: str = "t", baseline: float | None = None) -> TrajectoryGroup:
    task = Task(name, (), "", "s")
    played = [Trajectory(task, n, turns, StopReason.STOP, Outcome.SCORED) for n, (turns, _) in enumerate(episodes)]
    rewards = tuple(reward for _, reward in episodes)
    return TrajectoryGroup(task, tuple(played), tuple(Score(each, {}) for each in rewards), rewards, baseline=baseline)


def same(one: TokenBatch, other: TokenBatch, *without: str) -> None:
    """Equal to the bit, types included."""
    for field in fields(TokenBatch):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if field.name in without:
            continue
        if isinstance(first, np.ndarray):
            assert first.dtype == second.dtype, field.name
            assert first.tobytes() == second.tobytes(), field.name
        else:
            assert first == second, field.name


def of_two_kinds() -> TrajectoryGroup:
    """An episode whose sub-agent (segment 7) works between two turns of its own, and one without."""
    forked = (
        turn((1, 2), (3, 4), 0),
        turn((9,), (5,), 7, 0.5),
        turn((6, 6), (7,), 7),
        turn((8,), (3,), 0),
    )
    return group((forked, 2.0), ((turn((1, 2), (4,)),), 1.0), baseline=0.25)


@pytest.mark.parametrize("observed", [False, True])
def test_a_sample_of_each_segment_by_hand(observed: bool) -> None:
    """The sub-agent ends first, so the sample with the episode's last turn, and its reward, comes last."""
    batch, o = to_batch([of_two_kinds()], observed), observed
    assert batch.episodes is not None and batch.rollout_logprobs is not None
    assert batch.rewards is not None and batch.baselines is not None
    assert batch.token_ids.tolist() == [9, 5, 6, 6, 7, *(1, 2, 3, 4, 8, 3), *(1, 2, 4)]
    assert batch.action_mask.tolist() == [0, 1, o, o, 1, *(0, 0, 1, 1, o, 1), *(0, 0, 1)]
    assert (batch.num_tokens.tolist(), batch.num_trained.tolist()) == ([5, 6, 3], [2 + 2 * o, 3 + o, 1])
    assert (batch.groups.tolist(), batch.episodes.tolist()) == ([0, 0, 0], [0, 0, 1])
    assert batch.episode_bounds.tolist() == [0, 2, 3]
    unknown = [float("nan")] * o
    logprobs = [-5.0, *unknown, *unknown, -7.0, -3.0, -4.0, *unknown, -3.0, -4.0]
    np.testing.assert_equal((8 * batch.rollout_logprobs).tolist(), logprobs)
    assert batch.rewards.tolist() == [0.5, *[0.0] * (2 * o), 0.0, 0.0, 0.0, *[0.0] * o, 2.0, 1.0]
    assert batch.baselines.tolist() == [0.25, 0.25, 0.25]


def test_the_reward_falls_on_the_last_segment_that_was_written() -> None:
    """A last segment without tokens, whose response was aborted, loses no reward."""
    batch = to_batch([group(((turn((1,), (2, 3)), turn((4,), (), 1)), 3.0))])
    assert batch.rewards is not None and batch.rewards.tolist() == [0.0, 3.0]


def test_segments_of_a_trajectory() -> None:
    forked, plain = of_two_kinds().trajectories
    assert [[each.segment for each in turns] for turns in forked.segments] == [[7, 7], [0, 0]]
    assert plain.segments == (plain.turns,) and replace(plain, turns=()).segments == ()


def test_grpo_compares_episodes_not_samples_by_hand() -> None:
    """Sums of rewards 2.5 and 1: mean 1.75, std 1.5 / sqrt(2). The forked episode has five tokens in two samples."""
    batch = with_advantages(to_batch([of_two_kinds()]), replace(GRPO, kl=KLTerm()))
    high = 0.75 / (1.5 / 2**0.5 + 1e-6)
    assert batch.advantages is not None
    assert batch.advantages.tolist() == pytest.approx([high] * 5 + [-high])


def test_gae_continues_in_the_next_segment_by_hand() -> None:
    """Rewards 0.5, then 2 at the end, values 0.1 .. 0.6, gamma = 1, lam = 0.5: deltas 0.6, 0.1, 0.1, 0.1, 1.5, and 0.4
    of the other episode. A_t = delta_t + A_{t+1} / 2; the critic's targets are A_t + V_t."""
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], dtype=np.float32)
    batch = replace(to_batch([of_two_kinds()]), values=values)
    algorithm = replace(PPO, advantage=partial(gae, gamma=1.0, lam=0.5), kl=KLTerm())
    raw = [0.78125, 0.3625, 0.525, 0.85, 1.5, 0.4]
    returns = with_advantages(batch, algorithm).returns
    assert returns is not None and returns.tolist() == pytest.approx([a + v for a, v in zip(raw, values, strict=True)])


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        (Aggregation.TOKEN_MEAN, [1 / 6, 1 / 6, 1 / 6]),
        (Aggregation.TOKEN_SUM, [1.0, 1.0, 1.0]),
        (Aggregation.SEQ_MEAN_TOKEN_SUM, [1 / 2, 1 / 2, 1 / 2]),
        (Aggregation.SEQ_MEAN_TOKEN_MEAN, [1 / 10, 1 / 10, 1 / 2]),
        (Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, [1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_an_episode_weighs_as_one_sequence_by_hand(mode: Aggregation, weights: list[float]) -> None:
    """Two episodes, of 2 + 3 tokens in two samples and of 1 token."""
    found = with_loss_weights(to_batch([of_two_kinds()]), mode, 10.0).loss_weights
    assert found is not None and found.tolist() == pytest.approx(weights)


def test_turns_of_all_segments_are_those_of_the_episode() -> None:
    """The state of a segment's first turn is its whole context."""
    forked, plain = turns_of(to_batch([of_two_kinds()]))
    assert forked.turn_L.tolist() == [0, 1, 2, 2, 3]
    assert forked.state_N[2] == plain.state_N[0] and len({*forked.state_N.tolist()}) == 4


def test_lengths_and_transcripts_are_of_the_episode() -> None:
    """Five tokens in two segments, and one token."""
    forked = of_two_kinds()
    metrics = rollout_metrics([forked])
    names = ("response_length/mean", "response_length/max", "segments/mean", "segments/max")
    assert [metrics[name] for name in names] == [3.0, 5, 1.5, 2] and all(map(known, names))
    assert length(forked, 4) == [False, True]
    overlong = Overlong(max_tokens=5, buffer=4)
    assert apply_overlong_penalty(forked, overlong).rewards == (1.0, 1.0)
    first, second = group_rows(1, forked)
    assert (first["segments"], first["num_tokens"], first["turn_rewards"]) == ([0, 7, 7, 0], 5, [None, 0.5, None, None])
    assert "segments" not in second
    assert "segments/mean" not in rollout_metrics(random_groups(0))


def random_groups(seed: int) -> list[TrajectoryGroup]:
    """Groups of several episodes of one to four turns, each in one segment."""
    source = random.Random(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(source.randrange(1, 40) for _ in range(source.randint(least, most)))

    def episode(prompt: tuple[int, ...]) -> tuple[tuple[Turn, ...], float]:
        contexts = [prompt, *(tokens(1, 3) for _ in range(source.randint(0, 3)))]
        return tuple(turn(context, tokens(1, 4)) for context in contexts), source.choice([0.0, 0.5, 1.0, 2.0])

    prompts = [tokens(2, 6) for _ in range(source.randint(1, 3))]
    sizes = [source.randint(2, 4) for _ in prompts]
    return [
        group(*(episode(prompt) for _ in range(size)), name=f"{number}", baseline=0.5)
        for number, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
    ]


def cut(groups: list[TrajectoryGroup], seed: int) -> list[TrajectoryGroup]:
    """The same turns, of which some begin a segment."""
    source = random.Random(seed)

    def recut(trajectory: Trajectory) -> Trajectory:
        number, turns = 0, []
        for each in trajectory.turns:
            turns.append(replace(each, segment=number))
            number += source.random() < 0.5
        return replace(trajectory, turns=tuple(turns))

    return [replace(each, trajectories=tuple(map(recut, each.trajectories))) for each in groups]


def scored(batch: TokenBatch, algorithm: Algorithm) -> TokenBatch:
    """With numbers in place of the models' scores, and advantages."""
    drawn = np.random.default_rng(3).normal(size=(4, int(batch.num_trained.sum()))).astype(np.float32) / 4
    assert batch.rollout_logprobs is not None
    old = batch.rollout_logprobs + drawn[0]
    ref = None if algorithm.kl.placement is KLPlacement.NONE else old + drawn[1]
    values = drawn[2] if algorithm.needs_critic else None
    scores = {"ref_logprobs": ref, "values": values, "teacher_logprobs": old + drawn[3]}
    return with_advantages(replace(batch, old_logprobs=old, **scores), algorithm)


def weighted(batch: TokenBatch, algorithm: Algorithm) -> TokenBatch:
    """Zero advantages included."""
    return policy_minibatch(batch, replace(algorithm, entropy_coefficient=1.0), 3, entropies)


def per_token(batch: TokenBatch) -> Any:
    assert batch.loss_weights is not None
    return batch.loss_weights.repeat(batch.num_trained)


@EVERY
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10**6))
def test_a_cut_changes_no_advantage_and_no_weight(algorithm: Algorithm, seed: int) -> None:
    """The same trained tokens in any number of segments: every algorithm sees the same episodes."""
    algorithm = lively(algorithm)
    whole = to_batch(groups := random_groups(seed))
    pieces = to_batch(cut(groups, seed))
    assert len(pieces) > len(whole) or pieces.episodes is None
    whole, pieces = (weighted(scored(each, algorithm), algorithm) for each in (whole, pieces))
    same(whole, pieces, "num_tokens", "num_trained", "groups", "episodes", "baselines", "loss_weights")
    assert per_token(whole).tobytes() == per_token(pieces).tobytes()


@EVERY
@settings(deadline=None, max_examples=5)
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans())
def test_a_cut_changes_no_loss_and_no_gradient(algorithm: Algorithm, seed: int, ranks: int, share: bool) -> None:
    """Of losses per token, in the worker's own function, in whatever packs and mini-batches."""
    algorithm = lively(algorithm)
    if algorithm.name in SEQUENCE_RATIOS:
        return
    groups = random_groups(seed)
    losses, gradients = zip(
        *(learned(to_batch(each), algorithm, ranks, share) for each in (groups, cut(groups, seed))), strict=True
    )
    assert losses[0] == pytest.approx(losses[1], rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradients[0], gradients[1])


def learned(batch: TokenBatch, algorithm: Algorithm, ranks: int, share: bool) -> tuple[float, torch.Tensor]:
    """(loss, gradient [A]) of two mini-batches, with a table of log-probs as the policy. The column of the critic's
    targets, which no policy reads, holds each token's place."""
    batch = scored(batch, algorithm)
    assert batch.old_logprobs is not None
    batch = replace(batch, returns=np.arange(len(batch.old_logprobs), dtype=np.float32))
    parameters = (torch.from_numpy(batch.old_logprobs).double() + 0.3).requires_grad_()  # sums cancel in float32
    total = torch.zeros((), dtype=torch.float64)
    for minibatch in map(batch.rows, batch.minibatch_rows(2)):
        minibatch = weighted(minibatch, algorithm)
        for units in assign(make_units(minibatch, share, 60), 60, ranks):
            if units:
                total = total + policy_loss(Table(parameters), pack(units, minibatch), algorithm, 1.0)[0]
    total.backward()  # type: ignore[no-untyped-call]
    assert parameters.grad is not None
    return float(total.detach()), parameters.grad


@EVERY
@settings(deadline=None, max_examples=5)
@example(677)  # rewards nearly equal
@example(15671)  # returns nearly equal
@given(st.integers(0, 10**6))
def test_the_order_of_episodes_changes_nothing(algorithm: Algorithm, seed: int) -> None:
    """Advantages and weights of a group's episodes in reverse, where scores follow from the tokens."""
    algorithm, groups = lively(algorithm), cut(random_groups(seed)[:1], seed)
    turned = [replace(each, trajectories=each.trajectories[::-1], rewards=each.rewards[::-1]) for each in groups]

    def rows(batch: TokenBatch) -> list[list[float]]:
        old = batch.rollout_logprobs
        assert old is not None
        ref = None if algorithm.kl.placement is KLPlacement.NONE else old * 1.1
        values = old / 4 if algorithm.needs_critic else None
        batch = replace(batch, old_logprobs=old, ref_logprobs=ref, teacher_logprobs=old * 0.9, values=values)
        done = with_loss_weights(with_advantages(batch, algorithm), algorithm.aggregation, algorithm.aggregation_length)
        assert done.advantages is not None
        columns = np.stack([done.advantages, per_token(done)], axis=1)
        return [each.flatten().tolist() for each in per_episode(torch.from_numpy(columns), done)]

    for one, other in zip(rows(to_batch(groups)), rows(to_batch(turned))[::-1], strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_a_minibatch_has_whole_episodes(seed: int, num_parts: int) -> None:
    batch = to_batch(cut(random_groups(seed), seed))
    if batch.episodes is None:
        return
    parts = [batch.rows(rows).episodes for rows in batch.minibatch_rows(num_parts)]
    found = [set(each.tolist()) for each in parts if each is not None]
    assert sum(map(len, found)) == len(set().union(*found)) == len(set(batch.episodes.tolist()))


@EVERY
@settings(deadline=None, max_examples=5)
@given(st.integers(0, 10**6))
def test_episodes_of_one_segment_need_no_column(algorithm: Algorithm, seed: int) -> None:
    """Naming each sample as an episode of its own changes no bit, nor does the number of the only segment."""
    algorithm, groups = lively(algorithm), random_groups(seed)
    plain = to_batch(groups)
    assert plain.episodes is None
    named = replace(plain, episodes=np.arange(len(plain)))
    one, other = (weighted(scored(each, algorithm), algorithm) for each in (plain, named))
    same(one, other, "episodes")
    same(plain, to_batch([renumbered(each) for each in groups]))


def renumbered(each: TrajectoryGroup) -> TrajectoryGroup:
    turns = [tuple(replace(one, segment=4) for one in trajectory.turns) for trajectory in each.trajectories]
    return replace(
        each, trajectories=tuple(replace(one, turns=of) for one, of in zip(each.trajectories, turns, strict=True))
    )


def edited() -> TrajectoryGroup:
    """Two episodes with a segment that edits the observation after the first response, and one with the prompt and a
    summary; then one of a single response. Packs sort the edited segment before the one that trains the response."""
    prompt, first = (11, 12, 13, 14, 15), tuple(range(50, 61))

    def episode(own: int) -> tuple[Turn, ...]:
        return (
            turn(prompt, (own, *first)),
            turn((30, 31), (own, 23)),
            turn((*prompt, own, *first, 29), (own, 24, 25), 1),
            turn((*prompt, 40, 41), (own, 26), 2),
            turn((42,), (27, 28), 2),
        )

    return group((episode(1), 1.0), (episode(2), 0.0), (episode(3)[:1], 0.5))


def test_segments_share_what_they_begin_with_by_hand() -> None:
    """Rows: the original, edited and summarized context of an episode. The first two have 17 tokens in common, the
    response included; the summaries and the third episode only the 5 of the prompt."""
    batch = to_batch([edited()])
    assert batch.num_tokens.tolist() == [21, 21, 12, 21, 21, 12, 17]
    units = make_units(batch, True, 1000)
    assert {(frozenset(unit.samples), unit.prefix, unit.num_tokens) for unit in units} == {
        (frozenset({0, 1}), 17, 17 + 4 + 4),
        (frozenset({3, 4}), 17, 17 + 4 + 4),
        (frozenset({2, 5, 6}), 5, 5 + 7 + 7 + 12),
    }


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=2, max_size=12))
def test_parts_of_a_group_save_at_least_as_much_as_one(sequences: list[list[int]]) -> None:
    """Every sample is in one unit, and a unit's prefix is what its samples begin with, by the lists themselves."""
    turns = tuple(turn(tuple(ids), (7,), number) for number, ids in enumerate(sequences))
    batch, whole = to_batch([group((turns, 1.0))]), [[*each, 7] for each in sequences]
    units = make_units(batch, True, 1000)
    assert sorted(row for unit in units for row in unit.samples) == list(range(len(whole)))
    for unit in units:
        rows = [whole[row] for row in unit.samples]
        assert unit.prefix == (common(rows) if len(rows) > 1 else 0)
        assert unit.num_tokens == sum(map(len, rows)) - (len(rows) - 1) * unit.prefix
    together = sum(map(len, whole)) - (len(whole) - 1) * common(whole)
    assert sum(unit.num_tokens for unit in units) <= together


def common(sequences: list[list[int]]) -> int:
    columns = enumerate(zip(*sequences, strict=False))
    return next((place for place, each in columns if len({*each}) > 1), min(map(len, sequences)))


@pytest.mark.parametrize("max_tokens", [21, 40, 1000])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_shared_segments_equal_separate_ones(dtype: torch.dtype, bound: float, max_tokens: int) -> None:
    """Log-probs and gradients of a model, where a prefix has trained tokens."""
    model, batch = tiny_model("qwen2", True, dtype), to_batch([edited()])
    places = np.concatenate([np.arange(count) for count in batch.num_trained]).astype(np.float32)
    batch = replace(batch, advantages=places)
    alone_logprobs, alone = batch_run(model, batch, False, 21)
    logprobs, gradient = batch_run(model, batch, True, max_tokens)
    assert logprobs == {row: pytest.approx(values, abs=bound) for row, values in alone_logprobs.items()}
    assert (gradient - alone).norm() <= bound * alone.norm()
