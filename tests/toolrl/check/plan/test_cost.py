"""Counted cost: operators by hand, FLOPs by formula, one layer scaled against all, and the figures of a real model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from bench.shapes import QWEN2_5, qwen2
from toolrl.check.plan import liger_cost
from toolrl.check.plan.cost import (
    Cost,
    CostCounter,
    PassCost,
    attention_pairs,
    count_score,
    count_update,
    critic_pass,
    meta_model,
    over_layers,
    pack_of_groups,
    policy_pass,
    score_pass,
)
from toolrl.check.plan.liger_cost import (
    LigerRMSNormFunction,
    LigerRopeFunction,
    LigerSiLUMulFunction,
)
from verl.batch.packed import Segment
from verl.tracking.flops import DecoderShape, forward_flops
from verl.units import GIB
from verl.workers.attention import flash_attention, varlen_plan
from verl.workers.fused import _NormWithSum
from verl.workers.logprobs import LOGITS_AT_ONCE, max_kept_bytes
from verl.workers.memory import PackShape, RankSettings, activations, shape_of
from verl.workers.model import PackedPolicy

SIZES: Any = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = Qwen2Config(**SIZES, num_hidden_layers=5, vocab_size=500, tie_word_embeddings=True)
QWEN_1_5B = qwen2(*QWEN2_5["1.5B"])
PACK = pack_of_groups(2, 12, 5, 3)  # 48 tokens, 30 trained


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_bytes_of_operators_by_hand() -> None:
    """[10, 4] float32 has 160 bytes, [3] int64 has 24."""
    table, places, rows = meta(10, 4), meta(3, dtype=torch.long), meta(3, 4)
    with CostCounter() as counter:
        table + table.T.T  # reads twice, writes once; views are free
        table.add_(1.0)
        table.to(torch.bfloat16)
        table[places]
        table.logsumexp(0)
        table.index_put_((places,), rows, accumulate=True)
        torch.zeros_like(table)
        table.copy_(meta(10, 4, dtype=torch.bfloat16))
        torch.empty_like(table)
    assert counter.traffic == {
        "aten::add": 480,
        "aten::add_": 320,
        "aten::_to_copy": 160 + 80,
        "aten::index": 2 * 48 + 24,
        "aten::logsumexp": 6 * 160,
        "aten::index_put_": 24 + 48 + 2 * 48,
        "aten::zeros_like": 160,
        "aten::copy_": 80 + 160,
    }
    assert counter.cost() == Cost(8, 0.0, 0.0, 2688) and counter.cost() == Cost()


def test_matrix_products_count_flops_and_no_bytes() -> None:
    one, other, many = meta(6, 4), meta(4, 5), meta(3, 6, 4)
    with CostCounter() as counter:
        one @ other
        torch.addmm(meta(5), one, other)
        many @ meta(3, 4, 5)
        torch.mm(one, other, out=meta(6, 5))
    assert counter.cost() == Cost(4, 2 * 6 * 4 * 5 * (1 + 1 + 3 + 1), 0.0, 0.0)


def test_memory_is_counted_from_allocation_to_release() -> None:
    owned = meta(100)
    with CostCounter() as counter:
        view = owned[:50]
        kept = owned + 1
        dropped = kept * 2
        del dropped
        more = view * 2
    assert (counter.live, counter.peak) == (600, 800)
    del kept, more
    assert counter.live == 0


def test_pairs_of_queries_and_keys_by_hand() -> None:
    segments = (Segment(0, 3), Segment(3, 5, 0), Segment(5, 6))
    assert attention_pairs(segments) == 6 + (3 + 1) + (3 + 2) + 1


@pytest.mark.parametrize("shared", [True, False])
def test_flops_are_those_of_the_formula(shared: bool) -> None:
    packed = pack_of_groups(2, 12, 5, 3, shared)
    found = policy_pass(SMALL, packed)
    matrices = SMALL.num_hidden_layers * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    shape = DecoderShape(matrices, SMALL.num_hidden_layers, 64, 64 * 500, selecting=64 * 64 + 3 * 64 * 96)
    group = [(12, 0), *[(4, 12)] * 3] if shared else [(16, 0)] * 3
    expected = forward_flops(shape, group * 2, num_logits=30)
    assert found.forward.gemm_flops + found.forward.attention_flops == pytest.approx(expected)
    head = 2 * 64 * 500 * 30  # computed again in the backward
    assert found.backward.gemm_flops == pytest.approx(2 * found.forward.gemm_flops + head)
    assert found.backward.attention_flops == pytest.approx(2.5 * found.forward.attention_flops)


@pytest.mark.parametrize(("key_heads", "moved"), [(4, 0), (2, 2 * 2 * 7 * (4 + 2) * 8), (1, 2 * 2 * 7 * (4 + 1) * 8)])
def test_gradients_of_shared_key_heads_are_added_up(key_heads: int, moved: int) -> None:
    """7 tokens, 4 query heads of size 8, bf16: keys and values are read for each query head and written for each of
    their own."""
    plan = varlen_plan((Segment(0, 7),), torch.device("meta"))
    query, key, value = (
        meta(7, heads, 8, dtype=torch.bfloat16).requires_grad_() for heads in (4, key_heads, key_heads)
    )
    output = flash_attention(query, key, value, plan, None, (-1, 0))
    with CostCounter(100.0) as counter:
        torch.autograd.grad(output, (query, key, value), meta(7, 4, 8, dtype=torch.bfloat16))
        (name,) = (each for each in counter.kernels if "varlen" in each)
        found = counter.kernels[name], counter.traffic[name], counter.attention_flops
        assert found == (3 if moved else 1, moved, 250.0)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_saved_memory_is_the_plans(kind: Any, shared: bool, checkpointing: bool, fused: bool) -> None:
    config = kind(**SIZES, num_hidden_layers=5, vocab_size=500, head_dim=16)
    packed = pack_of_groups(4, 64, 24, 2, shared)
    tokens = packed.segments[-1].end
    shape = shape_of(PackedPolicy(meta_model(config, 5)), config)
    settings = RankSettings(compute=2, shards=1, checkpointed=5 * checkpointing, fused=fused)
    planned = activations(shape, PackShape.of(tokens, 64, 24, 2, shared), settings)
    assert policy_pass(config, packed, checkpointing, fused=fused).saved == pytest.approx(planned, rel=0.03)


class NormWithSum:
    @staticmethod
    def apply(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        return _NormWithSum.apply(liger_cost, hidden, weight, 1e-6)  # type: ignore[no-untyped-call]


def test_fused_kernels_move_what_ligers_do() -> None:
    """Tokens 6, hidden size 8, 2 query heads and 1 key head of size 4, bf16: 96 bytes a tensor of [6, 8]."""
    hidden, gate, up = (meta(1, 6, 8, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    weight = meta(8, dtype=torch.bfloat16).requires_grad_()
    query, key = (meta(1, 6, n, 4, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for n in (2, 1))
    angles = meta(1, 6, 4, dtype=torch.bfloat16)
    small, rows = 16, 24  # the weight, and a float32 per token
    for function, inputs, forward, backward in (
        (LigerRMSNormFunction, (hidden, weight), 2 * 96 + small + rows, (3 + 1) * 96 + 2 * small + rows),
        (NormWithSum, (hidden, weight), 2 * 96 + small + rows, 4 * 96 + 2 * small + rows),
        (LigerSiLUMulFunction, (gate, up), 3 * 96, 5 * 96),
        (LigerRopeFunction, (query, key, angles, angles), 2 * (96 + 48) + 48, 2 * (96 + 48) + 48),
    ):
        with CostCounter() as counter:
            found = function.apply(*inputs)  # type: ignore[no-untyped-call]
            assert counter.cost().traffic == forward
        outputs = found if isinstance(found, tuple) else (found,)
        grads = [torch.empty_like(each) for each in outputs]
        with CostCounter() as counter:
            torch.autograd.grad(outputs, inputs[:2], grads)
            assert counter.cost().traffic == backward


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_scaled_layer_equals_all_layers(kind: Any, checkpointing: bool) -> None:
    config = kind(**SIZES, num_hidden_layers=5, vocab_size=500, head_dim=16)

    def count(layers: int) -> PassCost:
        module = PackedPolicy(meta_model(config, layers, checkpointing))
        return count_update(module, lambda policy, packed: policy(packed, 1.0, True).logprobs.sum(), PACK)

    full, scaled = count(5), over_layers(count, 5)
    assert replace(scaled, peak=0.0) == replace(full, peak=0.0)
    assert scaled.peak <= full.peak and (checkpointing or scaled.peak == full.peak)
    assert score_pass(config, PACK) == count_score(PackedPolicy(meta_model(config, 5)), PACK)


def test_checkpointing_computes_the_layers_again_and_keeps_their_inputs() -> None:
    plain, again = policy_pass(SMALL, PACK), policy_pass(SMALL, PACK, checkpointing=True)
    assert again.forward == plain.forward and again.saved < plain.saved / 3
    head, product = 2 * 64 * 500 * 30, 2 * 96 * 64  # torch stops before a layer's last product, which saves nothing
    recomputed = plain.forward.gemm_flops - head - (4 * 48 + 30) * product
    assert again.backward.gemm_flops == plain.backward.gemm_flops + recomputed


def test_an_entropy_that_is_only_logged_costs_no_gradient_and_a_critic_no_head() -> None:
    plain, entropy = (policy_pass(SMALL, PACK, entropy=each, fused=False) for each in (False, True))
    of_logits = 3 * 4 * 500 * 30  # a sum with its factor, and a product
    assert (
        entropy.backward.traffic - plain.backward.traffic > of_logits > entropy.forward.traffic - plain.forward.traffic
    )
    values = critic_pass(SMALL, PACK, fused=False)
    assert 0 < plain.forward.gemm_flops - values.forward.gemm_flops < 2 * 64 * 500 * 30


def of_loss(fused: bool, model: PreTrainedModel, _: bool) -> PackedPolicy:
    """With or without the fused loss, whatever the model's modules are."""
    return PackedPolicy(model, fused)


