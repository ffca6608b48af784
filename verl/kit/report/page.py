"""The report of some runs: one HTML file without any reference to another."""

from __future__ import annotations

import math
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

from verl import __version__
from verl.kit.report.chunks import Chunks, encoded
from verl.kit.report.compare import compare_runs, differences
from verl.kit.report.curves import columns, describe, marks, validation, verdict
from verl.kit.report.folder import RunFolder, default_settings, read_runs
from verl.kit.report.rollouts import read_rollouts
from verl.system.files import replacing

_TITLE = ("model.path", "algorithm.name", "data.train_files")  # settings under the name of a run
MAX_CHARS = 14_000_000  # of the chunks, so that a file has less than 15 MB


def write_report(folders: Sequence[Path], out: Path) -> list[str]:
    """Write the report of the runs. Returns the notes on files that could not be read.

    Raises ConfigError if a folder is not that of a run.
    """
    text, notes = render(folders)
    with replacing(out) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return notes


def render(folders: Sequence[Path], live: str = "") -> tuple[str, list[str]]:
    """(the page, notes on files that could not be read). live: version of a page that follows its server"""
    runs = read_runs(folders)
    chunks = Chunks()
    comparisons = [asdict(each) for each in compare_runs(runs, chunks)]
    room = (MAX_CHARS - chunks.size) // len(runs)
    described = [_described(run, chunks, room) for run in runs]
    names = sorted({name for each in described for name in each["metrics"]})
    metrics = {name: asdict(metric) for name in names if (metric := describe(name)) is not None}
    data = {
        "runs": described,
        "metrics": metrics,
        "comparisons": comparisons,
        "differences": differences(runs),
        "version": __version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "live": live,
    }
    page = files(__package__) / "page"
    template = Environment(autoescape=True).from_string((page / "report.html.jinja").read_text(encoding="utf-8"))
    script_names = ("uplot.min.js", "report.js", "curves.js", "rollouts.js", "tokens.js", "compare.js")
    text = template.render(
        title=", ".join(run.name for run in runs),
        nonce=secrets.token_urlsafe(16),
        live=live,
        data=encoded(data),
        chunks=chunks.texts,
        styles=[_raw(page, name) for name in ("uplot.min.css", "report.css")],
        scripts=[_raw(page, name) for name in script_names],
    )
    return text, [note for run in runs for note in run.notes]


def _raw(page: Any, name: str) -> Any:
    """One of our own files, which is not escaped."""
    return Markup((page / name).read_text(encoding="utf-8"))


def _plain(value: Any) -> Any:
    """A setting for JSON, which has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _described(run: RunFolder, chunks: Chunks, room: int) -> dict[str, Any]:
    rollouts = read_rollouts(run, chunks, room)
    defaults = default_settings()
    changed = {name: value for name, value in run.settings.items() if defaults.get(name) != value}
    return {
        "name": run.name,
        "folder": shlex.quote(str(run.folder)),
        "settings": {name: [_plain(value), _plain(defaults.get(name))] for name, value in changed.items()},
        "all_settings": {name: _plain(run.settings.get(name)) for name in _TITLE},
        "known": {"settings": bool(run.settings), "data": bool(run.data), "code": bool(run.code)},
        "verdict": verdict(run),
        "notes": run.notes,
        "metrics": columns(run),
        "validation": validation(run),
        "marks": marks(run),
        "rollouts": asdict(rollouts),
    }
