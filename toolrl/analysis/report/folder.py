"""Reads the folder of a run. A missing or damaged file is a note; the rest is still read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from errno import EFBIG, EINVAL
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from toolrl.analysis.report.rows import is_scored, is_step
from toolrl.analysis.samples.sample_files import StepSamples, kept_steps, read_lines, read_samples, samples_path
from verl.checkpoint.crash import CRASH_FILES, LOGS
from verl.checkpoint.state import CHANGES
from verl.config.bounded_yaml import load_yaml
from verl.config.commands import SFT, TRAIN
from verl.config.load import restored_config
from verl.config.schema import Config
from verl.data.rows import DATA_VERSIONS
from verl.errors import ConfigError, DataError
from verl.host import untrusted_files
from verl.host.code_version import CODE_VERSION
from verl.host.files import step_files
from verl.registry import names_code
from verl.text import counted
from verl.utils.reward_score.rlla import TOGGLES

_OF_RESPONSES = re.compile("val/.+/total")  # metrics of validations that leave their responses
_LINE = 500  # characters of a crash report's first line
_LISTED = 5  # missing steps, files of other names
_LONGEST = 1 << 24  # bytes of a line; a longer one is not read into memory
_SKIPPED = 1 << 28  # bytes of such a line; what follows a longer one is not read
_SETTINGS_BYTES = 1 << 22  # size limit of config.yaml
_STEP_FILES = {"transcripts": ".jsonl", "validation": ".jsonl", "samples": ".npz"}
_WITHOUT = {  # settings that may name code: what is not known without it
    "algorithm.name": "token losses are not computed again",
    "env.tool_call_format": "calls in responses are not parsed",
}
_BESIDE = {  # settings that it is built with
    "algorithm.name": ("algorithm.", "teacher.", "data.max_response_length", "rollout.max_staleness"),
    "env.tool_call_format": ("env.tool_call_format", "reward.options"),
}
_EXPORT = "export "  # in the name of a variable among the settings
_DAMAGES = (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """notes: one line per crash, and per file that is missing or cannot be read

    user_code: whether code that the settings name may be run; the folder may be a colleague's
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]  # config.yaml, flat, and `export NAME` of ToolRL's variables that are on
    rows: Sequence[Mapping[str, Any]]  # metrics.jsonl
    alarms: Sequence[Mapping[str, Any]]  # collapses.jsonl
    code: Mapping[str, str]  # code_version.json, without ToolRL's variables
    data: Mapping[str, str]  # data_versions.jsonl: path or name on the hub -> digest or commit
    notes: list[str] = field(default_factory=list)
    user_code: bool = False

    def config(self, code: str) -> Config:
        """The settings for building what the setting `code` names; others are those of the defaults.

        A run of another version may have other keys, which do not matter here. Raises ConfigError if these settings
        cannot be restored, or if `code` is missing or names code that may not be run, which are notes, too.
        """
        value = self.settings.get(code)
        if value is None and code == "algorithm.name":  # the default would be another algorithm
            self.note(f"config.yaml lacks {code}: {_WITHOUT[code]}")
            raise ConfigError(f"config.yaml lacks {code}")
        if not self.user_code and names_code(str(value)):
            self.note(f"{code}={value} names code, which is not run without --user-code: {_WITHOUT[code]}")
            raise ConfigError(f"{code}={value} names code; --user-code runs it")
        used = {name: each for name, each in self.settings.items() if name.startswith(_BESIDE[code])}
        try:
            return restored_config(used)
        except (ArithmeticError, AttributeError, RecursionError) as error:
            raise ConfigError(f"config.yaml holds a value of another type ({error})") from error

    @property
    def switches(self) -> dict[str, str]:
        """ToolRL's variables that are on."""
        return {name: "1" for name in TOGGLES if self.settings.get(_EXPORT + name) == "1"}

    def transcript_steps(self) -> list[int]:
        return list(step_files(self.folder / "transcripts", ".jsonl"))

    def transcript(self, step: int) -> Iterator[bytes]:
        """The lines of a step's transcript, undecoded; an empty one in place of one that is too long."""
        path = self.folder / "transcripts" / f"step-{step:06d}.jsonl"
        try:
            yield from _lines(path)
        except OSError as error:
            self.note(f"{path.name} of transcripts cannot be read ({error.strerror})")

    def validated_steps(self) -> list[int]:
        return list(step_files(self.folder / "validation", ".jsonl"))

    def validation(self, step: int) -> list[dict[str, Any]]:
        """The responses of a validation that have a finite score, by set."""
        path = self.folder / "validation" / f"step-{step:06d}.jsonl"
        notes: list[str] = []
        rows = _json_lines(path, notes, is_scored, "finite score")
        for note in notes:
            self.note(note)
        return rows

    def kept_steps(self) -> list[int]:
        return kept_steps(self.folder)

    def samples(self, step: int) -> StepSamples | None:
        """None if they cannot be read."""
        try:
            return read_samples(samples_path(self.folder, step))
        except DataError as error:
            self.note(str(error))
            return None

    def sample_lines(self, step: int) -> tuple[list[int | None], int]:
        """The lines of a step's kept samples in its transcript, and the number of those that the file had no room for.

        ([], 0) if they cannot be read.
        """
        try:
            return read_lines(samples_path(self.folder, step))
        except DataError as error:
            self.note(str(error))
            return [], 0

    def note(self, text: str) -> None:
        """A file may be read again."""
        if text not in self.notes:
            self.notes.append(text)