def test_a_fused_loss_reads_logits_once_forward_and_reads_and_writes_them_once_backward() -> None:
    eager, plain, entropy = (
        policy_pass(SMALL, PACK, entropy=each, fused=False, wrapper=partial(of_loss, loss))
        for each, loss in ((False, False), (False, True), (True, True))
    )
    # Per logit and in bytes. Eager forward: to float32 6, over the temperature 8, normalizer 24, minus it 8,
    # exponential 8, product 12, sum 4. Backward: to float32 6, five operations of 8, to bfloat16 6.
    logits = 500 * 30
    assert eager.forward.traffic - plain.forward.traffic == pytest.approx((70 - 2) * logits, rel=0.01)
    assert eager.backward.traffic - plain.backward.traffic == pytest.approx((52 - 4) * logits, rel=0.01)
    assert entropy.backward.traffic - plain.backward.traffic < logits


def test_kept_logits_are_not_computed_again() -> None:
    """30 trained tokens, a vocabulary of 500, bf16."""
    size = 30 * 500 * 2
    again, kept = (policy_pass(SMALL, PACK, kept_bytes=limit) for limit in (size - 1, size))
    assert again == policy_pass(SMALL, PACK)
    assert again.backward.gemm_flops - kept.backward.gemm_flops == 2 * 30 * 500 * 64
    assert kept.forward.gemm_flops == again.forward.gemm_flops and kept.saved - again.saved == size
    assert kept.total.traffic == again.total.traffic
    assert max_kept_bytes(80 * GIB) >= 8000 * 151936 * 2 > max_kept_bytes(48 * GIB)


