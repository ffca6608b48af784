"""Importance weights by hand, by their properties, and by what they do to the gradient of a policy on a bandit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from toolrl.algorithms import presets
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.correction import UNBOUNDED, Correction, TokenWeights, effective_sample_size, token_weights
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.losses.policy_loss import clipped
from verl.algorithms.names import Aggregation, Level, OldLogprobs
from verl.workers.policy_worker import policy_loss

NAN = math.nan
# Ratios of two samples: (2, 3, 1/4) with product 3/2, and (1/2, 4) with product 2 and mean sqrt(2).
RATIOS, SAMPLE = [2.0, 3.0, 0.25, 0.5, 4.0], [7, 7, 7, 2, 2]


def weighed(correction: Correction, ratios: list[float] = RATIOS, sample: list[int] = SAMPLE) -> TokenWeights:
    """Weights where the engine takes everything for as likely as e^-1."""
    engine_T = torch.full((len(ratios),), -1.0)
    return token_weights(correction, torch.tensor(ratios).log() - 1.0, engine_T, torch.tensor(sample))


def only(**settings: Any) -> Correction:
    """A mask or a veto without weights."""
    return Correction(**{"is_level": None, "rejection_lower": 0.0, "rejection_upper": math.inf, **settings})


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (UNBOUNDED, RATIOS),
        (Correction(Level.TOKEN, is_cap=2.5), [2.0, 2.5, 0.25, 0.5, 2.5]),
        (Correction(Level.SEQUENCE, is_cap=5.0), [1.5, 1.5, 1.5, 2.0, 2.0]),
        (Correction(Level.SEQUENCE, is_cap=1.75), [1.5, 1.5, 1.5, 1.75, 1.75]),
        (only(rejection_level=Level.TOKEN, rejection_lower=0.5, rejection_upper=2.5), [1.0, 0.0, 0.0, 1.0, 0.0]),
        (only(rejection_level=Level.SEQUENCE, rejection_upper=1.9), [1.0, 1.0, 1.0, 0.0, 0.0]),
        (only(rejection_level=Level.GEOMETRIC, rejection_upper=1.4), [1.0, 1.0, 1.0, 0.0, 0.0]),
        (only(rejection_level=Level.GEOMETRIC, rejection_upper=1.42), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (only(token_veto=0.4), [0.0, 0.0, 0.0, 1.0, 1.0]),
        (Correction(Level.TOKEN, 2.5, Level.SEQUENCE, 0.5, 1.9), [2.0, 2.5, 0.25, 0.0, 0.0]),
        (Correction(Level.TOKEN, 5.0, Level.TOKEN, 0.5, 3.5), [2.0, 3.0, 0.0, 0.5, 0.0]),
    ],
)
def test_weights_by_hand(correction: Correction, expected: list[float]) -> None:
    weights = weighed(correction)
    assert weights.weight_T.tolist() == pytest.approx(expected)
    assert weights.masked_T.tolist() == [each == 0.0 for each in expected]


@pytest.mark.parametrize("level", Level)
def test_weights_never_read_from_the_device(level: Level) -> None:
    """They are computed on tensors without data."""
    values_T, sample_T = torch.empty(5, device="meta"), torch.empty(5, device="meta", dtype=torch.long)
    correction = only(rejection_level=level, token_veto=0.1)
    if level in (Level.TOKEN, Level.SEQUENCE):
        correction = replace(correction, is_level=level)
    assert token_weights(correction, values_T, values_T, sample_T).weight_T.shape == (5,)


def test_truncated_are_those_above_the_bound() -> None:
    assert weighed(Correction(is_cap=2.5)).truncated_T.tolist() == [False, True, False, False, True]


def test_tokens_not_sampled_by_the_engine_have_no_ratio() -> None:
    """Its sample's product is of the others alone, and so is the mean: of (2, 8) it is 4, not the cube root of 16."""
    trainer_T, engine_T = torch.tensor([2.0, 9.0, 8.0]).log(), torch.tensor([0.0, NAN, 0.0])
    sample_T = torch.zeros(3, dtype=torch.long)

    def weights(correction: Correction) -> list[float]:
        return token_weights(correction, trainer_T, engine_T, sample_T).weight_T.tolist()

    assert weights(UNBOUNDED) == pytest.approx([2.0, 1.0, 8.0])
    assert weights(Correction(Level.SEQUENCE, is_cap=99.0)) == pytest.approx([16.0] * 3)
    assert weights(only(rejection_level=Level.GEOMETRIC, rejection_lower=1.0, rejection_upper=3.9)) == [0.0] * 3
    assert weights(only(rejection_level=Level.GEOMETRIC, rejection_lower=1.0, rejection_upper=4.1)) == [1.0] * 3


def test_weights_carry_no_gradient() -> None:
    now_T, engine_T = torch.zeros(2, requires_grad=True), torch.tensor([-0.1, 0.2])
    assert not token_weights(Correction(), now_T, engine_T, torch.zeros(2, dtype=torch.long)).weight_T.requires_grad


