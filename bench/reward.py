"""Row 10: pairs scored per CPU second, ours / ToolRL's published reward, on the same pairs in the same run.

    python bench/reward.py [--data FILE] [--upstream PATH/TO/ToolRL/verl/utils/reward_score/rlla.py] [--rounds 5]

The pairs are the gold answers of FILE (default: dataset/mini/train.parquet) and all their corruptions, deduplicated;
before the measurement, both sides must give the same scores. ToolRL's file is not part of this project: clone its
repository and pass the file; its output is discarded, but the time to print is included. Without it, the baseline is
the plain reimplementation in the tests. Also prints the maximum CPU time for an adversarial text of 1 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import ROOT, Result, alternate, console, median_ratio, report

from tests.conftest import TOGGLES
from tests.verl.utils.reward_score.test_rlla import ANSWERS, HOSTILE
from tests.verl.utils.reward_score.toolrl_oracle import oracle_score
from verl.data.tasks import TaskSet
from verl.utils.reward_score.rlla import RllaOptions, compute_score
from verl.utils.reward_score.rlla_mutations import corrupted_responses

TARGET = 1.5
ROUNDING = 1e-9
Pairs = list[tuple[str, str]]
Scorer = Callable[[str, str], tuple[float, ...]]


def make_pairs(source: str) -> Pairs:
    """(whole ChatML sequence, gold answer), deduplicated."""
    pairs: dict[tuple[str, str], None] = {}
    for task in TaskSet(source, max_bad_share=1.0):
        prompt = "".join(f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in task.prompt)
        responses = [task.answer, *(mutation.text for mutation in corrupted_responses(task, task.answer))]
        for response in responses:
            pairs[f"{prompt}<|im_start|>assistant\n{response}<|im_end|>", task.answer] = None
    return list(pairs)


def load_upstream(path: str) -> Scorer:
    """`compute_score` of ToolRL's file, which selects its chat template by an environment variable."""
    os.environ["EXPERIMENT_NAME"] = "qwen"
    spec = importlib.util.spec_from_file_location("toolrl_rlla", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda solution, truth: module.compute_score(solution, truth, step=0)


def score_all(scorer: Scorer, pairs: Pairs) -> list[tuple[float, ...]]:
    """The scores; printed output is discarded."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        return [scorer(solution, truth) for solution, truth in pairs]


def plain(solution: str, truth: str) -> tuple[float, ...]:
    """The plain reimplementation in the tests."""
    response = solution.rpartition("<|im_start|>assistant")[2].partition("<|im_end|>")[0].strip()
    return oracle_score(response, truth, 0, {name for name in TOGGLES if os.environ.get(name) == "1"})


def slowest_hostile() -> tuple[str, float]:
    """Name and CPU seconds of the slowest 1 MB text, over all answer shapes."""
    seconds = {}
    for name, text in HOSTILE.items():
        for shape, answer in ANSWERS.items():
            started = time.process_time()
            score_all(compute_score, [(text, answer)])
            seconds[f"{name} / {shape}"] = time.process_time() - started
    worst = max(seconds, key=seconds.__getitem__)
    return worst, seconds[worst]


def main() -> None:
    """Compare scores, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(ROOT / "dataset/mini/train.parquet"))
    parser.add_argument("--upstream", help="ToolRL's verl/utils/reward_score/rlla.py")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    baseline = load_upstream(arguments.upstream) if arguments.upstream else plain
    pairs = make_pairs(arguments.data)
    scorers: dict[str, Scorer] = {
        "theirs": baseline,
        "ours": lambda solution, truth: compute_score(solution, truth, 0, RllaOptions()),
    }
    theirs, ours = (score_all(scorer, pairs) for scorer in scorers.values())
    gap = max(abs(a - b) for pair in zip(theirs, ours, strict=True) for a, b in zip(*pair, strict=True))
    sides = {name: partial(score_all, scorer, pairs) for name, scorer in scorers.items()}
    seconds = alternate(sides, arguments.rounds)
    rates = {name: [len(pairs) / each for each in rounds] for name, rounds in seconds.items()}
    name = "ToolRL's file" if arguments.upstream else "a plain reimplementation of ToolRL's"
    worst, slowest = slowest_hostile()
    console.print(f"slowest adversarial text: {worst}, {slowest:.2f} s of CPU time")
    report(
        Result(
            row=10,
            name=f"reward, ours / {name}",
            ratio=median_ratio(rates["ours"], rates["theirs"]),
            target=TARGET,
            ours={"pairs/CPU s": statistics.median(rates["ours"]), "pairs": len(pairs)},
            theirs={"pairs/CPU s": statistics.median(rates["theirs"]), "pairs": len(pairs)},
            limits={"largest difference of a score": (gap, ROUNDING)},
        )
    )


if __name__ == "__main__":
    main()
