"""Tokens generated per second: our engine's concurrent requests against plain vllm.LLM.generate, in the same run.

    python bench/rollout.py [--prompts 64] [--n 8] [--tokens 64] [--rounds 5] [--threads 1] [--model PATH]

Each side lives in a process of its own, with the same prompts (dataset/mini), arguments and number of threads; rounds
alternate, so that both meet the same neighbours on the machine. The model is a random Qwen2 unless one is named. Also
prints the seconds that each side took to start, imports included. CPU only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MINI = ROOT / "dataset/mini"
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 256
KV_CACHE_GIB = 2
ANSWER = "bench: "  # marks our lines among what vLLM prints
Round = Callable[[], int]  # generates once; returns the number of tokens


def make_model(path: str) -> None:
    """A random Qwen2 with the vocabulary of dataset/mini's tokenizer."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(AutoTokenizer.from_pretrained(MINI / "tokenizer")),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def prompt_ids(count: int) -> list[tuple[int, ...]]:
    from transformers import AutoTokenizer

    from verl.data.chat import ChatCodec
    from verl.data.tasks import TaskSet

    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    tasks = [task for task, _ in zip(TaskSet(str(MINI / "train.parquet")), range(count), strict=False)]
    return [ChatCodec(tokenizer).prompt_ids(task.prompt) for task in tasks]


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
        num_threads=arguments.threads,
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
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}
    from vllm import LLM, SamplingParams

    llm = LLM(
        arguments.model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    params = SamplingParams(n=arguments.n, max_tokens=arguments.tokens, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": list(ids)} for ids in prompt_ids(arguments.prompts)]

    def generate() -> int:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(each.token_ids) for output in outputs for each in output.outputs)

    yield generate


SIDES = {"our engine": our_engine, "plain vLLM": plain_vllm}


def run_side(arguments: argparse.Namespace) -> None:
    """Start; then one round for every line on standard input. Answers with seconds and tokens."""
    started = time.monotonic()
    with SIDES[arguments.side](arguments) as generate:
        print(f"{ANSWER}{json.dumps([time.monotonic() - started, 0])}", flush=True)
        for _ in sys.stdin:
            started = time.monotonic()
            tokens = generate()
            print(f"{ANSWER}{json.dumps([time.monotonic() - started, tokens])}", flush=True)


def ask(process: subprocess.Popen[str]) -> tuple[float, int]:
    """The next answer of a side."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(ANSWER):
            seconds, tokens = json.loads(line.removeprefix(ANSWER))
            return seconds, tokens
    raise SystemExit(f"a side ended with {process.wait()}")


def compare(arguments: argparse.Namespace) -> None:
    processes, rates = {}, {side: [] for side in SIDES}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--model", arguments.model]
        command += [f"--{name}={getattr(arguments, name)}" for name in ("prompts", "n", "tokens", "threads")]
        processes[side] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(f"{side}: started in {ask(processes[side])[0]:.1f} s")
    for number in range(arguments.rounds + 1):  # the first warms up
        for side, process in processes.items():
            assert process.stdin is not None
            process.stdin.write("again\n")
            process.stdin.flush()
            seconds, tokens = ask(process)
            if number:
                rates[side].append(tokens / seconds)
    for side, process in processes.items():
        process.communicate()
        print(f"{side}: {statistics.median(rates[side]):,.0f} tokens/s (rounds: {[round(r) for r in rates[side]]})")
    ratios = [ours / theirs for ours, theirs in zip(rates["our engine"], rates["plain vLLM"], strict=True)]
    print(f"our engine / plain vLLM: {statistics.median(ratios):.2f} (median of {len(ratios)} pairs of rounds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="per completion")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", help="a folder; a random Qwen2 is made otherwise")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run_side(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        if arguments.model is None:
            arguments.model = folder
            make_model(folder)
        compare(arguments)


if __name__ == "__main__":
    main()
