"""Row 11: planned against measured memory, the largest deviation of six configurations, lower is better.

    python bench/plan_memory.py [--sizes small,medium,large] [--tokens 2048,6144]

For each of three model sizes with random weights and two pack lengths, one process trains a policy on one CPU rank:
two optimizer steps of two packs each, float32 master weights, bf16 compute. Its peak resident memory, minus the
baseline after imports and a step of a tiny model, is compared with the plan's total for the update. There is no second
side.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from common import Result, Side, answer, report, requests
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from verl.algorithms.algorithm import KLTerm
from verl.algorithms.estimators.grpo import GRPO
from verl.batch.experience import policy_minibatch
from verl.batch.packing import Shard, Sharding, assign, make_units
from verl.batch.samples import batch_of, sample_from_completion
from verl.types import Completion, FinishReason
from verl.units import MIB
from verl.workers import attention
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.memory import PackShape, RankSettings, resident, shape_of, updating
from verl.workers.model import PackedPolicy, decoder_layers
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import PolicyWorker

SIZES = {  # hidden, layers, vocabulary, heads, key heads, intermediate
    "small": (256, 4, 8192, 4, 2, 768),
    "medium": (512, 8, 16384, 8, 4, 1536),
    "large": (576, 30, 49152, 9, 3, 1536),
    "tiny": (64, 2, 512, 2, 1, 64),
    "calibration": (384, 6, 12288, 6, 2, 1024),
}
TOKENS = (2048, 6144)
_PROMPT, _RESPONSE, _RESPONSES = 1024, 256, 4  # one group has 2,048 tokens
MAX_SHARE = 0.2


def policy(size: str) -> PackedPolicy:
    """A Llama with random weights and a tied head."""
    hidden, layers, vocabulary, heads, key_heads, intermediate = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=True,
    )
    attention.register()
    return PackedPolicy(AutoModelForCausalLM.from_config(config, attn_implementation=attention.PACKED))


def two_packs(tokens: int, vocabulary: int) -> Shard:
    """Two full packs of groups with shared prompts."""
    draw = np.random.default_rng(0)
    samples = []
    for group in range(2 * tokens // (_PROMPT + _RESPONSES * _RESPONSE)):
        prompt = draw.integers(vocabulary, size=_PROMPT)
        for _ in range(_RESPONSES):
            response = draw.integers(vocabulary, size=_RESPONSE)
            completion = Completion(response, np.full(_RESPONSE, 1e-3), FinishReason.LENGTH, 0)
            samples.append(sample_from_completion(prompt, completion, group))
    batch = policy_minibatch(batch_of(samples), GRPO)
    batch = replace(batch, advantages=batch.rollout_logprobs)
    (shard,) = Sharding(batch, assign(make_units(batch, True, tokens), tokens), 1).shards()
    return shard


def train(size: str, tokens: int, mesh: DeviceMesh) -> float:
    """Two optimizer steps of two packs each. Returns the planned bytes."""
    module = policy(size)
    engine = FSDPEngine(module, decoder_layers(module), mesh, OptimizerSettings(), torch.bfloat16)
    shard = two_packs(tokens, SIZES[size][2])
    for _ in range(2):
        PolicyWorker(engine, 1.0).update(shard, replace(GRPO, kl=KLTerm()), compare_engine=True)
    shape, settings = shape_of(module, module.model.config), RankSettings(compute=2, shards=1, on_cpu=True)
    packed = PackShape.of(tokens, _PROMPT, _RESPONSE, _RESPONSES, shared=True)
    return sum((resident(shape, settings) | updating(shape, packed, settings)).values())


def measure(size: str, tokens: int) -> dict[str, float]:
    """In this process: planned, measured and baseline MiB."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        train("tiny", 2048, mesh)  # triggers lazy initialization of libraries
        baseline = _peak()
        planned = train(size, tokens, mesh)
        dist.destroy_process_group()
    return {"planned": planned / MIB, "measured": (_peak() - baseline) / MIB, "baseline": baseline / MIB}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def measured(size: str, tokens: int) -> dict[str, float]:
    """The same in a separate process."""
    with Side([sys.executable, __file__, "--measure", size, str(tokens)]) as side:
        found: dict[str, float] = side.ask()
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="small,medium,large")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--rounds", type=int, help="ignored")
    parser.add_argument("--measure", nargs=2, metavar=("SIZE", "TOKENS"), help=argparse.SUPPRESS)  # in its own process
    arguments = parser.parse_args()
    if arguments.measure:
        next(requests())
        answer(measure(arguments.measure[0], int(arguments.measure[1])))
        return
    pairs = [(size, int(tokens)) for size in arguments.sizes.split(",") for tokens in arguments.tokens.split(",")]
    found = {f"{size}, {tokens} tokens": measured(size, tokens) for size, tokens in pairs}
    report(
        Result(
            row=11,
            name="memory of an update, |measured / planned - 1|, the largest of all",
            ratio=max(abs(each["measured"] / each["planned"] - 1.0) for each in found.values()),
            target=MAX_SHARE,
            ours={f"{name} MiB": each["measured"] for name, each in found.items()},
            theirs={f"{name} MiB": each["planned"] for name, each in found.items()},
            lower_is_better=True,
            note="theirs: planned",
        )
    )


if __name__ == "__main__":
    main()
