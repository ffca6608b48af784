"""What a run has left in its folder. A missing or damaged file is a note; the rest is still read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from verl.checkpoint.crash import CRASH_FILES
from verl.config.schema import Config
from verl.data.rows import DATA_VERSIONS
from verl.errors import ConfigError, DataError
from verl.system.code_version import CODE_VERSION
from verl.tracking.samples import StepSamples, kept_steps, read_samples, samples_path

_LINE = 500  # characters of a crash report's first line
_LISTED = 5  # missing steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """notes: one line per crash, and per file that is missing or cannot be read"""

    folder: Path
    name: str
    settings: Mapping[str, Any]  # of config.yaml, flat
    rows: Sequence[Mapping[str, Any]]  # of metrics.jsonl
    alarms: Sequence[Mapping[str, Any]]  # of collapses.jsonl
    code: Mapping[str, str]  # of code_version.json
    data: Mapping[str, str]  # of data_versions.jsonl: name of the file -> digest or commit
    notes: list[str] = field(default_factory=list)

    def transcript_steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("transcripts/step-*.jsonl"))

    def transcript(self, step: int) -> Iterator[bytes]:
        """The lines of a step's transcript, undecoded."""
        path = self.folder / "transcripts" / f"step-{step:06d}.jsonl"
        try:
            with path.open("rb") as file:
                yield from file
        except OSError as error:
            self.notes.append(f"{path.name} of transcripts cannot be read ({error.strerror})")

    def validated_steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("validation/step-*.jsonl"))

    def validation(self, step: int) -> list[dict[str, Any]]:
        """The responses of a validation, by set."""
        return _json_lines(self.folder / "validation" / f"step-{step:06d}.jsonl", self.notes)

    def kept_steps(self) -> list[int]:
        return kept_steps(self.folder)

    def samples(self, step: int) -> StepSamples | None:
        """None if they cannot be read."""
        try:
            return read_samples(samples_path(self.folder, step))
        except DataError as error:
            self.notes.append(str(error))
            return None


def read_run(folder: Path) -> RunFolder:
    """Raises ConfigError if the folder is not that of a run."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {str(folder)!r}")
    if not (folder / "metrics.jsonl").exists() and not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} is not the folder of a run: it has neither metrics.jsonl nor config.yaml")
    notes: list[str] = []
    run = RunFolder(
        folder=folder,
        name=folder.resolve().name,
        settings=_settings(folder / "config.yaml", notes),
        rows=[row for row in _json_lines(folder / "metrics.jsonl", notes) if isinstance(row.get("step"), int)],
        alarms=_lines_if_any(folder / "collapses.jsonl", notes),
        code={name: str(value) for row in _lines_if_any(folder / CODE_VERSION, notes) for name, value in row.items()},
        data={
            Path(str(row.get("source"))).name: str(row.get("sha256", row.get("revision")))
            for row in _lines_if_any(folder / DATA_VERSIONS, notes)
        },
        notes=notes,
    )
    run.notes.extend([*_crashes(folder), *_missing(run)])
    return run


def _crashes(folder: Path) -> list[str]:
    reports = sorted(folder.glob(CRASH_FILES))
    if not reports:
        return []
    try:
        with reports[-1].open(encoding="utf-8", errors="replace") as file:
            first = file.readline(_LINE).strip()
    except OSError as error:
        first = f"cannot be read ({error.strerror})"
    times = f" {len(reports)} times, the last time" if len(reports) > 1 else ""
    return [f"the run has crashed{times}: {first}; crash report: {reports[-1]}"]


def _missing(run: RunFolder) -> list[str]:
    """What steps should have left and have not. A step that is not logged yet may be about to leave it."""
    notes = []
    if not run.rows and not any(note.startswith("metrics.jsonl") for note in run.notes):
        notes.append("metrics.jsonl has no line: no step has been logged")
    left = {"transcripts": set(run.transcript_steps()), "samples": set(run.kept_steps())}
    found = sorted(set().union(*left.values()))
    finished = sorted({row["step"] for row in run.rows if "reward/total" in row}.union(found[:-1]))
    if run.settings.get("trainer.samples_kept") == 0:
        del left["samples"]
    for name, steps in left.items():
        if missing := [step for step in finished if step not in steps]:
            listed = ", ".join(map(str, missing[:_LISTED])) + (", .." if len(missing) > _LISTED else "")
            which = "all" if len(missing) == len(finished) else f"{len(missing)} of {len(finished)}"
            notes.append(f"{name}/ lacks the files of {which} finished steps: {listed}")
    return notes


def read_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Runs whose folders have one name are named with as many parent folders as it takes. Raises as `read_run`."""
    runs, parts = [read_run(folder) for folder in folders], [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _settings(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return dict(flat(yaml.safe_load(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read ({str(error).splitlines()[0]})")
        return {}


def _lines_if_any(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    return _json_lines(path, notes) if path.exists() else []


def _json_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a file; lines that hold none are counted in a note. A partial last line is normal."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror})")
        return []
    rows = [parsed(line) for line in lines[:-1]]
    if damaged := sum(row is None for row in rows):
        notes.append(f"{path.name}: {damaged} of {len(rows)} lines are damaged and left out")
    return [row for row in rows if row is not None]


def parsed(line: str | bytes, finite: bool = False) -> dict[str, Any] | None:
    """The JSON object of a line; None if it holds none, or if its numbers have to be finite and are not."""
    try:
        row = json.loads(line, parse_constant=_refuse if finite else None)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def default_settings() -> dict[str, Any]:
    """Every setting's default, flat."""
    return dict(flat(asdict(Config())))
