"""The manifest of a run: what went in, and for every step what came out, without times.

Inputs are settings, the SHA-256 of models, data and code of the user's, ToolRL's variables, versions and the processor.
Of a step the manifest has all metrics but those of time and memory, the mean reward with its standard error, and the
SHA-256 of its rollouts and validation. It holds neither rows nor responses.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from yaml import YAMLError

from verl.build.threads import threads_of
from verl.checkpoint.contents import Contents, contents_of
from verl.config.bounded_yaml import load_yaml
from verl.config.load import flattened, restored_config
from verl.config.schema import Config
from verl.embedded import FOLDER, PREFIX
from verl.errors import DataError
from verl.host import untrusted_files
from verl.host.digests import folder_digests
from verl.host.files import replacing, step_files
from verl.trainer.cli import check_files, check_model
from verl.utils.reward_score.rlla import switches

FORMAT = 1
Manifest = dict[str, Any]
Settings = dict[str, Any]  # flat
_DIGEST = "sha256"
_PARTS = ("settings", "variables", "inputs", "made_by", "steps", "models")
_OUTCOMES = {"rollouts": "transcripts", "validation": "validation"}  # folders
_MOST_BYTES = 1 << 30
_UNREPEATABLE = ("time/", "perf/", "memory/", "reward/swe/")  # groups of metrics
_SECONDS = "/seconds_mean"
_WHERE = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name", "trainer.logger")
_HINT = "Give the folder of a training, in which config.yaml, metrics.jsonl and transcripts/ are"


def manifest_of(run: Path) -> Manifest:
    """Of the run in this folder. Raises DataError for a folder that is none, or that lacks rollouts of a step."""
    settings = settings_of(run)
    config = restored_config(settings)
    manifest = {
        "format": FORMAT,
        "run": run.resolve().name,
        "settings": {key: _named(value) for key, value in settings.items() if key not in _WHERE},
        "variables": recorded_variables(run),
        "inputs": inputs_of(settings),
        "made_by": {**recorded_code(run), **machine(config)},
        "steps": steps_of(run),
        "models": models_of(run),
    }
    return {**manifest, _DIGEST: digest(manifest)}


def settings_of(run: Path) -> Settings:
    """Those of config.yaml. Raises DataError."""
    text = _text(run, "config.yaml")
    try:
        tree = load_yaml(text)
    except (ValueError, RecursionError, YAMLError) as error:
        raise DataError(f"cannot be read ({error})", hint=_HINT, file=f"{run}/config.yaml") from error
    if not isinstance(tree, dict):
        raise DataError("has no settings", hint=_HINT, file=f"{run}/config.yaml")
    return flattened(tree)


def inputs_of(settings: Settings) -> Contents:
    """SHA-256 of every file that the settings name, weights included; the hub's by commit. {setting: contents}

    Raises ConfigError for a model or data file that is not there.
    """
    config = restored_config(settings)
    check_model(config.model, critic=config.critic.path, teacher=config.teacher.local, lora=config.lora.path)
    check_files("data.train_files", config.data.train_files, needed=True)
    check_files("data.val_files", config.data.val_files)
    return {key: content for key, content in contents_of(settings, reads_weights=True).items() if key in settings}


def recorded_code(run: Path) -> dict[str, str]:
    """Versions of the code and its packages. Raises DataError if they changed during the run."""
    rows = _rows(run, "code_version.json")
    if len(rows) != 1:
        found = f"{len(rows)} rows" if rows else "nothing"
        raise DataError(f"has {found}", "one row: a run of one version", file=str(run / "code_version.json"))
    return {name: value for name, value in rows[0].items() if name not in ("step", *recorded_variables(run))}


def recorded_variables(run: Path) -> dict[str, str]:
    """ToolRL's variables that were on."""
    rows = _rows(run, "code_version.json")
    return switches(rows[-1]) if rows else {}


def machine(config: Config) -> dict[str, Any]:
    """What rounding depends on besides the code."""
    return {"processor": _processor(), "threads": threads_of(config), "engine": config.rollout.name}


