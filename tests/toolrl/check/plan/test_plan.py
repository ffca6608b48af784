"""The plan of a run: its terms against autograd and against resident memory, its arithmetic, its command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.conftest import ROOT
from tests.support.saved import saved_bytes
from tests.support.service import free_port
from tests.support.tiny import MINI, with_heads
from tests.verl.workers.test_state import model_of
from toolrl.check.plan.__main__ import main
from toolrl.check.plan.plan import (
    Hardware,
    Lengths,
    Plan,
    build_plan,
    changed,
    decoder_of,
    find_hardware,
    read_lengths,
    read_shape,
)
from toolrl.check.plan.show import format_engine, format_episode, format_model
from toolrl.check.preflight.local_group import LocalGroup
from verl.batch.packed import PackedBatch, Segment
from verl.build.algorithm import build_algorithm
from verl.build.engines import default_num_seqs
from verl.build.env import build_episode_runner, prompt_fn
from verl.build.ranks import rank_spec
from verl.build.run import build_meter, load_chat_template
from verl.config.load import load_config
from verl.config.schema import Config
from verl.data.tasks import TaskSet
from verl.errors import ConfigError, DataError
from verl.pretrained import read_model_config
from verl.rollout.gpu_share import CONTEXT_GIB
from verl.single_controller.group import WorkerContext
from verl.tracking.flops import DEVICES, find_device
from verl.transfer.bucket import BUCKET_BYTES
from verl.units import GIB
from verl.workers import attention
from verl.workers.memory import ModelShape, PackShape, RankSettings, activations, resident, shape_of, updating
from verl.workers.model import PackedCritic, PackedPolicy, head_size
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import PolicyWorker
from verl.workers.rank import RankSpec, TrainingRank, build_rank
from verl.workers.state import CHUNK

PROMPT, RESPONSE = 64, 24
RESPONSES = "data.max_response_length=128"
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def one_group(
    shared: bool, prompt: int = PROMPT, response: int = RESPONSE, vocabulary: int = 1000
) -> tuple[PackedBatch, PackShape]:
    """Two responses of one prompt."""
    if shared:
        ends = prompt + response
        segments = (Segment(0, prompt), Segment(prompt, ends, 0), Segment(ends, ends + response, 0))
    else:
        segments = tuple(Segment(at, at + prompt + response) for at in (0, prompt + response))
    tokens = segments[-1].end
    source = torch.arange(tokens - 2 * response, tokens)
    ids = torch.randint(vocabulary, (tokens,))
    batch = PackedBatch(
        token_ids=ids,
        position_ids=torch.arange(tokens),
        segments=segments,
        source=source,
        target=ids[source],
        sample=torch.zeros_like(source),
    )
    return batch, PackShape.of(tokens, prompt, response, 2, shared)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_activations_are_what_autograd_saves(
    kind: type[PretrainedConfig], dtype: torch.dtype, shared: bool, checkpointing: bool
) -> None:
    attention.register()
    model = AutoModelForCausalLM.from_config(kind(**SHAPE), dtype=dtype, attn_implementation=attention.PACKED)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = PackedPolicy(model.train())
    packed, pack = one_group(shared)
    shape = shape_of(policy, model.config)
    settings = RankSettings(dtype.itemsize, shards=1, checkpointed=shape.layers * checkpointing, on_cpu=True)
    expected = activations(shape, pack, settings)
    assert saved_bytes(policy, lambda: policy(packed, 1.0, True)) == pytest.approx(
        expected, rel=0.08
    )  # recomputed layers hold the angles


def test_a_gpu_with_fla_core_keeps_less_of_layers_with_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("qwen3_5_text").config.save_pretrained(tmp_path)
    shapes = []
    for release in (None, "0.6.0"):
        monkeypatch.setattr("toolrl.check.plan.plan.fla_release", lambda release=release: release)
        shapes += [read_shape(str(tmp_path), each, fused=True) for each in (PackedPolicy, PackedCritic)]
    loop, of_critic, kernels, kernels_of_critic = (each.saved[2] for each in shapes)
    assert loop == of_critic and kernels == kernels_of_critic
    assert (loop.chunk, kernels.chunk) == (CHUNK, 1) and loop.per_token > kernels.per_token
    assert read_shape(str(tmp_path), PackedPolicy).saved[2] == loop


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tokens"), [("small", 6144), ("medium", 2048)])
def test_planned_memory_is_what_two_updates_need(size: str, tokens: int) -> None:
    command = [sys.executable, "bench/plan_memory.py", "--sizes", size, "--tokens", str(tokens)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["ratio"] <= 0.2


SEVEN = ModelShape(7_000_000_000, 230_000_000, 500_000_000, 28, 3584, 28, 3584, 512, 18944, 152064, 2, False)


GROUPS_OF_FOUR = [
    *("algorithm.name=toolrl_grpo", "rollout.n=4", "data.train_batch_size=512", "actor.ppo_mini_batch_size=128"),
    *("data.max_prompt_length=2048", "data.max_response_length=1024"),
]


def plan_of(overrides: Sequence[str], gpu: str = "h200", shape: ModelShape = SEVEN) -> Plan:
    """A plan with round lengths, of a model that is nowhere."""
    config = load_config([*GROUPS_OF_FOUR, *overrides])
    algorithm = build_algorithm(config.algorithm, config.data.max_response_length, config.rollout.max_staleness)
    critic = shape if algorithm.needs_critic else None
    return Plan(config, algorithm, shape, critic, Lengths(900, 250, "given"), find_hardware(config, gpu))


def needed_gib(plan: Plan) -> float:
    """What ranks and engines need on a CPU that has too little."""
    return float(plan.violations()[0].split()[4])


def sums(plan: Plan) -> dict[str, float]:
    return {phase: sum(terms.values()) / GIB for phase, terms in plan.memory().items()}


def test_auto_recomputes_only_the_layers_that_a_gpu_requires() -> None:
    """On larger GPUs fewer; the estimate lies between none and all."""
    overrides = ["algorithm.kl_placement=none", "trainer.n_gpus_per_node=4"]
    off, auto, on = (
        [
            plan_of([*overrides, f"model.enable_gradient_checkpointing={value}"], gpu)
            for gpu in ("h200", "h100", "a100-40gb")
        ]
        for value in ("false", "auto", "true")
    )
    assert [plan.rank.checkpointed for plan in (off[0], on[0])] == [0, SEVEN.layers]
    numbers = [plan.rank.checkpointed for plan in auto]
    assert 0 == numbers[0] < numbers[1] < numbers[2] == SEVEN.layers
    some = auto[1]
    assert not some.violations() and off[1].violations()
    assert sums(on[1])["update"] < sums(some)["update"] < sums(off[1])["update"]
    update = [plan.seconds()["update"][0] for plan in (off[1], some, on[1])]
    share = numbers[1] / SEVEN.layers
    assert update[1] == pytest.approx(update[0] + share * (update[2] - update[0]))
    on_cpu = plan_of([*overrides, "model.enable_gradient_checkpointing=auto"], "cpu")
    assert on_cpu.rank.checkpointed == 0


def test_an_episode_of_maximum_length_is_one_pack_on_one_rank() -> None:
    """As an update whose packs hold nothing else; a fourth of the length needs less."""
    overrides = ["data.max_prompt_length=8192", "data.max_response_length=24576", "actor.max_tokens_per_pack=32768"]
    overrides += ["model.enable_gradient_checkpointing=true", "trainer.n_gpus_per_node=8"]
    lone = replace(
        plan_of([*overrides, "rollout.n=1", "algorithm.name=reinforce_pp"]), lengths=Lengths(8192, 24576, "given")
    )
    assert lone.episode_gib() == pytest.approx(sums(lone)["update"])
    episode = plan_of(overrides).episode_gib()
    short = plan_of([*overrides, "data.max_prompt_length=2048", "data.max_response_length=6144"]).episode_gib()
    assert short < episode
    assert format_episode(plan_of(overrides, "h200")).startswith("32768 tokens at most, fits on one h200 without")
    assert "does not fit on one l4 without context parallelism" in format_episode(plan_of(overrides, "l4"))


def test_a_machine_without_a_gpu_names_those_that_hold_the_longest_episode() -> None:
    overrides = ["recipe=skyrl_swe_7b", "model.path=nowhere", "trainer.n_gpus_per_node=8"]
    config = load_config(overrides)
    algorithm = build_algorithm(config.algorithm, config.data.max_response_length, config.rollout.max_staleness)
    lengths = Lengths(12000, 20768, "given")
    printed = format_episode(Plan(config, algorithm, SEVEN, None, lengths, Hardware("cpu", 16.0, None, on_cpu=True)))
    assert printed.startswith("32768 tokens at most, does not fit on a rank")
    _, _, names = printed.partition("; on a node of 8 GPUs: ")
    for gpu in ("h200", "h100", "a100", "a100-40gb", "l4"):
        alone = Plan(config, algorithm, SEVEN, None, lengths, find_hardware(config, gpu))
        assert (gpu in names.split(", ")) == (alone.episode_gib() <= alone.hardware.memory_gib)
    assert "h100" in names.split(", ") and "l4" not in names.split(", ")


def test_states_are_sixteen_bytes_a_parameter_dealt_to_the_ranks() -> None:
    settings = RankSettings(compute=2, shards=4)
    terms = resident(SEVEN, settings) | updating(SEVEN, PackShape(2048, 1024), settings)
    assert sum(terms[name] for name in ("parameters", "optimizer", "gradients")) == 16 * SEVEN.parameters / 4


def test_a_reference_a_critic_and_longer_packs_cost_memory_checkpointing_saves_it() -> None:
    plain = sums(plan_of(["algorithm.kl_placement=none"]))
    assert sums(plan_of([]))["rollout"] - plain["rollout"] == pytest.approx(2 * 7e9 / GIB)
    critic = sums(plan_of(["algorithm.name=ppo", "algorithm.kl_placement=none"]))
    assert critic["rollout"] - plain["rollout"] > 8 * 7e9 / GIB
    shorter = sums(plan_of(["algorithm.kl_placement=none", "actor.max_tokens_per_pack=4096"]))
    checkpointed = sums(plan_of(["algorithm.kl_placement=none", "model.enable_gradient_checkpointing=true"]))
    assert shorter["update"] < plain["update"] and checkpointed["update"] < shorter["update"]


def test_offloaded_states_leave_the_gpu_while_unused() -> None:
    overrides = ["algorithm.name=ppo", "algorithm.kl_placement=loss"]
    offloaded = ["actor.offload=all", "critic.offload=all", "ref.offload_params=true"]
    before, after = plan_of(overrides).memory(), plan_of([*overrides, *offloaded]).memory()
    gone = {phase: set(before[phase]) - set(after[phase]) for phase in before}
    assert gone == {
        "rollout": {"parameters", "optimizer", "critic's parameters", "critic's optimizer", "reference"},
        "score": {"optimizer", "critic's optimizer"},
        "update": {"reference"},
        "step": {"reference"},
        "weight_sync": {"optimizer", "critic's parameters", "critic's optimizer", "reference"},
        "save": {"optimizer", "critic's parameters", "critic's optimizer", "reference"},
        "engine": set(),
    }


def test_a_teacher_costs_its_weights_and_a_forward_unless_it_is_offloaded() -> None:
    """Four times as large as the policy: 2 bytes of a parameter between phases, and the largest pass of the score."""
    without = plan_of(["algorithm.kl_placement=none"])
    large = replace(SEVEN, parameters=4 * SEVEN.parameters, layers=4 * SEVEN.layers)
    taught = replace(without, teacher=large)
    before, after = sums(without), sums(taught)
    for phase in ("rollout", "update", "weight_sync"):
        assert after[phase] - before[phase] == pytest.approx(2 * 4 * 7e9 / GIB)
    assert after["score"] - before["score"] > 2 * 4 * 7e9 / GIB
    forward = without.seconds()["update"][0] / 3
    assert taught.seconds()["score"][0] - without.seconds()["score"][0] > 3 * forward
    offloaded = replace(taught, config=changed(taught.config, "ref.offload_params", True))
    assert sums(offloaded)["update"] == before["update"] and sums(offloaded)["score"] == after["score"]


def test_suggested_changes_fit_and_no_smaller_one_was_skipped() -> None:
    plan = plan_of(["trainer.n_gpus_per_node=2"], "h100")
    assert plan.violations()
    suggested_changes = plan.suggested_changes()
    assert suggested_changes and len({len(each) for each in suggested_changes}) == 1
    for changes in suggested_changes:
        config: Any = plan.config
        for number, (key, value) in enumerate(changes.items()):
            assert replace(plan, config=config).violations(), f"{number} of {changes} are enough"
            config = changed(config, key, value)
        assert not replace(plan, config=config).violations()


def test_a_critic_can_make_room_and_so_can_a_smaller_cache_on_a_cpu() -> None:
    overrides = ["algorithm.name=ppo", "rollout.n=1", "trainer.n_gpus_per_node=8"]
    overrides.append("model.enable_gradient_checkpointing=true")
    beside = plan_of([*overrides, "rollout.gpu_memory_utilization=0.72"], "h100")
    assert beside.violations() and {"critic.offload": "optimizer"} in beside.suggested_changes()
    small = replace(SEVEN, parameters=1_000_000, layer_parameters=20_000, vocabulary=100, largest=1000)
    overrides = ["rollout.kv_cache_gib=8", "data.max_response_length=64", "actor.max_tokens_per_pack=4096"]
    plan = plan_of(overrides, "cpu", small)
    needed = needed_gib(replace(plan, hardware=replace(plan.hardware, memory_gib=1.0)))
    crowded = replace(plan, hardware=replace(plan.hardware, memory_gib=needed - 2.0))
    assert crowded.violations() and any(set(each) == {"rollout.kv_cache_gib"} for each in crowded.suggested_changes())


def test_fitting_plans_need_no_change_and_hopeless_ones_have_none() -> None:
    roomy = plan_of(["trainer.n_gpus_per_node=8", "model.enable_gradient_checkpointing=true"])
    assert roomy.violations() == [] and roomy.suggested_changes() == []
    assert plan_of([], "a100", replace(SEVEN, parameters=700_000_000_000)).suggested_changes() == []


def test_an_engine_beside_a_rank_must_leave_it_room() -> None:
    overrides = ["trainer.n_gpus_per_node=8", "model.enable_gradient_checkpointing=true"]
    beside = plan_of([*overrides, "rollout.gpu_memory_utilization=0.95"])
    assert [each.split()[0] for each in beside.violations()] == ["rollout", "weight_sync", "save"]  # where it is awake
    assert plan_of([*overrides, "rollout.gpu_memory_utilization=0.95", "rollout.placement=separate"]).violations() == []
    assert beside._options()["rollout.placement"] == ["separate"]


def test_an_engine_gets_what_the_rank_beside_it_leaves() -> None:
    """A 7B on an H200: float32 parameters, AdamW, 2 bytes gathered, the largest tensor, two buckets, CUDA context."""
    plan = plan_of(["algorithm.kl_placement=none"])
    held = max(sums(plan)[phase] for phase in ("rollout", "weight_sync", "save"))
    assert held == pytest.approx((7e9 * (4 + 8 + 2) + 4 * 5e8) / GIB + 0.5 + 2.0)
    assert plan.gpu_share == pytest.approx((139.8 - held) / 139.8, abs=0.01)
    assert held + plan.gpu_share * 139.8 <= 139.8
    assert plan_of(["rollout.gpu_memory_utilization=0.7"]).gpu_share == 0.7
    assert plan_of(["rollout.placement=separate"]).gpu_share == 0.9  # nothing else is on its GPU
    assert plan_of(["actor.offload=optimizer"]).gpu_share > plan_of([]).gpu_share
    crowded = plan_of([], "rtx4090")
    assert crowded.sequences == 0 and "cannot hold one sequence" in crowded.violations()[-1]
    assert "9%" in format_engine(plan_of(["rollout.gpu_memory_utilization=0.09"]))


@pytest.mark.parametrize("offload", ["none", "optimizer", "params"])
@pytest.mark.parametrize("name", ["toolrl_grpo", "ppo", "opd"])
def test_the_plan_knows_what_a_rank_holds_beside_an_engine(name: str, offload: str, model: Path) -> None:
    overrides = [f"algorithm.name={name}", f"model.path={model}", "data.max_prompt_length=512", RESPONSES]
    if name == "opd":
        overrides.append(f"teacher.path={MINI / 'model'}")
    overrides.append("rollout.n=1" if name == "ppo" else "rollout.n=4")
    for each in ("actor", "critic") if name == "ppo" else ("actor",):
        overrides.append(f"{each}.offload={offload}")
    config = load_config(overrides)
    plan = build_plan(config, Lengths(200, 60, "given"), find_hardware(config, "h100"))
    spec = rank_spec(config, plan.algorithm, "cpu", total_steps=1)
    try:
        rank = build_rank(spec, WorkerContext(0, 1, port=free_port()))
        held = rank.held_bytes(BUCKET_BYTES) + CONTEXT_GIB * GIB
    finally:
        dist.destroy_process_group()
    phases = plan.memory()
    assert held == pytest.approx(max(sum(phases[phase].values()) for phase in ("rollout", "weight_sync", "save")))


def test_sequences_decoded_at_once_are_those_of_the_engine_on_its_device() -> None:
    plans = [plan_of([], gpu) for gpu in ("h200", "h100", "a100", "cpu")]
    assert [plan.max_num_seqs for plan in plans] == [1024, 1024, 256, 256]
    assert [plan.max_num_batched_tokens for plan in plans] == [16384, 16384, 8192, 4096]
    assert plan_of(["rollout.name=hf"]).max_num_seqs == 256
    assert plan_of(["rollout.max_num_seqs=64"]).max_num_seqs == 64


def test_a_colocated_engine_decodes_many_sequences_if_they_fit_at_maximum_length() -> None:
    """2048 of 2048 / 4 + 1024 tokens, 8 bytes each, need 25.2 MB beside 2 bytes of a weight; a tenth is left."""
    shape = replace(SEVEN, parameters=1_000_000, layers=1, key=2)
    plans = [plan_of(each, shape=shape) for each in ([], ["rollout.placement=separate"], ["rollout.max_num_seqs=64"])]
    assert [plan.max_num_seqs for plan in plans] == [2048, 1024, 64]
    assert [plan.max_num_batched_tokens for plan in plans] == [32768, 16384, 16384]
    config, needed = plans[0].config, 2048 * 1536 * 8 / 0.9 + 2_000_000
    assert [default_num_seqs(config, shape, needed + more) for more in (-1, 1)] == [None, 2048]
    fewer = load_config([*GROUPS_OF_FOUR, "rollout.max_num_batched_tokens=2047"])
    assert default_num_seqs(fewer, shape, 2 * needed) is None  # vLLM refuses more sequences than tokens


def test_an_engine_that_never_sleeps_is_there_in_every_phase() -> None:
    overrides = ["trainer.n_gpus_per_node=2", "rollout.name=hf", "rollout.max_num_seqs=384"]
    overrides.append("model.enable_gradient_checkpointing=true")
    assert plan_of([*overrides, "rollout.placement=separate"]).violations() == []
    assert [each.split()[0] for each in plan_of(overrides).violations()] == ["update"]


def test_seconds_are_the_formulas_at_the_data_sheets_speed() -> None:
    plan = plan_of(["algorithm.kl_placement=none", "actor.ppo_mini_batch_size=512"])
    seconds = {phase: value for phase, (value, _) in plan.seconds().items()}
    prompts, samples, block = 512, 2048, 28 * 230e6  # the prompt of a group is computed once
    tokens, pairs = prompts * 900 + samples * 250, prompts * 900 * 901 / 2 + samples * (250 * 900 + 250 * 251 / 2)
    forward = 2 * block * tokens + 2 * 3584 * 152064 * samples * 250 + 4 * 28 * 3584 * pairs
    assert seconds["update"] == pytest.approx(3 * forward / 989e12)
    assert seconds["score"] == 0.0  # one update a step, no KL: the update's own log-probs are the old ones
    twice = plan_of(["algorithm.kl_placement=none", "trainer.n_gpus_per_node=2"]).seconds()
    assert twice["update"][0] == pytest.approx(seconds["update"] / 2)


def test_rollouts_hidden_by_training_add_no_time() -> None:
    overrides = ["rollout.placement=separate", "trainer.n_gpus_per_node=4"]
    in_turn, ahead = plan_of(overrides), plan_of([*overrides, "rollout.max_staleness=2"])
    seconds = {phase: value for phase, (value, _) in ahead.seconds().items()}
    training = seconds["score"] + seconds["update"] + seconds["step"]
    assert seconds["rollout"] < training
    assert in_turn.step_seconds() == pytest.approx(sum(seconds.values()))
    assert ahead.step_seconds() == pytest.approx(training + seconds["weight_sync"])
    few = plan_of([*overrides, "rollout.max_staleness=2", "rollout.num_engines=1", "rollout.max_num_seqs=128"])
    assert few.step_seconds() == pytest.approx(
        few.seconds()["rollout"][0] + seconds["weight_sync"]
    )  # now it is the longer


def test_samples_in_flight_are_those_of_all_slots() -> None:
    overrides = ["data.train_batch_size=512", "rollout.n=4", "data.max_response_length=1000"]
    ahead = plan_of([*overrides, "rollout.max_staleness=3"])
    assert ahead.in_flight == 4 * 512 * 4 and plan_of(overrides).in_flight == 512 * 4
    assert ahead.in_flight_gib == pytest.approx(8192 * 1900 * 72 / GIB)
    remax = plan_of([*overrides, "rollout.max_staleness=1", "algorithm.name=remax", "rollout.n=1"])
    assert remax.in_flight == 2 * 512 * 2  # a greedy one beside each


def lengths_of(config: Config, *files: TaskSet) -> Lengths:
    tool_call_format = load_chat_template(config.model)
    return read_lengths(config, tool_call_format, files, tool_call_format.task_prompt_ids)


@pytest.mark.long
def test_lengths_are_the_datas_or_the_greatest_allowed(model: Path) -> None:
    given = load_config([f"model.path={model}", f"data.train_files=[{MINI / 'train.parquet'}]"])
    lengths = lengths_of(given, TaskSet(str(MINI / "train.parquet")))
    assert 50 < lengths.prompt < 200 and 10 < lengths.response < 100 and "train.parquet" in lengths.source
    without = load_config([f"model.path={model}"])
    assert lengths_of(without).prompt == 512


def test_episodes_of_several_turns_are_as_long_as_they_may_be(model: Path) -> None:
    overrides = [f"model.path={model}", "env.name=tool", "env.tool_call_format=hermes", "env.tools=[calculator]"]
    config = load_config([*overrides, "data.max_response_length=777"])
    lengths = lengths_of(config, TaskSet(str(MINI / "train.parquet")))
    assert lengths.response == 777
    assert re.fullmatch(r"means of \d+ tasks of .*; episodes of maximum length", lengths.source)


@pytest.mark.long
def test_rows_that_do_not_fit_are_reported_or_dropped(model: Path) -> None:
    overrides = [f"model.path={model}", f"data.train_files=[{MINI / 'train.parquet'}]", "data.max_prompt_length=100"]
    config, tasks = load_config(overrides), TaskSet(str(MINI / "train.parquet"))
    with pytest.raises(DataError, match=r"more than data.max_prompt_length=100"):
        lengths_of(config, tasks)
    dropping, cutting = (load_config([*overrides, f"data.truncation={name}"]) for name in ("drop", "left"))
    assert lengths_of(dropping, tasks).prompt < lengths_of(cutting, tasks).prompt < 100


def test_old_logprobs_of_the_engine_cost_no_pass_and_a_critic_has_no_head_to_pay_for() -> None:
    overrides = ["algorithm.kl_placement=none", "actor.ppo_mini_batch_size=128"]
    trainer, rollout = (plan_of([*overrides, f"algorithm.old_logprobs={name}"]) for name in ("trainer", "rollout"))
    assert trainer.seconds()["score"][0] > 0.0 and rollout.seconds()["score"][0] == 0.0
    small = replace(SEVEN, vocabulary=1)
    with_critic = replace(plan_of([*overrides, "algorithm.name=ppo", "rollout.n=1"]), critic=small)
    alone = replace(with_critic, critic=None)
    grown = with_critic.seconds()["update"][0] / alone.seconds()["update"][0]
    assert 1.5 < grown < 2.0


def test_nodes_of_cpus_share_the_need() -> None:
    needs = []
    for nodes in (1, 2):
        plan = plan_of([f"trainer.nnodes={nodes}", "rollout.kv_cache_gib=4"], "cpu")
        needs.append(needed_gib(replace(plan, hardware=replace(plan.hardware, memory_gib=1.0))))
    assert needs[0] == pytest.approx(needs[1], rel=0.2)


def test_the_critic_has_no_head(model: Path) -> None:
    config = LlamaConfig(**SHAPE, tie_word_embeddings=False)
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(config)
        policy, critic = shape_of(PackedPolicy(decoder), config), shape_of(PackedCritic(decoder), config)
    assert policy.parameters - critic.parameters == 1000 * 96 - 96
    assert critic.vocabulary == 1
    assert policy.root_parameters == 2 * 1000 * 96 + 96


@pytest.mark.parametrize(
    ("config", "width"),
    [  # of Qwen3-0.6B, whose heads are wider together than its hidden states, and of Qwen2.5-0.5B
        (Qwen3Config(hidden_size=1024, num_attention_heads=16, head_dim=128, num_hidden_layers=2), 2048),
        (Qwen2Config(hidden_size=896, num_attention_heads=14, num_hidden_layers=2), 896),
    ],
)
def test_mfu_counts_the_width_of_attention(config: PretrainedConfig, width: int) -> None:
    """As the plan does."""
    with torch.device("meta"):
        module = PackedPolicy(AutoModelForCausalLM.from_config(config))
    spec, engine = RankSpec("", torch.float32, 1.0, OptimizerSettings(lr=1.0)), SimpleNamespace(module=module)
    rank = TrainingRank(spec, PolicyWorker(engine, 1.0), None, None)  # type: ignore[arg-type]
    meter = build_meter(LocalGroup(rank), "cuda")
    planned = decoder_of(shape_of(module, config))
    assert meter is not None and meter.shape.hidden == planned.hidden == width
    assert (meter.shape.layers, meter.shape.head_parameters) == (planned.layers, planned.head_parameters)
    assert meter.shape.parameters == planned.parameters + config.hidden_size  # the last norm


def test_the_measured_peak_stands_beside_the_expected(model: Path) -> None:
    config = load_config([f"model.path={model}", "trainer.device=cpu", "data.max_prompt_length=512", RESPONSES])
    plan = build_plan(config, Lengths(200, 60, "given"), find_hardware(config))
    assert plan.format_peak({"memory/trainer_gib": 1.5}).startswith("peak memory of a training rank: 1.50 GiB, ")


def test_every_device_is_found_by_its_own_name() -> None:
    config = load_config([])
    for name, device in DEVICES.items():
        assert find_hardware(config, name.lower().replace(" ", "-")).device == device


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("rtx4090", "RTX 4090"), ("4090", "RTX 4090"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx-5090", "RTX 5090"), ("NVIDIA GeForce RTX 3090", "RTX 3090"), ("a10g", "A10G"), ("l4", "L4"),
        ("NVIDIA L40S", "L40S"), ("NVIDIA B200", "B200"), ("h20", "H20"), ("NVIDIA H200", "H200"),
        ("AMD Instinct MI300X", "MI300X"), ("NVIDIA A100-SXM4-40GB", "A100 40GB"), ("NVIDIA A100-SXM4-80GB", "A100"),
    ],
)  # fmt: skip
def test_a_card_is_found_by_the_names_people_and_torch_use(given: str, name: str) -> None:
    assert find_device(given) is DEVICES[name]


def test_every_card_keeps_its_proportions() -> None:
    """A slip in a unit would be a factor of a thousand."""
    for name, device in DEVICES.items():
        assert 70e12 <= device.flops <= 2300e12 and 0.3e12 <= device.bytes_per_s <= 8e12, name
        assert 30 <= device.flops / device.bytes_per_s <= 420 and 20 <= device.memory_gib <= 192, (
            name
        )  # or: no such card


@pytest.mark.parametrize(("size", "gib"), [("24GiB", 24.0), ("24 GB", 24.0), ("79.1gib", 79.1), ("16g", 16.0)])
def test_a_memory_size_stands_for_any_card(size: str, gib: float, model: Path) -> None:
    config = load_config([f"model.path={model}", "data.max_prompt_length=512", RESPONSES])
    hardware = find_hardware(config, size)
    assert (hardware.memory_gib, hardware.device, hardware.on_cpu) == (gib, None, False)
    plan = build_plan(config, Lengths(200, 60, "given"), hardware)
    assert plan.seconds() == {} and plan.engine()["KV cache"] > 0


@pytest.mark.parametrize("name", ["0GiB", "24", "rtx9999", "gib"])
def test_an_unknown_card_lists_the_known_ones_and_the_form_of_a_size(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpu={name} is unknown; .* RTX 4090, .* cpu, or a size as in 24GiB"):
        find_hardware(load_config([]), name)


@pytest.mark.long
def test_the_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"model.path={model}", "trainer.n_gpus_per_node=2", f"data.train_files=[{MINI / 'train.parquet'}]"]
    overrides += ["data.max_prompt_length=512", RESPONSES]
    assert main([*overrides, "--gpu=h100"]) == 0
    output = capsys.readouterr().out
    assert "It fits" in output and "Seconds of a step: lower bound" in output and "2 x h100 train" in output
    assert main([*overrides, "--gpu=h100", "rollout.gpu_memory_utilization=1.0"]) == 1
    assert "suggested changes: rollout.gpu_memory_utilization=0.8" in capsys.readouterr().out


@pytest.mark.long
def test_the_command_shows_the_pools_and_what_overlaps(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = f"data.train_files=[{MINI / 'train.parquet'}]"
    overrides = [f"model.path={model}", files, "data.max_prompt_length=512", RESPONSES]
    overrides += [*GROUPS_OF_FOUR[:3], "rollout.max_staleness=1", "trainer.num_threads=1", "rollout.num_engines=2"]
    outputs = []
    for place in ("--gpu=h100", "--gpu=cpu"):
        assert main([*overrides, place]) == 0
        outputs.append(" ".join(capsys.readouterr().out.split()))
    on_gpus, on_cpu = outputs
    assert "1 x h100 train, 2 more x h100 generate, concurrently" in on_gpus
    assert "max(rollout, training) + weight_sync" in on_gpus
    assert "1 rank(s) train, 2 more engine(s) generate, concurrently; 1 of" in on_cpu
    in_flight = "at most 4096 episodes in flight"
    assert f"{in_flight}, 2048 decoded concurrently" in on_gpus and f"{in_flight}, 512 decoded concurrently" in on_cpu
    assert main([*overrides[:4], "--gpu=h100", "rollout.placement=separate"]) == 0
    assert "alternately: each pool waits for the other" in " ".join(capsys.readouterr().out.split())


def test_prompts_are_measured_as_training_puts_them(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe with a prompt template of its own asks for more than the chat template does."""
    overrides = [f"model.path={model}", f"data.train_files=[{MINI / 'train.parquet'}]", RESPONSES, "--gpu=h100"]
    code = ["env.name=tool", "env.tool_call_format=fence", "env.tools=[python]", "data.prompt_template=torl"]
    code += ["sandbox.isolation=none", "data.max_prompt_length=512"]
    config = load_config([*overrides[:3], *code])
    tasks, tool_call_format = TaskSet(str(MINI / "train.parquet")), load_chat_template(config.model)
    episode_runner = build_episode_runner(config, tool_call_format)
    opened = read_lengths(config, tool_call_format, [tasks], prompt_fn(episode_runner)).prompt
    assert opened > lengths_of(config, tasks).prompt + 50
    assert main([*overrides, *code]) == 0
    assert f"{opened:.0f} tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    ["NVIDIA RTX A1000", "NVIDIA GH200 480GB", "RTX 6000", "NVIDIA A10", "L40", "RTX 3090 Ti", "RTX 4090 Laptop GPU"],
)
def test_a_similar_name_is_not_confused_with_another(name: str) -> None:
    assert find_device(name) is None


