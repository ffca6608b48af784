"""The cross-entropy in the policy's loss: which tokens, divided by how many, by hand; and its gradient against plain
torch on separate sequences, in any packs and on two ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from tests.support.ranks import in_ranks
from tests.verl.batch.test_packing import sample, tiny_model
from tests.verl.batch.test_segments import edited, of_two_kinds
from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.losses.vapo import VAPO, right_tokens
from verl.algorithms.names import Aggregation
from verl.batch.experience import nonzero_advantage_rows, policy_minibatch
from verl.batch.packed import PackedBatch
from verl.batch.packing import assign, make_units, pack
from verl.batch.samples import batch_of, to_batch
from verl.batch.token_batch import TokenBatch
from verl.lora import Lora, adapter_tensors, add_adapter
from verl.workers.fsdp_engine import FSDPEngine, PackMetric
from verl.workers.model import PackedPolicy, PolicyOutput, decoder_layers, hf_named_parameters
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import policy_loss

COEFFICIENT = 0.3
PLAIN = replace(GRPO, kl=KLTerm(), aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
ECHO = replace(PLAIN, observation_coefficient=COEFFICIENT)
BOTH = replace(ECHO, likelihood=right_tokens)  # two kinds of tokens in one loss
TEMPERATURE = 0.7


def two_turns() -> TokenBatch:
    """Two rollouts of one prompt, 7 8: the first asks twice and sees 2 3 and 5, the second once and sees 9, behind its
    last token."""
    first = sample([7, 8], [1, 2, 3, 4, 5, 6], masked=(1, 2, 4))
    second = sample([7, 8], [1, 9], masked=(1,))
    batch = batch_of([first, second])
    advantages, rewards = np.array([1.0, 1.0, 1.0, -1.0]), np.array([0.0, 0.0, 1.0, 0.0])
    return replace(batch, advantages=advantages.astype(np.float32), rewards=rewards.astype(np.float32))


class Known:
    """In place of a model: each token's log-prob is minus its id over 8."""

    def __call__(self, packed: PackedBatch, temperature: float, with_entropy: bool) -> PolicyOutput:
        logprobs = -packed.target.float() / 8
        return PolicyOutput(logprobs, torch.zeros_like(logprobs))


def test_observations_are_between_trained_tokens_by_hand() -> None:
    assert two_turns().observed.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, *[0, 0, 0, 0]]
    batch = to_batch([of_two_kinds()])  # 9 [5] 6 6 [7], then 1 2 [3 4] 8 [3], then 1 2 [4]
    assert batch.observed.tolist() == [0, 0, 1, 1, 0, *[0, 0, 0, 0, 1, 0], *[0, 0, 0]]
    assert not to_batch([of_two_kinds()], train_on_observations=True).observed.any()
    mask, counts = np.zeros_like(batch.action_mask), np.zeros_like(batch.num_trained)
    assert not replace(batch, action_mask=mask, num_trained=counts).observed.any()


def test_a_batch_by_hand() -> None:
    """Token mean over 4 trained tokens: advantages 1, 1, 1 and -1 at ratio 1. Three observations: -log p of 2, 3 and 5
    is 2/8, 3/8 and 5/8, so their mean is 10/24."""
    algorithm = replace(ECHO, aggregation=Aggregation.TOKEN_MEAN)
    minibatch = policy_minibatch(two_turns(), algorithm)
    assert minibatch.nll_weights is not None
    assert minibatch.nll_weights.tolist() == pytest.approx([0, 0, 0, 0.1, 0.1, 0, 0.1, 0, *[0, 0, 0, 0]])
    packed = pack(make_units(minibatch, True, 100), minibatch)
    assert packed.target.tolist() == [1, 4, 6, 1, 2, 3, 5] and packed.source.tolist() == [1, 4, 6, 1, 2, 3, 5]
    loss, metrics = policy_loss(Known(), packed, algorithm, 1.0)
    assert float(loss) == pytest.approx(-2 / 4 + COEFFICIENT * 10 / 24)
    found = {name: each.value().value for name, each in metrics.items()}
    assert found["actor/observation_loss"] == pytest.approx(10 / 24) and found["actor/observation_tokens"] == 3


