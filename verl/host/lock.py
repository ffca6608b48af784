"""Folder locks: only one process writes to a folder; a second one gets an error that names the first."""

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
from verl.host.files import unwritable

LOCK = ".lock"
_BEAT_S = 5.0
_WATCHED_S = 16.0  # slightly more than three heartbeats

_log = logging.getLogger(__name__)


@contextmanager
def alone_in(folder: Path, hint: str = "name another output") -> Iterator[None]:
    """Exclusive access to a folder. Creates it if needed, which also tests whether it is writable.

    The kernel releases the lock when the process ends. For file systems that do not share locks between hosts, the
    owner also writes a heartbeat counter; no host's clock is used.
    hint: what the user can do instead of waiting
    Raises ConfigError, naming host and process of the owner; DataError if the folder is not writable.
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
            os.ftruncate(file, 0)  # empty: released properly
    finally:
        os.close(file)


def _lock(file: int, path: Path, hint: str) -> bool:
    """Whether the kernel confirms that this host has no owner. Raises ConfigError if it has one."""
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
    """Raises ConfigError if an owner on another host still updates its heartbeat."""
    owner = _owner(path)
    if not owner:
        return
    if not local_owner_ended or owner.get("host") != socket.gethostname():
        _log.warning("%s: locked by %s; checking for %.0f s whether it is alive", path, _name(owner), _WATCHED_S)
        time.sleep(_WATCHED_S)
        if _owner(path) != owner:
            raise _taken(path.parent, owner, hint)
    _log.warning("%s: taken over from %s, which ended without releasing it", path, _name(owner))


def _taken(folder: Path, owner: dict[str, Any], hint: str) -> ConfigError:
    return ConfigError(f"another run is writing to {str(folder)!r}: {_name(owner)}; let it end, or {hint}")


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}"


def _owner(path: Path) -> dict[str, Any]:
    """The owner's record; empty if there is none or it is unreadable."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: int, beats: int) -> None:
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "beats": beats})
    os.pwrite(file, text.encode(), 0)  # in one write, never shorter than the previous one
    os.fsync(file)


def _beat(file: int, path: Path, ended: threading.Event) -> None:
    beats = 0
    while not ended.wait(_BEAT_S):
        beats += 1
        try:
            _write(file, beats)
        except OSError as error:
            _log.warning("%s cannot be written (%s)", path, error.strerror)
