"""Memory and CPU time of updates with packs of ever new lengths, by the number of kernels that oneDNN keeps.

    python bench/kernel_cache.py [--size medium] [--steps 36] [--kernels 1024,128]

One process for each number trains the same model on the same packs, in bfloat16 on one thread, all of them at the same
time, so that they share what else the machine does. Groups have a prompt of 200 to 900 tokens and four responses of 20
to 256. oneDNN's own default is 1,024.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from plan_memory import SIZES, policy
from torch.distributed.device_mesh import init_device_mesh

from verl.algorithms.algorithm import KLTerm
from verl.algorithms.estimators.grpo import GRPO
from verl.batch.experience import policy_minibatch
from verl.batch.packing import Shard, Sharding, assign, make_units
from verl.batch.samples import batch_of, sample_from_completion
from verl.types import Completion, FinishReason
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import decoder_layers
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import PolicyWorker

_TOKENS = 2048  # of a pack
_GROUPS, _RESPONSES = 2, 4


def packs(draw: np.random.Generator, vocabulary: int) -> Shard:
    """One or more packs of groups whose lengths are drawn."""
    samples = []
    for group in range(_GROUPS):
        prompt = draw.integers(vocabulary, size=int(draw.integers(200, 900)))
        for _ in range(_RESPONSES):
            response = draw.integers(vocabulary, size=int(draw.integers(20, 256)))
            completion = Completion(response, np.full(len(response), 1e-3), FinishReason.LENGTH, 0)
            samples.append(sample_from_completion(prompt, completion, group))
    batch = policy_minibatch(batch_of(samples), GRPO)
    batch = replace(batch, advantages=batch.rollout_logprobs)
    (shard,) = Sharding(batch, assign(make_units(batch, True, _TOKENS), _TOKENS), 1).shards()
    return shard


def measure(size: str, steps: int) -> None:
    """Train in this process, and print peak memory in MiB and CPU seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        module = policy(size)
        mesh = init_device_mesh("cpu", (1,))
        engine = FSDPEngine(module, decoder_layers(module), mesh, OptimizerSettings(), torch.bfloat16)
        for _ in range(steps):
            shard = packs(draw, SIZES[size][2])
            PolicyWorker(engine, 1.0).update(shard, replace(GRPO, kl=KLTerm()), compare_engine=True)
        dist.destroy_process_group()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_maxrss / 1024, used.ru_utime + used.ru_stime)


def main() -> None:
    """Measure all numbers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium", choices=SIZES)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--kernels", default="1024,128")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # in its own process
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.size, arguments.steps)
        return
    command = [sys.executable, __file__, "--measure", "--size", arguments.size, "--steps", str(arguments.steps)]
    running = {}
    for number in arguments.kernels.split(","):
        environment = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": number}
        running[number] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    print("| kernels kept | peak memory, MiB | CPU s |\n|---|---|---|")
    for number, process in running.items():
        memory, seconds = map(float, process.communicate()[0].split())
        print(f"| {number} | {memory:,.0f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
