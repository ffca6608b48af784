"""SHA-256 of files and folders. A large file is read once: later calls know it by size, times and inode."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl.errors import DataError
from verl.host.files import replacing

_REMEMBERED_BYTES = 2**20  # smaller files are read every time
_SETTLED_S = 2.0  # a file that changed just now may change again within the resolution of its times
_MAX_ENTRIES = 10_000
_THREADS = 4

Known = dict[str, str]  # {the identity of a file: its digest}, oldest first


def cache_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "toolrl" / "digests.json"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return digests([path])[0]


def digests(paths: Iterable[Path]) -> list[str]:
    """SHA-256 of every file, in hexadecimal. Large ones are remembered in the user's cache, if it can be written."""
    paths = list(paths)
    known = _read_known()
    names = [_identity(path) for path in paths]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda path, name: known.get(name or "") or _hashed(path), paths, names))
    new = {
        name: digest
        for path, name, digest in zip(paths, names, found, strict=True)
        if name and name not in known and name == _identity(path)  # it did not change meanwhile
    }
    if new:
        _write_known({**known, **new})
    return found


def folder_digests(folder: Path, but: Iterable[str] = ()) -> dict[str, str]:
    """{path in the folder: SHA-256} of its files in order, without hidden ones and those that match `but`."""
    patterns = tuple(but)
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    kept = {
        place: path
        for place, path in found.items()
        if not any(part.startswith(".") for part in place.parts) and not any(map(path.match, patterns))
    }
    return {place.as_posix(): each for place, each in zip(kept, digests(kept.values()), strict=True)}


def _identity(path: Path) -> str | None:
    """The text under which a file is remembered; None if it is small or has just changed."""
    found = path.stat()
    if found.st_size < _REMEMBERED_BYTES or time.time() - max(found.st_mtime, found.st_ctime) < _SETTLED_S:
        return None
    parts = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return "-".join(map(str, parts))


def _hashed(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_known() -> Known:
    """Empty without a cache, or with one that is damaged."""
    try:
        found = json.loads(cache_path().read_text())
    except (OSError, ValueError):
        return {}
    good = isinstance(found, dict) and all(isinstance(each, str) for each in found.values())
    return found if good else {}


def _write_known(known: Known) -> None:
    newest = dict(list(known.items())[-_MAX_ENTRIES:])
    try:
        with replacing(cache_path()) as unfinished:
            unfinished.write_text(json.dumps(newest))
    except DataError:  # a home that cannot be written costs time alone
        return
