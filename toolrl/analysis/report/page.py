"""The report of some runs: one HTML file without any reference to another."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from toolrl.analysis.report.chunks import Chunks, encoded, fitting, short
from toolrl.analysis.report.compare import compare_runs, differences
from toolrl.analysis.report.curves import describe, fitting_columns, marks, validation
from toolrl.analysis.report.folder import RunFolder, default_settings, read_runs
from toolrl.analysis.report.rollouts import read_rollouts
from toolrl.analysis.report.verdict import verdict
from verl import __version__
from verl.errors import ConfigError
from verl.host.files import replacing
from verl.text import counted

MAX_BYTES = 15_000_000  # per file
_RESERVE = 60_000  # characters for notes and rules of a run
_TITLE = ("model.path", "algorithm.name", "data.train_files")  # settings under the name of a run
_MAX_NOTES = 50


def write_report(folders: Sequence[Path], out: Path, user_code: bool = False) -> list[str]:
    """Write the report of the runs. Returns the notes on files that could not be read.

    Raises ConfigError if a folder is not that of a run, or `out` is a folder or a device.
    """
    target = out.resolve()
    if target.exists() and not target.is_file():
        raise ConfigError(f"--out: {out} is no regular file")
    text, notes = render(folders, user_code=user_code)
    with replacing(target) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return notes


def render(folders: Sequence[Path], live: str = "", user_code: bool = False) -> tuple[str, list[str]]:
    """(the page, notes on files that could not be read). live: version of a page that follows its server

    user_code: as in `RunFolder`
    """
    runs = read_runs(folders, user_code)
    chunks = Chunks()
    room = MAX_BYTES - len(_fill(runs, live, "", []).encode()) - _RESERVE * len(runs)
    comparisons = [asdict(each) for each in compare_runs(runs, chunks, room // 4)]
    described = [_describe(run, room // 3 // len(runs)) for run in runs]
    names = sorted({name for each in described for name in each["metrics"]})
    data = {
        "runs": described,
        "metrics": {name: asdict(metric) for name in names if (metric := describe(name)) is not None},
        "differences": differences(runs, room // 20),
        "version": __version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "live": live,
    }
    chunks.size += len(encoded(data))
    for number, (run, each) in enumerate(zip(runs, described, strict=True)):
        rollouts = read_rollouts(run, chunks, max(0, room - chunks.size) // (len(runs) - number))
        each["rollouts"] = asdict(rollouts)
        each["left_out"] += rollouts.left_out
        more = [f"{counted(len(run.notes) - _MAX_NOTES, 'other note')}"] if len(run.notes) > _MAX_NOTES else []
        each["notes"] = [*map(short, run.notes[:_MAX_NOTES]), *more]
    text = _fill(runs, live, encoded({**data, "comparisons": comparisons}), chunks.texts)
    return text, [note for run in runs for note in run.notes]


def _fill(runs: Sequence[RunFolder], live: str, data: str, chunks: Sequence[str]) -> str:
    page = files(__package__) / "page"
    template = Environment(autoescape=True).from_string((page / "report.html.jinja").read_text(encoding="utf-8"))
    script_names = ("uplot.min.js", "report.js", "curves.js", "rollouts.js", "tokens.js", "compare.js")
    return template.render(
        title=", ".join(run.name for run in runs),
        nonce=secrets.token_urlsafe(16),
        live=live,
        data=data,
        chunks=chunks,
        styles=[_raw(page, name) for name in ("uplot.min.css", "report.css")],
        scripts=[_raw(page, name) for name in script_names],
    )


def _raw(page: Any, name: str) -> Any:
    """One of our own files, which is not escaped."""
    return Markup((page / name).read_text(encoding="utf-8"))


def _describe(run: RunFolder, room: int) -> dict[str, Any]:
    """Run data of a page without rollouts. room: characters for metrics, settings and marks"""
    defaults = default_settings(run)
    changed = {name: value for name, value in run.settings.items() if defaults.get(name) != value}
    changed = {str(short(name)): [short(value), short(defaults.get(name))] for name, value in changed.items()}
    metrics, left_out = fitting_columns(run, room // 2)
    validated = validation(run)
    every: dict[str, list[Any]] = {
        "setting": list(changed.items()),
        "mark": [{**mark, "text": short(mark["text"])} for mark in marks(run)],
    }
    listed = {name: fitting(items, room // 4) for name, items in every.items()}
    for name, items in every.items():
        if len(listed[name]) < len(items):
            left_out.append(f"{len(listed[name])} of {counted(len(items), name)} are listed")
    return {
        "name": run.name,
        "folder": shlex.quote(str(run.folder)),
        "settings": dict(listed["setting"]),
        "all_settings": {name: short(run.settings.get(name)) for name in _TITLE},
        "known": {"settings": bool(run.settings), "data": bool(run.data), "code": bool(run.code)},
        "verdict": verdict(run, validated),
        "metrics": metrics,
        "validation": [each for each in validated if each[0] in metrics],
        "marks": listed["mark"],
        "left_out": left_out,
    }
