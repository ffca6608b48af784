"""The training batch and the metrics of a step on disk, to replay the step without rollouts.

`records/step-000012.npz` in the run folder holds the samples in order as plain arrays (per-token fields concatenated,
per-sample fields with one value each) and a JSON header. Floats are bit-exact.
"""

from __future__ import annotations

import hashlib
import json
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from verl.batch.train_batch import TrainBatch
from verl.config.load import flattened
from verl.config.schema import Config
from verl.errors import DataError
from verl.system.files import replacing
from verl.trainer.builders.threads import threads_of
from verl.trainer.builders.workers import abs_paths
from verl.types import Sample

FORMAT = 2
_TURN_REWARDS = "turn_rewards"  # stored in the header: few values, and neither per token nor per sample
_NAMES = tuple(field.name for field in fields(Sample) if field.name != _TURN_REWARDS)
_LENGTHS, _BASELINES, _HEADER = "lengths", "baselines", "header"
_PACKAGE = Path(__file__).parents[2]
_DAMAGED = "Copy it again if it was copied; a step without a record cannot be replayed"


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one step."""

    step: int  # counted from 1, as in metrics.jsonl
    train_batch: TrainBatch
    metrics: Mapping[str, float]  # all metrics of the step
    settings: Mapping[str, Any]  # the whole configuration, flat
    made_by: Mapping[str, Any]  # everything else that may change rounding: versions, threads


@dataclass(frozen=True)
class Recorder:
    """Writes a run's records."""

    folder: Path  # of the run
    settings: Mapping[str, Any]
    made_by: Mapping[str, Any]

    def write(self, step: int, train_batch: TrainBatch, metrics: Mapping[str, float]) -> None:
        """Write the record of a step atomically. Raises DataError if that fails."""
        record = Record(step, train_batch, metrics, self.settings, self.made_by)
        with replacing(record_path(self.folder, step)) as unfinished, unfinished.open("wb") as file:
            np.savez_compressed(file, **_arrays(record))

    def truncate_after(self, step: int) -> None:
        """Removes the records of later steps, which a run that was rolled back will write again."""
        for later in recorded_steps(self.folder):
            if later > step:
                record_path(self.folder, later).unlink()


def build_recorder(config: Config, folder: Path, device: str, total_steps: int) -> Recorder:
    """The recorder of a run. total_steps: end of the schedules"""
    return Recorder(folder, flattened(asdict(abs_paths(config))), made_by(config, device, total_steps))


def made_by(config: Config, device: str, total_steps: int) -> dict[str, Any]:
    """Everything besides the settings that affects rounding. total_steps: end of the schedules"""
    sources = sorted(_PACKAGE.rglob("*.py"))
    digest = hashlib.sha256(b"".join(hashlib.sha256(source.read_bytes()).digest() for source in sources))
    return {
        "code": digest.hexdigest()[:12],
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": device,
        "threads": threads_of(config),
        "total_steps": total_steps,
    }


def record_path(run_folder: Path, step: int) -> Path:
    """Path of the record of a step."""
    return run_folder / "records" / f"step-{step:06d}.npz"


def recorded_steps(run_folder: Path) -> list[int]:
    """The steps that have a record, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in (run_folder / "records").glob("step-*.npz"))


# Errors of numpy for a damaged archive, array header (which it parses as Python) or array data.
_DAMAGES = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)


def read_record(path: Path) -> Record:
    """The record at `path`. Raises DataError if there is none, if it is damaged or of another format."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            header = json.loads(str(arrays[_HEADER]))
            if header["format"] != FORMAT:
                raise DataError("is of an unknown format", f"format {FORMAT}", file=str(path))
            return _record(header, {name: arrays[name] for name in arrays.files})
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError("is missing", hint="Set trainer.record=true before the step is run", file=str(path)) from None
    except _DAMAGES as error:
        raise DataError(f"is damaged ({error})", "a record", _DAMAGED, file=str(path)) from error


def _arrays(record: Record) -> dict[str, Any]:
    train_batch = record.train_batch
    header = {
        "format": FORMAT,
        "step": record.step,
        "kl_coefficient": train_batch.kl_coefficient,
        _TURN_REWARDS: [sample.turn_rewards for sample in train_batch.samples],
        "metrics": dict(record.metrics),
        "settings": dict(record.settings),
        "made_by": dict(record.made_by),
    }
    columns: dict[str, Any] = {}
    for name in _NAMES:
        values = [getattr(sample, name) for sample in train_batch.samples]
        per_token = isinstance(values[0], tuple)
        columns[f"{'token' if per_token else 'sample'}.{name}"] = (
            np.concatenate([np.array(each) for each in values]) if per_token else np.array(values)
        )
    return {
        **columns,
        _LENGTHS: np.array([len(sample.token_ids) for sample in train_batch.samples]),
        _BASELINES: np.array([np.nan if each is None else each for each in train_batch.baselines]),
        _HEADER: np.array(json.dumps(header)),
    }


def _record(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> Record:
    bounds = list(pairwise(accumulate(arrays[_LENGTHS].tolist(), initial=0)))
    columns: dict[str, list[Any]] = {}
    for name in _NAMES:
        if f"token.{name}" in arrays:
            flat = arrays[f"token.{name}"].tolist()
            columns[name] = [tuple(flat[start:end]) for start, end in bounds]
        else:
            columns[name] = arrays[f"sample.{name}"].tolist()
    rewards = [tuple((place, reward) for place, reward in each) for each in header[_TURN_REWARDS]]
    rows = zip(*columns.values(), rewards, strict=True)
    samples = [Sample(**dict(zip((*_NAMES, _TURN_REWARDS), row, strict=True))) for row in rows]
    baselines = [None if np.isnan(each) else float(each) for each in arrays[_BASELINES]]
    train_batch = TrainBatch(samples, baselines, header["kl_coefficient"])
    return Record(header["step"], train_batch, header["metrics"], header["settings"], header["made_by"])
