"""Does the policy learn from a better copy of itself in half the steps that the reward needs?

    python bench/distillation.py [--seeds 0 1 2] [--out outputs/distillation]

Teacher: the embedded model after `recipe=composed_grpo` with a seed of its own. From the start model then, by seed:
reward: the same recipe, 48 steps; teacher: 24 steps of `algorithm.name=opd`, which learns from the teacher's log-probs
alone, at twice the rate; reward, half: the recipe with these 24 steps and rate, without a teacher. Prompts, responses
and updates of a step are the same. All runs are those of users, through Ray and vLLM, one to three minutes each.
Finished ones are kept, so a second call resumes.

The table has the mean greedy reward by validated step. Differences of the last rewards are paired over rows and seeds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from common import ROOT, console
from rich.table import Table

from toolrl.analysis.compare.arms import scores
from toolrl.analysis.compare.paired import difference
from toolrl.analysis.report.folder import RunFolder, read_run

TEACHER_SEED = 100
STEPS, HALF = 48, 24
HALVED = (f"trainer.total_training_steps={HALF}", f"actor.optim.warmup_steps={HALF}", "actor.optim.lr=6e-4")


def train(folder: Path, seed: int, overrides: Sequence[str] = ()) -> RunFolder:
    """A run, unless it is finished."""
    if not (folder / "done").exists():
        where = f"trainer.default_local_dir={folder.parent}", f"trainer.experiment_name={folder.name}"
        command = [sys.executable, "-m", "verl.trainer.main_ppo", "recipe=composed_grpo", f"trainer.seed={seed}"]
        subprocess.run([*command, *overrides, *where], check=True, cwd=ROOT, stdout=sys.stderr)
        (folder / "done").touch()
    return read_run(folder)


def show(arms: Mapping[str, Sequence[RunFolder]]) -> None:
    reward, *others = arms
    table = Table("validation", "from", *(f"step {step}" for step in arms[reward][0].validated_steps()))
    ends = {name: [scores(run, run.validated_steps()[-1], exact=False) for run in runs] for name, runs in arms.items()}
    for name in ends[reward][0]:
        for arm, runs in arms.items():
            steps = runs[0].validated_steps()
            table.add_row(name, arm, *(f"{fmean(mean_of(run, step, name) for run in runs):.3f}" for step in steps))
    console.print(table)
    for arm in others if len(ends[reward]) > 1 else []:
        for name in ends[reward][0]:
            found = difference([each[name] for each in ends[arm]], [each[name] for each in ends[reward]])
            low, high = found.interval
            console.print(f"{arm} minus {reward}, {name}: {found.mean:+.3f} ({low:+.3f} to {high:+.3f})")


def mean_of(run: RunFolder, step: int, name: str) -> float:
    return fmean(scores(run, step, exact=False)[name].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/distillation")
    args = parser.parse_args()
    out = args.out.resolve()
    train(out / "teacher", TEACHER_SEED)
    teacher = f"teacher.path={out}/teacher/checkpoints/step-{STEPS:06}/hf"
    arms = {"reward": (), "reward, half": HALVED, "teacher": (*HALVED, "algorithm.name=opd", teacher)}
    runs = {
        name: [train(out / f"{name.replace(', ', '_')}_{seed}", seed, overrides) for seed in args.seeds]
        for name, overrides in arms.items()
    }
    show(runs)


if __name__ == "__main__":
    main()
