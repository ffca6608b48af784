"""Per-token training data of selected rollouts: `samples/step-000012.npz` in the run folder.

A file holds a JSON header and flat arrays, and is read with numpy alone: `toolrl report` shows it.

Shape legend: L tokens of a sample, A its trained tokens, B all samples of the step.
"""

from __future__ import annotations

import io
import json
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.errors import DataError
from verl.host import untrusted_files
from verl.host.files import replacing, step_files

FORMAT = 1
MAX_BYTES = 1_000_000  # per file, if the step has less than about 20,000 samples
_MAX_ARRAYS = 1 << 28  # bytes; what decompresses to more is damage
COLUMNS = (  # per trained token
    "rollout_logprobs",  # the engine's
    "old_logprobs",  # the trainer's before the step's first update, where a pass of their own computes them
    "logprobs",  # the trainer's in the first update with the sample
    "ref_logprobs",  # the reference's
    "teacher_logprobs",  # the teacher's
    "teacher_kl",  # the KL divergence over the teacher's likeliest tokens
    "entropy",  # nats
    "rewards",  # an episode's on its last token, a turn's on the turn's last
    "advantages",
    "returns",
    "values",
    "importance",  # weight of the off-policy correction
    "ratio",  # the importance ratio in the loss: of the token, or of its sequence (GSPO)
    "clipped",  # 1 where the clip is active
    "loss",  # share of the loss of its update
)
_SETTINGS = ("aggregation", "length", "minibatches", "observation_coefficient")  # fields of `LossScale` in the header
_COUNTS = ("num_trained", "groups", "episodes")  # fields of `LossScale` stored as arrays
_HEADER = "header"
_TYPES: Mapping[str, Any] = {  # fields of a sample in the header
    **dict.fromkeys(("row", "group", "index", "segment", "num_segments"), int),
    "line": int | None,
    "task_id": str,
    "reward": int | float,
    "group_returns": list,
    "baseline": int | float | None,
}
_DAMAGES = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, SyntaxError, RecursionError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)
_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """One token sequence: a rollout, or a segment of one.

    columns: [A] each; those that the step does not have are missing. `logprobs`, `entropy`, `ratio`, `clipped` and
        `loss` are of the first update with the sample, and missing where no update computes it: its advantage is zero,
        or the critic warms up
    """

    row: int  # in the batch of the step
    line: int | None  # line in the step's transcript; None: the rollout is of an earlier step
    task_id: str
    group: int
    index: int  # in its group
    segment: int
    num_segments: int
    reward: float  # as trained on, after shaping and penalties
    group_returns: Sequence[float]  # rewards and turn rewards of all rollouts of the group
    baseline: float | None = None  # reward of the greedy response to the prompt
    token_ids: _Array  # [L]
    mask: _Array  # [L] True where trained
    versions: _Array  # [L] weight version that sampled the token; -1: not sampled by the policy
    columns: Mapping[str, _Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossScale:
    """Inputs of the loss weights, for all samples of a step."""

    aggregation: str  # of token losses: algorithm.aggregation
    length: float | None  # divisor of seq-mean-token-sum-norm, in tokens
    minibatches: int  # parts of the step, of whole groups
    num_trained: _Array  # [B]
    groups: _Array  # [B]
    episodes: _Array  # [B] their segments are neighbors
    observation_coefficient: float = 0.0  # of the cross-entropy on observations, which is in no sample's share


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """The kept samples of a step, and the share of every sample in the loss.

    loss, sums: by row; samples that the update did not compute are missing
    """

    samples: Sequence[KeptSample]
    loss: Mapping[int, float] = field(default_factory=dict)
    sums: Mapping[int, Sequence[float]] = field(default_factory=dict)  # unweighted token losses, one sum per epoch
    scale: LossScale | None = None  # None: not recorded
    whitening: Sequence[float] | None = None  # mean and standard deviation that whiten the advantages, if any do
    left_out: int = 0  # chosen samples that exceed the limit of a file
    texts: Mapping[int, str] = field(default_factory=dict)  # token id -> text; filled when read


class SampleFiles:
    """The files of a run. decode: from token ids to text"""

    def __init__(self, run_folder: Path, decode: Callable[[list[int]], str]) -> None:
        self.run_folder, self._decode = run_folder, decode
        self._texts: dict[int, str] = {}

    def write(self, step: int, kept: StepSamples) -> None:
        """Write the file of a step atomically, without the longest samples if it had over `MAX_BYTES` with them.

        Raises DataError if that fails.
        """
        content = self._content(step, kept)
        while len(content) > MAX_BYTES and kept.samples:
            fitting = _shortest(kept.samples, MAX_BYTES / len(content))
            kept = replace(kept, samples=fitting, left_out=kept.left_out + len(kept.samples) - len(fitting))
            content = self._content(step, kept)
        with replacing(samples_path(self.run_folder, step)) as unfinished:
            unfinished.write_bytes(content)

    def _content(self, step: int, kept: StepSamples) -> bytes:
        used = sorted({token for sample in kept.samples for token in sample.token_ids.tolist()})
        for token in used:
            if token not in self._texts:
                self._texts[token] = self._decode([token])
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(each, name).astype(dtype) for each in kept.samples] or [np.empty(0, dtype)])
            for name, dtype in (("token_ids", np.int32), ("mask", np.bool_), ("versions", np.int32))
        }
        for name in COLUMNS:
            if parts := [each.columns[name].astype(np.float32) for each in kept.samples if name in each.columns]:
                arrays[name] = np.concatenate(parts)
        arrays["loss_rows"] = np.array(list(kept.loss), dtype=np.int64)
        arrays["loss_shares"] = np.array(list(kept.loss.values()), dtype=np.float64)
        if kept.scale is not None:
            arrays["loss_sums"] = np.array([kept.sums[row] for row in kept.loss], dtype=np.float64)
            arrays |= {name: getattr(kept.scale, name).astype(np.int32) for name in _COUNTS}
        header = {
            "format": FORMAT,
            "step": step,
            "left_out": kept.left_out,
            "scale": kept.scale and {name: getattr(kept.scale, name) for name in _SETTINGS},
            "whitening": kept.whitening,
            "texts": {token: self._texts[token] for token in used},
            "samples": [_describe(sample) for sample in kept.samples],
        }
        arrays[_HEADER] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        return buffer.getvalue()

    def truncate_after(self, step: int) -> None:
        """Remove the files of later steps, which a resumed run writes again."""
        for later in kept_steps(self.run_folder):
            if later > step:
                samples_path(self.run_folder, later).unlink()