def test_a_model_without_supported_layers_is_refused(tmp_path: Path) -> None:
    GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="GPT2Model is not supported"):
        read_shape(str(tmp_path), PackedPolicy)


@pytest.mark.parametrize("key", ["model.path", "critic.path"])
def test_a_model_that_packs_do_not_compute_is_refused(key: str, model: Path, tmp_path: Path) -> None:
    Gemma2Config().save_pretrained(tmp_path)
    overrides = {"model.path": str(model), key: str(tmp_path)}
    config = load_config(["recipe=mini_ppo", *(f"{name}={path}" for name, path in overrides.items())])
    with pytest.raises(ConfigError, match=rf"^{key}: .*softcap=50\.0"):
        build_plan(config, Lengths(200, 60, "given"), find_hardware(config, "cpu"))


@pytest.mark.parametrize(
    ("size", "place", "overrides", "message"),
    [
        (
            24,
            "cpu",
            [],
            "vLLM's attention on a CPU computes heads of size 32, 64, .*; rollout.name=hf has no",
        ),
        (72, "cpu", [], "heads of size 32, 64,"),
        (
            36,
            "h100",
            [],
            "heads whose size is a multiple of 8, up to 256; model.compute_dtype=float32 has no",
        ),
        (36, "h100", ["rollout.name=hf"], "flash attention"),
        (264, "24GiB", [], "flash attention"),
        (24, "cpu", ["rollout.name=hf"], None),
        (512, "cpu", [], None),
        (24, "h100", [], None),
        (36, "h100", ["model.compute_dtype=float32"], None),
    ],
)
def test_heads_of_a_size_that_nothing_computes_are_refused(
    size: int, place: str, overrides: list[str], message: str | None, model: Path, tmp_path: Path
) -> None:
    config = load_config([f"model.path={with_heads(model, size, tmp_path)}", *overrides])
    lengths, hardware = Lengths(200, 60, "given"), find_hardware(config, place)
    if message is None:
        assert build_plan(config, lengths, hardware).policy.head_size == size
        return
    with pytest.raises(
        ConfigError, match=f"^model.path: attention heads of size {size} are not supported: .*{message}"
    ):
        build_plan(config, lengths, hardware)


