"""Checkpoints on disk: whole or not at all, verified, the newest and the best of them kept. Knows nothing of torch.

```
folder/step-000020/                     what the workers wrote, state.json, manifest.json (files, sizes, hashes)
folder/latest.json, best.json           {"step", "folder", "score"}, for people and tools
folder/.step-000040.unfinished-<pid>    being written, or left by a process that was killed
```
One process at a time has a store (`verl.lock`), so what is unfinished when it is opened was left by another that has
ended. Order is counted, never read from a clock.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, DataError
from verl.files import full, replacing, unwritable
from verl.trainer.manifest import Checkpoint, fingerprints, read_json, read_manifest, verify, write_json, write_manifest

STATE = "state.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A checkpoint being written: whatever lies in `folder` at the end of the `with` block belongs to it."""

    folder: Path

    def write_state(self, state: Mapping[str, Any]) -> None:
        """The controller's state: plain JSON, so that it comes back as the same objects (no tuples, no int keys)."""
        text = json.dumps(state, indent=1)
        assert repr(json.loads(text)) == repr(dict(state)), "the state is not plain JSON"  # repr: NaN equals NaN
        (self.folder / STATE).write_text(text)


def read_state(path: Path) -> dict[str, Any]:
    """The controller's state of the checkpoint at `path`. Raises DataError if there is none."""
    return read_json(path / STATE)


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep_last: int, keep_best: int) -> None:
        """Removes what killed processes left unfinished; makes no folder.

        keep_last: number of newest checkpoints to keep, at least 1
        keep_best: number of checkpoints with the highest scores to keep besides; 0 turns it off, best.json included
        """
        if keep_last < 1 or keep_best < 0:
            raise ConfigError(f"keep_last must be at least 1 and keep_best at least 0, got {keep_last} and {keep_best}")
        self.folder = folder
        self._keep_last, self._keep_best = keep_last, keep_best
        self._clear_leftovers()

    @contextmanager
    def writing(self, step: int, score: float | None = None) -> Iterator[Unfinished]:
        """A checkpoint to fill, by this process and by others; it counts from the end of the block on.

        score: larger is better; NaN and infinities count as no score
        An older checkpoint of the same step is replaced. Whatever fails, the checkpoints and pointers there were stay
        as they are and the unfinished folder goes; a disk that is full or cannot be written to is a DataError.
        """
        target = self.folder / f"step-{step:06d}"
        unfinished = _unfinished(target)
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            yield Unfinished(unfinished)
            self._commit(unfinished, step, score if score is not None and math.isfinite(score) else None)
        except OSError as error:
            raise unwritable(target, error) from error
        except Exception as error:
            if (reason := full(unfinished)) is not None:  # which torch does not say
                raise unwritable(target, reason) from error
            raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self._remove_old()

    def latest(self, hashes: bool = False) -> Path | None:
        """The newest checkpoint that is whole, None if there never was one; damaged ones are warned of and skipped.

        hashes: read every byte and compare; otherwise sizes are compared
        Raises DataError if there are checkpoints but all are damaged: starting anew is for the user to decide.
        """
        paths = sorted(self.folder.glob("step-*"), key=_number_or_last, reverse=True)
        for path in paths:
            try:
                verify(path, hashes)
            except DataError as error:
                _log.warning("checkpoint skipped: %s", error)
            else:
                return path
        if paths:
            hint = "Restore one of them, or name another folder to start anew"
            raise DataError("holds checkpoints, but all are damaged", hint=hint, file=str(self.folder))
        return None

    def best(self) -> Path | None:
        """The whole checkpoint with the highest score, if any has one."""
        ranked = ranking(self._whole())
        return self.folder / ranked[0].name if ranked else None

    def _whole(self) -> list[Checkpoint]:
        """Those whose files are there in full size, in order of writing."""
        found = []
        for path in self.folder.glob("step-*"):
            with suppress(DataError):
                found.append(verify(path))
        return sorted(found, key=lambda each: each.number)

    def _commit(self, unfinished: Path, step: int, score: float | None) -> None:
        """Everything that needs space comes before the renames; the pointer to the newest is renamed last."""
        number = 1 + max((_number_or_last(path)[1] for path in self.folder.glob("step-*")), default=0)
        new = Checkpoint(step, number, score, fingerprints(unfinished))
        write_manifest(unfinished, new)
        _sync_folders(unfinished)
        pointers = {"latest.json": new}
        ranked = ranking([new, *(each for each in self._whole() if each.step != step)])
        if ranked and self._keep_best:
            pointers["best.json"] = ranked[0]
        with ExitStack() as renames:  # undone in reverse, therefore latest.json comes last
            for name, each in pointers.items():
                pointer = renames.enter_context(replacing(self.folder / name))
                write_json(pointer, {"step": each.step, "folder": each.name, "score": each.score})
            _swap_in(unfinished, self.folder / new.name)
        _sync(self.folder)

    def _remove_old(self) -> None:
        """Damaged ones are left for a person to look at."""
        whole = self._whole()
        staying = kept(whole, self._keep_last, self._keep_best)
        for path in (self.folder / each.name for each in whole if each not in staying):
            hidden = _unfinished(path)  # a removal that is cut short must not look like damage
            try:
                path.rename(hidden)
                shutil.rmtree(hidden)
            except OSError as error:
                _log.warning("%s: cannot be removed (%s)", path, error.strerror or error)

    def _clear_leftovers(self) -> None:
        for replaced in self.folder.glob(".step-*.replaced-*"):
            name = replaced.name.removeprefix(".").partition(".")[0]
            if not (self.folder / name).exists():  # killed between the two renames of `_swap_in`
                replaced.rename(self.folder / name)
            _remove(replaced)
        for unfinished in self.folder.glob(".*.unfinished-*"):
            _log.info("removing %s, which a process that has ended left unfinished", unfinished)
            _remove(unfinished)


def ranking(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those with a score, the best first; of equal ones the newer first."""
    scored = [(each.score, each.number, each) for each in checkpoints if each.score is not None]
    return [each for *_, each in sorted(scored, key=lambda entry: entry[:2], reverse=True)]


def kept(checkpoints: Sequence[Checkpoint], keep_last: int, keep_best: int) -> list[Checkpoint]:
    """The newest `keep_last` and the best `keep_best`, in order of writing."""
    ordered = sorted(checkpoints, key=lambda each: each.number)
    chosen = {each.number for each in [*ordered[-keep_last:], *ranking(ordered)[:keep_best]]}
    return [each for each in ordered if each.number in chosen]


def _number_or_last(path: Path) -> tuple[bool, int]:
    """Order of writing; what has no readable manifest counts as newest, so that it is not passed over in silence."""
    try:
        return False, read_manifest(path).number
    except DataError:
        return True, 0


def _unfinished(target: Path) -> Path:
    """Where this process writes or removes a checkpoint; what is left there after its death goes at the next start."""
    return target.with_name(f".{target.name}.unfinished-{os.getpid()}")


def _swap_in(unfinished: Path, target: Path) -> None:
    """Rename to `target`; what is there already goes only afterwards: folders cannot be replaced in one step."""
    replaced = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.exists():
        target.rename(replaced)
    unfinished.rename(target)
    _remove(replaced)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_folders(folder: Path) -> None:
    for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(each)


def _sync(folder: Path) -> None:
    """Put the folder's names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
