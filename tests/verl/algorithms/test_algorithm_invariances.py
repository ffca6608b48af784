"""What no algorithm may depend on: how a mini-batch is cut, the order of its samples, what lies at masked tokens.

A policy that is a table of numbers, one for each token, takes the place of a model, so that losses and gradients of the
worker's own function can be compared exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from toolrl.algorithms import presets
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.correction import Correction
from verl.algorithms.losses.policy_loss import token_loss
from verl.algorithms.names import KLPlacement, Level, OldLogprobs
from verl.batch.experience import policy_minibatch, with_advantages
from verl.batch.packed import PackedBatch
from verl.batch.packing import assign, make_units, pack
from verl.batch.samples import Sample, batch_of
from verl.batch.token_batch import TokenBatch
from verl.workers.fsdp_engine import PackMetric
from verl.workers.policy_worker import policy_loss

EVERY = pytest.mark.parametrize("algorithm", presets(), ids=lambda each: each.name)
CORRECTABLE = pytest.mark.parametrize(  # the others' ratio is to the engine's log-probs: it corrects already
    "algorithm",
    [each for each in presets() if each.old_logprobs is OldLogprobs.TRAINER],
    ids=lambda each: each.name,
)
P, A, O = False, True, False  # prompt, action, observation  # noqa: E741
MASKS = (
    (P, P, A, A, A),
    (P, P, A, O, A, A),
    (P, P, A, A, O, O, A),
    (P, A, A),
    (P, A, O, A),
    (P, A, O, A, A, A),
)
GROUPS, REWARDS, GREEDY = (0, 0, 0, 1, 1, 1), (1.0, 0.0, 0.25, 2.0, 0.5, 0.5), (0.5, 0.5, 0.5, 1.0, 1.0, 1.0)
NAN = float("nan")
ABSOLUTE = ("max_rl", "raft_pp", "vapo")  # advantages that depend on more than differences of rewards


@dataclass(frozen=True)
class Case:
    """Samples, and per token the outputs of models."""

    samples: list[Sample]
    logprobs: list[Tensor]
    old: list[Tensor]
    ref: list[Tensor]
    values: list[Tensor]
    greedy: list[float]

    def rows(self, order: Sequence[int]) -> Case:
        return Case(*([each[row] for row in order] for each in vars(self).values()))


def case(elsewhere: float = 0.0, shift: float = 0.0) -> Case:
    """`elsewhere`: what stands at masked tokens. `shift`: of all rewards"""
    generator = torch.Generator().manual_seed(5)
    masks = [torch.tensor(mask) for mask in MASKS]

    def column(scale: float) -> list[Tensor]:
        drawn = [scale * torch.randn(len(mask), generator=generator) - 1.0 for mask in masks]
        return [torch.where(mask, row, elsewhere) for row, mask in zip(drawn, masks, strict=True)]

    logprobs, old, ref, values = (column(scale) for scale in (0.5, 0.5, 0.5, 0.1))
    samples = [
        Sample(
            token_ids=np.arange(len(mask)),
            action_mask=np.array(mask),
            rollout_logprobs=row.numpy()[list(mask)],
            group=group,
            reward=reward + shift,
        )
        for mask, row, group, reward in zip(MASKS, old, GROUPS, REWARDS, strict=True)
    ]
    return Case(samples, logprobs, old, ref, values, [each + shift for each in GREEDY])


def engine_apart(given: Case) -> Case:
    """The same of an engine whose log-probs are other than the trainer's."""
    apart = [each - 0.7 * (-1.0) ** place for place, each in enumerate(given.old)]
    samples = [
        replace(each, rollout_logprobs=(row + 0.5 * torch.arange(len(row)).sin()).numpy()[each.action_mask])
        for each, row in zip(given.samples, apart, strict=True)
    ]
    return replace(given, samples=samples)


def lively(algorithm: Algorithm) -> Algorithm:
    """With settings under which so few tokens show something."""
    if algorithm.name == "clip_cov":
        return replace(algorithm, selection=partial(algorithm.selection, share=1.0, low=0.05))  # type: ignore[arg-type]
    if algorithm.name == "dr_grpo":
        return replace(algorithm, aggregation_length=8.0)
    return algorithm


def undiscounted(algorithm: Algorithm) -> Algorithm:
    """Where returns of turns are discounted, by 1."""
    discounts = algorithm.needs_turns and "gamma" in signature(algorithm.advantage).parameters
    return replace(algorithm, advantage=partial(algorithm.advantage, gamma=1.0)) if discounts else algorithm


def trained(given: Case, rows: Sequence[Tensor]) -> Tensor:
    """[B][L] -> [A]"""
    return torch.cat([row[torch.from_numpy(each.action_mask)] for row, each in zip(rows, given.samples, strict=True)])


