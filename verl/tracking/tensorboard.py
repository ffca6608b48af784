"""Metrics as TensorBoard events, written with the tensorboard package only: no torch, no tensorflow."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from verl.tracking.tracker import Run, Tracker


class TensorBoardTracker(Tracker):
    """Scalars under `tensorboard/` in the run folder, flushed after every step. Each start writes a separate file."""

    def __init__(self, run: Run) -> None:
        self._folder = run.folder / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all metrics of the step."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a session start, which makes TensorBoard drop the events of earlier files after `step`."""
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def _write(self, event: Event) -> None:
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # readers sort files by name
            name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
            self._writer = RecordWriter((self._folder / name).open("ab"))
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._writer.write(event.SerializeToString())
        self._writer.flush()
