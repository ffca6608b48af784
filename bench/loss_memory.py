"""Row 5: memory of the loss, full logits / chunks, forward and backward, and the time of both.

    python bench/loss_memory.py [--tokens 4096] [--vocabulary 49152] [--hidden 576] [--rounds 3]

Each side runs in a fresh process per round; measured is the increase of its peak resident memory. bf16 and float32 are
two rows.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import psutil
import torch
from common import Result, Side, answer, median_ratio, medians, report, requests
from torch import Tensor

from verl.workers.logprobs import token_logprobs

TARGET = 8.0
MAX_TIME_RATIO = 1.15
WARM_UP_TOKENS = 8


def full_logits(hidden_AE: Tensor, head_VE: Tensor, target_A: Tensor) -> Tensor:
    """[A] log p(target), naive, in float32."""
    return (hidden_AE @ head_VE.T).float().log_softmax(-1).gather(-1, target_A[:, None]).squeeze(-1)


def chunked(hidden_AE: Tensor, head_VE: Tensor, target_A: Tensor) -> Tensor:
    """[A] log p(target) as the trainer computes it."""
    return token_logprobs(hidden_AE, head_VE, target_A)[0]


SIDES = {"theirs": full_logits, "ours": chunked}


def run_side(arguments: argparse.Namespace) -> None:
    """One forward and backward; answers with CPU seconds, MiB and the loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    hidden_AE = torch.randn(arguments.tokens, arguments.hidden).to(dtype).requires_grad_()
    head_VE = (torch.randn(arguments.vocabulary, arguments.hidden) / arguments.hidden**0.5).to(dtype).requires_grad_()
    target_A = torch.randint(arguments.vocabulary, (arguments.tokens,))
    logprobs = SIDES[arguments.side]
    logprobs(hidden_AE[:WARM_UP_TOKENS], head_VE, target_A[:WARM_UP_TOKENS]).sum().backward()
    for _ in requests():
        before, started = psutil.Process().memory_info().rss, time.process_time()
        loss = -logprobs(hidden_AE, head_VE, target_A).mean()
        loss.backward()
        seconds = time.process_time() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer({"CPU s": seconds, "peak MiB": (peak - before) / 2**20, "loss": loss.item()})


def measured(arguments: argparse.Namespace, dtype: str) -> Result:
    """Alternating rounds in fresh processes."""
    command = [sys.executable, __file__, f"--tokens={arguments.tokens}", f"--vocabulary={arguments.vocabulary}"]
    command += [f"--hidden={arguments.hidden}", f"--dtype={dtype}"]
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for _ in range(arguments.rounds):
        for name, so_far in figures.items():
            with Side([*command, f"--side={name}"]) as side:
                so_far.append(side.ask())
    ours, theirs = figures["ours"], figures["theirs"]
    gap = abs(ours[0]["loss"] - theirs[0]["loss"]) / theirs[0]["loss"]
    return Result(
        row=5,
        name=f"memory of the loss, full logits / chunks, {dtype}",
        ratio=median_ratio([each["peak MiB"] for each in theirs], [each["peak MiB"] for each in ours]),
        target=TARGET,
        ours=medians(ours),
        theirs=medians(theirs),
        limits={
            "time, ours / theirs": (
                median_ratio([each["CPU s"] for each in ours], [each["CPU s"] for each in theirs]),
                MAX_TIME_RATIO,
            ),
            "relative difference of the losses": (gap, 1e-4),
        },
    )


def main() -> None:
    """Measure and report; one row per dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # the measured process
    parser.add_argument("--dtype", default="bfloat16", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run_side(arguments)
        return
    for dtype in ("bfloat16", "float32"):
        report(measured(arguments, dtype))


if __name__ == "__main__":
    main()
