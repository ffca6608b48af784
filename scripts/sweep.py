"""Train the same run at several values of a setting, one after the other, and compare them.

    python scripts/sweep.py recipe=zerotir env.max_tool_calls=0,2,4,20 model.path=MODEL data.train_files=[FILE]
    python scripts/sweep.py recipe=torl model.path=A,B env.max_tool_calls=0,1 trainer.experiment_name=study ..

Arguments are those of main_ppo. One with several values, separated by commas, is swept; of several such arguments every
combination is a point. A point is a run of its own in <trainer.default_local_dir>/<trainer.experiment_name>/<point>.
The same command goes on where it was stopped: points that are finished are skipped, one that is not resumes, and new
values add new points. In the end the study's folder has

    sweep.json, sweep.md   a row for each point: its last figures, and means over its last 10 steps
    sweep.png              --metric over the steps, and its last value over the setting (with matplotlib: extra plot)

    --metric NAME  what is drawn (docs/metrics.md); if left out, the first figure of a benchmark or validation set, or
                   the reward
    --dry-run      list the points and stop
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

from verl.config.load import load_config  # noqa: E402
from verl.config.schema import RunConfig  # noqa: E402
from verl.config.show import as_yaml  # noqa: E402
from verl.errors import ConfigError, VerlError  # noqa: E402
from verl.files import replacing  # noqa: E402
from verl.lock import alone_in  # noqa: E402
from verl.tracking.jsonl import read_rows  # noqa: E402

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
_GOES_ON = 1  # exit code of a run that failed; others are the user's: nothing more is started
_UNSAFE = re.compile(r"[^\w.+-]+")
Run = Callable[[list[str]], int]


@dataclass(frozen=True)
class Point:
    """One run of the study."""

    name: str
    values: Mapping[str, str]  # of the settings that are swept
    words: tuple[str, ...]  # of main_ppo
    config: str  # as a run with these words writes it


@dataclass(frozen=True)
class Study:
    """Points, and the folder that they share."""

    folder: Path
    points: tuple[Point, ...]

    def is_finished(self, point: Point) -> bool:
        """Whether a run with exactly this configuration has ended."""
        folder = self.folder / point.name
        return (folder / _FINISHED).is_file() and (folder / "config.yaml").read_text(encoding="utf-8") == point.config


def plan(words: Sequence[str]) -> Study:
    """The study that the arguments describe. Raises ConfigError for what no run could be started with."""
    fixed, axes = _parsed(words)
    if not axes:
        raise ConfigError("nothing is swept: give a setting several values, as env.max_tool_calls=0,2,4")
    for key in (_FOLDER, _NAME):
        if key in axes:
            raise ConfigError(f"{key} cannot be swept: every point has a folder of its own in that of the study")
    settings = dict(word.split("=", 1) for word in fixed)
    named = settings.get(_NAME, f"sweep_{'_'.join([settings.get('recipe', 'run'), *map(_last, axes)])}")
    folder = Path(_unquoted(settings.get(_FOLDER, RunConfig().default_local_dir))) / _unquoted(named)
    kept = [word for word in fixed if not word.startswith((f"{_FOLDER}=", f"{_NAME}="))]
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
            raise ConfigError(f"two points would share the folder {name!r}; leave one of the values out")
    return Study(folder, tuple(points))


def _short_names(values: Sequence[str]) -> dict[str, str]:
    """Each value as part of a folder's name: the last part of a path, the whole of it where two end alike."""
    last = {value: _UNSAFE.sub("_", value.rpartition("/")[2]) for value in values}
    return last if len(set(last.values())) == len(values) else {each: _UNSAFE.sub("_", each) for each in values}


def _point(name: str, values: Mapping[str, str], words: tuple[str, ...]) -> Point:
    """Every point's configuration is loaded before the first run starts."""
    try:
        return Point(name, values, words, as_yaml(load_config(words)))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _parsed(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(arguments with one value as they are, {key: values} of the others)."""
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
            if override.is_sweep_override():
                axes[override.key_or_group] = list(override.sweep_string_iterator())
            else:
                fixed.append(word)
        except (HydraException, ValueError) as error:
            raise ConfigError(f"{word!r} is not key=value ({' '.join(str(error).split())})") from error
    return fixed, axes


def _last(key: str) -> str:
    return key.rpartition(".")[2] if key != "model.path" else "model"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _unquoted(text: str) -> str:
    return str(OverridesParser.create().parse_override(f"x={text}").value())


def train(words: list[str]) -> int:
    """A run of main_ppo in a process of its own; its exit code.

    Ctrl-C reaches that process as well, which shuts down by itself; SIGTERM is passed on.
    """
    process = subprocess.Popen([sys.executable, "-m", "verl.trainer.main_ppo", *words])
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_term = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGTERM, on_term)


def sweep(study: Study, run: Run = train) -> int:
    """Runs what is not finished. Returns 0, or the exit code of what went wrong."""
    failed = 0
    for number, point in enumerate(study.points, 1):
        place = f"point {number} of {len(study.points)}, {point.name}"
        if study.is_finished(point):
            print(f"{place}: finished before", flush=True)
            continue
        print(f"{place}: begins", flush=True)
        code = run(list(point.words))
        if code == 0:
            (study.folder / point.name / _FINISHED).touch()
            continue
        print(f"{place}: ended with code {code}; the same command takes it up again", file=sys.stderr)
        failed = code
        if code != _GOES_ON:
            break
    return failed


def results(study: Study) -> list[dict[str, Any]]:
    """A row for each point: values, status, steps, hours, and its last figures."""
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
    return read_rows(path) if path.is_file() else []


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
    return f"{table}\n\neval/ and val/: the last there are; all others: means over the last {_LAST_STEPS} steps.\n"


def drawn_metric(found: Sequence[Mapping[str, Any]], asked: str | None) -> str:
    """The name of the metric that is drawn: the one asked for, a benchmark's or validation's, or another one."""
    names = list(dict.fromkeys(name for row in found for name in row["figures"]))
    return asked or next(iter([*filter(_is_figure, names), *names]), "reward/total")


def draw(study: Study, found: Sequence[Mapping[str, Any]], metric: str, path: Path) -> None:
    """The metric over the steps, and its last value over what was swept. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # the extra "plot": everything else works without
    except ImportError as error:
        raise ConfigError(f"the picture needs matplotlib; {INSTALL_PLOT}. The table is there") from error
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
    """Writes table and picture, and prints the table."""
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
    parser.add_argument("words", nargs="+", metavar="key=value")
    parser.add_argument("--metric")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_intermixed_args(argv)
    try:
        study = plan(options.words)
        if options.dry_run:
            print("\n".join(f"{study.folder / point.name}: {' '.join(point.words)}" for point in study.points))
            return 0
        with alone_in(study.folder):
            code = sweep(study)
            report(study, options.metric)
    except VerlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