def test_one_token_among_many_of_equal_weight_costs_by_hand() -> None:
    """Weights 1, 1, 1 and 3: (6 / 4)^2 / (12 / 4) = 3 / 4."""
    assert effective_sample_size(6 / 4, 12 / 4) == pytest.approx(0.75)
    assert effective_sample_size(1.0, 1.0) == 1.0 and effective_sample_size(0.0, 0.0) == 0.0


def test_a_ratio_of_nothing_overflows_nowhere() -> None:
    far_T, sample_T = torch.tensor([-300.0, 300.0]), torch.zeros(2, dtype=torch.long)
    for level in (Level.TOKEN, Level.SEQUENCE):
        assert token_weights(Correction(level, math.inf), far_T, -far_T, sample_T).weight_T.isfinite().all()


corrections = st.builds(
    Correction,
    is_level=st.sampled_from([None, Level.TOKEN, Level.SEQUENCE]),
    is_cap=st.floats(1.0, 10.0),
    rejection_level=st.sampled_from([None, *Level]),
    rejection_lower=st.floats(0.0, 1.0),
    rejection_upper=st.floats(1.0, 10.0),
    token_veto=st.none() | st.floats(1e-6, 0.9),
)
tokens = st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 4)), min_size=1, max_size=20)


@given(corrections, tokens)
def test_equal_policies_have_weight_one(correction: Correction, drawn: list[tuple[float, int]]) -> None:
    weights = weighed(correction, [1.0] * len(drawn), [sample for _, sample in drawn])
    assert torch.equal(weights.weight_T, torch.ones(len(drawn))) and not weights.truncated_T.any()


@given(corrections, tokens)
def test_weights_are_within_their_bound_and_a_sample_stands_or_falls_as_one(
    correction: Correction, drawn: list[tuple[float, int]]
) -> None:
    sample = [each for _, each in drawn]
    weights = weighed(correction, [ratio for ratio, _ in drawn], sample)
    assert bool((weights.weight_T >= 0).all()) and float(weights.weight_T.max()) <= correction.is_cap * (1 + 1e-6)
    if correction.rejection_level not in (Level.TOKEN, Level.BINARY_KL):
        fates = set(zip(sample, weights.masked_T.tolist(), strict=True))
        assert len(fates) == len(set(sample))


@pytest.mark.parametrize("algorithm", presets(), ids=lambda each: each.name)
def test_every_preset_takes_a_correction(algorithm: Algorithm) -> None:
    corrected = replace(algorithm, correction=Correction(), old_logprobs=OldLogprobs.TRAINER)
    assert corrected.correction == Correction()
    with pytest.raises(AssertionError, match="corrects already"):
        replace(algorithm, correction=Correction(), old_logprobs=OldLogprobs.ROLLOUT)


RESPONSES = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # [9, 2] all there are on the bandit
PLAIN = Algorithm("bandit", "none", GRPO.advantage, clipped, Aggregation.TOKEN_SUM)


def logprobs(logits: Tensor, responses: Tensor) -> Tensor:
    """[2 N] of two arms, the second drawn from a bandit that the first one chooses. logits: [4, 3]"""
    table = logits.log_softmax(-1)
    first, second = responses.unbind(-1)
    return torch.stack([table[0][first], table[1 + first, second]], -1).flatten()


def chances(logits: Tensor) -> Tensor:
    """[9] of every response."""
    return logprobs(logits, RESPONSES).view(-1, 2).sum(-1).exp()


@dataclass(frozen=True)
class Table:
    """The policy in a model's place."""

    logits: Tensor

    def __call__(self, packed: Any, temperature: float, entropy: bool) -> Any:
        values = logprobs(self.logits, packed.responses)
        return SimpleNamespace(logprobs=values, entropy=torch.zeros_like(values))


def test_the_loss_of_three_policies_by_hand() -> None:
    """Ratio now / before 1.1, weights before / engine of 1.5 and of 8, which is left out, but counts among the two."""
    before_T = torch.tensor([-1.0, -2.0])
    now_T = (before_T + math.log(1.1)).requires_grad_()
    half_T = torch.full((2,), 0.5)
    packed: Any = SimpleNamespace(
        old_logprobs=before_T,
        rollout_logprobs=before_T - torch.tensor([1.5, 8.0]).log(),
        advantages=torch.tensor([3.0, 5.0]),
        selected=None,
        loss_weights=half_T,
        metric_weight=0.5,
        sampled_weight=0.5,
        sample=torch.zeros(2, dtype=torch.long),
    )

    def policy(*_: Any) -> Any:
        return SimpleNamespace(logprobs=now_T, entropy=torch.zeros(2))

    correction = Correction(
        Level.TOKEN, is_cap=2.0, rejection_level=Level.TOKEN, rejection_lower=0.0, rejection_upper=4.0
    )
    loss, metrics = policy_loss(policy, packed, replace(PLAIN, correction=correction), 1.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.5 * 1.5 * 1.1 * 3.0)
    assert now_T.grad is not None and now_T.grad.tolist() == pytest.approx([-0.5 * 1.5 * 1.1 * 3.0, 0.0])
    corrections = {
        name.removeprefix("correction/"): metric.value().value
        for name, metric in metrics.items()
        if name.startswith("correction/")
    }
    k3 = (1.5 - math.log(1.5) - 1.0 + 8.0 - math.log(8.0) - 1.0) / 2
    assert corrections.pop("engine_kl") == pytest.approx(k3)
    assert corrections == pytest.approx(
        {"weight_mean": 0.75, "ess": 0.75**2 / 1.125, "weight_max": 1.5, "truncated": 0.5, "masked": 0.5}
    )


