"""A run's own temporary folder, which is gone after the run, with all its processes, however the run ends.

    with scratch_folder() as folder:
        ...  # children of this process find it as TMPDIR

A watcher of its own session (`verl/watcher.py`) tidies up, at the block's end as after kill -9 of this process.
"""

from __future__ import annotations

import getpass
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from verl import watcher
from verl.errors import ConfigError

_log = logging.getLogger(__name__)
_TIDYING_S = 40.0
# A unix socket's path has 107 bytes, of which Ray's own part takes 64 and 2 for its folder, ours 14.
_LONGEST_PLACE = 107 - 64 - 2 - 14


@contextmanager
def variables(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables of this process and its children during a block; None: unset."""
    before = {name: os.environ.get(name) for name in wanted}
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that only this user can read, under RAY_TMPDIR or TMPDIR; under /tmp where their paths are too long.

    Its end ends every process that this one has started meanwhile, except this one's own living children. Raises
    ConfigError where no folder can be made.
    """
    folder = _make_folder()
    command = [sys.executable, "-IS", watcher.__file__, str(folder), str(os.getpid())]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, cwd="/"
    )
    children = {watcher.MARK: str(folder), "TMPDIR": str(folder / "tmp"), **_kept_caches()}
    try:
        with variables(children):
            yield folder
    finally:
        _end(process, folder)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Let the watcher tidy up; what it did not do, as when it was killed, is done here."""
    try:
        process.communicate(b"\n", timeout=_TIDYING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.returncode or folder.exists():
        _log.warning("the process that tidies up after the run ended early (exit code %s)", process.returncode)
        watcher.Run(str(folder), os.getpid()).tidy()


def _make_folder() -> Path:
    place = _place()
    try:
        folder = Path(tempfile.mkdtemp(prefix="verl-", dir=place))
        (folder / "tmp").mkdir()
    except OSError as error:
        raise ConfigError(
            f"no temporary folder can be made in {place!r} ({error}); point TMPDIR to a folder with room"
        ) from error
    return folder


def _place() -> str:
    place = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return place if len(os.fsencode(place)) <= _LONGEST_PLACE else "/tmp"


def _kept_caches() -> dict[str, str]:
    """What torch compiles may be used by the next run, too: where torch itself would keep it."""
    with suppress(OSError, KeyError):  # a user without a name
        cache = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        return {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache)}
    return {}


def _set(wanted: Mapping[str, str | None]) -> None:
    for name, value in wanted.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
