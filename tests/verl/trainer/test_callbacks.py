"""Callbacks: early stopping by hand, entries that are refused, and a run that one of them stops."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_run import local_fit, local_trainer
from tests.support.tiny import run_overrides, save_tiny_model
from toolrl.analysis.collapse.collapse import CollapseWatch
from toolrl.check.preflight.local_group import LocalGroup
from verl.config.load import load_config
from verl.errors import ConfigError
from verl.tracking.jsonl import read_jsonl
from verl.trainer.callbacks import Callback, CallbackError, Callbacks, EarlyStopping, build_callbacks

FAILING = """
from toolrl import Callback

class Failing(Callback):
    def __init__(self, method):
        self._method = method

    def on_step(self, step, metrics):
        assert self._method != "on_step" or step < 2  # while that of step 1 is written

    def on_checkpoint(self, step, folder):
        assert self._method != "on_checkpoint"
"""
MINE = """
from toolrl import Callback

class Mine(Callback):
    def __init__(self, log, last=2):
        self.log, self.last = log, last

    def on_step(self, step, metrics):
        self.write("step", step, sorted(metrics)[:1])
        return "enough" if step == self.last else None

    def on_validation(self, step, metrics):
        self.write("validation", step)

    def on_checkpoint(self, step, folder):
        self.write("checkpoint", step, folder.name, (folder / "hf" / "config.json").is_file())

    def write(self, *values):
        with open(self.log, "a") as file:
            print(*values, file=file)
"""


def steps_until(stopping: EarlyStopping, values: list[float], name: str = "val/test/total") -> int | None:
    """The number of the validation that stops the run."""
    found = (number for number, value in enumerate(values) if stopping.on_validation(number, {name: value}))
    return next(found, None)


@pytest.mark.parametrize(
    ("options", "values", "stop"),
    [
        ({}, [1.0, 2.0, 1.5, 2.0, 1.9], 4),  # the best is at 1, and three are no better
        ({}, [1.0, 2.0, 1.5, 1.5, 2.1, 2.0], None),
        ({"patience": 1}, [1.0, 1.0], 1),
        ({"patience": 2, "min_change": 0.5}, [1.0, 1.4, 1.5, 9.0], 2),
        ({"patience": 1, "lower": True}, [3.0, 2.0, 2.5], 2),
        ({"patience": 2}, [1.0, float("nan"), float("nan")], 2),
    ],
)
def test_early_stopping_by_hand(options: dict[str, Any], values: list[float], stop: int | None) -> None:
    assert steps_until(EarlyStopping(**options), values) == stop


def test_patience_outlives_a_resume() -> None:
    first, second = EarlyStopping(patience=3), EarlyStopping(patience=3)
    assert steps_until(first, [2.0, 1.0, 1.0]) is None
    second.restore(json.loads(json.dumps(first.state())))
    reason = second.on_validation(4, {"eval/bfcl/score": 1.5, "eval/bfcl/score_stderr": 0.1})
    assert reason == "eval/bfcl/score was no better than 2 in 3 validations"


def test_a_metric_that_is_missing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"early_stopping has no metric val/tset/total: val/test/total"):
        EarlyStopping(metric="val/tset/total").on_validation(1, {"val/test/total": 1.0})


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("early_stoping", "unknown callback 'early_stoping'; did you mean 'early_stopping'"),
        ({"patience": 3}, "is no callback"),
        ({"name": "early_stopping", "patiense": 3}, "has no option 'patiense'"),
        ({"name": "early_stopping", "patience": 0}, "patience of 1 or more"),
        ("argparse:Namespace", "has no on_step, on_validation, on_checkpoint, state, restore; inherit from"),
    ],
)
def test_entries_that_are_refused(entry: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_callbacks([entry], validates=True)


def test_early_stopping_without_validations_is_refused() -> None:
    with pytest.raises(ConfigError, match="early_stopping needs validations"):
        build_callbacks(["early_stopping"], validates=False)
    with pytest.raises(ConfigError, match="early_stopping is given twice"):
        build_callbacks(["early_stopping", {"name": "early_stopping", "patience": 9}], validates=True)


def test_a_stopped_run_goes_on_without_its_callbacks() -> None:
    stopped = Callbacks({"mine": Callback()}, "enough").state()
    same, other = Callbacks({"mine": Callback()}), Callbacks({"another": Callback()})
    for each in (same, other):
        each.restore(stopped)
    assert (same.stopped, other.stopped) == ("enough", None)


def test_a_callback_that_fails_is_named() -> None:
    class Failing(Callback):
        def on_step(self, step: int, metrics: Any) -> str | None:
            raise KeyError("reward")

    with pytest.raises(CallbackError, match=r"the callback mine.py:Failing has failed \(KeyError: 'reward'\)"):
        Callbacks({"mine.py:Failing": Failing()}).on_step(1, {})


@pytest.mark.long
def test_a_callback_sees_all_and_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    model = save_tiny_model(tmp_path / "model")
    overrides = [*run_overrides(model, tmp_path, "hf", 5), "trainer.save_freq=1", "trainer.num_threads=1"]
    entry = f"{{name: {tmp_path}/mine.py:Mine, log: {tmp_path}/log}}"
    config = load_config([*overrides, f"trainer.callbacks=[{entry}]"])
    with local_trainer(config) as trained:
        fit = local_fit(trained, config, CollapseWatch())
        fit.checkpointing.callbacks = build_callbacks(config.trainer.callbacks, validates=False)
        last = asyncio.run(fit.run())
    assert last.name == "step-000002"
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    seen = [line.split(" [")[0] for line in (tmp_path / "log").read_text().splitlines()]
    written = [line for line in seen if line.startswith("checkpoint")]  # while the next step is trained
    assert written == ["checkpoint 1 step-000001 True", "checkpoint 2 step-000002 True"]
    assert [line for line in seen if line not in written] == ["step 1", "step 2", "validation 2"]
    assert json.loads((last / "state.json").read_text())["callbacks"]["stopped"] == "enough"


class SlowDisk(LocalGroup):
    """Writes longer than a step takes."""

    def call_beside(self, function: Any, *args: Any) -> list[Any]:
        time.sleep(3)
        return super().call_beside(function, *args)


@pytest.mark.long
@pytest.mark.parametrize("failing", ["on_step", "on_checkpoint"])
def test_a_failure_while_a_checkpoint_is_written_does_not_cost_it(tmp_path: Path, failing: str) -> None:
    (tmp_path / "mine.py").write_text(FAILING)
    model = save_tiny_model(tmp_path / "model")
    overrides = [*run_overrides(model, tmp_path, "hf", 3), "trainer.save_freq=1", "trainer.num_threads=1"]
    config = load_config([*overrides, f"trainer.callbacks=[{{name: {tmp_path}/mine.py:Failing, method: {failing}}}]"])
    with local_trainer(config) as trained:
        fit = local_fit(trained, config, CollapseWatch())
        fit.checkpointing.workers = SlowDisk(trained.learner.policy.workers.group._worker)  # type: ignore[attr-defined]
        fit.checkpointing.callbacks = build_callbacks(config.trainer.callbacks, validates=False)
        with pytest.raises(CallbackError, match="has failed") as caught:
            asyncio.run(fit.run())
    assert f"The same command resumes from {tmp_path}/run/checkpoints/step-000001" in str(caught.value.__notes__)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["latest.json", "step-000001"]