def test_the_command_refuses_such_heads(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"model.path={with_heads(model, 40, tmp_path)}", "--gpu=cpu"]) == 2
    assert "attention heads of size 40 are not supported" in " ".join(capsys.readouterr().out.split())


def test_a_critics_heads_are_checked_where_it_is_trained(model: Path, tmp_path: Path) -> None:
    """The engine does not serve it."""
    critic = f"critic.path={with_heads(model, 20, tmp_path)}"
    config = load_config(["recipe=mini_ppo", f"model.path={model}", critic, "model.compute_dtype=bfloat16"])
    build_plan(config, Lengths(200, 60, "given"), find_hardware(config, "cpu"))
    with pytest.raises(ConfigError, match=r"^critic.path: attention heads of size 20"):
        build_plan(config, Lengths(200, 60, "given"), find_hardware(config, "h100"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.max_response_length=9999"], "the model supports"),
        (["--gpu=k80"], "--gpu=k80 is unknown; choose one of B200"),
        (["gpus=1"], "unknown option 'gpus'; did you mean 'gpu'?"),
        (["data.train_files=[nowhere.parquet]"], "there is no file 'nowhere.parquet'"),
    ],
)
def test_wrong_settings_are_reported(
    overrides: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"model.path={model}", *overrides]) == 2
    assert message in " ".join(capsys.readouterr().out.split())


