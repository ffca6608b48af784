"""The records in a run's folder: settings, code, data, and the changes that a resume was allowed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoint.state import CHANGES, Saved
from verl.config.commands import Command
from verl.config.schema import Config
from verl.config.show import as_yaml
from verl.data.rows import DATA_VERSIONS, version_of
from verl.errors import DataError
from verl.host.code_version import CODE_VERSION, code_version
from verl.host.files import replacing
from verl.tracking.jsonl import read_jsonl, write_jsonl
from verl.utils.reward_score.rlla import switches


def write_records(folder: Path, config: Config, command: Command, saved: Saved | None) -> None:
    """Called at every start. The settings are the newest; rows of the other files stay, and new ones follow."""
    step = 0 if saved is None else saved.step
    with replacing(folder / "config.yaml") as unfinished:
        unfinished.write_text(as_yaml(config, command), encoding="utf-8")
    append_changed(folder / CODE_VERSION, [{**code_version(), **switches()}], step)
    files = [*config.data.train_files, *config.data.val_files]
    append_changed(folder / DATA_VERSIONS, map(version_of, files), step, key="source")
    if saved is not None and saved.changed:
        append_changed(folder / CHANGES, [{"changed": saved.changed}], step)


def append_changed(path: Path, rows: Iterable[Mapping[str, Any]], step: int, key: str = "") -> None:
    """Append the rows that differ from the file's last one (with the same value of `key`, if given), with the step."""
    try:
        kept = read_jsonl(path) if path.exists() else []
        last = {row.get(key): _without_step(row) for row in kept}
    except (ValueError, AttributeError) as error:
        hint = "Move it out of the folder; the run then begins a new one"
        raise DataError(f"is damaged ({error})", "a JSON object per line", hint, file=str(path)) from error
    new = [{"step": step, **row} for row in rows if last.get(row.get(key)) != json.loads(json.dumps(row))]
    if new:
        write_jsonl(path, [*kept, *new])


def _without_step(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "step"}
