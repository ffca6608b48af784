"""The names that a weight sync must bring, and those that it has left out, from the modules of a model in vLLM."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from verl.errors import EngineError
from verl.rollout.vllm_engine import _compare, _known_names, _spelled
from verl.rollout.vllm_extension import checkpoint_names, not_loaded
from verl.transfer.bucket import all_names, plan
from verl.workers.policy_worker import _buckets


class Fused(nn.Module):
    """A layer as vLLM fuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(2, 6)
        self.o_proj = nn.Linear(2, 2, bias=False)


SEPARATE = {f"layer.{name}.{leaf}" for name in ("q_proj", "k_proj", "v_proj") for leaf in ("weight", "bias")}


@pytest.mark.parametrize(
    ("mapping", "names"),
    [
        ("none", SEPARATE),  # as Starcoder2's class in vLLM
        (None, SEPARATE),
        ({"qkv_proj": ["q_proj", "k_proj", "v_proj"]}, SEPARATE),
        ({"qkv_proj": ["qkv_proj"]}, {"layer.qkv_proj.weight", "layer.qkv_proj.bias"}),  # as Phi-3's
    ],
)
def test_fused_weights_are_sent_by_the_names_of_their_parts(mapping: object, names: set[str]) -> None:
    model = nn.ModuleDict({"layer": Fused()})
    if mapping != "none":
        model.packed_modules_mapping = mapping
    assert checkpoint_names(model) == {*names, "layer.o_proj.weight"}


def test_one_of_several_tied_parameters_is_enough() -> None:
    tensors = {"model.embed_tokens.weight": 1, "lm_head.weight": 1, "model.norm.weight": 2}
    assert not_loaded(tensors, ["model.embed_tokens.weight", "model.norm.weight"]) == []
    assert not_loaded(tensors, ["model.norm.weight"]) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_a_tied_head_that_the_engine_does_not_have_is_no_unknown_weight() -> None:
    tied, norm = torch.zeros(4), torch.zeros(4)
    layouts = plan([("embed.weight", tied), ("lm_head.weight", tied), ("norm.weight", norm)], torch.float32, 10)
    every, without_head = {"embed.weight", "lm_head.weight", "norm.weight"}, {"embed.weight", "norm.weight"}
    assert _known_names(layouts, without_head) == without_head
    assert _known_names(layouts, every) == _known_names(layouts, {"norm.weight"}) == every


@pytest.mark.parametrize(
    ("of_transformers", "of_vllm"),
    [
        ("model.layers.0.mamba.A_log", "model.layers.0.mamba.A"),  # Granite
        ("model.layers.0.mamba.A_log", "model.layers.0.mamba.mamba.A"),  # Falcon-H1
        ("model.layers.0.mamba.dt_bias", "model.layers.0.mamba.mamba.dt_bias"),
        ("model.layers.0.conv.in_proj.weight", "model.layers.0.short_conv.in_proj.weight"),  # LFM2
        ("model.embeddings.weight", "model.embed_tokens.weight"),  # Nemotron-H
    ],
)
def test_a_name_that_vllm_spells_otherwise_is_the_same_weight(of_transformers: str, of_vllm: str) -> None:
    assert _spelled(of_transformers) == _spelled(of_vllm)
    layouts = plan([(of_transformers, torch.zeros(4))], torch.float32, 64)
    _compare(_known_names(layouts, {_spelled(of_vllm)}), {_spelled(of_vllm)})
    with pytest.raises(EngineError, match=r"other is missing"):
        _compare(_known_names(layouts, {_spelled(of_vllm)}), {_spelled(of_vllm), "other"})


def test_names_of_other_weights_are_as_they_were() -> None:
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"):
        assert _spelled(name) == name


@pytest.mark.parametrize(
    ("engine", "trainer", "dtypes"),
    [
        (torch.bfloat16, torch.float32, [torch.bfloat16, torch.float32]),
        (torch.bfloat16, torch.bfloat16, [torch.bfloat16]),  # rounded, as the trainer computes
        (torch.float32, torch.float32, [torch.float32]),
        (torch.float32, torch.bfloat16, [torch.float32]),
    ],
)
def test_decays_are_sent_as_exact_as_the_trainer_computes(
    engine: torch.dtype, trainer: torch.dtype, dtypes: list[torch.dtype]
) -> None:
    named = [("a.A_log", torch.zeros(4)), ("a.weight", torch.zeros(8)), ("b.A_log", torch.zeros(4))]
    layouts = _buckets(named, engine, trainer, 1024)
    assert [each.dtype for each in layouts] == dtypes
    assert [each.number for each in layouts] == [*range(len(dtypes))]
    assert sorted(all_names(layouts)) == ["a.A_log", "a.weight", "b.A_log"]
    if len(dtypes) == 2:
        assert all_names(layouts[1:]) == ["a.A_log", "b.A_log"]
