"""A mistake as an edit of the source, and a copy of the packages with one mistake planted.

An edit reaches every process that runs in the copy: ranks, engines and scorers of a whole training, too. The simulation
stays in one process, so its defects are patches there (tests/simulation/mutants.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("verl", "toolrl", "tests")  # tests import from the folder that they lie in, so they are copied, too


class NotApplicableError(ValueError):
    """The source has changed: a mistake does not fit it any more."""


@dataclass(frozen=True, slots=True)
class Edit:
    """`old`, which occurs exactly once in the file, is replaced by `new`."""

    file: str  # relative to the root
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """Raises NotApplicableError."""
        if (count := text.count(self.old)) != 1:
            raise NotApplicableError(f"{self.file} has this text {count} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Mistake:
    """What someone could write by mistake, and the fast tests that must notice."""

    name: str
    wrong: str  # a sentence
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]  # files or folders

    def edited(self, root: Path = ROOT) -> Mapping[str, str]:
        """The new text of each file. Raises NotApplicableError for a text that does not occur exactly once."""
        texts: dict[str, str] = {}
        for edit in self.edits:
            text = texts.get(edit.file)
            texts[edit.file] = edit.applied_to((root / edit.file).read_text("utf-8") if text is None else text)
        return texts


def plant(mistake: Mistake | None, folder: Path) -> None:
    """Make `folder` a checkout with this mistake, or with none: packages and tests are copied, all else is linked.

    A command that has this folder as PYTHONPATH and as its working directory runs the mistake.
    Raises NotApplicableError.
    """
    texts = {} if mistake is None else mistake.edited()
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, folder / path.name, symlinks=True)  # compiled files, too: times are kept
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    for file, text in texts.items():
        (folder / file).write_text(text, "utf-8")
