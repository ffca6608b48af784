"""Pairs scored per second on one core: ours against ToolRL's published reward, on the same pairs in the same run.

    python bench/reward.py [--data FILE] [--upstream PATH/TO/ToolRL/verl/utils/reward_score/rlla.py] [--repeats 5]

The pairs are the gold answers of FILE (default: dataset/mini/train.parquet) and all their declared mutations, each pair
once. ToolRL's file is not part of this project: clone its repository and name the file; its prints are thrown away, the
work of making them is its own. Without it, the baseline is the plain telling that the tests use. CPU time, medians.
Also prints the longest CPU time that any hostile text of 1 MB takes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console
from rich.table import Table

from tests.conftest import TOGGLES
from tests.test_rlla import ANSWERS, HOSTILE
from tests.toolrl_oracle import oracle_score
from verl.data.tasks import TaskSet
from verl.utils.reward_score.rlla import RllaOptions, compute_score
from verl.utils.reward_score.rlla_lab import spoiled_replies

Pairs = list[tuple[str, str]]
Scorer = Callable[[str, str], object]


def make_pairs(source: str) -> Pairs:
    """(whole ChatML sequence, gold answer), no pair twice."""
    pairs: dict[tuple[str, str], None] = {}
    for task in TaskSet(source, on_bad_row="skip"):
        prompt = "".join(f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in task.prompt)
        replies = [task.answer, *(mutation.text for mutation in spoiled_replies(task, task.answer))]
        for reply in replies:
            pairs[f"{prompt}<|im_start|>assistant\n{reply}<|im_end|>", task.answer] = None
    return list(pairs)


def load_upstream(path: str) -> Scorer:
    """`compute_score` of ToolRL's file, which chooses its chat template by an environment variable."""
    os.environ["EXPERIMENT_NAME"] = "qwen"
    spec = importlib.util.spec_from_file_location("toolrl_rlla", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda solution, truth: module.compute_score(solution, truth, step=0)


def cpu_seconds(scorer: Scorer, pairs: Pairs) -> float:
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        started = time.process_time()
        for solution, truth in pairs:
            scorer(solution, truth)
        return time.process_time() - started


def plain(solution: str, truth: str) -> object:
    reply = solution.rpartition("<|im_start|>assistant")[2].partition("<|im_end|>")[0].strip()
    return oracle_score(reply, truth, 0, {name for name in TOGGLES if os.environ.get(name) == "1"})


def slowest_hostile() -> tuple[str, float]:
    """Name and CPU seconds of the 1 MB text that takes longest, over all answers' shapes."""
    seconds = {}
    for name, text in HOSTILE.items():
        for shape, answer in ANSWERS.items():
            seconds[f"{name} / {shape}"] = cpu_seconds(compute_score, [(text, answer)])
    worst = max(seconds, key=seconds.__getitem__)
    return worst, seconds[worst]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(ROOT / "dataset/mini/train.parquet"))
    parser.add_argument("--upstream", help="ToolRL's verl/utils/reward_score/rlla.py")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    baseline = load_upstream(arguments.upstream) if arguments.upstream else plain
    scorers: dict[str, Scorer] = {
        "ToolRL's file" if arguments.upstream else "plain telling": baseline,
        "compute_score, options from the environment": compute_score,
        "compute_score, options given": lambda solution, truth: compute_score(solution, truth, 0, RllaOptions()),
    }
    pairs = make_pairs(arguments.data)
    runs = [[cpu_seconds(scorer, pairs) for scorer in scorers.values()] for _ in range(arguments.repeats)]
    table = Table("scorer", "pairs/s", "times the first", title=f"{len(pairs)} distinct pairs of {arguments.data}")
    for column, name in enumerate(scorers):
        rate = statistics.median(len(pairs) / run[column] for run in runs)
        ratio = statistics.median(run[0] / run[column] for run in runs)
        table.add_row(name, f"{rate:,.0f}", f"{ratio:.2f}")
    console = Console()
    console.print(table)
    worst, seconds = slowest_hostile()
    console.print(f"slowest hostile text: {worst}, {seconds:.2f} s of CPU time")


if __name__ == "__main__":
    main()
