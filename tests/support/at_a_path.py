"""What another party can leave at a path of which this process expects a file: each kind, and how to make it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

DIGITS = "471147114711"  # so many that no time or size has them by chance
SECRET = f'{{"reward": 0.{DIGITS}}}'  # of the host: valid wherever JSON is expected


def host_file(folder: Path) -> Path:
    """A file of the host outside of all that another party owns."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "host.json"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def _socket(path: Path, _: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path, _: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


def nested(path: Path, depth: int = 3000, name: str = "d") -> None:
    """Folders in folders, deeper than a path can name."""
    path.mkdir()
    here = os.open(path, os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


# (path, a file of the host): the path's folder exists and is empty
KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link out": lambda path, host: path.symlink_to(host),
    "relative link out": lambda path, host: path.symlink_to(os.path.relpath(host, path.parent)),
    "hard link out": lambda path, host: os.link(host, path),
    "link to a link out": lambda path, host: (
        path.with_name("hop").symlink_to(host),
        path.symlink_to("hop"),
    ),
    "dangling link": lambda path, host: path.symlink_to("nowhere"),
    "loop": lambda path, host: path.symlink_to(path.name),
    "link to a device": lambda path, host: path.symlink_to("/dev/zero"),
    "link to a terminal": lambda path, host: path.symlink_to("/dev/tty"),
    "link to own memory": lambda path, host: path.symlink_to("/proc/self/mem"),
    "pipe": lambda path, host: os.mkfifo(path),
    "socket": _socket,
    "giant": _sparse,
    "folder": lambda path, host: path.mkdir(),
    "deep": lambda path, host: nested(path),
    "deep, long names": lambda path, host: nested(path, 300, "d" * 255),
}
