"""Row 19: final reward of the tool loop as the environment `tool` and as a program on the openai SDK.

    bash scripts/agents/prepare.sh openai_loop
    python bench/agents_learning.py [--seeds 0 1 2] [--steps 8] [--out outputs/agents_learning]

Both train the model and data of scripts/train_tool_loop.sh, from one cold start: examples/agents/tool_loop.py with its
code in `toolrl sandbox-server`, and env.name=tool. A seed is that of the training. The figure is the difference of the
mean greedy validation rewards after the last step; the limit is the half-width of its 95 % t interval, paired over
seeds. Finished runs are kept, so a second call resumes. Each run takes minutes.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from common import Result, report
from convergence import Run, interval

from verl.tracking.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
MAX_DIFFERENCE = 0.1
WAYS: Mapping[str, Sequence[str]] = {
    "tool": (),
    "agent": (
        *("env.name=agent", "env.tools=[]", "env.max_tool_calls=null", "env.agent=examples/agents/tool_loop.py:run"),
        "env.options.python=.agents/openai_loop/bin/python",
    ),
}


@contextmanager
def sandbox() -> Iterator[str]:
    """The address of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    server = subprocess.Popen(
        [sys.executable, "-m", "toolrl.sandbox.server", "--port", port], cwd=ROOT, stdout=sys.stderr
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def train(start: Path, way: str, seed: int, steps: int) -> Run:
    """A run from the cold start in this folder, unless it is finished."""
    folder = start / f"seed{seed}" / f"{way}_{steps}"
    if not (folder / "done").exists():
        overrides = [
            *("recipe=tool_loop", f"model.path={start}/cold_start/checkpoints/step-000400/hf", *WAYS[way]),
            *(f"data.train_files=[{start}/data/train.jsonl]", f"data.val_files=[{start}/data/test.jsonl]"),
            *(f"trainer.seed={seed}", f"trainer.total_training_steps={steps}", "trainer.save_freq=0"),
            *(f"trainer.default_local_dir={folder.parent}", f"trainer.experiment_name={folder.name}"),
        ]
        subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *overrides], check=True, cwd=ROOT, stdout=sys.stderr
        )
        (folder / "done").touch()
    return Run(read_jsonl(folder / "metrics.jsonl"))


def result(runs: Mapping[str, Sequence[Run]]) -> Result:
    """The row. runs: by way, in the order of the seeds"""
    finals = {way: [run.points[-1].reward for run in each] for way, each in runs.items()}
    differences = [ours - theirs for ours, theirs in zip(finals["agent"], finals["tool"], strict=True)]
    mean = statistics.fmean(differences)
    limits = {}
    if len(differences) > 1:
        low, high = interval(differences)
        limits["difference within its 95 % interval"] = (abs(mean), (high - low) / 2)
    sides = [
        {
            "final reward": statistics.fmean(finals[way]),
            "first reward": statistics.fmean(run.points[0].reward for run in runs[way]),
            "s a step": statistics.fmean(run.step_s() for run in runs[way]),
        }
        for way in ("agent", "tool")
    ]
    name = f"final reward, an agent's minus env.name=tool's, {len(differences)} seeds"
    return Result(19, name, abs(mean), MAX_DIFFERENCE, *sides, lower_is_better=True, limits=limits)


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "agents_learning")
    options = parser.parse_args()
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    with sandbox() as url:
        os.environ["SANDBOX_URL"] = url
        start = options.out.resolve()
        cold_start = ["bash", "scripts/tool_loop/cold_start.sh", str(start), "0"]
        subprocess.run(cold_start, check=True, cwd=ROOT, stdout=sys.stderr)
        for seed in options.seeds:
            for way in WAYS:
                runs[way].append(train(start, way, seed, options.steps))
    report(result(runs))


if __name__ == "__main__":
    main()
