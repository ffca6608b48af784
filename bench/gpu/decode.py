"""vLLM by itself: decoding with and without seeds, prefill, sleep, and a weight sync that wakes it up.

    bash bench/gpu/first_hour.sh decode

Distinct prompts of 900 random tokens, 4 responses of 250 tokens each. The time of a decoding step is that of a batch
without that of a batch with one token per response, over 249 steps.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from piece import PROMPT, RESPONSE, RESPONSES, Piece, random_folder, shape, start

from tests.support.weight_sync import sync
from verl.rollout.engine import Sampling
from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings
from verl.transfer.bucket import BucketSender
from verl.transfer.gpu import CudaIpc
from verl.transfer.shared_memory import SharedMemory
from verl.workers.model import PackedPolicy, hf_named_parameters, load_causal_lm

BUCKET_BYTES = 256 * 2**20


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def batch(engine: VLLMEngine, prompts: list[list[int]], num_tokens: int, seed: int | None = None) -> None:
    """Every prompt with RESPONSES responses of exactly `num_tokens` tokens."""
    seeds = [None if seed is None else seed + RESPONSES * at for at in range(len(prompts))]
    wanted = [Sampling(num_tokens, n=RESPONSES, seed=each) for each in seeds]
    await asyncio.gather(*map(engine.generate, prompts, wanted))


async def measure(piece: Piece, size: str, folder: Path) -> dict[str, float]:
    prompt, response, counts = (24, 8, (2,)) if piece.rehearse else (PROMPT, RESPONSE, (64, 256))
    memory = {"kv_cache_gib": 0.25} if piece.rehearse else {"gpu_memory_utilization": 0.7}
    started = time.perf_counter()
    engine = await VLLMEngine.start(VLLMSettings(str(folder), prompt + response, sleeps=True, **memory))  # type: ignore[arg-type]
    figures = {"start: s": time.perf_counter() - started}
    draw = random.Random(0)

    def fresh(count: int) -> list[list[int]]:
        return [[draw.randrange(shape(size).vocab_size) for _ in range(prompt)] for _ in range(count)]

    await batch(engine, fresh(counts[0]), response)  # a warm-up
    for count in counts:
        label = f"{count * RESPONSES} sequences"
        prefill = await timed(lambda count=count: batch(engine, fresh(count), 1))
        figures[f"{label}, prefill: s"] = prefill
        for name, seed in (("without seeds", None), ("with seeds", 1)):
            whole = await timed(lambda count=count, seed=seed: batch(engine, fresh(count), response, seed))
            figures[f"{label}, a decoding step {name}: ms"] = 1000 * (whole - prefill) / (response - 1)
            figures[f"{label}, {name}: tokens/s"] = count * RESPONSES * response / whole
    figures["sleep: s"] = await timed(engine.sleep)
    policy = PackedPolicy(load_causal_lm(str(folder), torch.bfloat16).to(piece.device))
    sender: BucketSender = SharedMemory() if piece.rehearse else CudaIpc()
    for number, name in enumerate(("a weight sync that wakes it up", "a weight sync")):
        weights = list(hf_named_parameters(policy))
        figures[f"{name}: s"] = await timed(
            lambda weights=weights, number=number: sync(
                engine, number + 1, weights, torch.bfloat16, BUCKET_BYTES, sender
            )
        )
    await engine.close()
    return figures


if __name__ == "__main__":
    piece, arguments = start(__doc__, "an NVIDIA GPU and vLLM", size={"default": "1.5B"})
    size = piece.size(arguments.size)
    piece.write(asyncio.run(measure(piece, size, random_folder(piece, size))))
