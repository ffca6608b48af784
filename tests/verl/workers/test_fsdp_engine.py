"""The training engine on real processes: two ranks that share prompts and checkpoint equal one that does neither."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.every import every
from tests.support.ranks import in_ranks
from tests.verl.batch.test_packing import random_samples, tiny_model
from tests.verl.workers.test_fused import FORMULAS, assert_as_exact
from verl.algorithms.names import Aggregation
from verl.batch.experience import with_loss_weights
from verl.batch.packing import assign, make_units, pack
from verl.batch.samples import batch_of
from verl.tracking.metric import Max, Mean
from verl.workers.fsdp_engine import FSDPEngine, PackMetric, UpdateResult
from verl.workers.fused import fuse
from verl.workers.model import PackedCritic, PackedPolicy, checkpoint_layers, decoder_layers, hf_named_parameters
from verl.workers.optim import OptimizerSettings, learning_rate_factor

MAX_TOKENS = 60


def policy_loss(module: Any, packed: Any) -> Any:
    output = module(packed, 0.7, True)
    weights, entropy = packed.loss_weights, output.entropy
    metrics = {"entropy": PackMetric(((entropy * weights).sum(),)), "most": PackMetric((entropy.max(),), maximum=True)}
    return (-(output.logprobs + 0.1 * entropy) * weights).sum(), metrics


def critic_loss(module: Any, packed: Any) -> Any:
    return ((module(packed) - 1.0).square() * packed.loss_weights).sum(), {}


def train(rank: int, world: int, folder: Path, kind: str, fused: bool) -> None:
    """Two updates of a policy and a critic on this rank's packs: the metrics, and the full weights afterwards.

    fused: whether layers use the kernels, by their formulas
    """
    mesh = init_device_mesh("cpu", (world,))
    samples = random_samples(5, group_sizes=(4, 1, 3, 2))
    batch = with_loss_weights(batch_of(samples), Aggregation.SEQ_MEAN_TOKEN_MEAN)
    lean = world > 1
    dealt = assign(make_units(batch, lean, MAX_TOKENS), MAX_TOKENS, num_ranks=world)
    packs = [pack(units, batch) for units in dealt[rank::world]]
    settings = OptimizerSettings(lr=1e-3, max_grad_norm=0.5)
    outcome: dict[str, Any] = {}
    for name, wrapper, loss in (("policy", PackedPolicy, policy_loss), ("critic", PackedCritic, critic_loss)):
        model = tiny_model(kind, True, torch.float64)
        assert not fused or fuse(model, FORMULAS).layers == 3
        if lean:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        module = wrapper(model)
        engine = FSDPEngine(module, decoder_layers(module), mesh, settings, compute_dtype=torch.float64)
        assert every(isinstance(parameter, DTensor) for parameter in module.parameters())
        outcome[name] = [engine.update(packs, loss) for _ in range(2)]
        named = hf_named_parameters(module) if isinstance(module, PackedPolicy) else module.named_parameters()
        outcome[f"{name} weights"] = {key: full.clone() for key, full in engine.export_weights(named)}
    if rank == 0:
        torch.save(outcome, folder / "outcome.pt")


def trained(world: int, folder: Path, kind: str, fused: bool = False) -> dict[str, Any]:
    in_ranks(world, train, folder, kind, fused)
    outcome: dict[str, Any] = torch.load(folder / "outcome.pt", weights_only=False)
    return outcome


def values(result: UpdateResult) -> dict[str, float]:
    return {name.removeprefix("model/"): metric.value for name, metric in result.of("model").items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What one rank computes with layers of a kind, once for all tests."""
    return cache(lambda kind: trained(1, tmp_path_factory.mktemp(kind), kind))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        ("qwen2", False),
        ("qwen2", True),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in ("llama", "qwen3")),
    ],
)
def test_two_ranks_equal_one(kind: str, fused: bool, alone: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    one, two = alone(kind), trained(2, tmp_path, kind, fused)
    for name in ("policy", "critic"):
        for alone, together in zip(one[name], two[name], strict=True):
            assert values(together) == pytest.approx(values(alone), rel=1e-6)
            assert {name: type(each) for name, each in together.metrics.items()} == (
                {"entropy": Mean, "most": Max} if name == "policy" else {}
            )
        for key, weight in one[f"{name} weights"].items():
            # A fiftieth of an update, for gradients that nearly cancel: they are reduced in float32, and Adam divides
            # by their size.
            torch.testing.assert_close(two[f"{name} weights"][key], weight, rtol=1e-6, atol=2e-5)
    assert one["policy"][1].loss < one["policy"][0].loss
    assert one["critic"][1].loss < one["critic"][0].loss == pytest.approx(1.0)  # values start at zero


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_scales_its_loss_by_the_number_of_ranks(rank: int) -> None:
    """FSDP takes the mean of the ranks' gradients, and losses are parts of one sum. The other rank does not exist here:
    what collectives return is of no use, but the scale is applied before."""
    scales: list[float] = []

    def loss(module: Any, packed: Any) -> Any:
        value, metrics = policy_loss(module, packed)
        value.register_hook(lambda gradient: scales.append(float(gradient)))
        return value, metrics

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        batch = with_loss_weights(batch_of(random_samples(5)), Aggregation.TOKEN_SUM)
        module = PackedPolicy(tiny_model("qwen2", True, torch.float32))
        engine = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (2,)), OptimizerSettings())
        engine.backward([pack([unit], batch) for unit in make_units(batch, True, MAX_TOKENS)], loss)
    finally:
        gc.collect()
        dist.destroy_process_group()
    assert len(scales) > 1 and set(scales) == {2.0}


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
@pytest.mark.parametrize("checkpointed", [0, 1])
def test_sums_that_layers_leave_to_the_next_pass_through_sharding(checkpointed: int, group: None) -> None:
    """Scores, and gradients after two packs, of fused layers are those of the untouched."""
    batch = with_loss_weights(batch_of(random_samples(5)), Aggregation.TOKEN_SUM)
    packs = [pack([unit], batch) for unit in make_units(batch, True, MAX_TOKENS)][:2]
    found = []
    for fused in (False, True):
        model = tiny_model("qwen2", True, torch.float32)
        assert not fused or fuse(model, FORMULAS).layers == 3
        module = PackedPolicy(model)
        checkpoint_layers(module, checkpointed)
        engine = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (1,)), OptimizerSettings())
        scores = engine.score(packs, lambda policy, packed: policy(packed, 1.0, False).logprobs)
        engine.backward(packs, policy_loss)
        found.append([*scores, *(each.grad.to_local() for each in module.parameters())])  # type: ignore[union-attr]
    assert_as_exact(found[1], found[0], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_gathers_and_reduces_once_an_update_with_equal_gradients(dtype: torch.dtype, group: None) -> None:
    """Bit for bit those of a reduction after every pack."""
    batch = with_loss_weights(batch_of(random_samples(5)), Aggregation.TOKEN_SUM)
    packs = [pack([unit], batch) for unit in make_units(batch, True, MAX_TOKENS)]
    gathered: list[bool] = []

    def loss(module: Any, packed: Any) -> Any:
        gathered.append(not every(isinstance(each, DTensor) for each in module.parameters()))
        return policy_loss(module, packed)

    def build() -> FSDPEngine:
        module = PackedPolicy(tiny_model("qwen2", True, torch.float32))
        mesh = init_device_mesh("cpu", (1,))
        return FSDPEngine(module, decoder_layers(module), mesh, OptimizerSettings(), compute_dtype=dtype)

    together, one_by_one = build(), build()
    for _ in range(2):  # a second update starts from sharded parameters again
        together.backward(packs, loss)
        for each in packs:
            one_by_one.backward([each], policy_loss)
        assert gathered == [False, *[True] * (len(packs) - 1)]
        gathered.clear()
        pairs = zip(together.module.parameters(), one_by_one.module.parameters(), strict=True)
        for found, expected in pairs:
            assert isinstance(found.grad, DTensor) and isinstance(expected.grad, DTensor)
            assert torch.equal(found.grad.to_local(), expected.grad.to_local())
        for engine in (together, one_by_one):
            engine.module.zero_grad()
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(0.9)


def test_exported_weights_name_the_tied_head() -> None:
    names = [name for name, _ in hf_named_parameters(PackedPolicy(tiny_model("qwen2", True, torch.float32)))]
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(names)


def test_learning_rate_by_hand() -> None:
    cosine = OptimizerSettings(warmup_steps=2, schedule="cosine", total_steps=6, min_lr_ratio=0.1)
    factors = [learning_rate_factor(cosine, step) for step in (0, 1, 2, 4, 6, 99)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
    assert learning_rate_factor(OptimizerSettings(), 1000) == 1.0