def read_run(folder: Path, user_code: bool = False) -> RunFolder:
    """Raises ConfigError if the folder is not that of a run."""
    try:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {str(folder)!r}")
        if not (folder / "metrics.jsonl").exists() and not (folder / "config.yaml").exists():
            runs = _format_list(sorted(str(each.parent) for each in folder.glob("*/metrics.jsonl")))
            hint = f"; runs in it: {runs}" if runs else ""
            missing = "it has neither metrics.jsonl nor config.yaml"
            raise ConfigError(f"{folder} is not the folder of a run: {missing}{hint}")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror})") from error
    notes: list[str] = []
    settings = _settings(folder / "config.yaml", notes)
    starts = _lines_if_any(folder / CODE_VERSION, notes)  # a line for each that had other code or variables
    code = {name: str(value) for row in starts[-1:] for name, value in row.items() if name != "step"}
    settings |= {_EXPORT + name: code.pop(name) for name in TOGGLES if name in code}
    run = RunFolder(
        folder=folder,
        name=folder.resolve().name,
        settings=settings,
        rows=_in_order(_json_lines(folder / "metrics.jsonl", notes, _has_step, "step", grows=True), notes),
        alarms=_lines_if_any(folder / "collapses.jsonl", notes, grows=True),
        code=code,
        data={
            str(row.get("source")): str(row.get("sha256", row.get("revision")))
            for row in _lines_if_any(folder / DATA_VERSIONS, notes)
        },
        notes=notes,
        user_code=user_code,
    )
    run.notes.extend([*_crashes(folder), *_changes(folder, notes), *_foreign(folder), *_missing(run)])
    return run


def _in_order(rows: list[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """One row per step, as curves need. A step that is logged again has its last values."""
    steps = [row["step"] for row in rows]
    if all(one < two for one, two in pairwise(steps)):
        return rows
    notes.append("metrics.jsonl: steps repeat or go back; each is shown once, with its last values")
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


def _crashes(folder: Path) -> list[str]:
    reports = sorted(folder.glob(CRASH_FILES))
    if not reports:
        return []
    try:
        with _open(reports[-1]) as file:
            first = file.readline(_LINE).decode(errors="replace").strip()
    except OSError as error:
        first = f"cannot be read ({error.strerror})"
    times = f" {len(reports)} times, the last time" if len(reports) > 1 else ""
    return [f"the run has crashed{times}: {first}; crash report: {reports[-1]}"]


def _changes(folder: Path, notes: list[str]) -> list[str]:
    """Contents changed under trainer.allow_changed, with the step after which they changed."""
    rows = _json_lines(folder / CHANGES, notes, _has_changes, "changes") if (folder / CHANGES).exists() else []
    return [f"after step {row['step']} the run went on with other {', '.join(row['changed'])}" for row in rows]


def _has_changes(row: Mapping[str, Any]) -> bool:
    return is_step(row.get("step")) and isinstance(row.get("changed"), dict)


def _foreign(folder: Path) -> list[str]:
    """Files between those of the steps that are not named after a step. Hidden ones are unfinished."""
    notes = []
    for name, suffix in _STEP_FILES.items():
        known = set(step_files(folder / name, suffix).values())
        others = sorted(each.name for each in (folder / name).glob("[!.]*") if each not in known)
        if others:
            notes.append(
                f"{name}/ has files that are not named step-<6 digits>{suffix}, not read: {_format_list(others)}"
            )
    return notes


def _format_list(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:_LISTED])) + (", .." if len(names) > _LISTED else "")


