"""Row 3: CPU seconds of a GRPO update, prompts packed with every response / shared prompts.

    python bench/shared_prompt.py [--n 4 8] [--prompt 900] [--response 250] [--rounds 3] [--model DIR]

One group of random tokens, the same on both sides, bf16. Before the measurement, the gradients of both are compared in
float32 at a quarter of the lengths.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from common import SMOLLM2, Result, alternate, median_ratio, need_smollm2, report
from local import PLAIN_GRPO, gradient_gap, join_alone, load_worker, made_up_groups, minibatch_of, policy_of

from toolrl.check.plan.plan import decoder_of
from verl.batch.token_batch import TokenBatch
from verl.tracking.flops import forward_flops
from verl.workers.memory import shape_of
from verl.workers.policy_worker import PolicyWorker

TARGETS = {4: 2.0, 8: 2.8}
TOLERANCE = 1e-5


def most(worker: PolicyWorker, prompt: int, response: int, n: int) -> float:
    """The ratio of the FLOPs, an upper bound of the speedup."""
    module = worker.engine.module
    decoder = decoder_of(shape_of(module, module.model.config))
    plain, shared = [(prompt + response, 0)] * n, [(prompt, 0), *[(response, prompt)] * n]
    return forward_flops(decoder, plain, n * response) / forward_flops(decoder, shared, n * response)


def measure(worker: PolicyWorker, minibatch: TokenBatch, n: int, rounds: int, gap: float, limit: float) -> Result:
    """Both ways of packing the same update."""
    ways = {"plain": policy_of(worker, share_prefix=False), "shared": policy_of(worker)}
    sides = {name: partial(policy.update, minibatch, PLAIN_GRPO) for name, policy in ways.items()}
    plain, shared = alternate(sides, rounds).values()
    return Result(
        row=3,
        name=f"update, plain packs / shared prompts, n={n}",
        ratio=median_ratio(plain, shared),
        target=TARGETS.get(n, 1.0),
        ours={"CPU s": statistics.median(shared)},
        theirs={"CPU s": statistics.median(plain)},
        limits={"relative difference of the gradients": (gap, TOLERANCE)},
        note=f"the FLOPs allow {limit:.3g}",
    )


def main() -> None:
    """Compare, measure, report; one row per n."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[4, 8], help="responses per prompt")
    parser.add_argument("--prompt", type=int, default=900, help="tokens")
    parser.add_argument("--response", type=int, default=250, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    arguments = parser.parse_args()
    need_smollm2(arguments.model)
    join_alone()
    worker = load_worker(arguments.model, torch.bfloat16)
    vocabulary = worker.engine.module.model.config.vocab_size
    for n in arguments.n:
        short = made_up_groups([(arguments.prompt // 4, arguments.response // 4)], n, vocabulary)
        ways = [(minibatch_of(short), share) for share in (False, True)]
        gap = gradient_gap(arguments.model, ways)
        whole = made_up_groups([(arguments.prompt, arguments.response)], n, vocabulary)
        limit = most(worker, arguments.prompt, arguments.response, n)
        report(measure(worker, minibatch_of(whole), n, arguments.rounds, gap, limit))


if __name__ == "__main__":
    main()
