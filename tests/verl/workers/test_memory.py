"""Gradient checkpointing of the layers that a GPU requires: their number by hand, their gradients, a rank's choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis.strategies import booleans, integers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.verl.batch.test_packing import random_samples, tiny_model
from tests.verl.workers.test_fsdp_engine import critic_loss, policy_loss
from verl.algorithms.names import Aggregation
from verl.batch.experience import with_loss_weights
from verl.batch.packing import make_units, pack
from verl.batch.samples import batch_of
from verl.config.schema import ModelConfig
from verl.errors import ConfigError
from verl.workers.critic_worker import CriticWorker
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.memory import (
    USED_SHARE,
    ModelShape,
    PackShape,
    RankSettings,
    activations,
    layers_to_checkpoint,
    shape_of,
    updating,
)
from verl.workers.model import PackedCritic, PackedPolicy, checkpoint_layers, decoder_layers
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import PolicyWorker
from verl.workers.rank import RankSpec, TrainingRank

LAYERS = 3


@pytest.mark.parametrize(
    ("held", "layers"), [(-36_600, 0), (-36_599, 1), (-10_200, 1), (16_200, 2), (16_201, 3), (42_600, 3), (42_601, 4)]
)
def test_layers_by_hand(held: int, layers: int) -> None:
    """100 tokens, 4 layers, widths of 10 and 5, 1 head, bf16, no parameters, of a GPU of 100,000 bytes.

    A layer saves per token: norms (4 + 2) * 2 * 10, linear layers 2 * 10 * 2 + 10 * 2, the MLP 4 * 5 * 2, attention
    10 * 2 + 4 * 1 + 2 * 10 * 2: 284 bytes; recomputed, its input: 20. Beside the layers: rotary angles 40, last norm
    60, gradients of an MLP 30. Needed are 126,600 bytes without recomputing, and 26,400 less for each layer.
    """
    shape = ModelShape(0, 0, 0, 4, 10, 1, 10, 10, 5, 1, 2, False, selects=False)
    settings = RankSettings(compute=2, shards=1)
    assert layers_to_checkpoint(shape, PackShape(tokens=100, trained=0), settings, 100_000, held) == layers


@pytest.mark.parametrize(
    ("checkpointed", "saved"), [(0, 124_100 - 13_500), (3, 124_100 - 13_500 - 3 * 26_400), (4, 14_000)]
)
def test_the_last_layer_keeps_the_trained_positions_alone_by_hand(checkpointed: int, saved: float) -> None:
    """As above, with 25 trained tokens of 20 bytes each. At 75 positions the last layer's second norm and MLP save
    nothing, 60 + 20 + 40 bytes, nor does the last norm, 60. Of four recomputed layers 2,000 bytes each remain, 4,000 of
    angles, and of trained tokens 60 + 20."""
    shape = ModelShape(0, 0, 0, 4, 10, 1, 10, 10, 5, 1, 2, False)
    assert activations(shape, PackShape(100, 25), RankSettings(2, 1, checkpointed)) == saved


def test_short_responses_have_more_copies_of_the_prompts_keys() -> None:
    """500 tokens are 10 groups of a prompt of 10 tokens and 4 responses of 10: 40 sequences of 20 keys. With responses
    of one token they are 35.7 groups: 142.9 sequences of 11 keys. 4 layers keep keys and values of width 10, in bf16,
    and a trained token 10 * 2 bytes."""
    shape = ModelShape(0, 0, 0, 4, 10, 1, 10, 10, 5, 1, 2, False, selects=False)
    settings, pack = RankSettings(2, 1), PackShape.of(500, 10, 10, 4, shared=True)
    shortest = pack.with_trained(pack.fewest_trained)
    assert shortest.response == pytest.approx(1)
    more = activations(shape, shortest, settings) - activations(shape, pack, settings)
    assert more == pytest.approx(4 * 2 * 10 * 2 * (4 * 500 / 14 * 11 - 40 * 20) - 10 * 2 * (400 - 4 * 500 / 14))
    room = sum(updating(shape, pack, settings).values()) / USED_SHARE
    assert layers_to_checkpoint(shape, pack, settings, room + 1, 0) == 1  # only the pack itself fits as it is
    assert PackShape.of(500, 10, 10, 4, shared=False).fewest_trained == 0


@given(
    prompt=integers(1, 900),
    response=integers(1, 400),
    responses=integers(2, 16),
    kept=integers(0, 8 * 10**9),
    fused=booleans(),
)
def test_layers_are_chosen_for_responses_of_any_length(
    prompt: int, response: int, responses: int, kept: int, fused: bool
) -> None:
    """Also of a length between the ends, whose logits are just few enough to be kept."""
    shape = ModelShape(10**6, 10**5, 10**5, 8, 64, 4, 64, 32, 256, 10**6, 2, False)
    settings = RankSettings(2, 1, checkpointed=3, fused=fused, kept_bytes=kept)
    longest = PackShape.of(4000, prompt, response, responses, shared=True)
    for length in range(1, response + 1):
        other = PackShape.of(4000, prompt, length, responses, shared=True)
        too_little = 0.999 * sum(updating(shape, other, settings).values()) / USED_SHARE
        assert layers_to_checkpoint(shape, longest, settings, too_little, 0) > 3


def test_if_nothing_suffices_all_layers_are_recomputed() -> None:
    shape = ModelShape(0, 0, 0, 4, 10, 1, 10, 10, 5, 1, 2, False)
    assert layers_to_checkpoint(shape, PackShape(100, 0), RankSettings(2, 1), 100_000, 10**9) == 4


def build(wrapper: Any) -> FSDPEngine:
    module = wrapper(tiny_model("qwen2", True, torch.float32))
    return FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (1,)), OptimizerSettings())


@pytest.mark.parametrize(("wrapper", "loss"), [(PackedPolicy, policy_loss), (PackedCritic, critic_loss)])
def test_gradients_are_equal_however_many_layers_are_recomputed(wrapper: Any, loss: Any, group: None) -> None:
    batch = with_loss_weights(batch_of(random_samples(5)), Aggregation.TOKEN_SUM)
    packs = [pack([unit], batch) for unit in make_units(batch, True, 100)]
    found: list[list[Tensor]] = []
    for number in range(LAYERS + 1):
        engine, passes = build(wrapper), [0] * LAYERS
        if number:
            checkpoint_layers(engine.module, number)  # type: ignore[arg-type]
        for index, layer in enumerate(decoder_layers(engine.module)):  # type: ignore[arg-type]

            def count(*_: Any, index: int = index, passes: list[int] = passes) -> None:
                passes[index] += 1

            layer.mlp.register_forward_pre_hook(count)
        engine.backward(packs, loss)
        assert passes == [2 * len(packs)] * number + [len(packs)] * (LAYERS - number)
        found.append([each.grad.to_local() for each in engine.module.parameters()])  # type: ignore[union-attr]
    for gradients in found[1:]:
        for one, other in zip(gradients, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_rank_recomputes_what_its_gpu_requires_and_nothing_on_a_cpu(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RankSpec("unused", torch.bfloat16, 1.0, OptimizerSettings(), largest_pack=PackShape(4000, 1000))
    policy, critic = PolicyWorker(build(PackedPolicy), 1.0), CriticWorker(build(PackedCritic), 0.5)
    rank = TrainingRank(spec, policy, PolicyWorker(build(PackedPolicy), 1.0), critic)

    def choice(**changes: Any) -> int:
        return replace(rank, spec=replace(spec, **changes)).layers_to_checkpoint()

    assert [choice(gradient_checkpointing=each) for each in (False, "auto", True)] == [0, 0, LAYERS]
    states = [3 * policy.engine.param_bytes, 3 * critic.engine.param_bytes, policy.engine.param_bytes]
    shape = shape_of(policy.engine.module, policy.engine.module.model.config)  # type: ignore[arg-type,union-attr]
    settings, chosen = RankSettings(compute=2, shards=1), []
    for total in range(8 * 10**6, 10**8, 4 * 10**6):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda total=total: (0, total))
        gpu = {"device": "cuda", "gradient_checkpointing": "auto", "fused_kernels": "none"}
        chosen.append(choice(**gpu))
        assert chosen[-1] == layers_to_checkpoint(shape, PackShape(4000, 1000), settings, total, sum(states))
    assert chosen[0] == LAYERS and chosen[-1] == 0 and len(set(chosen)) > 2

    def of_another_rank(most: Tensor, operation: Any) -> None:
        assert operation is dist.ReduceOp.MAX
        most.fill_(LAYERS)

    monkeypatch.setattr(dist, "all_reduce", of_another_rank)
    assert choice(**gpu) == LAYERS  # all ranks recompute what the fullest GPU requires


def test_other_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.enable_gradient_checkpointing.*true, false or auto"):
        ModelConfig(enable_gradient_checkpointing="some")
