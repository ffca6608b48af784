"""Metrics as TensorBoard events, by the writer that torch's SummaryWriter uses."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from verl.tracking.tracker import RunInfo, Tracker

_TABLE = "rollouts"


class TensorBoardTracker(Tracker):
    """Scalars under `tensorboard/` in the run folder, flushed after every step. Each start writes a separate file."""

    def __init__(self, run: RunInfo) -> None:
        self._folder = str(run.folder / "tensorboard")
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table under the tab Text; its first row is the head."""
        cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        table = make_tensor_proto(np.array(cells, dtype=object))
        kind = create_summary_metadata(display_name="", description="")
        self._write(Event(step=step, summary=Summary(value=[Summary.Value(tag=_TABLE, tensor=table, metadata=kind)])))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """A session start makes TensorBoard drop the events of earlier files after `step`."""
        self._write(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer = self._writer or EventFileWriter(self._folder)
        self._writer.add_event(event)
        self._writer.flush()
