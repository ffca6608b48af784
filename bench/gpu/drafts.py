"""Drafts by prompt lookup beside none: tokens per second, accepted tokens, and log-probs beside the trainer's.

    MODEL=FOLDER bash bench/gpu/first_hour.sh drafts

Prompts of the embedded rows, at temperature 1. With random weights hardly any draft is accepted: name a model.
Log-probs of the engine are compared with a pass of the same weights in float32.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import mean

from piece import RESPONSE, RESPONSES, ROOT, Piece, random_folder, start
from speculation import prompt_ids, repaired_sampler

from tests.rollout.test_hf_engine import trainer_logprobs
from verl.rollout.engine import Sampling
from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings
from verl.types import Completion
from verl.workers.model import PackedPolicy, load_causal_lm

Prompts = list[tuple[int, ...]]
COMPARED = 8  # prompts of which log-probs are compared


async def generated(
    piece: Piece, folder: Path, prompts: Prompts, speculation: str | None
) -> tuple[list[Completion], dict[str, float]]:
    """The first response to each prompt, and figures of the second of two batches."""
    tokens = 8 if piece.rehearse else RESPONSE
    memory = {"kv_cache_gib": 0.25} if piece.rehearse else {"gpu_memory_utilization": 0.7}
    longest, drafts = max(map(len, prompts)) + tokens, bool(speculation)
    with repaired_sampler(drafts and piece.rehearse):
        engine = await VLLMEngine.start(VLLMSettings(str(folder), longest, speculation=speculation, **memory))  # type: ignore[arg-type]
    for _ in range(2):
        await engine.metrics()
        started = time.perf_counter()
        groups = await asyncio.gather(*(engine.generate(each, Sampling(tokens, n=RESPONSES)) for each in prompts))
        seconds = time.perf_counter() - started
    counts = await engine.metrics()
    await engine.close()
    figures = {"tokens/s": sum(len(each.token_ids) for group in groups for each in group) / seconds}
    return [group[0] for group in groups], figures | {name.rpartition("/")[2]: value for name, value in counts.items()}


def measure(piece: Piece, folder: Path) -> dict[str, float]:
    prompts = prompt_ids(str(folder), str(ROOT / "dataset/mini/train.parquet"), 4 if piece.rehearse else 256)
    found = {
        name: asyncio.run(generated(piece, folder, prompts, speculation))
        for name, speculation in (("without drafts", None), ("with drafts", "ngram"))
    }
    figures = {f"{name}: {each}": value for name, (_, values) in found.items() for each, value in values.items()}
    policy = PackedPolicy(load_causal_lm(str(folder)).to(piece.device), fused=False)
    for name, (responses, _) in found.items():
        gaps = []
        for prompt, response in zip(prompts[:COMPARED], responses, strict=False):
            exact = trainer_logprobs(policy, prompt, response.token_ids, 1.0, str(piece.device))
            gaps += [abs(ours - theirs) for ours, theirs in zip(response.logprobs, exact, strict=True)]
        figures[f"{name}: mean difference of log-probs"] = mean(gaps)
    return figures


if __name__ == "__main__":
    piece, arguments = start(
        __doc__, "an NVIDIA GPU and vLLM", size={"default": "1.5B"}, model={"type": Path, "help": "a model folder"}
    )
    folder = arguments.model if arguments.model and not piece.rehearse else None
    piece.write(measure(piece, folder or random_folder(piece, piece.size(arguments.size))))
