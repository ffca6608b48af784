"""FLOPs and memory of layers with state: by torch's own counter, by hand, by transformers' cache and by vLLM's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.support.stateful import DENSE, STATEFUL
from tests.verl.chat.test_native import needs_vllm
from tests.verl.workers.test_parity import tiny_config
from toolrl.check.plan.plan import decoder_of
from verl.pretrained import class_of
from verl.tracking.flops import DecoderShape, forward_flops
from verl.workers.memory import cache_per_sequence, cache_per_token, shape_of
from verl.workers.model import PackedPolicy
from verl.workers.state import has_state
from verl.workers.state_cost import state_cost

LENGTH = 64  # one chunk of a gated delta net


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(kind, **STATEFUL[kind])
    model: PreTrainedModel = class_of(config).from_config(config, attn_implementation="eager")
    return model.eval()


def counted(model: nn.Module, *args: Any, **options: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args, **options)
    return int(counter.get_total_flops())


def delta_rule(query_TD: Tensor, key_TD: Tensor, value_TD: Tensor, decay_T: Tensor, beta_T: Tensor) -> Tensor:
    """The recurrence of one head, token by token, by matrix products."""
    state_DD, outputs = torch.zeros(key_TD.shape[1], value_TD.shape[1]), []
    for query, key, value, decay, beta in zip(query_TD, key_TD, value_TD, decay_T, beta_T, strict=True):
        state_DD = decay * state_DD
        delta = beta * (value - torch.mm(key[None], state_DD)[0])
        state_DD = state_DD + torch.mm(key[:, None], delta[None])
        outputs.append(torch.mm(query[None], state_DD)[0])
    return torch.stack(outputs)


def test_the_delta_rule_has_three_products_per_element_of_its_state() -> None:
    """The recurrence is transformers' own, and torch counts what the formula has."""
    torch.manual_seed(0)
    T, K, V = 5, 3, 4
    query, key, value = torch.randn(T, K), torch.randn(T, K), torch.randn(T, V)
    gate, beta = -torch.rand(T), torch.rand(T)
    with FlopCounterMode(display=False) as counter:
        found = delta_rule(query / K**0.5, key, value, gate.exp(), beta)
    rule = modeling_qwen3_5.torch_recurrent_gated_delta_rule
    theirs, _ = rule(
        *(each[None, :, None] for each in (query, key, value)), gate[None, :, None], beta[None, :, None], None, False
    )
    torch.testing.assert_close(found, theirs[0, :, 0])
    assert counter.get_total_flops() == 2 * 3 * T * K * V


def test_mamba2_has_two_products_per_element_of_its_state() -> None:
    torch.manual_seed(0)
    T, P, N = 5, 3, 4
    value_TP, b_TN, c_TN, step_T, a = torch.randn(T, P), torch.randn(T, N), torch.randn(T, N), torch.rand(T), -0.3
    state_PN, outputs = torch.zeros(P, N), []
    with FlopCounterMode(display=False) as counter:
        for value, b, c, step in zip(value_TP, b_TN, c_TN, step_T, strict=True):
            state_PN = (step * a).exp() * state_PN + torch.mm(step * value[:, None], b[None])
            outputs.append(torch.mm(state_PN, c[:, None])[:, 0])
    values, keys, queries = (each[None, :, None] for each in (value_TP, b_TN, c_TN))
    theirs = mamba2_chunk_scan(values, step_T[None, :, None], torch.tensor([a]), keys, queries, 4)
    torch.testing.assert_close(torch.stack(outputs), theirs[0, :, 0])
    assert counter.get_total_flops() == 2 * 2 * T * P * N


def test_costs_by_hand() -> None:
    """Of two layers, the first of which has a state."""
    found = {kind: state_cost(model_of(kind).get_decoder()) for kind in ("qwen3_5_text", "granitemoehybrid", "lfm2")}
    delta, mamba, convolution = found["qwen3_5_text"], found["granitemoehybrid"], found["lfm2"]
    assert delta is not None and mamba is not None and convolution is not None
    assert delta.attending == mamba.attending == convolution.attending == 1
    assert delta.products == 3 * 4 * 8 * 8 and delta.elements == 4 * 8 * 8 + 3 * (2 * 2 * 8 + 4 * 8)
    assert mamba.products == 2 * 8 * 16 * 8 and mamba.elements == 8 * 16 * 8 + 3 * (8 * 16 + 2 * 2 * 8)
    assert convolution.products == 0 and convolution.elements == 2 * 64
    parallel = state_cost(model_of("falcon_h1").get_decoder())
    assert parallel is not None and parallel.attending == 2
    assert state_cost(class_of(tiny_config("qwen2")).from_config(tiny_config("qwen2")).get_decoder()) is None


