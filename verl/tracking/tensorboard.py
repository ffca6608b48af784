"""Metrics as TensorBoard events.

Each is written at once: the queue and thread of TensorBoard's own EventFileWriter end a full disk in tracebacks.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from verl.host.files import unwritable
from verl.tracking.tracker import RunInfo, Tracker

_TABLE = "rollouts"


class TensorBoardTracker(Tracker):
    """Scalars under `tensorboard/` in the run folder. Each start writes a separate file. Raises DataError."""

    def __init__(self, run: RunInfo) -> None:
        self._folder = run.folder / "tensorboard"
        self._file: Path | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table under the tab Text; its first row is the head."""
        cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        table = make_tensor_proto(np.array(cells, dtype=object))
        kind = create_summary_metadata(display_name="", description="")
        self._write(Event(step=step, summary=Summary(value=[Summary.Value(tag=_TABLE, tensor=table, metadata=kind)])))

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """A session start makes TensorBoard drop the events of earlier files after `step`."""
        self._write(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def _write(self, event: Event) -> None:
        events = [event]
        if self._file is None:  # files are read in the order of their names
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            self._file, events = self._folder / name, [Event(file_version="brain.Event:2"), event]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as file:
                for each in events:
                    each.wall_time = time.time()
                    RecordWriter(file).write(each.SerializeToString())
        except OSError as error:
            raise unwritable(self._file, error) from error
