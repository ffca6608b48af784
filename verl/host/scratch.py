"""A run's temporary folder, removed after the run with all its processes, however it ends.

    with scratch_folder() as folder:
        ...  # children of this process find it as TMPDIR

A watcher process in its own session (`watcher.py`) cleans up at the end of the block, and after kill -9 too.
"""

import getpass
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from verl.errors import ConfigError
from verl.host import watcher

_log = logging.getLogger(__name__)
_TIDYING_S = 40.0
# A Unix socket path has at most 107 bytes: Ray's part takes 64, its folder 2, ours 14.
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
    """Only for this user, under RAY_TMPDIR or TMPDIR; under /tmp if their paths are too long. Raises ConfigError.

    At the end, all processes started meanwhile are killed, except this process's own living children.
    """
    folder = _make_folder()
    command = [sys.executable, "-IS", watcher.__file__, str(folder), str(os.getpid())]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=nothing, start_new_session=True, cwd="/")
    children = {watcher.MARK: str(folder), "TMPDIR": str(folder / "tmp"), **_kept_caches()}
    try:
        with variables(children):
            yield folder
    finally:
        _end(process, folder)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Let the watcher clean up; if it fails, e.g. because it was killed, clean up here."""
    try:
        process.communicate(b"\n", timeout=_TIDYING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.returncode or folder.exists():
        _log.warning("the cleanup process of the run ended early (exit code %s)", process.returncode)
        watcher.RunProcesses(str(folder), os.getpid()).tidy()


def _make_folder() -> Path:
    place = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(place)) > _LONGEST_PLACE:
        place = "/tmp"
    try:
        folder = Path(tempfile.mkdtemp(prefix="verl-", dir=place))
        (folder / "tmp").mkdir()
    except OSError as error:
        hint = "point TMPDIR to a folder with free space"
        raise ConfigError(f"no temporary folder can be created in {place!r} ({error}); {hint}") from error
    return folder


def _kept_caches() -> dict[str, str]:
    """Keep torch's compilation cache at its default location, for later runs."""
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
