"""Counted, not timed: what a step costs on GPUs, from the real update and score on tensors without data.

    python bench/gpu_cost.py [--models 0.5B,1.5B,..] [--gpus h100,h200,b200,rtx4090] [--json FILE]

Prints four tables in Markdown. The first counts one pack of 8 groups (900 prompt and 4 * 250 response tokens) of a
model with the shape of Qwen2.5-1.5B. The second estimates the seconds of a step of 512 * 4 responses, by the counts of
`toolrl plan` at assumed speeds, on the fewest GPUs that hold the model (1, 2, 4, 8), with gradient checkpointing where
it is needed. Communication between GPUs is not counted.

The peer computes ToolRL's recipe as veRL does: old and reference log-probs, checkpointing, logits at all positions,
the prompt with every response; either padded to 2,048 + 1,024 tokens or without padding. Its rollouts, optimizer and
controller cost what ours do.

The third table starts from the settings that cost most, for one update of the 1.5B on an H200, and changes them one
after the other. The fourth has the same step at other speeds than the assumed ones: how far the estimate may be off.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from shapes import QWEN2_5, qwen2
from transformers import PretrainedConfig

from toolrl.check.plan.cost import Cost, PassCost, meta_model, pack_of_groups, policy_pass, score_pass
from toolrl.check.plan.plan import Lengths, Plan, find_hardware
from toolrl.check.plan.seconds import (
    Packing,
    Rates,
    counted_seconds,
    decode_step,
    rollout_seconds,
    scoring_traffic,
    sharding_traffic,
)
from verl.batch.packed import PackedBatch
from verl.build.algorithm import algorithm_of
from verl.config.load import load_config
from verl.rollout.gpu_share import MANY_SEQUENCES, MANY_TOKENS
from verl.tracking.flops import Device
from verl.units import GIB
from verl.workers.logprobs import max_kept_bytes
from verl.workers.memory import shape_of
from verl.workers.model import PackedPolicy, PolicyOutput

GPUS = ("h100", "h200", "b200", "rtx4090")
PROMPTS, RESPONSES, PROMPT, RESPONSE = 512, 4, 900, 250
PADDED = (2048, 1024, 5)  # prompt, response, rows of a micro-batch: 15,360 tokens, as many as a pack has
UNPADDED = (PROMPT, RESPONSE, 13)  # 14,950 tokens
ONE_UPDATE = ("algorithm.name=grpo", "algorithm.kl_placement=none", f"actor.ppo_mini_batch_size={PROMPTS}")
TOOLRL = ("algorithm.name=toolrl_grpo", "actor.ppo_mini_batch_size=128")
ALWAYS = (
    *(f"rollout.n={RESPONSES}", f"data.train_batch_size={PROMPTS}", f"data.max_prompt_length={PADDED[0]}"),
    *(f"data.max_response_length={PADDED[1]}", "model.compute_dtype=bfloat16"),
)
NUM_GPUS = (1, 2, 4, 8)
_SEED_S = 8e-6  # assumed, per sequence and token: vLLM samples rows with a seed one by one


class FullLogits(PackedPolicy):
    """Logits at every position, of which the responses' are normalized in float32."""

    def forward(self, packed: PackedBatch, temperature: float, with_entropy: bool) -> PolicyOutput:
        inputs = {"input_ids": packed.token_ids[None], "position_ids": packed.position_ids[None]}
        output = self.model.get_decoder()(**inputs, use_cache=False, segments=packed.segments)
        logits_TV = self.model.get_output_embeddings()(output.last_hidden_state.squeeze(0))
        logprobs_AV = (logits_TV[packed.source].float() / temperature).log_softmax(-1)
        logprobs_A = logprobs_AV.gather(-1, packed.target[:, None]).squeeze(-1)
        entropy_A = -(logprobs_AV.detach().exp() * logprobs_AV.detach()).sum(-1) if with_entropy else None
        return PolicyOutput(logprobs_A, entropy_A)