def test_right_tokens_by_hand() -> None:
    """Those of the first rollout, 1, 4 and 6: their mean is 11/24, whatever the aggregation of the loss is."""
    for aggregation, rl in ((Aggregation.TOKEN_MEAN, -2 / 4), (Aggregation.SEQ_MEAN_TOKEN_MEAN, 0.0)):
        algorithm = replace(PLAIN, aggregation=aggregation, likelihood=right_tokens)
        minibatch = policy_minibatch(two_turns(), algorithm)
        loss, metrics = policy_loss(Known(), pack(make_units(minibatch, True, 100), minibatch), algorithm, 1.0)
        assert float(loss) == pytest.approx(rl + 0.1 * 11 / 24)
        assert metrics["actor/selected_fraction"].value().value == pytest.approx(3 / 4)
        assert "actor/observation_loss" not in metrics


def test_off_it_leaves_no_trace() -> None:
    minibatch = policy_minibatch(two_turns(), PLAIN)
    assert minibatch.nll_weights is None
    packed = pack(make_units(minibatch, True, 100), minibatch)
    assert packed.nll_weights is None and len(packed.source) == len(packed.sample) == 4


def test_samples_with_observations_are_computed_without_an_advantage() -> None:
    nothing = replace(two_turns(), advantages=np.zeros(4, dtype=np.float32))
    assert nonzero_advantage_rows(nothing, ECHO).tolist() == [0]  # the second has none that the policy answers
    assert nonzero_advantage_rows(nothing, PLAIN).tolist() == []
    silent = batch_of([sample([1], [2], masked=(0,)), *[sample([7], [1, 2, 3], masked=(1,))] * 2])
    silent = replace(silent, advantages=np.array([0.0, 0.0, 0.0, 1.0], dtype=np.float32))
    assert nonzero_advantage_rows(silent, ECHO).tolist() == [1, 2]


def test_without_an_observation_there_is_nothing_to_learn() -> None:
    batch = replace(batch_of([sample([7], [1, 2])]), advantages=np.ones(2, dtype=np.float32))
    minibatch = policy_minibatch(batch, ECHO)
    loss, metrics = policy_loss(Known(), pack(make_units(minibatch, True, 100), minibatch), ECHO, 1.0)
    assert float(loss) == -1.0
    assert [metrics[f"actor/observation_{name}"].value().value for name in ("loss", "tokens")] == [0.0, 0.0]


# Against plain torch


def episodes() -> TokenBatch:
    """Two groups of episodes of several turns and segments, with an advantage for each token."""
    batch = to_batch([edited(), replace(edited(), rewards=(0.0, 2.0, 1.0))])
    advantages = np.sin(np.arange(batch.num_trained.sum()), dtype=np.float32)
    return replace(batch, advantages=advantages)


def by_hand(model: PreTrainedModel, batch: TokenBatch, algorithm: Algorithm) -> tuple[Tensor, dict[str, float]]:
    """The loss of separate sequences by transformers' own forward, in the formulas of the docs: the ratio is 1, so its
    gradient is that of A log p. Its value by kinds of tokens."""
    assert batch.advantages is not None and batch.rewards is not None
    model.set_attn_implementation("sdpa")
    bounds, num_episodes = batch.bounds, len(batch.episode_bounds) - 1
    rl, observations, right = [], [], []
    for first, after in zip(batch.episode_bounds[:-1], batch.episode_bounds[1:], strict=True):
        actions = slice(bounds.trained[first], bounds.trained[after])
        length, reward = actions.stop - actions.start, float(batch.rewards[actions].sum())
        for row in range(first, after):
            ids = torch.from_numpy(batch.token_ids[bounds.tokens[row] : bounds.tokens[row + 1]].astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
            mask = torch.from_numpy(batch.action_mask[bounds.tokens[row] : bounds.tokens[row + 1]])[1:]
            places = mask.nonzero().squeeze(-1)
            within = torch.zeros_like(mask)
            within[int(places[0]) : int(places[-1])] = True
            advantages = torch.from_numpy(batch.advantages[bounds.trained[row] : bounds.trained[row + 1]])
            ratio = (logprobs[mask] - logprobs[mask].detach()).exp()
            rl.append(-(ratio * advantages).sum() / length / num_episodes)
            observations.append(-logprobs[within & ~mask])
            if reward > 0:
                right.append(-logprobs[mask])
    cross_entropies = {"observations": torch.cat(observations).mean(), "right": torch.cat(right).mean()}
    loss = torch.stack(rl).sum() + algorithm.observation_coefficient * cross_entropies["observations"]
    if algorithm.likelihood is not None:
        loss = loss + 0.1 * cross_entropies["right"]
    return loss, {name: float(each.detach()) for name, each in cross_entropies.items()}


def gradients(parameters: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])


