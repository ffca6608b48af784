"""Row 6: tokens generated per second, our engine's concurrent requests / plain vllm.LLM.generate.

    python bench/rollout.py [--eager] [--prompts 64] [--n 4] [--tokens 64] [--rounds 5] [--model PATH]

Each side runs in its own process, with the same prompts (dataset/mini) and arguments; rounds alternate, so that both
see the same load on the machine. Plain vLLM compiles the model, which is its default. Ours does, too, as in long runs;
with --eager it does not, as in short ones (bench/compiled_rollout.py). The ratio is of wall time: one of plain vLLM's
processes busy-waits for the other, which doubles its CPU seconds. The model is a random Qwen2 unless --model is given.
CPU only, two free cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common import ROOT, Result, Side, alternate, answer, cpu_seconds, median_ratio, medians, report, requests

MINI = ROOT / "dataset/mini"
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 256
KV_CACHE_GIB = 2
TARGET = 0.95
Round = Callable[[], int]  # generates once; returns the number of tokens


def make_model(path: str) -> None:
    """A random Qwen2 with the vocabulary of dataset/mini's tokenizer."""
    from shapes import qwen2
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    vocabulary = len(AutoTokenizer.from_pretrained(MINI / "tokenizer"))
    config = qwen2(256, 768, 4, 4, 2, vocabulary, max_position_embeddings=MAX_MODEL_LEN)
    Qwen2ForCausalLM(config).save_pretrained(path)


def prompt_ids(count: int) -> list[tuple[int, ...]]:
    from transformers import AutoTokenizer

    from verl.chat.template import ChatTemplate
    from verl.data.tasks import TaskSet

    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    tasks = [task for task, _ in zip(TaskSet(str(MINI / "train.parquet")), range(count), strict=False)]
    return [ChatTemplate(tokenizer).prompt_ids(task.prompt) for task in tasks]


@contextmanager
def our_engine(arguments: argparse.Namespace) -> Iterator[Round]:
    from verl.rollout.engine import Sampling
    from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings

    prompts, sampling = prompt_ids(arguments.prompts), Sampling(arguments.tokens, n=arguments.n)
    settings = VLLMSettings(
        arguments.model,
        MAX_MODEL_LEN,
        "float32",
        kv_cache_gib=KV_CACHE_GIB,
        max_num_seqs=MAX_NUM_SEQS,
        enforce_eager=arguments.eager,
    )
    with asyncio.Runner() as runner:
        engine = runner.run(VLLMEngine.start(settings))

        async def together() -> int:
            groups = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
            return sum(len(completion.token_ids) for group in groups for completion in group)

        yield lambda: runner.run(together())
        runner.run(engine.close())


@contextmanager
def plain_vllm(arguments: argparse.Namespace) -> Iterator[Round]:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}
    from vllm import LLM, SamplingParams

    llm = LLM(
        arguments.model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    params = SamplingParams(n=arguments.n, max_tokens=arguments.tokens, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": list(ids)} for ids in prompt_ids(arguments.prompts)]

    def generate() -> int:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(each.token_ids) for output in outputs for each in output.outputs)

    yield generate


SIDES = {"ours": our_engine, "theirs": plain_vllm}


def run_side(arguments: argparse.Namespace) -> None:
    """One round per request; answers with rates."""
    with SIDES[arguments.side](arguments) as generate:
        for _ in requests():
            wall, cpu = time.perf_counter(), cpu_seconds()
            tokens = generate()
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            answer({"tokens/CPU s": tokens / cpu, "tokens/s of wall time": tokens / wall})


def compare(arguments: argparse.Namespace) -> Result:
    """Alternating rounds of both sides."""
    command = [sys.executable, __file__, f"--model={arguments.model}"]
    command += [f"--{name}={getattr(arguments, name)}" for name in ("prompts", "n", "tokens")]
    command += ["--eager"] if arguments.eager else []
    with Side([*command, "--side=ours"]) as ours, Side([*command, "--side=theirs"]) as theirs:
        figures = alternate({"ours": ours.ask, "theirs": theirs.ask}, arguments.rounds, lambda ask: ask())
    size = f"{arguments.prompts} x {arguments.n} responses of {arguments.tokens} tokens"
    rates = {side: [each["tokens/s of wall time"] for each in rounds] for side, rounds in figures.items()}
    return Result(
        row=6,
        name=f"rollout, our engine{' uncompiled' if arguments.eager else ''} / plain vLLM, {size}",
        ratio=median_ratio(rates["ours"], rates["theirs"]),
        target=TARGET,
        ours=medians(figures["ours"]),
        theirs=medians(figures["theirs"]),
    )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=4, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="per completion")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="our engine does not compile the model")
    parser.add_argument("--model", help="a folder; default: a random Qwen2")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run_side(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        if arguments.model is None:
            arguments.model = folder
            make_model(folder)
        report(compare(arguments))


if __name__ == "__main__":
    main()
