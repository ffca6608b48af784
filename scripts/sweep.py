"""Hyperparameter sweep: train the same run at several values of a setting, sequentially, and compare them.

    python scripts/sweep.py recipe=zerotir env.max_tool_calls=0,2,4,20 model.path=MODEL data.train_files=[FILE]
    python scripts/sweep.py recipe=torl model.path=A,B env.max_tool_calls=0,1 trainer.experiment_name=study ..

Arguments are those of main_ppo. One with several values, separated by commas, is swept; of several such arguments every
combination is a point. A point is a run in <trainer.default_local_dir>/<trainer.experiment_name>/<point>. The same
command resumes an interrupted sweep: finished points are skipped, an unfinished one resumes, and new values add points.
The study's folder finally contains

    sweep.json, sweep.md   a row per point: its last scores, and means over its last 10 steps
    sweep.png              --metric over the steps, and its last value over the setting (with matplotlib: extra plot)

    --metric NAME  the metric to plot (docs/metrics.md); default: the first score of a benchmark or validation set, or
                   the reward
    --dry-run      list the points and exit
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed, too

from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: E402
from hydra.errors import HydraException  # noqa: E402

from verl.config.commands import TRAIN  # noqa: E402
from verl.config.load import load_config  # noqa: E402
from verl.config.schema import TrainerConfig  # noqa: E402
from verl.config.show import as_yaml  # noqa: E402
from verl.errors import ConfigError, VerlError  # noqa: E402
from verl.host.exits import write_error  # noqa: E402
from verl.host.files import replacing  # noqa: E402
from verl.host.lock import alone_in  # noqa: E402
from verl.tracking.jsonl import read_jsonl  # noqa: E402

INSTALL_PLOT = "install it with: pip install -r scripts/requirements/plot.txt, or pip install 'toolrl[plot]'"
_FOLDER, _NAME = "trainer.default_local_dir", "trainer.experiment_name"
_LAST_STEPS = 10
_OF_LAST_STEPS = (
    "reward/total",
    "reward/correct",
    "tools/calls_mean",
    "tools/usage_rate",
    "tools/usage_rate_correct",
    "response_length/mean",
    "response_length/clip_ratio",
)
_FINISHED = "finished"
_RUN_FAILED = 1  # exit code after which the sweep continues; others are user errors or signals and stop it
_UNSAFE = re.compile(r"[^\w.+-]+")
Run = Callable[[list[str]], int]


@dataclass(frozen=True)
class Point:
    """One run of the study."""

    name: str
    values: Mapping[str, str]  # swept setting -> value
    overrides: tuple[str, ...]  # arguments of main_ppo
    config: str  # the resulting config.yaml


@dataclass(frozen=True)
class Study:
    """The points and their common folder."""

    folder: Path
    points: tuple[Point, ...]

    def is_finished(self, point: Point) -> bool:
        """Whether a run with exactly this configuration has finished."""
        folder = self.folder / point.name
        return (folder / _FINISHED).is_file() and (folder / "config.yaml").read_text(encoding="utf-8") == point.config


def plan(arguments: Sequence[str]) -> Study:
    """Parse the arguments into a study. Raises ConfigError for an invalid configuration."""
    fixed, axes = _parsed(arguments)
    if not axes:
        raise ConfigError("nothing to sweep: give a setting several values, such as env.max_tool_calls=0,2,4")
    for key in (_FOLDER, _NAME):
        if key in axes:
            raise ConfigError(f"{key} cannot be swept: every point has its own folder inside the study's")
    settings = dict(each.split("=", 1) for each in fixed)
    named = settings.get(_NAME, f"sweep_{'_'.join([settings.get('recipe', 'run'), *map(_last, axes)])}")
    folder = Path(_unquoted(settings.get(_FOLDER, TrainerConfig().default_local_dir))) / _unquoted(named)
    kept = [each for each in fixed if not each.startswith((f"{_FOLDER}=", f"{_NAME}="))]
    shown = {key: _short_names(values) for key, values in axes.items()}
    points = []
    for chosen in product(*axes.values()):
        values = dict(zip(axes, chosen, strict=True))
        name = "_".join(f"{_last(key)}-{shown[key][value]}" for key, value in values.items())
        place = (f"{_FOLDER}={_quoted(str(folder))}", f"{_NAME}={_quoted(name)}")
        points.append(_point(name, values, (*kept, *(f"{key}={value}" for key, value in values.items()), *place)))
    names = [point.name for point in points]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two points would share the folder {name!r}; drop one of the values")
    return Study(folder, tuple(points))


def _short_names(values: Sequence[str]) -> dict[str, str]:
    """Each value as part of a folder name: the last component of a path, or the full path if that is ambiguous."""
    last = {value: _UNSAFE.sub("_", value.rpartition("/")[2]) for value in values}
    return last if len(set(last.values())) == len(values) else {each: _UNSAFE.sub("_", each) for each in values}


def _point(name: str, values: Mapping[str, str], overrides: tuple[str, ...]) -> Point:
    """Build a point; loads its configuration, so that errors show before the first run starts."""
    try:
        return Point(name, values, overrides, as_yaml(load_config(overrides), TRAIN))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _parsed(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(single-valued arguments unchanged, {key: values} of the swept ones)."""
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    for argument in arguments:
        try:
            override = OverridesParser.create().parse_override(argument)
            if override.is_sweep_override():
                axes[override.key_or_group] = list(override.sweep_string_iterator())
            else:
                fixed.append(argument)
        except (HydraException, ValueError) as error:
            raise ConfigError(f"{argument!r} is not key=value ({' '.join(str(error).split())})") from error
    return fixed, axes


