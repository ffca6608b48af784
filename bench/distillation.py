"""Does the policy learn from a better copy of itself in half the steps that the reward needs?

    python bench/distillation.py [--seeds 0 1 2] [--out outputs/distillation] [key=value ..]

Teacher: the embedded model after `recipe=composed_grpo` with a seed of its own. From the start model then, by seed, the
same recipe, and in half the steps `algorithm.name=opd`, which learns from the teacher's log-probs alone. Prompts,
responses and updates of a step are the same. key=value: overrides of distillation, with another OUT. All runs are those
of users, through Ray and vLLM, two to four minutes each. Finished ones are kept, so a second call resumes.

The table has the mean greedy reward by validated step. The difference of both at their ends is paired over rows and
seeds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from common import ROOT, console
from rich.table import Table

from toolrl.analysis.compare.arms import scores
from toolrl.analysis.compare.paired import difference
from toolrl.analysis.report.folder import RunFolder, read_run

STEPS = 48
TEACHER_SEED = 100
HALF = STEPS // 2
DISTILLATION = ("algorithm.name=opd", f"trainer.total_training_steps={HALF}", f"actor.optim.warmup_steps={HALF}")


def train(folder: Path, seed: int, overrides: Sequence[str] = ()) -> RunFolder:
    """A run, unless it is finished."""
    if not (folder / "done").exists():
        where = f"trainer.default_local_dir={folder.parent}", f"trainer.experiment_name={folder.name}"
        command = [sys.executable, "-m", "verl.trainer.main_ppo", "recipe=composed_grpo", f"trainer.seed={seed}"]
        subprocess.run([*command, *overrides, *where], check=True, cwd=ROOT, stdout=sys.stderr)
        (folder / "done").touch()
    return read_run(folder)


def show(reward: Sequence[RunFolder], teacher: Sequence[RunFolder]) -> None:
    """The mean reward by validated step, and the difference of both at their ends."""
    sources = {"reward": reward, "teacher": teacher}
    table = Table("validation", "from", *(f"step {step}" for step in reward[0].validated_steps()))
    differences = []
    for name in scores(reward[0], STEPS, exact=False):
        for source, runs in sources.items():
            steps = runs[0].validated_steps()
            table.add_row(name, source, *(f"{fmean(mean_of(run, step, name) for run in runs):.3f}" for step in steps))
        if len(teacher) > 1:
            ends = [scores(run, HALF, exact=False)[name] for run in teacher]
            found = difference(ends, [scores(run, STEPS, exact=False)[name] for run in reward])
            low, high = found.interval
            differences.append(f"{name}: {found.mean:+.3f} ({low:+.3f} to {high:+.3f})")
    console.print(table)
    if differences:
        console.print(f"teacher after {HALF} steps minus reward after {STEPS}", *differences, sep="\n")


def mean_of(run: RunFolder, step: int, name: str) -> float:
    return fmean(scores(run, step, exact=False)[name].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/distillation")
    args = parser.parse_intermixed_args()
    out = args.out.resolve()
    train(out / "teacher", TEACHER_SEED)
    path = f"teacher.path={out}/teacher/checkpoints/step-{STEPS:06}/hf"
    teacher = [train(out / f"opd_{seed}", seed, [*DISTILLATION, path, *args.overrides]) for seed in args.seeds]
    reward = [train(out / f"grpo_{seed}", seed) for seed in args.seeds]
    show(reward, teacher)


if __name__ == "__main__":
    main()
