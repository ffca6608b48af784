"""A run feeds its trackers: rollouts and metrics of every step, and a broken one does not disturb it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.local_run import local_fit, local_trainer
from tests.support.tiny import run_overrides, save_tiny_model
from toolrl.analysis.collapse.collapse import CollapseWatch
from verl.config.load import load_config
from verl.tracking.jsonl import read_jsonl

OWN = """
import json
from verl.tracking.tracker import Tracker

class Lines(Tracker):
    def __init__(self, run):
        self.path = run.folder / "lines.jsonl"
    def log(self, step, metrics):
        self.write({"step": step, "reward": metrics["reward/total"]})
    def log_rollouts(self, step, rows):
        self.write({"step": step, "rows": rows})
    def write(self, row):
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\\n")

class Broken(Tracker):
    def log(self, step, metrics):
        raise OSError("the server is gone")
    def __init__(self, run):
        pass
"""


@pytest.mark.long
def test_a_run_feeds_its_trackers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    overrides = run_overrides(save_tiny_model(tmp_path / "model"), tmp_path / "out", "hf", steps=2)
    config = load_config([*overrides, f"trainer.logger=[console,{own}:Broken,{own}:Lines]"])
    with local_trainer(config) as trainer:
        asyncio.run(local_fit(trainer, config, CollapseWatch(())).run())
    folder = tmp_path / "out" / "run"
    rows = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert [(row["step"], row["reward"]) for row in rows[1::2]] == [
        (row["step"], row["reward/total"]) for row in metrics
    ]
    written = read_jsonl(folder / "transcripts" / "step-000001.jsonl")
    assert [row["task"] for row in rows[0]["rows"]] == [row["task_id"] for row in written if row["index"] == 0]
    assert rows[0]["rows"][0]["response"] == f"assistant: {written[0]['responses'][0]['content']}"
    assert [message for message in caplog.messages if "has failed and is off" in message] == [
        f"the tracker {own}:Broken has failed and is off; the run goes on (OSError: the server is gone)"
    ]