def test_an_adapter_costs_its_states_and_one_copy_of_the_base() -> None:
    """1e8 parameters of an adapter, 6.9e9 frozen: 12 + 4 bytes each of the former, 2 of the latter, no reference."""
    adapter = replace(SEVEN, adapter=100_000_000)
    settings = RankSettings(compute=2, shards=1)
    terms = resident(adapter, settings) | updating(adapter, PackShape(2048, 1024), settings)
    assert sum(terms[name] for name in ("parameters", "optimizer", "gradients")) == 16 * 1e8 + 2 * 6.9e9
    assert terms["gathered"] == 2 * (2 * 100_000_000 // 28)  # two layers' part of the adapter
    sharded = updating(adapter, PackShape(2048, 1024), replace(settings, shards=2))
    assert sharded["gathered"] == 2 * (adapter.root_parameters + 2 * adapter.layer_parameters)
    plans = [plan_of([], shape=shape) for shape in (SEVEN, adapter)]
    whole, few = (each.memory()["rollout"] for each in plans)
    assert "reference" in whole and "reference" not in few
    times = [each.seconds() for each in plans]
    assert times[1]["update"][0] / times[0]["update"][0] == pytest.approx(2 / 3, rel=1e-2)
    assert times[1]["weight_sync"][0] / times[0]["weight_sync"][0] == pytest.approx(1 / 70)


def test_a_plan_has_the_adapter_of_the_settings(model: Path) -> None:
    overrides = [*GROUPS_OF_FOUR, f"model.path={model}", "lora.rank=4", "lora.targets=[q_proj]"]
    overrides += ["data.max_prompt_length=90", "data.max_response_length=25"]
    plan = build_plan(load_config(overrides), Lengths(90, 25, "given"), find_hardware(Config(), "h200"))
    config = read_model_config(str(model))
    width = config.num_attention_heads * head_size(config)
    assert plan.policy.adapter == config.num_hidden_layers * 4 * (config.hidden_size + width)
    assert f"{plan.policy.adapter / 1e6:.1f}M of an adapter are trained, lr 1e-05, lora.sync=adapter" in format_model(
        plan
    )