def _shortest(samples: Sequence[KeptSample], share: float) -> list[KeptSample]:
    """In their order the shortest ones, with at most that share of all tokens: at least one less."""
    ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
    ends = np.cumsum([len(sample.token_ids) for sample in ordered])
    rows = {sample.row for sample, end in zip(ordered, ends, strict=True) if end <= share * ends[-1]}
    return [sample for sample in samples if sample.row in rows]


def _describe(sample: KeptSample) -> dict[str, Any]:
    columns = [name for name in COLUMNS if name in sample.columns]
    return {**{name: getattr(sample, name) for name in _TYPES}, "length": len(sample.token_ids), "columns": columns}


def samples_path(run_folder: Path, step: int) -> Path:
    return run_folder / "samples" / f"step-{step:06d}.npz"


def kept_steps(run_folder: Path) -> list[int]:
    return list(step_files(run_folder / "samples", ".npz"))


def read_samples(path: Path) -> StepSamples:
    """Raises DataError if the file is missing, damaged or of another format."""
    with _open(path) as file:
        header, arrays = _header(path, file), {name: file[name] for name in file.files if name != _HEADER}
        rows, scale = arrays["loss_rows"].tolist(), header.get("scale")
        if scale and max(rows, default=0) >= len(arrays["num_trained"]):
            raise ValueError("a row of the loss is beyond those of the step")
        return StepSamples(
            samples=list(_samples(header["samples"], arrays)),
            loss=dict(zip(rows, arrays["loss_shares"].tolist(), strict=True)),
            sums=dict(zip(rows, arrays["loss_sums"].tolist(), strict=True)) if scale else {},
            scale=LossScale(**scale, **{name: arrays[name] for name in _COUNTS}) if scale else None,
            whitening=header.get("whitening"),
            left_out=header["left_out"],
            texts={int(token): text for token, text in header["texts"].items()},
        )


def read_lines(path: Path) -> tuple[list[int | None], int]:
    """(`KeptSample.line` of every sample, `StepSamples.left_out`), without the tokens. Raises as `read_samples`."""
    with _open(path) as file:
        header = _header(path, file)
        return [each["line"] for each in header["samples"]], int(header["left_out"])


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Raises DataError if the file, or what is read of it, is missing or damaged."""
    try:
        run = path.parent.parent
        whole = untrusted_files.opened(run, path.relative_to(run).as_posix(), shared=True)
        with whole as source, np.load(source, allow_pickle=False) as file:
            if sum(each.file_size for each in file.zip.infolist()) > _MAX_ARRAYS:
                raise ValueError(f"it decompresses to over {_MAX_ARRAYS} bytes")
            yield file
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError("is missing", "a file of kept samples (trainer.samples_kept)", file=str(path)) from None
    except _DAMAGES as error:
        raise DataError(f"is damaged ({error})", "a file of kept samples", file=str(path)) from error


def _header(path: Path, file: Any) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(file[_HEADER].tobytes())
    if header["format"] != FORMAT:
        raise DataError("is of an unknown format", f"format {FORMAT}", file=str(path))
    mean, std = header.get("whitening") or (0.0, 1.0)
    if not isinstance(mean, int | float) or not isinstance(std, int | float):
        raise TypeError("whitening is not two numbers")
    for each in header["samples"]:
        for name, types in _TYPES.items():
            if not isinstance(each.get(name), types):
                raise TypeError(f"{name} of a sample is {each.get(name)!r}")
        if not all(isinstance(value, int | float) for value in each["group_returns"]):
            raise TypeError("group_returns of a sample are not numbers")
    return header


def _samples(described: Iterable[dict[str, Any]], arrays: Mapping[str, _Array]) -> Iterable[KeptSample]:
    taken = dict.fromkeys(arrays, 0)

    def take(name: str, count: int) -> _Array:
        start = taken[name]
        taken[name] = start + count
        if taken[name] > len(arrays[name]):
            raise ValueError(f"{name} ends early")
        return arrays[name][start : start + count]

    for each in described:
        length, columns = each.pop("length"), each.pop("columns")
        token_ids, mask, versions = (take(name, length) for name in ("token_ids", "mask", "versions"))
        trained = {name: take(name, int(mask.sum())) for name in columns}
        yield KeptSample(**each, token_ids=token_ids, mask=mask, versions=versions, columns=trained)