def make_plan(model: PretrainedConfig, gpu: str, *overrides: str) -> Plan:
    config = load_config([*ALWAYS, *overrides])
    algorithm = algorithm_of(config)
    shape = shape_of(PackedPolicy(meta_model(model, model.num_hidden_layers)), model)
    return Plan(config, algorithm, shape, None, Lengths(PROMPT, RESPONSE, "given"), find_hardware(config, gpu))


def fitting_plan(model: PretrainedConfig, gpu: str, recipe: tuple[str, ...]) -> Plan | None:
    """On the fewest GPUs; with checkpointing, of the layers that require it, only if it does not fit without."""
    for number in NUM_GPUS:
        for checkpointing in (False, "auto"):
            gpus = f"trainer.n_gpus_per_node={number}"
            plan = make_plan(model, gpu, *recipe, gpus, f"model.enable_gradient_checkpointing={checkpointing}")
            if not plan.violations():
                return plan
    return None


def rows_apart(prompt: int, response: int, rows: int) -> PackedBatch:
    """A micro-batch whose rows share nothing; all their tokens are computed, the last ones and padding, too."""
    return pack_of_groups(1, prompt + 1, response, rows, shared=False)


def peer_seconds(plan: Plan, model: PretrainedConfig, rows: tuple[int, int, int]) -> dict[str, float]:
    """Ours, with the passes of the peer; always with checkpointing, as ToolRL's script has it."""
    assert plan.hardware.device is not None
    rates, packed = Rates.of(plan.hardware.device), rows_apart(*rows)
    score = rates.seconds(score_pass(model, packed, False, FullLogits).forward)
    update = rates.seconds(policy_pass(model, packed, checkpointing=True, fused=False, wrapper=FullLogits).total)
    update += sharding_traffic(plan.policy, plan.rank) / rates.traffic
    packs = PROMPTS * RESPONSES / rows[-1] / plan.config.num_ranks
    gathering = scoring_traffic(plan.policy, plan.rank, packs) / rates.traffic
    return {**counted_seconds(plan, model), "score": 2 * (packs * score + gathering), "update": packs * update}


def pack_rows(model: PretrainedConfig) -> Iterator[tuple[str, PassCost]]:
    shared, plain = (
        pack_of_groups(8, PROMPT, RESPONSE, RESPONSES),
        pack_of_groups(8, PROMPT, RESPONSE, RESPONSES, False),
    )
    kept = max_kept_bytes(_device("h200").memory_gib * GIB)
    yield "update", policy_pass(model, shared, kept_bytes=kept)
    yield "update, logits computed again in the backward", policy_pass(model, shared)
    yield "update, model.fused_kernels=none", policy_pass(model, shared, fused=False)
    yield "update, with checkpointing", policy_pass(model, shared, checkpointing=True, kept_bytes=kept)
    yield "update, with an entropy term", policy_pass(model, shared, entropy=True, kept_bytes=kept)
    yield "score", score_pass(model, shared)
    yield "score, model.fused_kernels=none", score_pass(model, shared, fused=False)
    yield "update, prompts not shared (36,768 tokens)", policy_pass(model, plain, kept_bytes=kept)
    for name, rows in {"padded": PADDED, "not padded": UNPADDED}.items():
        found = policy_pass(model, rows_apart(*rows), checkpointing=True, fused=False, wrapper=FullLogits)
        yield f"peer's update, {name} ({(rows[0] + rows[1]) * rows[2]:,} tokens)", found


