"""The batch and the metrics of a step on disk, to replay the step without rollouts.

`records/step-000012.npz` in the run folder holds the arrays of the batch as collected, and a JSON header. Floats are
bit-exact.
"""

from __future__ import annotations

import hashlib
import json
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from verl.batch.token_batch import TokenBatch
from verl.build.ranks import abs_paths
from verl.build.threads import threads_of
from verl.config.load import flattened
from verl.config.schema import Config
from verl.errors import DataError
from verl.host.files import replacing, step_files
from verl.host.packages import OURS

FORMAT = 4
_HEADER, _BATCH = "header", "batch."  # names in the archive: the header, and the prefix of the batch's fields
_DAMAGED = "Copy it again if it was copied; a step without a record cannot be replayed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    step: int  # counted from 1, as in metrics.jsonl
    batch: TokenBatch
    coefficients: Mapping[str, float]  # see `TrainStepResult`
    metrics: Mapping[str, float]  # all metrics of the step
    settings: Mapping[str, Any]  # the whole configuration, flat
    made_by: Mapping[str, Any]  # everything else that may change rounding: versions, threads


@dataclass(frozen=True)
class Recorder:
    folder: Path  # the run's
    settings: Mapping[str, Any]
    made_by: Mapping[str, Any]

    def write(
        self, step: int, batch: TokenBatch, coefficients: Mapping[str, float], metrics: Mapping[str, float]
    ) -> None:
        """Write the record of a step atomically. Raises DataError if that fails."""
        header = {
            "format": FORMAT,
            "step": step,
            "coefficients": dict(coefficients),
            "metrics": dict(metrics),
            "settings": dict(self.settings),
            "made_by": dict(self.made_by),
        }
        arrays = {f"{_BATCH}{field.name}": getattr(batch, field.name) for field in fields(TokenBatch)}
        stored: dict[str, Any] = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
        stored[_HEADER] = np.array(json.dumps(header))
        with replacing(record_path(self.folder, step)) as unfinished, unfinished.open("wb") as file:
            np.savez_compressed(file, **stored)

    def truncate_after(self, step: int) -> None:
        """Removes the records of later steps, which a run that was rolled back will write again."""
        for later in recorded_steps(self.folder):
            if later > step:
                record_path(self.folder, later).unlink()


def build_recorder(config: Config, folder: Path, device: str, total_steps: int) -> Recorder:
    return Recorder(folder, flattened(asdict(abs_paths(config))), made_by(config, device, total_steps))


def made_by(config: Config, device: str, total_steps: int) -> dict[str, Any]:
    """Everything besides the settings that affects rounding. total_steps: end of the schedules"""
    return {
        "code": _code(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": device,
        "threads": threads_of(config),
        "total_steps": total_steps,
    }


@cache
def _code() -> str:
    """Digest of our sources, as they are at the first call."""
    sources = [file for package in OURS for file in sorted(package.rglob("*.py"))]
    digest = hashlib.sha256(b"".join(hashlib.sha256(source.read_bytes()).digest() for source in sources))
    return digest.hexdigest()[:12]


def record_path(run_folder: Path, step: int) -> Path:
    return run_folder / "records" / f"step-{step:06d}.npz"


def recorded_steps(run_folder: Path) -> list[int]:
    return list(step_files(run_folder / "records", ".npz"))


# Errors of numpy for a damaged archive, array header (which it parses as Python) or array data.
_DAMAGES = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)


def read_record(path: Path) -> Record:
    """Raises DataError if there is none, if it is damaged or of another format."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            header = json.loads(str(arrays[_HEADER]))
            if header["format"] != FORMAT:
                raise DataError("is of an unknown format", f"format {FORMAT}", file=str(path))
            names = [name for name in arrays.files if name.startswith(_BATCH)]
            batch = TokenBatch(**{name.removeprefix(_BATCH): arrays[name] for name in names})
            del header["format"]
            return Record(batch=batch, **header)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError("is missing", hint="Set trainer.record=true before the step is run", file=str(path)) from None
    except _DAMAGES as error:
        raise DataError(f"is damaged ({error})", "a record", _DAMAGED, file=str(path)) from error
