"""The README's learning curve, drawn from the metrics of a run.

    python scripts/draw_learning_curve.py [--metrics FILE] [--out FILE]

--metrics may be the metrics.jsonl of any run that validates on a set called `test`; the default is
docs/assets/mini_grpo_metrics.jsonl, the columns drawn of a run of `bash train_grpo.sh` (seed 0, two CPU cores).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib.figure import Figure

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
REWARD, VALIDATION = "reward/total", "val/test/total"
WINDOW = 5  # steps of the moving mean


def draw(metrics: Path, out: Path) -> None:
    """Draw reward and validation over the steps. The same metrics give the same bytes."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    rewards = [(row["step"], row[REWARD]) for row in rows if REWARD in row]
    validations = [(row["step"], row[VALIDATION]) for row in rows if VALIDATION in row]
    steps = [step for step, _ in rewards]
    means = [fmean(value for _, value in rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]

    figure = Figure(figsize=(7, 3))
    axes = figure.add_subplot()
    axes.plot(steps, [value for _, value in rewards], color="#b7c4d4", linewidth=1, label="training reward of a step")
    axes.plot(steps, means, color="#2f5d8c", linewidth=2, label=f"its mean over {WINDOW} steps")
    axes.plot(*zip(*validations, strict=True), "o--", color="#c2541b", label="validation, greedy, 200 held-out tasks")
    for step, value in validations:
        axes.annotate(f"{value:.2f}", (step, value), xytext=(0, -15), textcoords="offset points", ha="center")
    axes.set(xlabel="training step", ylabel="reward (-3 to 4)", ylim=(0.6, 3.6))
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with mpl.rc_context({"svg.hashsalt": "learning curve"}):
        figure.savefig(out, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=Path, default=ASSETS / "mini_grpo_metrics.jsonl")
    parser.add_argument("--out", type=Path, default=ASSETS / "learning_curve.svg")
    options = parser.parse_args()
    draw(options.metrics, options.out)


if __name__ == "__main__":
    main()