def test_a_score_keeps_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of weights that are trained: they are computed in slices, of two tokens here."""
    monkeypatch.setitem(LOGITS_AT_ONCE, "meta", 2 * 500)
    policy = PackedPolicy(meta_model(SMALL, 5), kept_bytes=30 * 500 * 2)
    assert all(each.requires_grad for each in policy.parameters())
    assert count_score(policy, PACK) == score_pass(SMALL, PACK)


def test_the_figures_of_qwen2_5_1_5b_hold() -> None:
    """8 groups of 900 + 4 * 250 tokens, on a GPU of 80 GiB. The tolerance is 1 %: a change of the training path that
    adds traffic, memory or FLOPs shows, and lower figures are to be written here."""
    packed = pack_of_groups(8, 900, 250, 4)
    found = policy_pass(QWEN_1_5B, packed, kept_bytes=max_kept_bytes(80 * GIB))
    measured = {
        "forward TFLOP": found.forward.gemm_flops / 1e12,
        "backward TFLOP": found.backward.gemm_flops / 1e12,
        "forward GB": found.forward.traffic / 1e9,
        "backward GB": found.backward.traffic / 1e9,
        "saved GiB": found.saved / GIB,
        "score GB": score_pass(QWEN_1_5B, packed).forward.traffic / 1e9,
    }
    expected = {
        "forward TFLOP": 42.88,
        "backward TFLOP": 85.76,
        "forward GB": 40.8,
        "backward GB": 69.2,
        "saved GiB": 31.50,
        "score GB": 35.7,
    }
    assert measured == pytest.approx(expected, rel=0.01)
