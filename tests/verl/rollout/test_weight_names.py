"""The names that a weight sync must bring, and those that it has left out, from the modules of a model in vLLM."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from verl.rollout.vllm_engine import _known_names
from verl.rollout.vllm_extension import checkpoint_names, not_loaded
from verl.transfer.bucket import plan


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
