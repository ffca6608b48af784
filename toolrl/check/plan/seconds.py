"""Estimated seconds of a step: what its passes cost (`cost.py`) at assumed speeds.

No kernel overlaps another, groups are of mean length, and communication between GPUs is not counted. The speeds are
assumptions for a good Hopper GPU, as shares of the data sheet's, and are the same for all GPUs. One time is measured:
that of vLLM's Python per generated token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from toolrl.check.plan.cost import Cost, PassCost, critic_pass, pack_of_groups, policy_pass, score_pass
from toolrl.check.plan.plan import Plan, decoder_of
from verl.build.engines import engine_dtype
from verl.errors import ConfigError
from verl.pretrained import has_attention_alone, is_multimodal, read_model_config
from verl.text import in_short
from verl.tracking.flops import Device, forward_flops
from verl.workers.memory import MASTER, ModelShape, RankSettings, cache_per_token

# Shares of the data sheet: on an H200 620 and 190 TFLOP/s, 3.3 and 4.3 TB/s
_GEMM = 620 / 989
_ATTENTION = 190 / 989
_TRAFFIC = 3.3 / 4.8  # kernels that only move data
_DECODE = 4.3 / 4.8  # reads of weights and KV cache
_SAMPLER_BYTES = 51  # moved per logit by vLLM's sampler
_DECODE_GAP_S = 0.3e-3  # between two decode steps
_HOST_S = 26e-6  # per sequence and decode step: vLLM's core process (bench/engine_host.py), while the GPU computes
_PREFILL_S = 5e-3  # per forward pass of prefill, which is launched kernel by kernel
_SWITCH_S = 2.0  # colocated engines: sleep, wake up, load weights
_CACHE_S = 0.2  # allocating anew what a colocated rank has returned to the device, before and after a weight sync
_CONTROLLER_S = 0.14e-3  # per sample (docs/benchmarks.md, row 9)
_CLIPPING_BYTES = 12  # per parameter: the norm reads, the scaling reads and writes
_ADAMW_BYTES = 28  # per parameter: the fused kernel reads weight, gradient and moments, and writes all but the gradient


@dataclass(frozen=True, slots=True)
class Rates:
    """Assumed speeds of a GPU: FLOP/s of matrix products and of attention, bytes/s of other kernels and of decoding."""

    gemm: float
    attention: float
    traffic: float
    decode: float

    @classmethod
    def of(cls, device: Device) -> Rates:
        flops, moved = device.flops, device.bytes_per_s
        return cls(_GEMM * flops, _ATTENTION * flops, _TRAFFIC * moved, _DECODE * moved)

    def seconds(self, cost: Cost) -> float:
        return cost.gemm_flops / self.gemm + cost.attention_flops / self.attention + cost.traffic / self.traffic


@dataclass(frozen=True, slots=True)
class Packing:
    """Equal packs of a rank: their number in a step, and the groups, responses and lengths of each."""

    packs: float
    groups: int
    responses: int
    prompt: int
    response: int

    @classmethod
    def of(cls, plan: Plan) -> Packing:
        config, limit = plan.config, plan.config.actor.max_tokens_per_pack
        prompt, response, n = round(plan.lengths.prompt), round(plan.lengths.response), config.rollout.n
        responses = min(n, max(1, (limit - prompt) // response))  # a group may be larger than a pack
        per_rank = math.ceil(config.prompts_per_minibatch / config.num_ranks)
        groups = max(1, min(limit // (prompt + responses * response), per_rank))
        packs = config.data.train_batch_size * n / (groups * responses) / config.num_ranks
        return cls(packs, groups, responses, prompt, response)


def gathering_traffic(shape: ModelShape, settings: RankSettings) -> float:
    """Bytes that FSDP moves on a rank to gather parameters: cast, and copied twice."""
    return shape.parameters * ((MASTER + settings.compute) / settings.shards + 4 * settings.compute)


def sharding_traffic(shape: ModelShape, settings: RankSettings, packs: float = 1.0) -> float:
    """Bytes that FSDP moves on a rank per pack, beside communication. packs: of an update

    Parameters are gathered, gradients cast, reduced, and added to those of earlier packs. Where nothing is sharded,
    only the last happens in every pack, the rest once an update; the first pack's gradients are cast alone.
    """
    c, shards, gathering = settings.compute, settings.shards, gathering_traffic(shape, settings)
    if shards == 1:
        return shape.parameters * (c + 2 * MASTER) + (gathering + shape.parameters * (4 - 1) * MASTER) / packs
    return gathering + shape.parameters * (c + MASTER + 2 * MASTER / shards + 3 * MASTER / shards)


def scoring_traffic(shape: ModelShape, settings: RankSettings, packs: float) -> float:
    """Bytes that gathering moves in a pass without gradients over `packs`: once where nothing is sharded."""
    return gathering_traffic(shape, settings) * (packs if settings.shards > 1 else 1.0)


def estimate_step(plan: Plan) -> dict[str, float]:
    """`counted_seconds` of the configured models; {} where nothing is known: on CPU, in float32, on an unknown GPU, for
    layers with state and for multimodal models.

    Raises ConfigError for a model that computes with its data, which cannot be counted.
    """
    config = plan.config
    if plan.hardware.device is None or config.model.compute_dtype != "bfloat16":
        return {}
    assert config.model.path is not None
    policy, critic, teacher = read_model_config(config.model.path), None, None
    if plan.critic:
        critic = read_model_config(config.critic.path or config.model.path, "critic.path")
    if plan.teacher and config.teacher.local is not None:
        teacher = read_model_config(config.teacher.local, "teacher.path")
    if not all(
        has_attention_alone(each) and not is_multimodal(each) for each in (policy, critic, teacher) if each is not None
    ):
        return {}
    try:
        return counted_seconds(plan, policy, critic, teacher)
    except RuntimeError as error:  # torch: no data to read
        raise ConfigError(
            f"model.path: the work of {policy.model_type} cannot be counted ({in_short(error)})"
        ) from error


def counted_seconds(
    plan: Plan,
    policy: PretrainedConfig,
    critic: PretrainedConfig | None = None,
    teacher: PretrainedConfig | None = None,
) -> dict[str, float]:
    """{phase: seconds}, the phases of `Plan.seconds` and "other", in bf16 on a known GPU."""
    device, config = plan.hardware.device, plan.config
    assert device is not None
    rates, packing = Rates.of(device), Packing.of(plan)
    packed = pack_of_groups(packing.groups, packing.prompt, packing.response, packing.responses)
    fused, kept = plan.rank.fused, plan.rank.kept_bytes
    share = min(1.0, plan.rank.checkpointed / policy.num_hidden_layers)
    entropy = bool(plan.algorithm.entropy_coefficient) or plan.algorithm.entropy_target is not None

    def of_policy(checkpointing: bool) -> PassCost:
        return policy_pass(policy, packed, checkpointing, entropy, fused, kept_bytes=kept)

    models = [(plan.policy, _mix(of_policy, share))]
    if plan.critic and critic:
        models.append((plan.critic, _mix(partial(critic_pass, critic, packed, fused=fused), share)))
    packs = packing.packs

    def scoring(shape: ModelShape, model: PretrainedConfig) -> float:
        seconds = packs * rates.seconds(score_pass(model, packed, fused).forward)
        return seconds + scoring_traffic(shape, plan.rank, packs) / rates.traffic

    values = sum(packs * rates.seconds(cost.forward) for _, cost in models[1:])
    values += sum(scoring_traffic(shape, plan.rank, packs) for shape, _ in models[1:]) / rates.traffic
    distilling = scoring(plan.teacher, teacher) if plan.teacher and teacher else 0.0
    together = max(1.0, packs / config.minibatches_per_step)
    sharding = sum(sharding_traffic(shape, plan.rank, together) for shape, _ in models) / rates.traffic
    update = sum(rates.seconds(cost.total) for _, cost in models) + sharding
    stepping = (_CLIPPING_BYTES + _ADAMW_BYTES) * sum(shape.parameters for shape, _ in models) / plan.rank.shards
    return {
        "rollout": rollout_seconds(plan, rates),
        "score": plan.score_passes * scoring(plan.policy, policy) + values + distilling,
        "update": packs * config.actor.ppo_epochs * update,
        "step": config.updates_per_step * stepping / rates.traffic,
        "weight_sync": (_SWITCH_S + 2 * _CACHE_S) * config.rollout.colocated,
        "other": _CONTROLLER_S * config.data.train_batch_size * config.rollout.n,
    }


def _mix(count: Callable[[bool], PassCost], share: float) -> PassCost:
    """A pass that recomputes a share of the layers. count: whether it recomputes all -> cost"""
    if share in (0.0, 1.0):
        return count(share == 1.0)
    return count(False) * (1.0 - share) + count(True) * share


class DecodeStep(NamedTuple):
    """A step of an engine that decodes so many sequences. Its seconds on the GPU, and those of vLLM's core process.

    vLLM prepares a step while the GPU computes another, so it takes the longer of the two.
    """

    sequences: int
    gpu: float
    host: float


def rollout_seconds(plan: Plan, rates: Rates) -> float:
    """Prefill of every prompt once, then decode steps of as many sequences as an engine takes; all end together."""
    prompts, prompt = plan.config.data.train_batch_size / plan.config.num_engines, round(plan.lengths.prompt)
    parallel, step = plan.config.rollout.tensor_model_parallel_size, decode_step(plan, rates)
    at_once = max(1, plan.max_num_batched_tokens // prompt)
    prefill = prompts * forward_flops(decoder_of(plan.policy), [(prompt, 0)]) / rates.gemm / parallel
    prefill += math.ceil(prompts / at_once) * _PREFILL_S
    turns = math.ceil(_samples(plan) / step.sequences)
    return prefill + turns * round(plan.lengths.response) * max(step.gpu, step.host)


def decode_step(plan: Plan, rates: Rates) -> DecodeStep:
    """With the KV cache of half-finished responses."""
    config, shape = plan.config, decoder_of(plan.policy)
    parallel = config.rollout.tensor_model_parallel_size
    prompt, response = round(plan.lengths.prompt), round(plan.lengths.response)
    concurrent = min(_samples(plan), plan.max_num_seqs)
    itemsize: int = getattr(torch, engine_dtype(config)).itemsize
    read: float = itemsize * (shape.parameters + shape.head_parameters)
    read += concurrent * (prompt + response / 2) * cache_per_token(plan.policy, itemsize)
    computed = concurrent * forward_flops(shape, [(1, round(prompt + response / 2))], 1)
    sampled = concurrent * plan.policy.vocabulary * _SAMPLER_BYTES / rates.traffic
    gpu = max(read / rates.decode, computed / rates.gemm) / parallel + sampled + _DECODE_GAP_S
    return DecodeStep(concurrent, gpu, concurrent * _HOST_S)


def _samples(plan: Plan) -> int:
    """Responses that one engine generates in a step."""
    prompts = plan.config.data.train_batch_size / plan.config.num_engines
    return math.ceil(prompts * (plan.config.rollout.n + plan.algorithm.greedy_baseline))
