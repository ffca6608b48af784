"""W&B, trackio, MLflow and SwanLab as they are, without a network: what was logged is read back from their files.

Each test needs its package: in an environment of its own, because some do not fit beside the trainer's pins.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from verl.tracking.tracker import RunInfo, Trackers, build_trackers

CONFIG = {"trainer": {"logger": ["console"], "seed": 0}, "actor": {"optim": {"lr": 1e-6}}}
ROW = {"task": "a.jsonl#1", "prompt": "user: hi", "response": "assistant: hello\nthere", "answer": "x", "score": 1.5}


def two_sessions(name: str, folder: Path) -> RunInfo:
    """A run of steps 0 to 2 that is resumed after step 1."""
    run = RunInfo(folder / "run", "exp/a", "proj", CONFIG)
    state: dict[str, Any] = {}
    for step, steps in ((-1, (0, 1, 2)), (1, (2, 3))):
        trackers = build_trackers([name], run)
        trackers.restore(step, state)
        for each in steps:
            trackers.log_rollouts(each, [ROW, ROW])
            trackers.log(each, {"reward/total": each / 2, "val/mini (test)/total": 2.0, "actor/kl": float("nan")})
        state = trackers.state()
        trackers.close()
        assert is_on(trackers)
        time.sleep(1.1)  # offline folders of W&B and SwanLab are named by the second
    return run


def is_on(trackers: Trackers) -> bool:
    return not trackers.members[-1]._off  # type: ignore[attr-defined]


def run_id(run: RunInfo, name: str) -> str:
    return (run.folder / f"{name}_run_id.txt").read_text().strip()


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "data"))  # read at import
    trackio = pytest.importorskip("trackio")
    run = two_sessions("trackio", tmp_path)
    (found,) = trackio.Api().runs("proj")
    assert found.name == f"exp/a-{run_id(run, 'trackio')}" and found.config["actor"] == CONFIG["actor"]
    logs = trackio.sqlite_storage.SQLiteStorage.get_logs("proj", found.name, run_id=found.id)
    assert [(row["step"], row["reward/total"]) for row in logs if "reward/total" in row] == [
        (0, 0.0), (1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5),
    ]  # fmt: skip
    assert next(row["rollouts"]["_value"] for row in logs if "rollouts" in row) == [ROW, ROW]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # artifacts of a database lie beside the program
    store = (
        "sqlite:///mlflow.db" if find_spec("sqlalchemy") else (tmp_path / "mlruns").as_uri()
    )  # without: mlflow-skinny
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = two_sessions("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("proj").experiment_id])
    assert (found.info.run_name, found.info.status) == ("exp/a", "FINISHED")
    assert found.data.tags["toolrl_run_id"] == run_id(run, "mlflow")
    assert found.data.params == {"trainer.logger": "['console']", "trainer.seed": "0", "actor.optim.lr": "1e-06"}
    history = client.get_metric_history(found.info.run_id, "reward/total")
    assert [(each.step, each.value) for each in history] == [(0, 0.0), (1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]
    assert found.data.metrics["val/mini _test_/total"] == 2.0  # MLflow refuses parentheses in names
    table = json.loads(Path(client.download_artifacts(found.info.run_id, "rollouts/step-000003.json")).read_text())
    assert table == {"columns": list(ROW), "data": [list(ROW.values())] * 2}


def test_swanlab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record  # type: ignore[import-not-found]
    from swanlab.sdk.internal.core_python.store import DataStoreReader  # type: ignore[import-not-found]

    run = two_sessions("swanlab", tmp_path)
    name, logs = run_id(run, "swanlab"), []
    for file in sorted((run.folder / "swanlog").glob(f"run-*-{name}/run-{name}.swanlab")):
        reader = DataStoreReader()
        reader.open(str(file))
        records = [Record.FromString(each) for each in reader]
        logs += [(each.scalar.step, each.scalar.value.number) for each in records if each.scalar.key == "reward/total"]
    assert logs == [(0, 0.0), (1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]
    (table, *_) = sorted((run.folder / "swanlog").glob("run-*/media/echarts/003-*.json"))
    assert json.loads(table.read_text())["rowData"] == [ROW, ROW]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-not-found]

    run = two_sessions("wandb", tmp_path)
    name, logs, tables = run_id(run, "wandb"), [], []
    for file in sorted((run.folder / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")):
        records = [Record.FromString(each) for each in framed(file.read_bytes()[7:])]
        opened = [each.run for each in records if each.WhichOneof("record_type") == "run"]
        assert {(each.run_id, each.project, each.display_name) for each in opened} == {(name, "proj", "exp/a")}
        rows = [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in each.history.item}
                for each in records if each.WhichOneof("record_type") == "history"]  # fmt: skip
        logs += [(row["step"], row["reward/total"]) for row in rows if "reward/total" in row]
        tables += sorted(file.parent.glob("files/media/table/rollouts_*.json"))
    assert logs == [(0, 0.0), (1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]
    table = json.loads(tables[0].read_text())
    assert (table["columns"], table["data"]) == (list(ROW), [list(ROW.values())] * 2)


def framed(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, which W&B's files are behind a head of 7 bytes."""
    place, record = 0, b""
    while place + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if 32768 - (place + 7) % 32768 < 7:  # no room for a head in this block
            place += 32768 - (place + 7) % 32768
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""
