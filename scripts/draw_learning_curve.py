"""The README's learning curve, drawn from the metrics of a run.

    python scripts/draw_learning_curve.py [--metrics FILE] [--out FILE]

--metrics may be the metrics.jsonl of any run that validates on rows of several data sources; the default is
docs/assets/composed_grpo_metrics.jsonl, the columns drawn of a run of `bash train_grpo.sh` (seed 0, two CPU cores).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
REWARD = "reward/total"
SETS = {"test": ("#c2541b", "validation, 200 held-out tasks"), "test_new_tools": ("#4f8a3a", "with tools never seen")}
WINDOW = 5  # steps of the moving mean
Row = dict[str, Any]


def draw(metrics: Path, out: Path) -> None:
    """Draw rewards over the steps, and beside them exact answers by data source. The same metrics, the same bytes."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    with mpl.rc_context({"svg.hashsalt": "learning curve", "font.size": 9}):
        figure = Figure(figsize=(9, 3.2))
        rewards, sources = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_rewards(rewards, rows)
        _draw_sources(sources, rows)
        for axes in (rewards, sources):
            axes.set_xlabel("training step")
            axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(out, metadata={"Date": None, "Creator": None})


def _draw_rewards(axes: Axes, rows: Sequence[Row]) -> None:
    steps, rewards = _series(rows, REWARD)
    means = [fmean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]
    axes.plot(steps, rewards, color="#b7c4d4", linewidth=1, label="training reward of a step")
    axes.plot(steps, means, color="#2f5d8c", linewidth=2, label=f"its mean over {WINDOW} steps")
    for name, (color, label) in SETS.items():
        axes.plot(*_series(rows, f"val/{name}/total"), "o--", color=color, markersize=4, label=label)
    axes.set(title="reward (-3 to 4)")
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def _draw_sources(axes: Axes, rows: Sequence[Row]) -> None:
    """Both sets have as many rows of a source, nearly; their mean is drawn."""
    names = [match[1] for name in rows[0] if (match := re.fullmatch(r"val/test/([^/]+)/exact", name))]
    for name in names:
        (steps, known), (_, unseen) = (_series(rows, f"val/{each}/{name}/exact") for each in SETS)
        shares = [50 * (first + second) for first, second in zip(known, unseen, strict=True)]
        axes.plot(steps, shares, "o-", markersize=3, label=name)
    axes.set(title="exactly right by kind of task, %", ylim=(0, 103))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=Path, default=ASSETS / "composed_grpo_metrics.jsonl")
    parser.add_argument("--out", type=Path, default=ASSETS / "learning_curve.svg")
    options = parser.parse_args()
    draw(options.metrics, options.out)


if __name__ == "__main__":
    main()
