"""Row 3: CPU seconds of a GRPO update, prompts packed with every reply / prompts held once.

    python bench/shared_prompt.py [--n 4 8] [--prompt 900] [--reply 250] [--rounds 3] [--model DIR]

One group of random tokens, the same on both sides, bf16. Before the clock runs, the gradients of both ways are compared
in float32 at a quarter of the lengths.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from common import SMOLLM2, Result, alternate, median_ratio, need_smollm2, report
from local import PLAIN_GRPO, experience_of, join_alone, load_worker, made_up_groups, policy_of
from torch import Tensor

from verl.tracking.flops import forward_flops
from verl.trainer.experience import Experience, with_metric_weights, with_weights
from verl.trainer.plan import decoder_of, shape_of
from verl.workers.model import PackedPolicy, load_causal_lm
from verl.workers.policy_worker import PolicyWorker, policy_loss

TARGETS = {4: 2.0, 8: 2.8}
TOLERANCE = 1e-5


def gradients(policy: PackedPolicy, experience: Experience, share_prefix: bool) -> Tensor:
    """All gradients of one update's loss, as one vector."""
    policy.zero_grad()
    weighted = with_metric_weights(with_weights(experience, PLAIN_GRPO.aggregation))
    (packs,) = policy_of(None, share_prefix).packs(weighted)
    for packed in packs:
        policy_loss(policy, packed, PLAIN_GRPO, 1.0)[0].backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None])


def gradient_gap(path: Path, experience: Experience) -> float:
    """|difference| / |gradient| between the two ways of packing, in float32."""
    policy = PackedPolicy(load_causal_lm(str(path), torch.float32))
    plain, shared = (gradients(policy, experience, share) for share in (False, True))
    return float((plain - shared).norm() / plain.norm())


def most(worker: PolicyWorker, prompt: int, reply: int, n: int) -> float:
    """The ratio of the FLOPs: no implementation can gain more."""
    module = worker.engine.module
    decoder = decoder_of(shape_of(module, module.model.config))
    plain, shared = [(prompt + reply, 0)] * n, [(prompt, 0), *[(reply, prompt)] * n]
    return forward_flops(decoder, plain, n * reply) / forward_flops(decoder, shared, n * reply)


def measure(worker: PolicyWorker, experience: Experience, n: int, rounds: int, gap: float, limit: float) -> Result:
    """Both ways of packing the same update."""
    ways = {"plain": policy_of(worker, share_prefix=False), "shared": policy_of(worker)}
    sides = {name: partial(policy.update, experience, PLAIN_GRPO) for name, policy in ways.items()}
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
    """Compare, measure, report; one row for each n."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[4, 8], help="replies to the prompt")
    parser.add_argument("--prompt", type=int, default=900, help="tokens")
    parser.add_argument("--reply", type=int, default=250, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    arguments = parser.parse_args()
    need_smollm2(arguments.model)
    join_alone()
    worker = load_worker(arguments.model, torch.bfloat16)
    vocabulary = worker.engine.module.model.config.vocab_size
    for n in arguments.n:
        short = made_up_groups([(arguments.prompt // 4, arguments.reply // 4)], n, vocabulary)
        gap = gradient_gap(arguments.model, experience_of(short))
        whole = made_up_groups([(arguments.prompt, arguments.reply)], n, vocabulary)
        limit = most(worker, arguments.prompt, arguments.reply, n)
        report(measure(worker, experience_of(whole), n, arguments.rounds, gap, limit))


if __name__ == "__main__":
    main()