def _last(key: str) -> str:
    return key.rpartition(".")[2] if key != "model.path" else "model"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _unquoted(text: str) -> str:
    return str(OverridesParser.create().parse_override(f"x={text}").value())


def train(overrides: list[str]) -> int:
    """Run main_ppo in a subprocess; returns its exit code.

    Ctrl-C also reaches the subprocess, which shuts down by itself; SIGTERM is forwarded.
    """
    process = subprocess.Popen([sys.executable, "-m", "verl.trainer.main_ppo", *overrides])
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_term = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGTERM, on_term)


def sweep(study: Study, run: Run = train) -> int:
    """Runs the unfinished points. Returns 0, or the exit code of the last failed run."""
    failed = 0
    for number, point in enumerate(study.points, 1):
        place = f"point {number} of {len(study.points)}, {point.name}"
        if study.is_finished(point):
            print(f"{place}: already finished", flush=True)
            continue
        print(f"{place}: starting", flush=True)
        code = run(list(point.overrides))
        if code == 0:
            (study.folder / point.name / _FINISHED).touch()
            continue
        print(f"{place}: exited with code {code}; run the same command to resume", file=sys.stderr)
        failed = code
        if code != _RUN_FAILED:
            break
    return failed


def results(study: Study) -> list[dict[str, Any]]:
    """A row per point: values, status, steps, hours, and final metrics."""
    return [_result(study, point) for point in study.points]


def _result(study: Study, point: Point) -> dict[str, Any]:
    rows = _metrics(study, point)
    trained = [row for row in rows if row["step"] > 0]
    figures: dict[str, float] = {}
    for row in rows:
        figures |= {name: value for name, value in row.items() if _is_figure(name) and value is not None}
    for name in _OF_LAST_STEPS:
        seen = [row[name] for row in trained[-_LAST_STEPS:] if row.get(name) is not None]
        if seen:
            figures[name] = fmean(seen)
    status = "finished" if study.is_finished(point) else "unfinished" if trained else "not started"
    hours = sum(row["time/step_s"] for row in trained) / 3600
    return {
        "point": point.name,
        "values": dict(point.values),
        "status": status,
        "steps": trained[-1]["step"] if trained else 0,
        "hours": hours,
        "figures": figures,
    }


def _metrics(study: Study, point: Point) -> list[dict[str, Any]]:
    path = study.folder / point.name / "metrics.jsonl"
    return read_jsonl(path) if path.is_file() else []


def _is_figure(name: str) -> bool:
    return (name.startswith("eval/") and name.endswith("/score")) or (
        name.startswith("val/") and name.endswith(("/total", "/correct", "/exact"))
    )


def markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """The results as a table."""
    axes = list(found[0]["values"])
    names = list(dict.fromkeys(name for row in found for name in row["figures"]))
    head = [*axes, "status", "steps", "hours", *names]
    lines = [head, ["---"] * len(head)]
    for row in found:
        figures = [f"{row['figures'][name]:.4g}" if name in row["figures"] else "" for name in names]
        lines.append([*row["values"].values(), row["status"], str(row["steps"]), f"{row['hours']:.2f}", *figures])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\neval/ and val/: last values; all others: means over the last {_LAST_STEPS} steps.\n"


def drawn_metric(found: Sequence[Mapping[str, Any]], selected: str | None) -> str:
    """The metric to plot: the selected one, else a score of a benchmark or validation set, else any."""
    names = list(dict.fromkeys(name for row in found for name in row["figures"]))
    return selected or next(iter([*filter(_is_figure, names), *names]), "reward/total")


def draw(study: Study, found: Sequence[Mapping[str, Any]], metric: str, path: Path) -> None:
    """Plot the metric over the steps, and its last value over the setting. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # from the extra "plot"
    except ImportError as error:
        raise ConfigError(f"the plot needs matplotlib; {INSTALL_PLOT}. The table was written") from error
    figure = Figure(figsize=(11, 4), layout="constrained")
    over_steps, over_values = figure.subplots(1, 2)
    last: dict[str, float] = {}
    for point, row in zip(study.points, found, strict=True):
        seen = [(each["step"], each[metric]) for each in _metrics(study, point) if each.get(metric) is not None]
        label = ", ".join(row["values"].values())
        if seen:
            over_steps.plot(*zip(*seen, strict=True), label=label, marker="." if len(seen) < 50 else "")
            last[label] = row["figures"].get(metric, seen[-1][1])
    if not last:
        raise ConfigError(f"no point has a metric {metric!r} yet (docs/metrics.md)")
    swept = ", ".join(found[0]["values"])
    over_steps.set(xlabel="step", ylabel=metric)
    over_steps.legend(title=swept)
    over_values.plot(list(last), list(last.values()), marker="o")
    over_values.set(xlabel=swept, ylabel=f"{metric}, at the end")
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=150)


def report(study: Study, metric: str | None) -> None:
    """Write table and plot, and print the table."""
    found = results(study)
    for name, text in (("sweep.json", json.dumps(found, indent=1) + "\n"), ("sweep.md", markdown(found))):
        with replacing(study.folder / name) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    print(markdown(found))
    try:
        draw(study, found, drawn_metric(found, metric), study.folder / "sweep.png")
    except ConfigError as error:
        print(f"no sweep.png: {error}", file=sys.stderr)
    print(f"written to {study.folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arguments", nargs="+", metavar="key=value")
    parser.add_argument("--metric")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_intermixed_args(argv)
    try:
        study = plan(options.arguments)
        if options.dry_run:
            print("\n".join(f"{study.folder / point.name}: {' '.join(point.overrides)}" for point in study.points))
            return 0
        with alone_in(study.folder):
            code = sweep(study)
            report(study, options.metric)
    except VerlError as error:
        return write_error(error)
    return code


if __name__ == "__main__":
    sys.exit(main())
