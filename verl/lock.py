"""One process at a time writes to a folder; whoever comes second learns which one is there."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.files import unwritable

LOCK = ".lock"
_BEAT_S = 5.0
_WATCHED_S = 16.0  # three beats and a little

_log = logging.getLogger(__name__)


@contextmanager
def alone_in(folder: Path, hint: str = "name another output") -> Iterator[None]:
    """Keep other processes out of a folder. Makes it if need be, and is thereby the test whether it can be written to.

    The kernel holds the lock and lets it go when the process ends, however it ends. Over a file system that does not
    share locks between hosts, the count that the owner writes every few seconds tells whether it lives; no clock of
    either host is asked.
    hint: what the user can do instead of waiting
    Raises ConfigError that names host and process of the owner, DataError where nothing can be written.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        local_owner_ended = _lock(file, path, hint)
        _check_stale(path, hint, local_owner_ended)
        try:
            os.ftruncate(file, 0)
            _write(file, 0)
        except OSError as error:
            raise unwritable(folder, error) from error
        ended = threading.Event()
        beating = threading.Thread(target=_beat, args=(file, path, ended), name="lock", daemon=True)
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()
            os.ftruncate(file, 0)  # empty: unlocked in order
    finally:
        os.close(file)


def _lock(file: int, path: Path, hint: str) -> bool:
    """Whether the kernel vouches that no process of this host has the lock. Raises ConfigError if one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _taken(path.parent, _owner(path), hint) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise unwritable(path, error) from error
        return False  # this file system has no locks
    return True


def _check_stale(path: Path, hint: str, local_owner_ended: bool) -> None:
    """Raises ConfigError if the owner that the file names is beyond the kernel's knowledge and goes on counting."""
    owner = _owner(path)
    if not owner:
        return
    if not local_owner_ended or owner.get("host") != socket.gethostname():
        _log.warning("%s: locked by %s; watching for %.0f s whether it lives", path, _name(owner), _WATCHED_S)
        time.sleep(_WATCHED_S)
        if _owner(path) != owner:
            raise _taken(path.parent, owner, hint)
    _log.warning("%s: taken over from %s, which ended without unlocking it", path, _name(owner))


def _taken(folder: Path, owner: dict[str, Any], hint: str) -> ConfigError:
    return ConfigError(f"another run is writing to {str(folder)!r}: {_name(owner)}; let it end, or {hint}")


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}"


def _owner(path: Path) -> dict[str, Any]:
    """What the owner wrote; empty if there is none, or nothing that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: int, beats: int) -> None:
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "beats": beats})
    os.pwrite(file, text.encode(), 0)  # whole, and never shorter than the beat before
    os.fsync(file)


def _beat(file: int, path: Path, ended: threading.Event) -> None:
    beats = 0
    while not ended.wait(_BEAT_S):
        beats += 1
        try:
            _write(file, beats)
        except OSError as error:
            _log.warning("%s cannot be written (%s)", path, error.strerror)
