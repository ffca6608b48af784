"""What a step learned from and what came of it, on disk, so that the step can be run again without any rollout.

`records/step-000012.npz` in the run folder holds the samples in their order as plain arrays (fields of tokens end to
end, fields of samples one value each) and a header in JSON. Floats keep every bit.
"""

from __future__ import annotations

import hashlib
import json
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from verl.config.schema import Config
from verl.errors import DataError
from verl.files import replacing
from verl.trainer.threads import threads_of
from verl.types import Sample

FORMAT = 2
_TURN_REWARDS = "turn_rewards"  # few, and of another length than everything else: they are in the header
_NAMES = tuple(field.name for field in fields(Sample) if field.name != _TURN_REWARDS)
_LENGTHS, _BASELINES, _HEADER = "lengths", "baselines", "header"
_PACKAGE = Path(__file__).parents[1]
_DAMAGED = "Copy it again if it was copied; a step without a record cannot be run again"


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What a step learns from, as the filters and the shaping left it; whatever else its arithmetic needs is settings,
    weights and the step's number.

    baselines: [B] the reward of the greedy response to each sample's prompt, where the algorithm asks for one
    kl_coefficient: the adaptive controller's at the beginning of the step, where there is one
    """

    samples: Sequence[Sample] = ()  # [B]
    baselines: Sequence[float | None] = ()
    kl_coefficient: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One step."""

    step: int  # counted from 1, as in metrics.jsonl
    train_batch: TrainBatch
    metrics: Mapping[str, float]  # all of the step's
    settings: Mapping[str, Any]  # the whole configuration, flat
    made_by: Mapping[str, Any]  # what else may change the rounding: versions, threads


@dataclass(frozen=True)
class Recorder:
    """Writes a run's records."""

    folder: Path  # the run's
    settings: Mapping[str, Any]
    made_by: Mapping[str, Any]

    def write(self, step: int, train_batch: TrainBatch, metrics: Mapping[str, float]) -> None:
        """The record of a step, whole or not at all. Raises DataError when it cannot be written."""
        record = Record(step, train_batch, metrics, self.settings, self.made_by)
        with replacing(record_path(self.folder, step)) as unfinished, unfinished.open("wb") as file:
            np.savez_compressed(file, **_arrays(record))


def made_by(config: Config, device: str, total_steps: int) -> dict[str, Any]:
    """What decides, beside the settings, how a step's arithmetic is rounded. total_steps: where schedules end"""
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
    """Where the record of a step lies."""
    return run_folder / "records" / f"step-{step:06d}.npz"


def recorded_steps(run_folder: Path) -> list[int]:
    """The steps that have a record, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in (run_folder / "records").glob("step-*.npz"))


def truncate_after(run_folder: Path, step: int) -> None:
    """Removes the records of later steps, which a run that was taken back will write again."""
    for later in recorded_steps(run_folder):
        if later > step:
            record_path(run_folder, later).unlink()


# What numpy raises for an archive, an array's header (which it parses as Python), or numbers that are not whole.
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
        of_tokens = isinstance(values[0], tuple)
        columns[f"{'token' if of_tokens else 'sample'}.{name}"] = (
            np.concatenate([np.array(each) for each in values]) if of_tokens else np.array(values)
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