def built(algorithm: Algorithm, given: Case) -> TokenBatch:
    batch = replace(
        batch_of(given.samples, np.array(given.greedy, dtype=np.float32)),
        old_logprobs=trained(given, given.old).numpy(),
        ref_logprobs=None if algorithm.kl.placement is KLPlacement.NONE else trained(given, given.ref).numpy(),
        teacher_logprobs=trained(given, given.ref).numpy() if algorithm.teacher_weight else None,
        values=trained(given, given.values).numpy() if algorithm.needs_critic else None,
    )
    return with_advantages(batch, algorithm)


def advantages_of(algorithm: Algorithm, given: Case) -> Tensor:
    advantages = built(algorithm, given).advantages
    assert advantages is not None
    return torch.from_numpy(advantages)


def batch_for_update(algorithm: Algorithm, given: Case) -> TokenBatch:
    """Ready for the update, zero advantages included; the column of the critic's targets, which no policy reads, holds
    each token's place."""
    batch = built(algorithm, given)
    batch = replace(batch, returns=np.arange(int(batch.num_trained.sum()), dtype=np.float32))
    return policy_minibatch(batch, replace(algorithm, entropy_coefficient=1.0), 3, entropies)


def entropies(batch: TokenBatch) -> Any:
    """Some, which depend on the token alone."""
    assert batch.old_logprobs is not None
    return np.abs(np.sin(9.0 * batch.old_logprobs))


@dataclass(frozen=True)
class Table:
    """A policy whose parameters are its log-probs."""

    parameters: Tensor

    def __call__(self, packed: PackedBatch, temperature: float, entropy: bool) -> Any:
        assert packed.returns is not None
        logprobs = self.parameters[packed.returns.long()]
        return type("Output", (), {"logprobs": logprobs, "entropy": -logprobs})


def learned(algorithm: Algorithm, given: Case, max_tokens: int = 100, share: bool = True, ranks: int = 1) -> Any:
    """(loss, its gradient [A], metrics) of the mini-batch in packs of at most `max_tokens`."""
    batch = batch_for_update(algorithm, given)
    parameters = trained(given, given.logprobs).requires_grad_()
    total, metrics = torch.zeros(()), dict[str, PackMetric]()
    for units in assign(make_units(batch, share, max_tokens), max_tokens, ranks):
        if units:
            loss, facts = policy_loss(Table(parameters), pack(units, batch), algorithm, 1.0)
            total = total + loss
            for name, fact in facts.items():
                metrics[name] = metrics[name].combined(fact.detached()) if name in metrics else fact.detached()
    total.backward()
    assert parameters.grad is not None
    return float(total.detach()), parameters.grad, {name: each.value().value for name, each in metrics.items()}


