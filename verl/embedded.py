"""The embedded tasks and model, which every installation has: `embedded:FILE` names them from any folder.

`mini` beside this file is a link to `dataset/mini` in a checkout, and a folder in an installed package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.registry import nearest

FOLDER = Path(__file__).with_name("mini").resolve()
PREFIX = "embedded:"


def embedded_path(name: str) -> str:
    """The path of the file or folder that `embedded:FILE` names; any other name as it is.

    Raises ConfigError with the nearest name where there is no such file, and where git made no link.
    """
    if not name.startswith(PREFIX):
        return name
    if not FOLDER.is_dir():
        raise ConfigError(
            f"{name}: {FOLDER} is not a folder. In a checkout it is a symbolic link to dataset/mini: run "
            "`git config core.symlinks true && git checkout verl/mini`, or copy dataset/mini there"
        )
    path = FOLDER / name.removeprefix(PREFIX)
    if not path.exists():
        known = [PREFIX + each.relative_to(FOLDER).as_posix() for each in FOLDER.glob("*")]
        raise ConfigError(f"there is no {name!r}; {nearest(name, known)}")
    return str(path)


def with_embedded_paths(value: Any) -> Any:
    """A value of the configuration with the paths of the embedded files that it names, alone or in a list."""
    if isinstance(value, str):
        return embedded_path(value)
    return [with_embedded_paths(each) for each in value] if isinstance(value, list) else value