def trained_model(adapted: bool) -> PreTrainedModel:
    model = tiny_model("qwen2", True, torch.float64)
    if adapted:
        add_adapter(model, Lora(4, 8.0, ("all-linear",)))
        generator = torch.Generator().manual_seed(1)
        for _, each in adapter_tensors(model):  # in float32; B is 0 at first, and would leave A without a gradient
            each.data = torch.randn(each.shape, generator=generator, dtype=torch.float64) / 4
    return model


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "an adapter"])
@pytest.mark.parametrize("algorithm", [PLAIN, ECHO, BOTH], ids=["off", "observations", "right tokens, too"])
def test_gradients_are_those_of_separate_sequences_in_any_packs(algorithm: Algorithm, adapted: bool) -> None:
    batch, model = episodes(), trained_model(adapted)
    trained = [each for each in model.parameters() if each.requires_grad]
    loss, expected = by_hand(model, batch, algorithm)
    loss.backward()  # type: ignore[no-untyped-call]
    wanted = gradients(trained)
    assert wanted.norm() > 0
    minibatch = policy_minibatch(batch, algorithm)
    policy = PackedPolicy(trained_model(adapted))
    own = [each for each in policy.parameters() if each.requires_grad]
    assert sum(map(Tensor.numel, own)) == len(wanted)
    for share, max_tokens, ranks in ((True, 1000, 1), (True, 60, 2), (False, 1000, 1), (False, 21, 3)):
        policy.zero_grad()
        total, found = torch.zeros((), dtype=torch.float64), dict[str, PackMetric]()
        for units in assign(make_units(minibatch, share, max_tokens), max_tokens, ranks):
            part, metrics = policy_loss(policy, pack(units, minibatch), algorithm, TEMPERATURE)
            part.backward()  # type: ignore[no-untyped-call]
            total = total + part.detach()
            found = {
                name: found[name].combined(each.detached()) if name in found else each.detached()
                for name, each in metrics.items()
            }
        assert float(total) == pytest.approx(float(loss.detach()), rel=1e-6)
        assert (gradients(own) - wanted).norm() <= 1e-6 * wanted.norm()
        if algorithm.observation_coefficient:
            assert found["actor/observation_loss"].value().value == pytest.approx(expected["observations"], rel=1e-6)
            assert found["actor/observation_tokens"].value().value == batch.observed.sum()


def update(rank: int, world: int, folder: Path) -> None:
    """An update on this rank's packs: metrics, and the full weights after it."""
    minibatch = policy_minibatch(episodes(), BOTH)
    dealt = assign(make_units(minibatch, True, 60), 60, num_ranks=world)
    module = PackedPolicy(tiny_model("qwen2", True, torch.float64))
    mesh, settings = init_device_mesh("cpu", (world,)), OptimizerSettings(lr=1e-3)
    engine = FSDPEngine(module, decoder_layers(module), mesh, settings, compute_dtype=torch.float64)

    def loss(policy: Any, packed: PackedBatch) -> Any:
        return policy_loss(policy, packed, BOTH, TEMPERATURE)

    result = engine.update([pack(units, minibatch) for units in dealt[rank::world]], loss)
    weights = {name: full.clone() for name, full in engine.export_weights(hf_named_parameters(module))}
    if rank == 0:
        torch.save((result.of("actor"), weights), folder / "outcome.pt")


@pytest.mark.long
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    outcomes = []
    for world in (1, 2):
        in_ranks(world, update, tmp_path / str(world))
        outcomes.append(torch.load(tmp_path / str(world) / "outcome.pt", weights_only=False))
    (one, weights), (two, others) = outcomes
    assert {name: each.value for name, each in two.items()} == pytest.approx(
        {name: each.value for name, each in one.items()}, rel=1e-6, abs=1e-9
    )
    assert one["actor/observation_tokens"].value == episodes().observed.sum()
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-6, atol=2e-5)  # as in test_fsdp_engine.py


def test_vapo_is_ppo_with_a_cross_entropy() -> None:
    assert VAPO.selection is None and VAPO.likelihood is not None
    rewards = torch.tensor([1.0, 0.0, 2.0])
    assert VAPO.likelihood(rewards).tolist() == pytest.approx([0.05, 0.0, 0.05])
