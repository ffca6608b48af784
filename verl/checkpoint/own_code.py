"""The code of a user's file: the file, and the modules that it imports from its own folder or the user's paths.

Imports are read, not run. Installed packages are known by their versions, which a run records.
"""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

_log = logging.getLogger(__name__)
_OWN = __name__.partition(".")[0]
_MAX_MODULES = 1000


def own_code(path: Path) -> list[Path]:
    """The file, then all modules of the user that it imports, directly or through others; with a warning if there are
    too many, without the others."""
    found = {path.resolve(): None}
    waiting = [path.resolve()]
    while waiting:
        if len(found) > _MAX_MODULES:
            _log.warning(
                "%s imports more than %d modules of yours, so a resume does not notice if others have changed",
                *(path, _MAX_MODULES),
            )
            break
        for module in _imported(waiting.pop()):
            if module not in found:
                found[module] = None
                waiting.append(module)
    return list(found)


def _imported(path: Path) -> Iterator[Path]:
    """Nothing for a file that is no Python code: its import fails, with a message, where it is used."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    yield from (folder / "__init__.py" for folder in _packages(path))
    absolute = _roots(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield from _found(absolute, each.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            roots = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else absolute
            for each in node.names:
                yield from _found(roots, [*parts, each.name])


def _packages(path: Path) -> list[Path]:
    """The folders of the packages that the file is in, the innermost first."""
    return list(takewhile(lambda folder: (folder / "__init__.py").is_file(), path.parents))


def _roots(path: Path) -> list[Path]:
    """The folders in which a module of the user's may be: of the file, of its package, and of the user's paths."""
    packages = _packages(path)
    top = [packages[-1].parent] if packages else []
    folders = [path.parent, *top, *(Path(each).resolve() for each in sys.path)]
    installed = {Path(each).resolve() for each in (sys.prefix, sys.base_prefix)}
    return [folder for folder in dict.fromkeys(folders) if installed.isdisjoint((folder, *folder.parents))]


def _found(roots: list[Path], parts: list[str]) -> list[Path]:
    """The files of a dotted name, from the outermost package on, in the first folder that has it."""
    if parts[0] == _OWN:
        return []
    for root in roots:
        files = []
        for number in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:number])
            files += [each for each in (place / "__init__.py", place.with_name(f"{place.name}.py")) if each.is_file()]
        if files:
            return files
    return []
