"""Rollouts with drafts by prompt lookup / without: tokens per CPU second, and how many drafted tokens are right.

    python bench/speculation.py [--prompts 8] [--n 4] [--tokens 64] [--rounds 3] [--model DIR] [--data FILE]

ToolRL's prompts, temperature 1. Each side runs in its own process, with one thread; rounds alternate. A CPU run refuses
drafts, because the sampler of vLLM's CPU build is wrong with them; here tests/support/repaired_sampler.py takes its
place. The accepted share depends on the model and its prompts alone, not on the machine. No row of the scoreboard: it
shows whether the default is right.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from common import (
    SMOLLM2,
    TOOLRL_ROWS,
    Result,
    Side,
    alternate,
    answer,
    cpu_seconds,
    median_ratio,
    medians,
    need_smollm2,
    need_toolrl_rows,
    report,
    requests,
)

KV_CACHE_GIB = 1
LONGEST = 2048  # prompt tokens; longer ones are left out
REPAIRED = {"worker_extension_cls": "tests.support.repaired_sampler.Repaired"}


def prompt_ids(model: str, rows: str, count: int) -> list[tuple[int, ...]]:
    from transformers import AutoTokenizer

    from verl.chat.template import ChatTemplate
    from verl.data.tasks import TaskSet

    template = ChatTemplate(AutoTokenizer.from_pretrained(model))
    found = (template.prompt_ids(task.prompt) for task in TaskSet(rows))
    return [ids for ids, _ in zip((each for each in found if len(each) <= LONGEST), range(count), strict=False)]


@contextmanager
def repaired_sampler(wanted: bool) -> Iterator[None]:
    """Engines that start inside sample rightly with drafts, on a CPU."""
    from verl.rollout import vllm_engine

    made = vllm_engine.engine_arguments
    with patch.object(vllm_engine, "engine_arguments", lambda *of: made(*of) | (REPAIRED if wanted else {})):
        yield


def run_side(arguments: argparse.Namespace) -> None:
    """A rollout per request."""
    from verl.rollout.engine import Sampling
    from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings

    prompts = prompt_ids(arguments.model, arguments.data, arguments.prompts)
    sampling, drafts = Sampling(arguments.tokens, n=arguments.n), arguments.side == "drafts"
    settings = VLLMSettings(
        arguments.model,
        LONGEST + arguments.tokens,
        kv_cache_gib=KV_CACHE_GIB,
        speculation="ngram" if drafts else None,
    )
    with asyncio.Runner() as runner, repaired_sampler(drafts):
        engine = runner.run(VLLMEngine.start(settings))

        async def together() -> int:
            groups = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
            return sum(len(each.token_ids) for group in groups for each in group)

        for _ in requests():
            started = cpu_seconds()
            tokens = runner.run(together())
            seconds = cpu_seconds() - started
            answer({"tokens/CPU s": tokens / seconds, "CPU s": seconds, **runner.run(engine.metrics())})
        runner.run(engine.close())


def compare(arguments: argparse.Namespace) -> Result:
    """Alternating rounds of both sides."""
    names = ("model", "data", "prompts", "n", "tokens")
    command = [sys.executable, __file__, *(f"--{name}={getattr(arguments, name)}" for name in names)]
    with Side([*command, "--side=drafts"]) as drafts, Side([*command, "--side=plain"]) as plain:
        figures = alternate({"ours": drafts.ask, "theirs": plain.ask}, arguments.rounds, lambda ask: ask())
    rates = {side: [each["tokens/CPU s"] for each in rounds] for side, rounds in figures.items()}
    ours = medians(figures["ours"])
    accepted, drafted = ours["rollout/accepted_tokens"], ours["rollout/draft_tokens"]
    return Result(
        row=0,
        name=f"rollout, drafts / none, {arguments.prompts} x {arguments.n} responses of {arguments.tokens} tokens",
        ratio=median_ratio(rates["ours"], rates["theirs"]),
        target=1.0,
        ours=ours,
        theirs=medians(figures["theirs"]),
        note=f"{accepted / drafted:.1%} of the drafted tokens are accepted" if drafted else "nothing was drafted",
    )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=4, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="per completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--data", default=TOOLRL_ROWS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run_side(arguments)
        return
    need_smollm2(Path(arguments.model))
    need_toolrl_rows(Path(arguments.data))
    report(compare(arguments))


if __name__ == "__main__":
    main()
