"""What layers with state keep for the backward: counted without data, against what autograd keeps of real packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.support.saved import saved_bytes
from tests.support.stateful import DENSE
from tests.toolrl.check.plan.test_plan import one_group
from tests.verl.workers.test_delta_net import KINDS
from tests.verl.workers.test_parity import tiny_config
from tests.verl.workers.test_state import mixers, model_of
from verl.batch.packed import Segment
from verl.lora import Lora, add_adapter
from verl.pretrained import class_of
from verl.workers import state_memory
from verl.workers.delta_net import use_kernels
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
from verl.workers.model import PackedPolicy, checkpoint_layers
from verl.workers.state import CHUNK, separate_states
from verl.workers.state_cost import Parts, StateCost
from verl.workers.state_memory import SavedState, saved_by_state


def layer_bytes(layer: torch.nn.Module, segments: Sequence[Segment], width: int, dtype: torch.dtype) -> int:
    layer.forward.segments = segments
    hidden = torch.randn(1, segments[-1].end, width, dtype=dtype, requires_grad=True)
    return saved_bytes(layer, lambda: layer(hidden))


def group(prompt: int, response: int, responses: int) -> list[Segment]:
    starts = [prompt + response * at for at in range(responses)]
    return [Segment(0, prompt), *(Segment(at, at + response, 0) for at in starts)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [*DENSE])
def test_the_bytes_of_packs_are_counted_without_data(kind: str, dtype: torch.dtype) -> None:
    """Of whole chunks nearly all; of shorter segments at most a chunk's more each."""
    model = model_of(kind)
    separate_states(model.get_decoder())
    width, saved = model.config.hidden_size, saved_by_state(model.get_decoder())[dtype.itemsize]
    layer = mixers(model)[0].module.to(dtype)
    for prompt, response, responses in ((2 * CHUNK, CHUNK, 3), (3 * CHUNK, 5, 2), (70, 90, 4)):
        segments = group(prompt, response, responses)
        counted = saved.num_bytes(segments[-1].end, len(segments))
        exact = layer_bytes(layer, segments, width, dtype)
        whole = saved.num_bytes(sum(-(-(each.end - each.start) // saved.chunk) * saved.chunk for each in segments), 0)
        assert exact <= 1.02 * counted
        assert 0.75 * (whole + len(segments) * saved.per_segment) <= exact


def test_what_the_kernels_keep_by_hand() -> None:
    """Per token and in bf16, of 2 key heads and 4 value heads of 8: normalized queries and keys 2 * 2 * 8, their norms
    of 4 bytes 2 * 2, values 4 * 8, sums of decays 4 of 4 bytes, betas 4, and 64 elements of the inverse for each head.
    A sequence begins with a state of 4 * 8 * 8 in float32. fla-core 0.6 in Triton's interpreter kept as much."""
    tokens, sequences = 6, 2
    query, key, value = (torch.randn(1, tokens, heads, 8).bfloat16() for heads in (2, 2, 4))
    decay, beta = torch.randn(1, tokens, 4), torch.rand(1, tokens, 4).bfloat16()
    before, kept = torch.randn(sequences, 4, 8, 8).requires_grad_(), []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes), lambda none: none):
        options = {"initial_state": before, "cu_seqlens": torch.tensor([0, 2, 6])}
        state_memory.keeping_rule(query, key, value, decay, beta, output_final_state=False, **options)
    token = 2 * (2 * 2 * 8 + 4 * 8 + 4 + 4 * 64) + 4 * (2 * 2 + 4)
    assert sum(kept) == tokens * token + sequences * 4 * 4 * 8 * 8


@pytest.mark.parametrize("kind", KINDS)
def test_layers_by_kernels_are_counted_over_all_sequences_at_once(kind: str) -> None:
    model = model_of(kind)
    separate_states(model.get_decoder())
    use_kernels(model, state_memory.KEEPING)
    saved = saved_by_state(model.get_decoder())[4]
    segments = group(33, 7, 3)
    exact = layer_bytes(mixers(model)[0].module, segments, model.config.hidden_size, torch.float32)
    assert saved.chunk == 1 and exact == pytest.approx(saved.num_bytes(segments[-1].end, 4), rel=0.02)


def test_frozen_weights_keep_less_and_the_layer_stays_as_it_is() -> None:
    model = model_of("granitemoehybrid")
    separate_states(model.get_decoder())
    before = [each.clone() for each in model.parameters()]
    whole = saved_by_state(model.get_decoder())[4]
    assert all(torch.equal(each, other) for each, other in zip(model.parameters(), before, strict=True))
    mixers(model)[0].module.requires_grad_(False)
    assert 0 < saved_by_state(model.get_decoder())[4].per_token < whole.per_token
    assert saved_by_state(class_of(tiny_config("qwen2")).from_config(tiny_config("qwen2")).get_decoder()) == {}


@pytest.mark.parametrize("kind", ["granitemoehybrid", "qwen3_5_text", "lfm2"])
def test_weights_in_four_bits_are_not_kept(kind: str) -> None:
    """An adapter's layer keeps as much beside them as beside frozen weights in 16 bits."""
    found = []
    for nf4 in (False, True):
        model = model_of(kind).to("meta")
        add_adapter(model, Lora(2, 4.0, ("all-linear",), nf4=nf4))
        separate_states(model.get_decoder())
        found.append(saved_by_state(model.get_decoder()))
    assert found[0] == found[1] and found[0][2].per_token > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recomputed", [0, 1])
@pytest.mark.parametrize("kind", [*DENSE])
def test_the_activations_of_a_model_are_those_of_all_its_layers(kind: str, recomputed: int, dtype: torch.dtype) -> None:
    """Of whole chunks, beside what a chunk of each segment may take. The first layer has a state; without it the rest
    shows what is not counted: norms that end in float32."""
    policy = PackedPolicy(model_of(kind).to(dtype).train())
    if recomputed:
        checkpoint_layers(policy, recomputed)
    shape, config = shape_of(policy, policy.model.config), policy.model.config
    packed, pack = one_group(True, 2 * CHUNK, CHUNK, config.vocab_size)
    settings = RankSettings(dtype.itemsize, 1, recomputed, on_cpu=True)
    saved = shape.saved[dtype.itemsize]
    spare = sum(each.state for each in shape.parts[recomputed:]) * saved.per_token * 3 * (saved.chunk - 1)
    found = saved_bytes(policy, lambda: policy(packed, 1.0, True))
    assert found == pytest.approx(activations(shape, pack, settings) - spare, rel=0.2 if recomputed else 0.15)


def test_layers_of_a_state_take_more_so_more_are_recomputed() -> None:
    """4 layers of 100 tokens, as of test_memory.py: 284 bytes a token, one of them a state's with 1,000 in place of
    the 104 of attention and of the input and output of its linear layers."""
    plain = ModelShape(0, 0, 0, 4, 10, 1, 10, 10, 5, 1, 2, False, selects=False)
    states = StateCost((*[Parts()] * 3, Parts(attention=False, state=True)), products=0, elements=0)
    mixed = replace(plain, states=states, saved={2: SavedState(1000.0, 50.0, 3)})
    pack, settings = PackShape.of(100, 20, 20, 4, shared=True), RankSettings(compute=2, shards=1)
    attention = 100 * (10 * 2 + 10 * 2 + 10 * 2 + 4) + 2 * 4 * 40 * 10 * 2
    more = activations(mixed, pack, settings) - activations(plain, pack, settings)
    assert more == pytest.approx(1000 * (100 + 5 * 2) + 5 * 50 - attention)  # one prompt and four responses
    room = sum(updating(plain, pack, settings).values()) / USED_SHARE
    fewer, chosen = (layers_to_checkpoint(each, pack, settings, room, 0) for each in (plain, mixed))
    assert fewer < chosen
    room = sum(updating(mixed, pack.with_trained(pack.fewest_trained), settings).values()) / USED_SHARE + 1
    assert layers_to_checkpoint(mixed, pack, settings, room, 0) == 0
    of_many = replace(mixed, saved={2: SavedState(1000.0, 50_000.0)})  # for each of 100 / 64 segments at least
    few = PackShape(100, 0, 0, 60, 40)  # one sequence
    room = sum(updating(of_many, few, settings).values()) / USED_SHARE + 1
    assert layers_to_checkpoint(of_many, few, settings, room, 0) > 0
    recomputed = replace(settings, checkpointed=4)
    largest = updating(mixed, pack, recomputed)["loss chunk"] - updating(plain, pack, recomputed)["loss chunk"]
    assert largest == pytest.approx(1000 * 110 + 250 - attention)
