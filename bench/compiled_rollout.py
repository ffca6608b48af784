"""CPU seconds of our engine's rollout with vLLM's compiled model / as it runs by default on a CPU, uncompiled.

    python bench/compiled_rollout.py [--prompts 2] [--n 4] [--tokens 160] [--prompt-tokens 550] [--rounds 3]
        [--model DIR]

Each side runs in its own process, with one thread; rounds alternate, with new random prompts in each. Compilation is
counted apart, with an empty cache: it is in the CPU seconds from the start to the end of the first, uncounted round.
"Pays from" is how many tokens outweigh it. No row of the scoreboard: it decides a default.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from pathlib import Path

import psutil
from common import SMOLLM2, Result, Side, answer, median_ratio, medians, need_smollm2, report, requests

KV_CACHE_GIB = 1


def spent() -> float:
    """CPU seconds of this process and its descendants, those of ended compilers among them."""
    process = psutil.Process()
    return sum(sum(each.cpu_times()[:4]) for each in (process, *process.children(recursive=True)))


def run_side(arguments: argparse.Namespace) -> None:
    """A rollout per request, which is a seed; answers with CPU seconds since the last answer."""
    from transformers import AutoConfig

    from verl.rollout.engine import Sampling
    from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings

    settings = VLLMSettings(
        arguments.model,
        arguments.prompt_tokens + arguments.tokens,
        kv_cache_gib=KV_CACHE_GIB,
        enforce_eager=arguments.side == "uncompiled",
    )
    sampling = Sampling(arguments.tokens, n=arguments.n)
    vocabulary = range(AutoConfig.from_pretrained(arguments.model).vocab_size)
    with asyncio.Runner() as runner:
        engine = runner.run(VLLMEngine.start(settings))

        async def together(seed: int) -> None:
            drawn = random.Random(seed)
            prompts = [drawn.choices(vocabulary, k=arguments.prompt_tokens) for _ in range(arguments.prompts)]
            await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))

        before = 0.0
        for seed in requests():
            runner.run(together(seed))
            answer(spent() - before)
            before = spent()
        runner.run(engine.close())


def compare(arguments: argparse.Namespace) -> Result:
    """Alternating rounds of both sides."""
    names = ("model", "prompts", "n", "tokens", "prompt_tokens")
    command = [sys.executable, __file__, *(f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names)]
    sides = ("compiled", "uncompiled")
    with Side([*command, "--side=compiled"]) as compiled, Side([*command, "--side=uncompiled"]) as uncompiled:
        starts, *rounds = [
            {name: side.ask(seed) for name, side in zip(sides, (compiled, uncompiled), strict=True)}
            for seed in range(arguments.rounds + 1)
        ]
    seconds = {name: [each[name] for each in rounds] for name in sides}
    middle = medians(rounds)
    size = f"{arguments.prompts} x {arguments.n} responses of {arguments.tokens} tokens"
    tokens = arguments.prompts * arguments.n * arguments.tokens
    saved = (middle["uncompiled"] - middle["compiled"]) / tokens
    cost = starts["compiled"] - starts["uncompiled"]
    return Result(
        row=0,
        name=f"rollout, compiled / uncompiled, {size}",
        ratio=median_ratio(seconds["compiled"], seconds["uncompiled"]),
        target=1.0,
        ours={"CPU s": middle["compiled"], "start CPU s": starts["compiled"]},
        theirs={"CPU s": middle["uncompiled"], "start CPU s": starts["uncompiled"]},
        lower_is_better=True,
        note=f"compilation pays from {cost / saved:,.0f} tokens" if saved > 0 else "compilation never pays",
    )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--n", type=int, default=4, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=160, help="per completion")
    parser.add_argument("--prompt-tokens", type=int, default=550)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run_side(arguments)
        return
    need_smollm2(Path(arguments.model))
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        os.environ["VLLM_CACHE_ROOT"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        report(compare(arguments))


if __name__ == "__main__":
    main()