def _processor() -> str:
    names = Path("/proc/cpuinfo")
    lines = names.read_text().splitlines() if names.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def steps_of(run: Path) -> dict[str, Any]:
    """{step: what came out}, step 0 being the validation before training. Raises DataError for a missing file."""
    folders = {name: step_files(run / folder, ".jsonl") for name, folder in _OUTCOMES.items()}
    steps = {}
    for row in _rows(run, "metrics.jsonl"):
        try:
            step = int(row["step"])
            if step > 0 and step not in folders["rollouts"]:
                raise DataError(f"has no rollouts of step {step}", hint=_HINT, file=f"{run}/transcripts")
            outcomes = {
                name: _outcome(_rows(run, f"{_OUTCOMES[name]}/{files[step].name}"))
                for name, files in folders.items()
                if step in files
            }
        except DataError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"has rows of another form, of step {row.get('step')} ({type(error).__name__}: {error})"
            raise DataError(problem, hint=_HINT, file=str(run)) from error
        steps[str(step)] = {"metrics": {name: value for name, value in row.items() if _repeats(name)}, **outcomes}
    return steps


def _repeats(name: str) -> bool:
    return name not in ("step", "time") and not name.startswith(_UNREPEATABLE) and not name.endswith(_SECONDS)


def _outcome(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kept = [_without_seconds(row) for row in rows]
    return {_DIGEST: digest(kept), "num": len(kept), **_mean(kept)}


def _without_seconds(row: Mapping[str, Any]) -> dict[str, Any]:
    uses = [{key: value for key, value in use.items() if key != "seconds"} for use in row.get("tool_uses", [])]
    return {**row, "tool_uses": uses}


def _mean(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mean reward and its standard error over prompts, which are groups in a step and tasks in a validation."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_prompt[str((row.get("group"), row.get("set"), row.get("task_id")))].append(row["reward"])
    means = [statistics.fmean(rewards) for rewards in by_prompt.values()]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return {"reward": statistics.fmean(means) if means else 0.0, "stderr": error}


def models_of(run: Path) -> dict[str, dict[str, str]]:
    """{checkpoint: {file: SHA-256}} of the exported models that are there."""
    folders = sorted((run / "checkpoints").glob("step-*/hf"))
    return {folder.parent.name: folder_digests(folder) for folder in folders}


def _named(value: Any) -> Any:
    """Paths of embedded files as `embedded:FILE`, which every installation has."""
    if isinstance(value, list):
        return [_named(each) for each in value]
    if isinstance(value, str) and value.startswith(f"{FOLDER}{os.sep}"):
        return PREFIX + value.removeprefix(f"{FOLDER}{os.sep}")
    return value


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(manifest: Manifest, path: Path) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """Raises DataError if it is none, of another format, or not as it was written."""
    try:
        manifest = json.loads(path.read_text("utf-8"))
        known = manifest.pop(_DIGEST)
        written = manifest["format"]
        parts = [manifest[name] for name in _PARTS]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "Give the file that `toolrl certify RUN` wrote"
        raise DataError(f"is no manifest ({type(error).__name__}: {error})", hint=hint, file=str(path)) from error
    if known != digest(manifest):
        raise DataError(f"was changed after it was written: its {_DIGEST} is not that of its content", file=str(path))
    if written != FORMAT:
        raise DataError(f"is of format {written!r}", f"format {FORMAT}", file=str(path))
    if not all(isinstance(part, Mapping) for part in parts):
        raise DataError("is no manifest", f"an object as each of {', '.join(_PARTS)}", file=str(path))
    return {**manifest, _DIGEST: known}


def _rows(run: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a file of the run, which may be another's. Raises DataError."""
    lines = _text(run, name).split("\n")[:-1]  # the last was not written to its end
    try:
        rows = [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot be read ({error})", "a JSON object per line", _HINT, file=f"{run}/{name}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise DataError("has a line that is no object", "a JSON object per line", file=f"{run}/{name}")
    return rows


def _text(run: Path, name: str) -> str:
    """Raises DataError."""
    try:
        return untrusted_files.read(run, name, _MOST_BYTES).decode(errors="replace")
    except FileNotFoundError as error:
        raise DataError("is missing", hint=_HINT, file=f"{run}/{name}") from error
