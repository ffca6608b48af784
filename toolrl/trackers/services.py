"""Trackers of other packages, each imported only if it is used: W&B, trackio, MLflow, SwanLab.

Where their data go is set by each package's own variables (WANDB_MODE, TRACKIO_SPACE_ID, MLFLOW_TRACKING_URI ..).
"""

import importlib
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.errors import ConfigError
from verl.tracking.tracker import RunInfo, Tracker

_TABLE = "rollouts"
_PARAM_CHARS, _PARAMS_PER_CALL = 6000, 100  # MLflow's limits


class Service(Tracker):
    """One run of the service across all resumes; its id is in `<package>_run_id.txt` and in checkpoints.

    A resumed run may log steps again; the services keep both passes over them.
    """

    package: str  # to import
    install = ""  # if its name on the index is another

    def __init__(self, run: RunInfo) -> None:
        try:
            self._api = importlib.import_module(self.package)
        except ImportError as error:
            what = f"trainer.logger names {self.package}, which cannot be imported ({error})"
            raise ConfigError(f"{what}: pip install {self.install or self.package}; docs/tracking.md") from error
        self._run = run
        self._key = f"{self.package}_run_id"
        self._file = run.folder / f"{self._key}.txt"
        self._id = self._file.read_text(encoding="utf-8").strip() if self._file.exists() else _new_id()
        self._opened: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._send(self._session(), step, metrics)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._send_table(self._session(), step, list(rows[0]), [list(row.values()) for row in rows])

    def close(self) -> None:
        if self._opened is not None:
            self._finish(self._opened)
        self._opened = None

    def state(self) -> dict[str, Any]:
        return {self._key: self._id}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Restore the checkpoint's run; starting over (-1) opens a new run, a rollback keeps the current one."""
        if self._opened is not None:
            return
        if self._key in state:
            self._id = state[self._key]
        elif step < 0:
            self._id = _new_id()

    def _session(self) -> Any:
        if self._opened is None:
            self._run.folder.mkdir(parents=True, exist_ok=True)
            self._file.write_text(self._id + "\n", encoding="utf-8")
            self._opened = self._open(self._run, self._id)
        return self._opened

    def _open(self, run: RunInfo, id: str) -> Any:
        """A session of the run with this id, which may exist."""
        raise NotImplementedError

    def _send(self, session: Any, step: int, metrics: Mapping[str, Any]) -> None:
        session.log(dict(metrics), step=step)

    def _send_table(self, session: Any, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        raise NotImplementedError

    def _finish(self, session: Any) -> None:
        session.finish()


class WandbTracker(Service):
    """The x axis is our own step, because W&B drops what is logged for an earlier step."""

    package = "wandb"

    def _open(self, run: RunInfo, id: str) -> Any:
        folder, config = str(run.folder), dict(run.config)
        session = self._api.init(project=run.project, name=run.name, id=id, resume="allow", dir=folder, config=config)
        session.define_metric("step")
        session.define_metric("*", step_metric="step")
        return session

    def _send(self, session: Any, step: int, metrics: Mapping[str, Any]) -> None:
        session.log({"step": step, **metrics})

    def _send_table(self, session: Any, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self._send(session, step, {_TABLE: self._api.Table(columns=columns, data=rows)})


class TrackioTracker(Service):
    """trackio finds a run by its name, which therefore ends in the id."""

    package = "trackio"

    def _open(self, run: RunInfo, id: str) -> Any:
        name = f"{run.name}-{id}"
        return self._api.init(project=run.project, name=name, resume="allow", config=dict(run.config), embed=False)

    def _send_table(self, session: Any, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self._send(session, step, {_TABLE: self._api.Table(columns=columns, data=rows)})


class SwanLabTracker(Service):
    """SwanLab continues runs in its cloud only: with SWANLAB_MODE=offline a resume writes another folder."""

    package = "swanlab"

    def _open(self, run: RunInfo, id: str) -> Any:
        folder = str(run.folder / "swanlog")
        return self._api.init(
            project=run.project, name=run.name, id=id, resume="allow", log_dir=folder, config=dict(run.config)
        )

    def _send_table(self, session: Any, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        table = self._api.echarts.Table()
        self._send(session, step, {_TABLE: table.add(columns, rows)})


class MlflowTracker(Service):
    """MLflow chooses the ids of its runs: ours is the tag `toolrl_run_id`. Rollouts: one file per step."""

    package = "mlflow"
    install = "mlflow-skinny"  # the client

    def _open(self, run: RunInfo, id: str) -> Any:
        client = self._client = self._api.MlflowClient()
        known = client.get_experiment_by_name(run.project)
        experiment = client.create_experiment(run.project) if known is None else known.experiment_id
        if runs := client.search_runs([experiment], f"tags.toolrl_run_id = '{id}'"):
            client.update_run(runs[0].info.run_id, status="RUNNING")
            return runs[0].info.run_id
        session = client.create_run(experiment, run_name=run.name, tags={"toolrl_run_id": id}).info.run_id
        params = [self._api.entities.Param(key, str(value)[:_PARAM_CHARS]) for key, value in _leaves(run.config)]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            client.log_batch(session, params=params[start : start + _PARAMS_PER_CALL])
        return session

    def _send(self, session: Any, step: int, metrics: Mapping[str, Any]) -> None:
        now, make = round(time.time() * 1000), self._api.entities.Metric
        rows = [make(re.sub(r"[^\w\-. :/]", "_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(session, metrics=rows)

    def _send_table(self, session: Any, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        data = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
        self._client.log_table(session, data, f"{_TABLE}/step-{step:06d}.json")

    def _finish(self, session: Any) -> None:
        self._client.set_terminated(session)


def _new_id() -> str:
    return uuid.uuid4().hex[:21]  # the length that SwanLab requires


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a tree of settings."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
