"""Row 13: items per second, a whole evaluation / plain vllm.LLM.generate on the same prompts, wall time.

    python bench/eval_throughput.py [--items 200] [--tokens 96] [--rounds 3] [--model PATH]

Ours generates, scores and records every row of dataset/mini/test.parquet greedily with main_eval's runner, records and
scoring process, and our engine, which does not compile the model on a CPU. Theirs only generates, from tokenized
prompts, with vLLM's defaults: a compiled model. Each side runs in its own process with one engine; after the uncounted
warm-up round both have the prompts in their prefix caches; rounds alternate. Also measured: CPU time of the scoring
process / wall time of the round, and / CPU time of all processes. CPU only, two free cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from common import ROOT, Result, Side, alternate, answer, cpu_seconds, median_ratio, medians, report, requests

if TYPE_CHECKING:  # heavy; imported only by the sides
    from verl.chat.template import ChatTemplate

DATA = ROOT / "dataset/mini/test.parquet"
MODEL = ROOT / "dataset/mini/model"
MAX_PROMPT_LENGTH = 512
KV_CACHE_GIB = 1
TARGET = 0.9
MAX_SCORING_SHARE = 0.05
Figures = dict[str, float]
Round = Callable[[], Figures]


@contextmanager
def our_evaluation(arguments: argparse.Namespace) -> Iterator[Round]:
    from toolrl.benchmarks.runner.benchmark import BenchmarkContext
    from toolrl.benchmarks.runner.records import Records
    from toolrl.benchmarks.runner.rows import rows_benchmark
    from toolrl.benchmarks.runner.runner import Runner
    from verl.build.env import single_turn_runner
    from verl.episodes.group import GroupRollout
    from verl.rollout.engine import Sampling
    from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings
    from verl.scoring.pool import ScoringPool
    from verl.scoring.process import ScoringLimits
    from verl.scoring.rewards import build_rewards

    (category,) = rows_benchmark(str(DATA), BenchmarkContext(DATA.parent)).categories
    tasks = list(islice(category.tasks(), arguments.items))
    chat = format_of(arguments.model)
    length = MAX_PROMPT_LENGTH + arguments.tokens
    with asyncio.Runner() as runner:
        engine = runner.run(
            VLLMEngine.start(VLLMSettings(arguments.model, length, "float32", kv_cache_gib=KV_CACHE_GIB))
        )
        others = set(psutil.Process().children(recursive=True))
        episode = category.episode
        with ScoringPool(episode.reward, episode.reward_options, 1, ScoringLimits(timeout_s=60.0)) as scorer:
            sampling = Sampling(arguments.tokens, 0.0, stop_token_ids=chat.stop_token_ids)
            rollout = GroupRollout(engine, scorer, sampling, single_turn_runner(chat, arguments.tokens))
            evaluation = Runner(rollout, chat.task_prompt_ids, build_rewards(episode.reward), MAX_PROMPT_LENGTH)

            def evaluate() -> Figures:
                started = scoring_seconds(others)
                with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
                    records = Records(Path(folder), category, 1)
                    faults = runner.run(evaluation.run(category, tasks, records, lambda: None))
                assert not faults, faults[0]
                tokens = sum(row["num_tokens"] for rows in records.of(tasks) for row in rows)
                return {"tokens": tokens, "scoring CPU s": scoring_seconds(others) - started}

            yield evaluate
        runner.run(engine.close())


def scoring_seconds(others: set[psutil.Process]) -> float:
    """CPU seconds of the descendants not in `others`."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True) if each not in others]
    return sum(each.user + each.system for each in times)


@contextmanager
def plain_vllm(arguments: argparse.Namespace) -> Iterator[Round]:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}
    from vllm import LLM, SamplingParams

    from verl.data.tasks import TaskSet

    chat = format_of(arguments.model)
    llm = LLM(
        arguments.model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_PROMPT_LENGTH + arguments.tokens,
        max_num_seqs=256,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    params = SamplingParams(
        temperature=0.0,
        max_tokens=arguments.tokens,
        stop_token_ids=list(chat.stop_token_ids),
        logprobs=0,
        detokenize=False,
    )
    tasks = islice(TaskSet(str(DATA)), arguments.items)
    prompts = [{"prompt_token_ids": list(chat.task_prompt_ids(task))} for task in tasks]

    def generate() -> Figures:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return {"tokens": sum(len(each.token_ids) for output in outputs for each in output.outputs)}

    yield generate


def format_of(model: str) -> ChatTemplate:
    from verl.build.run import load_chat_template
    from verl.config.schema import ModelConfig

    return load_chat_template(ModelConfig(path=model))


SIDES = {"ours": our_evaluation, "theirs": plain_vllm}


def run_side(arguments: argparse.Namespace) -> None:
    """One round per request; answers with rates and shares."""
    with SIDES[arguments.side](arguments) as work:
        for _ in requests():
            wall, cpu = time.perf_counter(), cpu_seconds()
            found = work()
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            scoring = found.get("scoring CPU s", 0.0)
            answer(
                {
                    "items/s": arguments.items / wall,
                    "tokens": found["tokens"],
                    "scoring / wall": scoring / wall,
                    "scoring / CPU": scoring / cpu,
                }
            )


def compare(arguments: argparse.Namespace) -> Result:
    """Alternating rounds of both sides."""
    command = [sys.executable, __file__, f"--model={arguments.model}"]
    command += [f"--{name}={getattr(arguments, name)}" for name in ("items", "tokens")]
    with Side([*command, "--side=ours"]) as ours, Side([*command, "--side=theirs"]) as theirs:
        figures = alternate({"ours": ours.ask, "theirs": theirs.ask}, arguments.rounds, lambda ask: ask())
    rates = {side: [each["items/s"] for each in rounds] for side, rounds in figures.items()}
    found, plain = medians(figures["ours"]), medians(figures["theirs"])
    return Result(
        row=13,
        name=f"evaluation, ours / plain vLLM's generation alone, {arguments.items} items",
        ratio=median_ratio(rates["ours"], rates["theirs"]),
        target=TARGET,
        ours={name: found[name] for name in ("items/s", "tokens")},
        theirs={name: plain[name] for name in ("items/s", "tokens")},
        limits={
            "scoring's CPU time by wall time": (found["scoring / wall"], MAX_SCORING_SHARE),
            "by all CPU time": (found["scoring / CPU"], MAX_SCORING_SHARE),
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=96, help="maximum response length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=str(MODEL), help="a folder")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.side:
        run_side(arguments)
        return
    report(compare(arguments))


if __name__ == "__main__":
    main()
