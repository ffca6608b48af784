"""Manifest of a checkpoint: every file with its size and hash, to detect damage before loading."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from itertools import starmap
from pathlib import Path, PurePosixPath
from typing import Any

from verl.errors import DataError
from verl.host import untrusted_files

FORMAT = 1
MANIFEST = "manifest.json"
_MOST_BYTES = 1 << 28  # per JSON file
_PART_BYTES = 1 << 20
_HASHING_THREADS = 4  # hashing releases the GIL, and one thread is slower than a disk


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    number: int  # counts the checkpoints of a folder in order of writing; steps repeat after a rollback
    score: float | None  # larger is better
    files: Mapping[str, Mapping[str, Any]]  # relative path -> {"size": bytes, "sha256": hex digits}

    @property
    def name(self) -> str:
        return f"step-{self.step:06d}"


def verify(path: Path, hashes: bool = False) -> Checkpoint:
    """Compare with the manifest. Raises DataError that names the first file that differs."""
    checkpoint = read_manifest(path)
    disk = shutil.disk_usage(path).total
    for name, wanted in checkpoint.files.items():
        try:
            with untrusted_files.opened(path, name, shared=True) as file:
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError as error:
            raise DataError("is missing", file=str(path / name)) from error
        if size != wanted["size"]:
            raise DataError(f"has {size} bytes", f"{wanted['size']} bytes", file=str(path / name))
        if size > disk:  # a sparse file, which would take hours
            raise DataError(f"has {size} bytes, more than its disk of {disk}", file=str(path / name))
    try:
        changed = _changed(path, checkpoint) if hashes else []
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", file=str(error.filename or path)) from error
    if changed:
        raise DataError("has changed since it was written (its hash differs)", file=str(path / changed[0]))
    return checkpoint


def _changed(path: Path, checkpoint: Checkpoint) -> list[str]:
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        hashes = pool.map(lambda name: _hash_of(path, name), checkpoint.files)
        wanted = checkpoint.files.items()
        return [name for (name, each), found in zip(wanted, hashes, strict=True) if found != each["sha256"]]


def _hash_of(path: Path, name: str) -> str:
    digest = hashlib.sha256()
    with untrusted_files.opened(path, name, shared=True) as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
    return digest.hexdigest()


def read_manifest(path: Path) -> Checkpoint:
    """Raises DataError if it is missing, damaged or of another format."""
    fields = read_json(path / MANIFEST)
    if fields.pop("format", None) != FORMAT:
        raise DataError("is of an unknown format", f"format {FORMAT}", file=str(path / MANIFEST))
    complete = fields.keys() == {each.name for each in dataclass_fields(Checkpoint)}
    if not complete or not _valid(**fields) or Checkpoint(**fields).name != path.name:
        raise DataError("is damaged", f"the manifest of {path.name}", file=str(path / MANIFEST))
    return Checkpoint(**fields)


def _valid(step: object, number: object, score: object, files: object) -> bool:
    """Whether the fields of a manifest, which may be damaged, have valid types and values."""
    counts = all(type(each) is int and each >= 0 for each in (step, number))  # excludes bool
    scored = score is None or (isinstance(score, int | float) and math.isfinite(score))
    return counts and scored and isinstance(files, dict) and bool(files) and all(starmap(_valid_entry, files.items()))


def _valid_entry(name: str, entry: object) -> bool:
    """Whether an entry of a manifest describes a file inside the checkpoint."""
    parts = PurePosixPath(name).parts
    inside = bool(parts) and not name.startswith("/") and ".." not in parts
    described = isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get("sha256"), str)
    return inside and described


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file below `folder`, with fsync."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        entries = pool.map(lambda path: {"size": path.stat().st_size, "sha256": _synced_hash(path)}, files)
        return {path.relative_to(folder).as_posix(): entry for path, entry in zip(files, entries, strict=True)}


def _synced_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises DataError if there is none."""
    try:
        fields = json.loads(untrusted_files.read(path.parent, path.name, _MOST_BYTES, shared=True))
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", file=str(path)) from error
    except DataError:
        raise
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise DataError(f"is damaged ({error})", "JSON", file=str(path)) from error
    if not isinstance(fields, dict):
        raise DataError("is damaged", "a JSON object", file=str(path))
    return fields


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(fields, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
