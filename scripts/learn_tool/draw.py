"""The curves of docs/results.md, drawn from the results of runs of scripts/learn_tool.sh.

    python scripts/learn_tool/draw.py RESULT.json .. --out FILE.svg

One line for each run: the mean reward of a step, its share of episodes that call the calculator, and that share among
the right ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

PANELS = {
    "reward": "right answers",
    "calls": "episodes that call",
    "calls_if_right": "right episodes that call",
}
COLORS = ("#2f5d8c", "#c2541b", "#5a8f3d", "#7a5195")


def draw(results: Sequence[Path], out: Path) -> None:
    """The same results give the same bytes."""
    figure = Figure(figsize=(9, 2.6))
    panels = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    for color, path in zip(COLORS, results, strict=False):
        curve = json.loads(path.read_text(encoding="utf-8"))["curve"]
        for axes, name in zip(panels, PANELS, strict=True):
            points = [(row["step"], row[name]) for row in curve if row[name] is not None]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.5, label=path.stem.replace("_", " "))
    for axes, title in zip(panels, PANELS.values(), strict=True):
        axes.set(xlabel="training step", ylim=(0, 1.03))
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].legend(loc="lower right", frameon=False, fontsize=8)
    figure.tight_layout()
    with mpl.rc_context({"svg.hashsalt": "learn tool"}):
        figure.savefig(out, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json", help=f"of at most {len(COLORS)} runs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if len(options.results) > len(COLORS):
        parser.error(f"at most {len(COLORS)} results, got {len(options.results)}")
    draw(options.results, options.out)


if __name__ == "__main__":
    main()
