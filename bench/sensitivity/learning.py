"""Can learning alone distinguish a trainer with a mistake from the right one?

    bash bench/sensitivity.sh [NAME ..]                trains what is missing below OUT, then writes the table
    python bench/sensitivity/learning.py OUT --table   the table of the runs that are there

Every mistake and the right trainer learn from the same seeds, under the condition that the mistake needs to act. The
runs are short: most of what these tasks teach is learned in a dozen steps. A row of a validation set counts with its
mean score over the validations, the first of them half-way: a mistake that only delays learning shows, too. The
differences to the right trainer are paired over rows and seeds; the p-value takes both as samples.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench.sensitivity.mistakes import MISTAKES
from bench.sensitivity.planting import Mistake, plant
from toolrl.analysis.compare.paired import difference

RIGHT = "right"
SIGNIFICANT = 0.01
SEEDS = 5
_PLAIN = "plain"
_SHORT = (
    "trainer.total_training_steps=16",
    "trainer.test_freq=8",
    "trainer.save_freq=0",
    "trainer.val_before_train=false",
)
_UPDATES = ("actor.ppo_mini_batch_size=16", "actor.optim.lr=2e-4", "actor.optim.warmup_steps=3")  # two a step
_CONSTANT = ("recipe=composed_grpo", *_SHORT, *_UPDATES)
_BASE = (*_CONSTANT, "actor.optim.schedule=cosine", "actor.optim.min_lr_ratio=0.1")
_TOOL_LOOP = "tool loop"
CONDITIONS: Mapping[str, tuple[str, ...]] = {
    _PLAIN: _BASE,
    "first steps": (*_CONSTANT, "trainer.total_training_steps=4", "trainer.test_freq=2"),
    "two ranks": (*_BASE, "trainer.n_gpus_per_node=2"),
    "KL loss": (*_BASE, "algorithm.kl_placement=loss", "algorithm.kl_coefficient=0.02"),
    "high rate": (*_BASE, "actor.optim.lr=3e-3", "actor.optim.warmup_steps=16"),
    "few prompts": (*_BASE, "data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=32"),
    "rejection": (
        *_BASE,
        "algorithm.correction.rejection_level=geometric",
        "algorithm.correction.rejection_bounds=[0.999,1.001]",
    ),
    "schedule": (*_BASE, "reward.options={schedule_reward: true, schedule_steps: 16}"),
    _TOOL_LOOP: ("recipe=tool_loop", *_SHORT),
}
NEEDED: Mapping[str, str] = {  # by the mistakes that do not act in plain runs, or whose delay these make up for
    "late_mask": _TOOL_LOOP,  # there the first token decides between code and an answer
    "stale_weights": "first steps",
    "doubled_rank": "two ranks",
    "tenfold_kl": "KL loss",
    "other_temperature": "rejection",
    "repeated_prompts": "few prompts",
    "no_warm_up": "high rate",
    "late_schedule": "schedule",
    "trained_observations": _TOOL_LOOP,
}
Row = tuple[str, str]  # validation set, id of the task
Scores = Mapping[Row, float]


def condition_of(name: str) -> str:
    return NEEDED.get(name, _PLAIN)


def start_of_tool_loop(out: Path) -> tuple[str, ...]:
    """Data and initial model of the tool loop as overrides; the right trainer makes both, once."""
    folder = (out / "tool_loop_start").resolve()
    subprocess.run(["bash", ROOT / "scripts/tool_loop/cold_start.sh", folder, "0"], check=True)
    files = [f"data.{name}_files=[{folder}/data/{file}.jsonl]" for name, file in (("train", "train"), ("val", "test"))]
    return (f"model.path={folder}/cold_start/checkpoints/step-000400/hf", *files)


def train(mistake: Mistake | None, overrides: Sequence[str], folder: Path) -> None:
    """One run in a copy of the packages. Raises SystemExit with the end of its log if it fails."""
    shutil.rmtree(folder, ignore_errors=True)  # left by an interruption
    folder.mkdir(parents=True)
    log = folder / "log"
    with tempfile.TemporaryDirectory() as parent, log.open("w") as written:
        checkout = Path(parent) / "checkout"
        plant(mistake, checkout)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
        command += [f"trainer.default_local_dir={folder}", "trainer.experiment_name=run"]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=checkout, env=environment, stdout=written, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise SystemExit(f"{folder.name} ended with {ended.returncode}:\n{log.read_text()[-2000:]}")
    scores = [[*row, score] for row, score in sorted(scores_of(folder / "run" / "validation").items())]
    temporary = folder / "scores.tmp"
    temporary.write_text(json.dumps(scores))
    temporary.rename(folder / "scores.json")


def scores_of(validation: Path) -> Scores:
    """The mean score of every row over all validations."""
    found: dict[Row, list[float]] = defaultdict(list)
    for step in validation.glob("step-*.jsonl"):
        for line in step.read_text("utf-8").splitlines():
            row = json.loads(line)
            found[row["set"], row["task_id"]].append(row["reward"])
    return {row: fmean(each) for row, each in found.items()}


def read(folder: Path) -> Scores:
    return {(name, task): score for name, task, score in json.loads((folder / "scores.json").read_text())}


def table(out: Path, seeds: Sequence[int]) -> str:
    """A Markdown table of the mistakes with all their runs, and what is missing."""
    lines = ["| mistake | condition | right | difference | p | found |", "| --- | --- | --- | --- | --- | --- |"]
    missing = []
    for mistake in MISTAKES:
        condition = condition_of(mistake.name)
        pairs = [[folder_of(out, condition, name, seed) for seed in seeds] for name in (mistake.name, RIGHT)]
        if not all((folder / "scores.json").exists() for folders in pairs for folder in folders):
            missing.append(mistake.name)
            continue
        wrong, right = ([read(folder) for folder in folders] for folders in pairs)
        learned, base = difference(wrong, right), fmean(fmean(each.values()) for each in right)
        found = "yes" if learned.p < SIGNIFICANT else "no"
        lines.append(f"| {mistake.name} | {condition} | {base:.3f} | {learned.mean:+.3f} | {learned.p:.2g} | {found} |")
    return "\n".join([*lines, "", f"{len(seeds)} seeds. Without runs: {', '.join(missing) or 'none'}."])


def folder_of(out: Path, condition: str, name: str, seed: int) -> Path:
    return out / condition.replace(" ", "_") / f"{name}-{seed}"


def train_missing(out: Path, names: Sequence[str], seeds: Sequence[int], jobs: int) -> None:
    """Seed by seed, so that an interrupted study has whole pairs."""
    mistakes = {each.name: each for each in MISTAKES}
    starts = {_TOOL_LOOP: start_of_tool_loop(out)} if any(condition_of(name) == _TOOL_LOOP for name in names) else {}
    runs: dict[Path, tuple[Mistake | None, list[str]]] = {}
    for seed in seeds:
        for name in names:
            condition = condition_of(name)
            overrides = [*CONDITIONS[condition], *starts.get(condition, ()), f"trainer.seed={seed}"]
            for label, mistake in ((RIGHT, None), (name, mistakes[name])):
                folder = folder_of(out, condition, label, seed).resolve()
                if not (folder / "scores.json").exists():
                    runs[folder] = mistake, overrides
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda folder: train(*runs[folder], folder), runs):
            pass


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the runs; those that are there are not run again")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mistakes; default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args(arguments)
    known = [each.name for each in MISTAKES]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if args.seeds < 2:
        parser.error("--seeds must be at least 2")
    seeds = range(args.seeds)
    if not args.table:
        train_missing(args.out, args.names or known, seeds, args.jobs)
    print(table(args.out, seeds))


if __name__ == "__main__":
    main()
