"""Estimated seconds of a step, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import Phi3Config

from tests.toolrl.check.plan.test_cost import QWEN_1_5B, SIZES, SMALL
from tests.toolrl.check.plan.test_plan import SEVEN, plan_of
from toolrl.check.plan import seconds
from toolrl.check.plan.cost import Cost, meta_model, pack_of_groups, policy_pass, score_pass
from toolrl.check.plan.plan import Lengths, build_plan, find_hardware
from toolrl.check.plan.seconds import (
    Packing,
    Rates,
    counted_seconds,
    decode_step,
    estimate_step,
    rollout_seconds,
    scoring_traffic,
    sharding_traffic,
)
from toolrl.check.plan.show import format_decoding, time_table
from verl.config.load import load_config
from verl.errors import ConfigError
from verl.tracking.flops import DEVICES
from verl.workers.memory import RankSettings, shape_of
from verl.workers.model import PackedPolicy

ONE_UPDATE = ["algorithm.name=grpo", "algorithm.kl_placement=none", "actor.ppo_mini_batch_size=512"]


def test_speeds_are_shares_of_the_data_sheet() -> None:
    h200 = Rates.of(DEVICES["H200"])
    assert (h200.gemm, h200.attention, h200.traffic, h200.decode) == pytest.approx((620e12, 190e12, 3.3e12, 4.3e12))
    assert Rates(10.0, 5.0, 2.0, 1.0).seconds(Cost(9, 30.0, 20.0, 8.0)) == 3 + 4 + 4


def test_assumed_speeds_and_times_stay_as_they_are() -> None:
    """Estimates before and after a change are comparable only with the same."""
    assumed = {
        name: value for name, value in vars(seconds).items() if name.isupper() and isinstance(value, float | int)
    }
    assert assumed.pop("_GEMM") * 989 == pytest.approx(620) and assumed.pop("_ATTENTION") * 989 == pytest.approx(190)
    assert assumed.pop("_TRAFFIC") * 4.8 == pytest.approx(3.3) and assumed.pop("_DECODE") * 4.8 == pytest.approx(4.3)
    assert assumed == {
        "MASTER": 4,
        "_SAMPLER_BYTES": 51,
        "_DECODE_GAP_S": 0.3e-3,
        "_HOST_S": 26e-6,
        "_PREFILL_S": 5e-3,
        "_SWITCH_S": 2.0,
        "_CACHE_S": 0.2,
        "_CONTROLLER_S": 0.14e-3,
        "_CLIPPING_BYTES": 12,
        "_ADAMW_BYTES": 28,
    }


def test_packs_hold_whole_groups_up_to_their_limit_and_a_rank_its_share() -> None:
    """Groups of 900 + 4 * 250 = 1,900 tokens."""
    packs = Packing.of(plan_of([*ONE_UPDATE, "actor.max_tokens_per_pack=16384"]))
    assert packs == Packing(64, 8, 4, 900, 250)
    assert Packing.of(plan_of([*ONE_UPDATE, "actor.max_tokens_per_pack=16384", "trainer.n_gpus_per_node=8"])).packs == 8
    small = ["actor.ppo_mini_batch_size=4", "actor.max_tokens_per_pack=16384"]
    assert Packing.of(plan_of([*ONE_UPDATE[:2], *small])) == Packing(128, 4, 4, 900, 250)
    short = ["data.max_prompt_length=900", "data.max_response_length=250", "actor.max_tokens_per_pack=1500"]
    assert Packing.of(plan_of([*ONE_UPDATE, *short])) == Packing(1024, 1, 2, 900, 250)


def test_sharding_traffic_by_hand() -> None:
    """Alone: gradients added to a float32 sum, 2 + 4 + 4; once an update, parameters cast 4 + 2 and copied twice
    2 + 2, gradients copied and reduced, each 4 + 4, but the first pack's sum is not read, 4. Of four ranks: cast
    (4 + 2) / 4, copied 8, gradients cast 2 + 4, reduced (4 + 4) / 4, accumulated (4 + 4 + 4) / 4."""
    alone = RankSettings(compute=2, shards=1)
    assert sharding_traffic(SEVEN, alone) == SEVEN.parameters * (10 + 6 + 8 + 16 - 4)
    assert sharding_traffic(SEVEN, alone, packs=10) == SEVEN.parameters * (10 + 2.6)
    assert scoring_traffic(SEVEN, alone, packs=10) == SEVEN.parameters * (6 + 8)
    assert scoring_traffic(SEVEN, RankSettings(compute=2, shards=4), packs=10) == SEVEN.parameters * 10 * (1.5 + 8)
    assert sharding_traffic(SEVEN, RankSettings(compute=2, shards=4)) == SEVEN.parameters * (1.5 + 8 + 6 + 2 + 3)


def test_passes_of_a_step_are_added_up() -> None:
    plain, recipe = plan_of(ONE_UPDATE), plan_of(["model.enable_gradient_checkpointing=true"])
    packed, rates = pack_of_groups(8, 900, 250, 4), Rates.of(DEVICES["H200"])
    found, more = counted_seconds(plain, SMALL), counted_seconds(recipe, SMALL)
    sharding = sharding_traffic(SEVEN, plain.rank, packs=64) / rates.traffic
    kept = policy_pass(SMALL, packed, kept_bytes=plain.rank.kept_bytes)
    assert found["score"] == 0.0
    assert found["update"] == pytest.approx(64 * (rates.seconds(kept.total) + sharding))
    # the reference's pass, and that of the old log-probs for three of four mini-batches
    gathering = scoring_traffic(SEVEN, recipe.rank, 64) / rates.traffic
    score = 64 * rates.seconds(score_pass(SMALL, packed).forward) + gathering
    assert more["score"] == pytest.approx(1.75 * score)
    assert counted_seconds(plan_of(["algorithm.kl_placement=loss"]), SMALL)["score"] == more["score"]
    # for all four, if groups do not fit into a pack: the penalty in the reward needs them before the update
    small = ["data.max_prompt_length=900", "data.max_response_length=250", "actor.max_tokens_per_pack=1899"]
    assert [plan_of([*small, *overrides]).score_passes for overrides in ([], ["algorithm.kl_placement=loss"])] == [
        2.0,
        1.75,
    ]
    assert more["update"] > found["update"] and more["step"] == pytest.approx(4 * found["step"])
    two = counted_seconds(plan_of([*ONE_UPDATE, "trainer.n_gpus_per_node=2"]), SMALL)
    sharding = sharding_traffic(SEVEN, RankSettings(compute=2, shards=2)) / rates.traffic
    assert two["step"] == found["step"] / 2
    assert two["update"] == pytest.approx(32 * (rates.seconds(kept.total) + sharding))


def test_decoding_by_hand() -> None:
    """A model whose reads bind: per step weights and half-filled caches, 51 bytes a logit, and 0.3 ms."""
    plan, rates = (
        plan_of([*ONE_UPDATE, "rollout.max_num_seqs=256", "rollout.max_num_batched_tokens=2048"]),
        Rates.of(DEVICES["H200"]),
    )
    weights = 2 * (SEVEN.layers * SEVEN.layer_parameters + SEVEN.hidden * SEVEN.vocabulary)
    cache = 256 * 1025 * 2 * SEVEN.layers * SEVEN.key * 2
    step = (weights + cache) / rates.decode + 256 * SEVEN.vocabulary * 51 / rates.traffic + 0.3e-3
    matrices = 2 * SEVEN.layers * SEVEN.layer_parameters * 900 + 4 * SEVEN.layers * SEVEN.query * 900 * 901 / 2
    prefill = 512 * matrices / rates.gemm + 256 * 5e-3  # two prompts in a forward pass
    assert rollout_seconds(plan, rates) == pytest.approx(prefill + 8 * 250 * step)
    assert decode_step(plan, rates) == pytest.approx((256, step, 256 * 26e-6))


def test_a_step_is_as_long_as_vllms_own_work_where_the_gpu_is_faster() -> None:
    """2,048 sequences of a small model: 53 ms of Python a step, with any number of sequences 26 us a token."""
    shape, rates = replace(SEVEN, parameters=1_000_000, layers=1, key=2, vocabulary=1000), Rates.of(DEVICES["H200"])
    plans = [plan_of([*ONE_UPDATE, f"rollout.max_num_seqs={each}"], shape=shape) for each in (256, 512, 2048)]
    decoding = []
    for plan in plans:
        step = decode_step(plan, rates)
        assert step.host == pytest.approx(step.sequences * 26e-6) and step.host > step.gpu
        decoding.append(2048 / step.sequences * 250 * step.host)
        assert rollout_seconds(plan, rates) == pytest.approx(decoding[-1], rel=0.05)
    assert decoding == pytest.approx([2048 * 250 * 26e-6] * 3)  # 13.3 s


def test_two_engines_share_the_hosts_work_and_a_gpu_that_is_slower_hides_it() -> None:
    rates = Rates.of(DEVICES["H200"])
    one, two = (plan_of([*ONE_UPDATE, f"trainer.n_gpus_per_node={each}"]) for each in (1, 2))
    assert decode_step(two, rates).sequences == decode_step(one, rates).sequences == 1024
    assert "takes the GPU" in format_decoding(one) and "vLLM's core process 26.6 ms of CPU" in format_decoding(one)
    slow = Rates(rates.gemm, rates.attention, rates.traffic, rates.decode / 100)
    step = decode_step(one, slow)
    assert step.gpu > 10 * step.host
    assert rollout_seconds(one, slow) > 2 * 250 * step.gpu


def test_the_plan_prints_the_estimate_beside_the_bound(model: Path) -> None:
    overrides = [f"model.path={model}", "data.max_prompt_length=512", "data.max_response_length=128"]
    config = load_config(overrides)
    plan = build_plan(config, Lengths(200, 60, "given"), find_hardware(config, "h200"))
    estimate = estimate_step(plan)
    assert list(estimate) == [*plan.seconds(), "other"]
    assert all(estimate[phase] >= bound for phase, (bound, _) in plan.seconds().items())
    console = Console(width=120)
    with console.capture() as capture:
        console.print(time_table(plan, plan.seconds(), estimate))
    (total,) = (line for line in capture.get().splitlines() if "total" in line)
    assert f"{sum(estimate.values()):.3g}" in total
    on_cpu = build_plan(config, Lengths(200, 60, "given"), find_hardware(config, "cpu"))
    assert estimate_step(on_cpu) == {}


def test_a_model_that_reads_its_data_is_refused_with_the_reason(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
    rope |= {"original_max_position_embeddings": 1024, "partial_rotary_factor": 1.0}
    phi3: Any = Phi3Config(**SIZES, num_hidden_layers=2, vocab_size=500, pad_token_id=0, rope_parameters=rope)
    phi3.save_pretrained(tmp_path)
    config = load_config([f"model.path={tmp_path}", "data.max_prompt_length=512", "data.max_response_length=128"])
    plan = build_plan(config, Lengths(200, 60, "given"), find_hardware(config, "h200"))
    with pytest.raises(ConfigError, match="the work of phi3 cannot be counted"):
        estimate_step(plan)


@pytest.mark.parametrize(
    ("recipe", "goal", "expected"),
    [
        (ONE_UPDATE, 36.4, {"rollout": 15.40, "score": 0.0, "update": 18.03}),
        (["algorithm.name=toolrl_grpo", "actor.ppo_mini_batch_size=128"], 46.4, {"score": 10.12, "update": 18.07}),
    ],
)
def test_the_seconds_of_qwen2_5_1_5b_hold(recipe: list[str], goal: float, expected: dict[str, float]) -> None:
    """512 * 4 responses on an H200. The tolerance is 1 %; the goal is the most that a change may cost."""
    shape = shape_of(PackedPolicy(meta_model(QWEN_1_5B, 28)), QWEN_1_5B)
    found = counted_seconds(plan_of([*recipe, "rollout.n=4"], shape=shape), QWEN_1_5B)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0.01)
    assert sum(found.values()) <= goal
