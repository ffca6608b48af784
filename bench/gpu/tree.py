"""The packages that a bare machine lacks, as bench/gpu/stage.py builds them: archives that come with several calls.

A stage folder holds SUMS, lines of `sha256sum` for all archives NAME.tar.xz in the order of PYTHONPATH, and those that
this call carries. Each is a folder of packages, whole by itself.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from contextlib import suppress
from pathlib import Path

from verl.errors import DataError
from verl.host.files import replacing

SUMS = "SUMS"
MIB = 2**20
REPOSITORY_MIB = 18
_LINE = re.compile(r"(?P<sum>[0-9a-f]{64}) [ *](?P<name>[\w-]+)\.tar\.xz")


class Tree:
    """The unpacked archives, in a folder that stays on the machine between calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sums = read_sums(folder / SUMS) if (folder / SUMS).exists() else {}

    def take_in(self, stage: Path) -> None:
        """Unpack the archives of this call that are not unpacked yet, those of another tree in place of its own.

        Raises DataError for a folder that cannot be used, and, after the others, for archives that cannot.
        """
        if not (stage / SUMS).is_file():
            raise DataError(f"has no {SUMS}", hint="Build the folder with bench/gpu/stage.py", file=str(stage))
        self._sums = read_sums(stage / SUMS)
        with replacing(self.folder / SUMS) as unfinished:
            shutil.copyfile(stage / SUMS, unfinished)
        broken = []
        for name, expected in self._sums.items():
            archive = stage / f"{name}.tar.xz"
            if archive.is_file() and not self._is_unpacked(name):
                try:
                    self._unpack(archive, name, expected)
                except DataError as error:
                    broken.append(error)
        if broken:
            raise DataError("; ".join(map(str, broken)))

    def paths(self) -> list[Path]:
        """Folders for PYTHONPATH."""
        return [self.folder / name for name in self._sums if self._is_unpacked(name)]

    def missing(self) -> list[str]:
        """Archives that are still to come."""
        return [f"{name}.tar.xz" for name in self._sums if not self._is_unpacked(name)]

    def _is_unpacked(self, name: str) -> bool:
        marker = self._marker(name)
        return marker.exists() and marker.read_text() == self._sums[name]

    def _marker(self, name: str) -> Path:
        return self.folder / f"{name}.sum"

    def _unpack(self, archive: Path, name: str, expected: str) -> None:
        folder, unfinished = self.folder / name, self.folder / f"{name}.unfinished"
        try:
            if _sum(archive) != expected:
                raise DataError(f"its checksum is not the one in {SUMS}", hint="Copy it again", file=str(archive))
            self._marker(name).unlink(missing_ok=True)
            for each in (folder, unfinished):
                shutil.rmtree(each, ignore_errors=True)
            with tarfile.open(archive, "r:xz") as tar:
                tar.extractall(unfinished, filter="tar")
            if other := _for_another_python(unfinished):
                problem, hint = f"holds {other.name}, not for this Python", f"Use another than {sys.executable}"
                raise DataError(problem, hint=hint, file=str(archive))
            unfinished.rename(folder)
            _compile(folder)
            self._marker(name).write_text(expected)
        except (OSError, tarfile.TarError, EOFError) as error:
            raise DataError(f"cannot be unpacked ({error})", hint="See the disk's space", file=str(archive)) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # half of an archive may have filled the disk


def _compile(folder: Path) -> None:
    """On all cores; imports would do it on one, so a failure costs time alone.

    A process of its own ends by itself if this one is killed. A pool of this one's would stay, and hold its output.
    """
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", str(folder)]
    with suppress(OSError):
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _for_another_python(folder: Path) -> Path | None:
    """An extension module that this Python would not find."""
    own = sysconfig.get_config_var("EXT_SUFFIX")
    return next((each for each in folder.rglob("*.cpython-3*.so") if not each.name.endswith(own)), None)


def read_sums(path: Path) -> dict[str, str]:
    """Checksum by archive, without its suffix. Raises DataError."""
    found = [_LINE.fullmatch(line) for line in path.read_text(errors="replace").splitlines()]
    if not all(found):
        raise DataError("is no list of checksums of archives", hint="Build the folder again", file=str(path))
    return {line["name"]: line["sum"] for line in found if line}


def carried(stage: Path) -> float:
    """MiB that a call brings to the machine: its archives and the repository."""
    return REPOSITORY_MIB + sum(each.stat().st_size for each in stage.glob("*.tar.xz")) / MIB


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