def print_packs(rows: dict[str, PassCost]) -> None:
    print("| pass over one pack | kernels | GEMM TFLOP | attention TFLOP | other GB | saved GiB | peak GiB | H200 ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rates = Rates.of(_device("h200"))
    for name, cost in rows.items():
        values = [_both(cost, "kernels", 1, ".0f"), _both(cost, "gemm_flops", 1e12, ".1f")]
        values += [_both(cost, "attention_flops", 1e12, ".1f"), _both(cost, "traffic", 1e9, ".0f")]
        milliseconds = " + ".join(f"{1e3 * rates.seconds(each):.0f}" for each in _halves(cost))
        print(f"| {name} | {' | '.join(values)} | {cost.saved / GIB:.1f} | {cost.peak / GIB:.1f} | {milliseconds} |")


def _device(gpu: str) -> Device:
    device = find_hardware(load_config(list(ALWAYS)), gpu).device
    assert device is not None
    return device


def _halves(cost: PassCost) -> list[Cost]:
    return [each for each in (cost.forward, cost.backward) if each.kernels]


def _both(cost: PassCost, name: str, unit: float, form: str) -> str:
    return " + ".join(f"{getattr(each, name) / unit:{form}}" for each in _halves(cost))


def step_rows(size: str, gpu: str) -> dict[str, Any]:
    """Estimated seconds of a step by recipe; {} where the model does not fit."""
    model, found = qwen2(*QWEN2_5[size]), {}
    for name, recipe in {"one update": ONE_UPDATE, "ToolRL": TOOLRL}.items():
        if plan := fitting_plan(model, gpu, recipe):
            found[name] = _row(plan, counted_seconds(plan, model))
            if name == "ToolRL":
                found["peer, padded"] = _row(plan, peer_seconds(plan, model, PADDED))
                found["peer"] = _row(plan, peer_seconds(plan, model, UNPADDED))
    return found


def _row(plan: Plan, seconds: dict[str, float]) -> dict[str, Any]:
    how = {"gpus": plan.config.num_ranks, "checkpointing": bool(plan.rank.checkpointed), "bound": plan.step_seconds()}
    return {**how, "seconds": sum(seconds.values()), "phases": seconds}


def print_steps(steps: dict[str, dict[str, Any]]) -> None:
    print("| model, GPU | GPUs | bound s | one update s | ToolRL's recipe s | peer s | peer, padded s | peer / ours |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, found in steps.items():
        if not found:
            print(f"| {name} | more than {NUM_GPUS[-1]} | | | | | | |")
            continue
        one, toolrl, peer = found["one update"], found["ToolRL"], found["peer"]
        gpus = f"{one['gpus']}" + (f", {toolrl['gpus']}" if toolrl["gpus"] != one["gpus"] else "")
        ratio = peer["seconds"] / toolrl["seconds"]
        cells = [f"{one['bound']:.1f}", *(_seconds(each) for each in (one, toolrl)), f"{peer['seconds']:.1f}"]
        cells += [f"{found['peer, padded']['seconds']:.1f}", f"{ratio:.2f}"]
        print(f"| {name} | {gpus} | {' | '.join(cells)} |")


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.1f}{' (c)' if row['checkpointing'] else ''}"


def choice_rows(model: PretrainedConfig, gpu: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Seconds by phase, from the dearest settings, each row with one more change."""
    settings: dict[str, Any] = {"rollout.max_num_seqs": 256, "rollout.max_num_batched_tokens": 2048}
    settings |= {"model.enable_gradient_checkpointing": True, "model.fused_kernels": "none"}

    def count(**more: float) -> dict[str, float]:
        plan = make_plan(model, gpu, *ONE_UPDATE, *(f"{key}={value}" for key, value in settings.items()))
        plan = replace(plan, algorithm=replace(plan.algorithm, entropy_coefficient=entropy))
        seconds = counted_seconds(plan, model)
        return {name: value + more.get(name, 0.0) for name, value in seconds.items()}

    entropy = 1e-3  # its value does not matter
    seeds = PROMPTS * RESPONSES * RESPONSE * _SEED_S
    yield "all of the below", count(rollout=seeds)
    yield "no seed per request", count()
    settings["rollout.max_num_seqs"] = 1024
    yield "1,024 sequences decoded concurrently, not 256", count()
    settings["rollout.max_num_batched_tokens"] = 16384
    yield "16,384 tokens per forward pass of the engine, not 2,048", count()
    entropy = 0.0
    yield "no gradient of the entropy", count()
    settings["model.enable_gradient_checkpointing"] = False
    yield "no checkpointing", count()
    settings["model.fused_kernels"] = "auto"
    yield "fused kernels", count()
    settings |= {"rollout.max_num_seqs": MANY_SEQUENCES, "rollout.max_num_batched_tokens": MANY_TOKENS}
    yield "2,048 sequences decoded concurrently, 32,768 tokens per forward pass", count()


def print_choices(rows: dict[str, dict[str, float]]) -> None:
    print("| setting | step s | rollout s | update s |")
    print("| --- | --- | --- | --- |")
    for name, seconds in rows.items():
        print(f"| {name} | {sum(seconds.values()):.1f} | {seconds['rollout']:.1f} | {seconds['update']:.1f} |")


def range_rows(model: PretrainedConfig, gpu: str) -> Iterator[tuple[str, float]]:
    """Seconds of a step of one update at other speeds, each change alone, then those that cost together."""
    plan = make_plan(model, gpu, *ONE_UPDATE)
    rates, packing = Rates.of(_device(gpu)), Packing.of(plan)
    packed = pack_of_groups(packing.groups, packing.prompt, packing.response, packing.responses)
    update = policy_pass(model, packed, kept_bytes=plan.rank.kept_bytes).total
    counted, host = sum(counted_seconds(plan, model).values()), decode_step(plan, rates).host

    def at(speeds: Rates) -> float:
        longer = packing.packs * (speeds.seconds(update) - rates.seconds(update))
        return counted + longer + rollout_seconds(plan, speeds) - rollout_seconds(plan, rates)

    slower = {
        "matrix products at 520 TFLOP/s, not 620": replace(rates, gemm=520 / 620 * rates.gemm),
        "attention at 100 TFLOP/s, not 190": replace(rates, attention=100 / 190 * rates.attention),
        "other kernels at 2.0 TB/s, not 3.3": replace(rates, traffic=2.0 / 3.3 * rates.traffic),
    }
    yield "as counted", counted
    step = decode_step(plan, rates)
    turns = PROMPTS * RESPONSES / step.sequences * RESPONSE
    yield "a host twice as fast as the measured one", counted - turns * (host - max(step.gpu, host / 2))
    yield from ((name, at(speeds)) for name, speeds in slower.items())
    speeds = [{name: getattr(each, name) for name in ("gemm", "attention", "traffic")} for each in slower.values()]
    worst = replace(rates, **{name: min(each[name] for each in speeds) for name in speeds[0]})
    yield "all three", at(worst)


def print_range(rows: dict[str, float]) -> None:
    print("| assumption | step s |")
    print("| --- | --- |")
    for name, seconds in rows.items():
        print(f"| {name} | {seconds:.1f} |")


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(QWEN2_5))
    parser.add_argument("--gpus", default=",".join(GPUS))
    parser.add_argument("--json", type=Path, help="a file for all figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    packs = dict(pack_rows(qwen2(*QWEN2_5["1.5B"])))
    print_packs(packs)
    names = [(size, gpu) for gpu in arguments.gpus.split(",") for size in arguments.models.split(",")]
    steps = {f"{size}, {gpu}": step_rows(size, gpu) for size, gpu in names}
    print()
    print_steps(steps)
    choices = dict(choice_rows(qwen2(*QWEN2_5["1.5B"]), "h200"))
    print()
    print_choices(choices)
    spread = dict(range_rows(qwen2(*QWEN2_5["1.5B"]), "h200"))
    print()
    print_range(spread)
    if arguments.json:
        counted = {name: asdict(cost) for name, cost in packs.items()}
        arguments.json.write_text(
            json.dumps({"packs": counted, "steps": steps, "choices": choices, "range": spread}, indent=1)
        )


if __name__ == "__main__":
    main()
