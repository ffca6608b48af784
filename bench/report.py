"""Seconds, memory and size of `toolrl report` for a long run, and milliseconds of the viewer's filters in chromium.

    python bench/report.py RUN [--steps 1000] [--rollouts 2048]

RUN is a run's folder with kept samples (trainer.samples_kept). Its steps are repeated: metrics with new step numbers,
transcripts until a step has that many rollouts (files are hard links to a few, so they are read from memory), kept
samples and validations as they are. The filters run over the metadata of 20,000 rollouts; without chromium and selenium
that part is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from toolrl.analysis.samples.sample_files import SampleFiles, StepSamples, read_samples
from verl.tracking.jsonl import read_jsonl

_FILTERS = 20
_ROLLOUTS = 20_000
_FILTER = f"""
const m = report.data.runs[0].rollouts.meta, count = m.step.length;
for (const name of Object.keys(m)) m[name] = Array.from({{length: {_ROLLOUTS}}}, (_, n) => m[name][n % count]);
found.low = "0.5"; found.task = "7"; found.stop = m.stop_reason[0];
const time = () => {{ const start = performance.now(); filtered(); return performance.now() - start; }};
return Array.from({{length: {_FILTERS}}}, time);
"""


def enlarged(run: Path, folder: Path, steps: int, rollouts: int) -> None:
    """Write the folder of the long run."""
    for name in ("transcripts", "samples"):
        (folder / name).mkdir(parents=True)
    shutil.copy(run / "config.yaml", folder)
    if (run / "validation").exists():
        shutil.copytree(run / "validation", folder / "validation")
    rows = read_jsonl(run / "metrics.jsonl")
    first = rows[0]["time"]
    with (folder / "metrics.jsonl").open("w") as file:
        for step, row in zip(range(1, steps + 1), cycle(rows[1:] or rows), strict=False):
            file.write(json.dumps({**row, "step": step, "time": first + 60 * step}) + "\n")
    long = []
    for number, path in enumerate(sorted((run / "transcripts").glob("step-*.jsonl"))):
        long.append(folder / f"made-{number}")
        long[-1].write_bytes(b"".join(islice(cycle(path.read_bytes().splitlines(keepends=True)), rollouts)))
    samples = sorted((run / "samples").glob("step-*.npz"))
    writer = SampleFiles(folder, str)
    for number, path in enumerate(samples, 1):
        writer.write(number, _counted(read_samples(path), rollouts))
    made = sorted((folder / "samples").iterdir())  # each beside the transcript of its step
    samples = [path.rename(folder / path.name.replace("step", "made")) for path in made]
    for step in range(1, steps + 1):
        os.link(long[step % len(long)], folder / "transcripts" / f"step-{step:06d}.jsonl")
        shutil.copy(samples[step % len(samples)], folder / "samples" / f"step-{step:06d}.npz")


def _counted(kept: StepSamples, rollouts: int) -> StepSamples:
    """With the loss, and the counts where the step has recorded them, of that many rollouts."""
    rows, scale = range(rollouts), kept.scale
    loss, sums = ([value[row] for row, _ in zip(cycle(value), rows, strict=False)] for value in (kept.loss, kept.sums))
    if scale is None:
        return replace(kept, loss=dict(zip(rows, loss, strict=False)))
    counts = {name: np.resize(getattr(scale, name), rollouts) for name in ("num_trained", "groups")}
    rewards = kept.rewards if kept.rewards is None or kept.rewards.lengths is None else None  # without those of turns
    given = {name: getattr(rewards, name) for name in ("rewards", "penalties", "baselines")} if rewards else {}
    resized = {name: np.resize(each, rollouts) for name, each in given.items() if each is not None}
    return replace(
        kept,
        rewards=rewards and replace(rewards, **resized),
        loss=dict(zip(rows, loss, strict=False)),  # none, where all advantages are zero
        sums=dict(zip(rows, sums, strict=False)),
        scale=replace(scale, episodes=np.arange(rollouts), **counts),
    )


def filter_ms(page: Path) -> list[float]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        started = time.monotonic()
        driver.get(page.as_uri())
        while not driver.execute_script("return document.documentElement.dataset.ready"):
            time.sleep(0.02)
        print(f"opened in {time.monotonic() - started:.1f} s")
        return [float(each) for each in driver.execute_script(_FILTER)]
    finally:
        driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=2048)
    options = parser.parse_args()
    for pattern in ("config.yaml", "metrics.jsonl", "transcripts/step-*.jsonl", "samples/step-*.npz"):
        if not any(options.run.glob(pattern)):
            parser.error(f"{options.run} has no {pattern}")
    with tempfile.TemporaryDirectory() as folder:
        long, page = Path(folder) / "long", Path(folder) / "report.html"
        enlarged(options.run, long, options.steps, options.rollouts)
        read = sum(path.stat().st_size for path in long.glob("transcripts/*")) / 2**30
        print(f"{options.steps} steps x {options.rollouts} rollouts, {read:.2f} GiB of transcripts")
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "toolrl.analysis.report", long, "--out", page], check=True)
        seconds = time.monotonic() - started
        gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        print(f"report: {seconds:.1f} s, {gib:.2f} GiB at most, {page.stat().st_size / 1e6:.1f} MB")
        if find_spec("selenium") and shutil.which("chromedriver"):
            times = filter_ms(page)
            print(
                f"filter of {_ROLLOUTS} rollouts: median {statistics.median(times):.1f} ms, at most {max(times):.1f} ms"
            )


if __name__ == "__main__":
    main()