@dataclass(frozen=True)
class Bandit:
    """What responses are worth, the policy of now, and an engine that still has another one."""

    rewards: Tensor  # [9]
    now: Tensor  # [4, 3] logits
    engine: Tensor  # [4, 3] logits

    @classmethod
    def random(cls, seed: int, apart: float = 0.6) -> Bandit:
        generator = torch.Generator().manual_seed(seed)
        rewards, now, step = (torch.randn(shape, generator=generator).double() for shape in (9, (4, 3), (4, 3)))
        return cls(rewards, now, now + apart * step)

    def gradient(self, correction: Correction | None, responses: Tensor, share: Tensor) -> Tensor:
        """[12] what the worker's own loss makes of responses whose tokens weigh `share`."""
        logits, share_T = self.now.clone().requires_grad_(), share.repeat_interleave(2)
        packed: Any = SimpleNamespace(
            responses=responses,
            advantages=self.rewards[3 * responses[:, 0] + responses[:, 1]].repeat_interleave(2),
            rollout_logprobs=logprobs(self.engine, responses),
            old_logprobs=None,
            selected=None,
            loss_weights=share_T,
            metric_weight=1.0,
            sample=torch.arange(len(responses)).repeat_interleave(2),
        )
        loss, _ = policy_loss(Table(logits), packed, replace(PLAIN, correction=correction), 1.0, compare_engine=False)
        loss.backward()
        assert logits.grad is not None
        return logits.grad.flatten()

    def expected(self, correction: Correction | None) -> Tensor:
        """[12] the gradient's mean over all that the engine might write."""
        return self.gradient(correction, RESPONSES, chances(self.engine))

    def on_policy(self) -> Tensor:
        """[12] the mean over all that the policy of now might."""
        return self.gradient(None, RESPONSES, chances(self.now))

    def error(self, correction: Correction | None) -> float:
        return float((self.expected(correction) - self.on_policy()).norm())


def test_sequence_weights_give_the_gradient_that_the_policy_itself_would() -> None:
    bandit = Bandit.random(0)
    torch.testing.assert_close(bandit.expected(Correction(Level.SEQUENCE, math.inf)), bandit.on_policy())
    assert bandit.error(None) > 0.2 * float(bandit.on_policy().norm())


def test_truncated_and_token_weights_come_nearer_and_not_all_the_way() -> None:
    """On the mean of bandits: a token's weight leaves out the other token's part, which can also go the wrong way."""
    bandits = [Bandit.random(seed) for seed in range(50)]
    plain, token, sequence = (
        sum(each.error(correction) for each in bandits) / len(bandits)
        for correction in (None, Correction(Level.TOKEN), Correction(Level.SEQUENCE))
    )
    assert 0.01 < sequence < 0.4 * plain and sequence < token < 0.7 * plain


def test_stale_samples_are_corrected_towards_the_on_policy_gradient() -> None:
    """The mean over 20,000 draws is within 4.5 of its own standard errors, known exactly, and without weights is not.

    Chance alone would leave that bound once in ten thousand seeds.
    """
    bandit, num_draws, correction = Bandit.random(0), 20_000, Correction(Level.SEQUENCE, is_cap=20.0)
    chance = chances(bandit.engine)
    drawn = torch.multinomial(chance, num_draws, replacement=True, generator=torch.Generator().manual_seed(1))
    share = torch.full((num_draws,), 1 / num_draws, dtype=torch.float64)

    def deviations(used: Correction | None) -> Tensor:
        """[12] of the mean from the on-policy gradient, in standard errors."""
        single = torch.stack([bandit.gradient(used, response[None], torch.ones(1).double()) for response in RESPONSES])
        spread = (chance @ (single - chance @ single).square() / num_draws).sqrt()
        return ((bandit.gradient(used, RESPONSES[drawn], share) - bandit.on_policy()) / spread).abs()

    assert float((chances(bandit.now) / chance).max()) < correction.is_cap
    assert float(deviations(correction).max()) < 4.5
    assert float(deviations(None).max()) > 20.0