def _missing(run: RunFolder) -> list[str]:
    """Files that logged steps should have written but did not. A step may write them before it is logged."""
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
            which = "all" if len(missing) == len(finished) else f"{len(missing)} of {len(finished)}"
            notes.append(f"{name}/ lacks the files of {which} finished steps: {_format_list(missing)}")
    validated = {row["step"] for row in run.rows if any(map(_OF_RESPONSES.fullmatch, row))}
    if missing := sorted(validated.difference(run.validated_steps())):
        notes.append(
            f"validation/ lacks the files of {counted(len(missing), 'validation')}: step {_format_list(missing)}"
        )
    return notes


def read_runs(folders: Sequence[Path], user_code: bool = False) -> list[RunFolder]:
    """Runs whose folders have one name are named with as many parent folders as it takes. Raises as `read_run`."""
    runs = [read_run(folder, user_code) for folder in folders]
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _settings(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        with _open(path) as file:
            text = file.read(_SETTINGS_BYTES + 1)
        if len(text) > _SETTINGS_BYTES:
            raise ValueError(f"it has over {_SETTINGS_BYTES} bytes")
        tree = load_yaml(text.decode())
        if not isinstance(tree, dict):
            raise TypeError("it holds no settings")
        return dict(flat(tree))
    except _DAMAGES as error:
        notes.append(f"{path.name} cannot be read ({_first_line(error)})")
        return {}


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]


def _lines_if_any(path: Path, notes: list[str], grows: bool = False) -> list[dict[str, Any]]:
    return _json_lines(path, notes, grows=grows) if path.exists() else []


def _json_lines(
    path: Path,
    notes: list[str],
    fits: Callable[[Mapping[str, Any]], bool] | None = None,
    expected: str = "",
    grows: bool = False,
) -> list[dict[str, Any]]:
    """The objects of a file; lines that hold none are counted in a note.

    fits: whether a row has what is `expected`; the others are counted in a note of their own
    grows: with the run, so a partial last line is normal
    """
    rows, damaged, unfit = [], 0, 0
    name = path.name if path.parent.name != "validation" else f"{path.name} of validation"
    try:
        for line in _lines(path):
            if line.endswith(b"\n") or not grows:
                row = parsed(line)
                damaged += row is None
                if row is not None and fits is not None and not fits(row):
                    unfit += 1
                elif row is not None:
                    rows.append(row)
    except OSError as error:
        notes.append(f"{name} cannot be read ({error.strerror})")
    every = len(rows) + damaged + unfit
    for count, why in ((damaged, "damaged"), (unfit, f"without {expected}, or with values of other types")):
        if count:
            notes.append(f"{name}: {count} of {counted(every, 'line')} left out ({why})")
    return rows


def _has_step(row: Mapping[str, Any]) -> bool:
    return is_step(row.get("step"))


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """A file of the run. Raises OSError, also for a pipe, which may never end, and for a link out of the folder."""
    run = path.parent.parent if path.parent.name in (*_STEP_FILES, LOGS) else path.parent
    try:
        with untrusted_files.opened(run, path.relative_to(run).as_posix(), shared=True) as file:
            yield file
    except DataError as error:
        cause = error.__cause__
        raise OSError(EINVAL, cause.strerror if isinstance(cause, OSError) else error.problem) from error


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; an empty one in place of one that is too long."""
    with _open(path) as file:
        while line := file.readline(_LONGEST):
            if len(line) < _LONGEST or line.endswith(b"\n"):
                yield line
            else:
                left = _SKIPPED
                while line and not line.endswith(b"\n"):
                    line = file.readline(_LONGEST)
                    left -= len(line)
                    if left < 0:  # a sparse file may have no line end in all of a disk
                        raise OSError(EFBIG, f"a line has over {_SKIPPED} bytes")
                yield b"\n"


def parsed(line: str | bytes, finite: bool = False) -> dict[str, Any] | None:
    """The JSON object of a line; None if it holds none, or if its numbers have to be finite and are not."""
    try:
        row = json.loads(line, parse_constant=_refuse if finite else None)
    except (ValueError, RecursionError):
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


def default_settings(run: RunFolder) -> dict[str, Any]:
    """Every setting's default in the command of the run, flat. Of the two, `toolrl sft` has no rollouts."""
    command = TRAIN if any(name.startswith("rollout.") for name in run.settings) else SFT
    return {**dict(flat(asdict(Config()))), **command.defaults}
