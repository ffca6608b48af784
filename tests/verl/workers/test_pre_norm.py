"""The last layer over trained positions: equal to all positions, of which they are chosen afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.verl.workers.test_fused import FORMULAS, small_model
from verl.batch.packed import PackedBatch, Segment
from verl.workers import attention
from verl.workers.fused import fuse
from verl.workers.model import PackedCritic, PackedPolicy, checkpoint_layers, decoder_layers, hidden_states
from verl.workers.pre_norm import selects_in_last_layer

SEGMENTS = (Segment(0, 6), Segment(6, 10, 0), Segment(10, 13, 0), Segment(13, 18))
SOURCE = (5, 6, 7, 8, 5, 10, 11, 14, 16)  # the prompt's last token predicts two


def packed() -> PackedBatch:
    positions = [*range(6), *range(6, 10), *range(6, 9), *range(5)]
    source = torch.tensor(SOURCE)
    return PackedBatch(
        token_ids=torch.arange(18) % 40,
        position_ids=torch.tensor(positions),
        segments=SEGMENTS,
        source=source,
        target=source,
        sample=torch.zeros_like(source),
    )


def of_all_positions(policy: PackedPolicy) -> Tensor:
    given = packed()
    output = policy.model.get_decoder()(
        input_ids=given.token_ids[None], position_ids=given.position_ids[None], use_cache=False, segments=SEGMENTS
    )
    states: Tensor = output.last_hidden_state[0]
    assert len(states) == 18
    return states[given.source]


def gradients(policy: PackedPolicy, states: Tensor) -> list[Tensor]:
    weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).to(states.dtype)
    return list(torch.autograd.grad((states * weight).sum(), list(policy.model.get_decoder().parameters())))


@pytest.mark.parametrize("fused", [None, "before the wrapper", "after it"])
@pytest.mark.parametrize("checkpointed", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig])
def test_states_and_gradients_are_those_of_all_positions(
    kind: type[PretrainedConfig], dtype: torch.dtype, bound: float, checkpointed: int, fused: str | None
) -> None:
    """The untouched model's, whose kernels are not fused."""
    attention.register()
    model = small_model(kind).to(dtype).train()
    model.set_attn_implementation(attention.PACKED)
    untouched = PackedPolicy(copy.deepcopy(model))
    if fused == "before the wrapper":
        fuse(model, FORMULAS)
    policy = PackedPolicy(model)
    if fused == "after it":
        fuse(model, FORMULAS)
    checkpoint_layers(policy, checkpointed)
    seen: list[int] = []
    last = decoder_layers(policy)[-1]
    mlp = last.get_submodule("mlp")
    mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    found = hidden_states(model.get_decoder(), packed())
    assert seen == [len(SOURCE)]
    found_gradients = gradients(policy, found)
    expected = of_all_positions(untouched)
    with torch.no_grad():
        scored = hidden_states(model.get_decoder(), packed())
    found_values, values = [scored, found, *found_gradients], [expected, expected, *gradients(untouched, expected)]
    for one, other in zip(found_values, values, strict=True):
        assert (one - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("kind", [Olmo2Config, Gemma2Config])
def test_other_layers_keep_their_forward(kind: type[PretrainedConfig]) -> None:
    """Both normalize what they add."""
    attention.register()
    model = small_model(kind)
    for wrapper in (PackedPolicy, PackedCritic):
        assert wrapper(model) and not selects_in_last_layer(model.get_decoder())
    assert selects_in_last_layer(PackedPolicy(small_model(LlamaConfig)).model.get_decoder())