@pytest.mark.parametrize("kind", [*DENSE])
def test_flops_of_a_forward_are_those_that_torch_counts(kind: str) -> None:
    """But for the other half of eager attention, padding before convolutions, and states: transformers computes them
    in chunks."""
    model = model_of(kind)
    states, config = state_cost(model.get_decoder()), model.config
    assert states is not None
    head = model.get_output_embeddings().weight
    matrices = sum(each.numel() for name, each in model.named_parameters() if each.ndim > 1 and "embed" not in name) - (
        head.numel() if head is not model.get_input_embeddings().weight else 0
    )
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 64 // config.num_attention_heads)
    shape = DecoderShape(matrices, states.attending, width, head.numel(), states=states.products)
    expected = forward_flops(shape, [(LENGTH, 0)], LENGTH)
    expected += 4 * states.attending * width * LENGTH * (LENGTH - 1) / 2
    convolutions = [each for each in model.modules() if isinstance(each, nn.Conv1d)]
    expected += sum(2 * each.weight.numel() * (each.kernel_size[0] - 1) for each in convolutions)
    expected += sum(in_chunks(each) for each in model.get_decoder().modules() if has_state(each))
    expected -= 2 * states.products * LENGTH
    found = counted(model, torch.randint(1, 90, (1, LENGTH)), use_cache=False)
    assert found == expected


def in_chunks(mixer: Any) -> int:
    """FLOPs of transformers' scans in chunks, as torch counts them."""
    if isinstance(mixer, Lfm2ShortConv):
        return 0
    heads = mixer.num_v_heads if hasattr(mixer, "head_k_dim") else mixer.num_heads
    gates = torch.rand(1, LENGTH, heads)
    with FlopCounterMode(display=False) as counter:
        if hasattr(mixer, "head_k_dim"):
            keys, values = (torch.randn(1, LENGTH, heads, size) for size in (mixer.head_k_dim, mixer.head_v_dim))
            modeling_qwen3_5.torch_chunk_gated_delta_rule(keys, keys, values, g=-gates, beta=gates)
        else:
            values, keys = (torch.randn(1, LENGTH, heads, size) for size in (mixer.head_dim, mixer.ssm_state_size))
            mamba2_chunk_scan(values, gates, -torch.rand(heads), keys, keys, mixer.chunk_size)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("kind", [*STATEFUL])
def test_states_have_the_sizes_of_transformers_cache(kind: str) -> None:
    """It keeps one more input of the convolution than the next token needs."""
    model = model_of(kind)
    cost, cache = state_cost(model.get_decoder()), DynamicCache(config=model.config)
    assert cost is not None
    with torch.no_grad():
        model(torch.randint(1, 90, (1, 9)), past_key_values=cache, use_cache=True)
    elements = 0
    for layer in cache.layers:
        recurrent, tails = getattr(layer, "recurrent_states", None) or {}, getattr(layer, "conv_states", None) or {}
        elements += sum(each.numel() for each in recurrent.values() if each is not None)
        elements += sum(each.numel() - each.numel() // each.shape[-1] for each in tails.values() if each is not None)
    assert elements == cost.elements


@needs_vllm
def test_states_have_the_sizes_of_vllms_cache() -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes

    def elements(shapes: Any) -> int:
        return sum(torch.Size(each).numel() for each in shapes)

    for kind in ("qwen3_5_text", "granitemoehybrid", "lfm2"):
        model = model_of(kind)
        (mixer,) = (each for each in model.get_decoder().modules() if has_state(each))
        if kind == "qwen3_5_text":
            shapes = Shapes.gated_delta_net_state_shape(1, 2, 4, 8, 8, 4)
        elif kind == "lfm2":
            shapes = Shapes.short_conv_state_shape(1, 64, 3)
        else:
            shapes = Shapes.mamba2_state_shape(
                intermediate_size=mixer.intermediate_size,
                tp_world_size=1,
                n_groups=2,
                num_heads=8,
                head_dim=16,
                state_size=8,
                conv_kernel=4,
            )
        cost = state_cost(model.get_decoder())
        assert cost is not None and cost.elements == elements(shapes)


def test_a_sequence_has_keys_of_attention_and_states_of_the_others() -> None:
    model = model_of("granitemoehybrid")
    shape = shape_of(PackedPolicy(model), model.config)
    assert cache_per_token(shape, 2) == 2 * 1 * 2 * 16 * 2  # key and value, one layer, two heads of 16, bf16
    assert cache_per_sequence(shape, 2) == 2 * (8 * 16 * 8 + 3 * 160)
    decoder = decoder_of(shape)
    assert (decoder.layers, decoder.states) == (1, 2 * 8 * 16 * 8)
    layers = sum(each.numel() for each in model.get_decoder().layers.parameters())
    assert shape.layer_parameters * shape.layers == pytest.approx(layers, abs=shape.layers)