@EVERY
def test_the_cut_into_packs_changes_nothing(algorithm: Algorithm) -> None:
    algorithm = lively(algorithm)
    loss, gradient, metrics = learned(algorithm, case())
    assert gradient.abs().sum() > 0
    for cut in ({"max_tokens": 7}, {"max_tokens": 7, "share": False}, {"max_tokens": 12, "share": False, "ranks": 3}):
        other, moved, facts = learned(algorithm, case(), **cut)
        assert other == pytest.approx(loss, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(moved, gradient)
        assert facts == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@CORRECTABLE
@pytest.mark.parametrize("weight", [Level.TOKEN, Level.SEQUENCE])
def test_the_cut_changes_nothing_under_a_correction(algorithm: Algorithm, weight: Level) -> None:
    """Of an engine that is far off, so that some of its six samples are truncated and some are left out."""
    correction = Correction(
        weight, is_cap=1.5, rejection_level=Level.GEOMETRIC, rejection_lower=0.6, rejection_upper=3.0
    )
    algorithm, given = replace(lively(algorithm), correction=correction), engine_apart(case())
    loss, gradient, metrics = learned(algorithm, given)
    assert metrics["correction/truncated"] > 0 and 0 < metrics["correction/masked"] < 1
    assert not torch.allclose(gradient, learned(replace(algorithm, correction=None), given)[1])
    for cut in ({"max_tokens": 7}, {"max_tokens": 12, "share": False, "ranks": 3}):
        other, moved, facts = learned(algorithm, given, **cut)
        assert other == pytest.approx(loss, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(moved, gradient)
        assert facts == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@CORRECTABLE
def test_kl_and_entropy_are_not_weighted(algorithm: Algorithm) -> None:
    """Where all that the engine sampled is left out, they are what remains."""
    algorithm, given = replace(lively(algorithm), entropy_coefficient=0.1), engine_apart(case())
    nothing = Correction(is_level=None, rejection_level=Level.TOKEN, rejection_lower=1.0, rejection_upper=1.0)
    loss, gradient, metrics = learned(replace(algorithm, correction=nothing), given)
    without = replace(algorithm, policy_loss=lambda inputs: token_loss(0.0 * inputs.logprobs_T))
    other, expected, _ = learned(without, given)
    assert metrics["correction/masked"] == pytest.approx(1.0) and expected.abs().sum() > 0
    assert loss == pytest.approx(other) and torch.equal(gradient, expected)


@CORRECTABLE
def test_a_correction_of_an_engine_that_agrees_changes_nothing(algorithm: Algorithm) -> None:
    corrected = replace(lively(algorithm), correction=Correction(rejection_level=Level.SEQUENCE, token_veto=1e-4))
    loss, gradient, metrics = learned(lively(algorithm), case())
    other, moved, facts = learned(corrected, case())
    assert other == loss and torch.equal(moved, gradient) and facts == metrics
    assert facts["correction/weight_mean"] == pytest.approx(1.0) and facts["correction/masked"] == 0.0


@EVERY
def test_advantages_by_group_are_those_of_the_group_alone(algorithm: Algorithm) -> None:
    """Beside a group whose rewards are all 0, as the preset defines: neither too much nor too little."""
    given = case()
    samples = [replace(each, reward=each.reward * (1 - each.group)) for each in given.samples]
    given = replace(given, samples=samples, greedy=[0.5] * 3 + [0.0] * 3)
    together, alone = advantages_of(algorithm, given), advantages_of(algorithm, given.rows([0, 1, 2]))
    assert torch.allclose(together[: len(alone)], alone, rtol=1e-6, atol=1e-7) is algorithm.by_group


@EVERY
def test_the_order_of_samples_changes_nothing(algorithm: Algorithm) -> None:
    """Clip-Cov's choice here takes all candidates, so that its dice have no effect."""
    algorithm, order = lively(algorithm), [4, 0, 5, 2, 3, 1]
    loss, gradient, _ = learned(algorithm, case())
    other, moved, _ = learned(algorithm, case().rows(order))
    rows = gradient.split([sum(mask) for mask in MASKS])
    assert other == pytest.approx(loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(moved, torch.cat([rows[row] for row in order]))


@EVERY
def test_values_at_masked_tokens_are_never_read(algorithm: Algorithm) -> None:
    algorithm = lively(algorithm)
    loss, gradient, _ = learned(algorithm, case())
    other, moved, _ = learned(algorithm, case(elsewhere=NAN))
    assert other == loss and torch.equal(moved, gradient)


@EVERY
def test_a_shift_of_all_rewards_changes_no_advantage(algorithm: Algorithm) -> None:
    """Discounted returns of turns would be shifted by less in early ones."""
    if algorithm.name in ABSOLUTE:
        pytest.skip("asks how large a reward is, not how it compares with others")
    plain, moved = (advantages_of(undiscounted(algorithm), case(shift=by)) for by in (0.0, 3.0))
    torch.testing.assert_close(plain, moved, atol=1e-4, rtol=1e-4)


@EVERY
def test_equal_rewards_teach_nothing(algorithm: Algorithm) -> None:
    """Where responses are compared with one another, and nothing but rewards is learned from."""
    if not algorithm.needs_group or algorithm.kl.placement is KLPlacement.REWARD:
        pytest.skip("is taught by more than differences within a group")
    given = case()
    same = replace(given, samples=[replace(sample, reward=0.1) for sample in given.samples])
    assert not advantages_of(undiscounted(algorithm), same).any()


def shortened(sample: Sample, kept: Tensor) -> Sample:
    return replace(sample, token_ids=sample.token_ids[kept.numpy()], action_mask=sample.action_mask[kept.numpy()])


@EVERY
def test_observations_between_turns_do_not_count(algorithm: Algorithm) -> None:
    """With the masked tokens of the episodes left out, every trained token learns the same."""
    if algorithm.needs_turns:
        pytest.skip("distinguishes turns by what lies between them")
    algorithm, given = lively(algorithm), case()
    kept = [torch.tensor(mask) for mask in MASKS]
    for mask in kept:
        mask[0] = True  # something to predict the first trained token from
    short = Case(
        [shortened(sample, mask) for sample, mask in zip(given.samples, kept, strict=True)],
        *(
            [row[mask] for row, mask in zip(rows, kept, strict=True)]
            for rows in (given.logprobs, given.old, given.ref, given.values)
        ),
        given.greedy,
    )
    loss, gradient, _ = learned(algorithm, given)
    other, moved, _ = learned(algorithm, short)
    assert other == pytest.approx(loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(moved, gradient)
