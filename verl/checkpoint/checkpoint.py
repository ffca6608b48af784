"""Checkpoints on disk: written atomically, verified, the newest and the best kept. Independent of torch.

```
folder/step-000020/                     files of the workers, state.json, manifest.json (files, sizes, hashes)
folder/latest.json, best.json           {"step", "folder", "score"}, for users and tools
folder/.step-000040.unfinished-<pid>    being written, or left by a killed process
```
A store belongs to one process (`verl.host.lock`), so unfinished folders found at the start are of ended processes.
Checkpoints are ordered by a counter, not by time stamps.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint import manifest
from verl.checkpoint.manifest import Checkpoint, verify
from verl.errors import ConfigError, DataError
from verl.host.files import full, replacing, unwritable

STATE = "state.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Being written: all files in `folder` at the end of the `with` block belong to it."""

    folder: Path

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Plain JSON (no tuples, no int keys), so that reading restores equal objects."""
        text = json.dumps(state, indent=1)
        assert repr(json.loads(text)) == repr(dict(state)), "the state is not plain JSON"  # repr: NaN equals NaN
        (self.folder / STATE).write_text(text)


def read_state(path: Path) -> dict[str, Any]:
    """The controller's state of the checkpoint at `path`. Raises DataError if there is none."""
    return manifest.read_json(path / STATE)


class CheckpointStore:
    def __init__(self, folder: Path, keep_last: int, keep_best: int) -> None:
        """Remove unfinished checkpoints of killed processes; creates no folder.

        keep_last: number of newest checkpoints to keep, at least 1
        keep_best: number of checkpoints with the highest scores to keep in addition; 0 disables this and best.json
        """
        if keep_last < 1 or keep_best < 0:
            raise ConfigError(f"keep_last must be at least 1 and keep_best at least 0, got {keep_last} and {keep_best}")
        self.folder = folder
        self._keep_last, self._keep_best = keep_last, keep_best
        self._clear_leftovers()

    @contextmanager
    def writing(self, step: int, score: float | None = None) -> Iterator[Unfinished]:
        """A checkpoint folder to fill, by this process and others; committed at the end of the block.

        score: larger is better; NaN and infinities count as no score
        Replaces a checkpoint of the same step. A failure leaves checkpoints and pointers unchanged. A full or
        read-only disk is a DataError.
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
            if (reason := full(unfinished)) is not None:  # torch's errors do not name this cause
                raise unwritable(target, reason) from error
            raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self._remove_old()

    def latest(self, hashes: bool = False) -> Path | None:
        """None if there is no checkpoint; damaged ones are skipped with a warning.

        hashes: compare hashes, which reads every byte; otherwise compare sizes
        Raises DataError if all checkpoints are damaged: starting from scratch is the user's decision.
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
            hint = "Restore one of them, or set another folder to start from scratch"
            raise DataError("holds checkpoints, but all are damaged", hint=hint, file=str(self.folder))
        return None

    def _intact(self) -> list[Checkpoint]:
        """Checkpoints whose files have their recorded sizes, in order of writing."""
        found = []
        for path in self.folder.glob("step-*"):
            with suppress(DataError):
                found.append(verify(path))
        return sorted(found, key=lambda each: each.number)

    def _commit(self, unfinished: Path, step: int, score: float | None) -> None:
        """Write all that needs disk space, then rename; the pointer to the newest is renamed last."""
        number = 1 + max((_number_or_last(path)[1] for path in self.folder.glob("step-*")), default=0)
        new = Checkpoint(step, number, score, manifest.fingerprints(unfinished))
        manifest.write_json(unfinished / manifest.MANIFEST, {"format": manifest.FORMAT, **asdict(new)})
        for folder in (unfinished, *filter(Path.is_dir, unfinished.rglob("*"))):
            _sync(folder)
        pointers = {"latest.json": new}
        ranked = ranking([new, *(each for each in self._intact() if each.step != step)])
        if ranked and self._keep_best:
            pointers["best.json"] = ranked[0]
        with ExitStack() as renames:  # they run in reverse order: latest.json is last
            for name, each in pointers.items():
                pointer = renames.enter_context(replacing(self.folder / name))
                manifest.write_json(pointer, {"step": each.step, "folder": each.name, "score": each.score})
            _swap_in(unfinished, self.folder / new.name)
        _sync(self.folder)

    def _remove_old(self) -> None:
        """Remove superseded checkpoints; damaged ones are left for inspection."""
        intact = self._intact()
        staying = kept(intact, self._keep_last, self._keep_best)
        for path in (self.folder / each.name for each in intact if each not in staying):
            hidden = _unfinished(path)  # so that an interrupted removal does not look like a damaged checkpoint
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
            _log.info("removing %s, left unfinished by an ended process", unfinished)
            _remove(unfinished)


def ranking(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Checkpoints with a score, best first; ties: newest first."""
    scored = [(each.score, each.number, each) for each in checkpoints if each.score is not None]
    return [each for *_, each in sorted(scored, key=lambda entry: entry[:2], reverse=True)]


def kept(checkpoints: Sequence[Checkpoint], keep_last: int, keep_best: int) -> list[Checkpoint]:
    ordered = sorted(checkpoints, key=lambda each: each.number)
    chosen = {each.number for each in [*ordered[-keep_last:], *ranking(ordered)[:keep_best]]}
    return [each for each in ordered if each.number in chosen]


def _number_or_last(path: Path) -> tuple[bool, int]:
    """Sort key: order of writing; without a manifest it is the newest, so that `latest` warns."""
    try:
        return False, manifest.read_manifest(path).number
    except DataError:
        return True, 0


def _unfinished(target: Path) -> Path:
    """Where a checkpoint is written or removed; the next start removes leftovers."""
    return target.with_name(f".{target.name}.unfinished-{os.getpid()}")


def _swap_in(unfinished: Path, target: Path) -> None:
    """An existing target is moved aside first: folders cannot be replaced atomically."""
    replaced = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.exists():
        target.rename(replaced)
    unfinished.rename(target)
    _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
