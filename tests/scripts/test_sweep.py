"""Scaling studies: what is a point, what is run again, and what the table shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import sweep
from tests.support.tiny import MINI
from verl.config.commands import TRAIN
from verl.config.load import load_config
from verl.config.show import as_yaml
from verl.data.overlap import TrainTasks
from verl.errors import ConfigError
from verl.tracking.jsonl import append_jsonl, read_jsonl

STUDY = ["recipe=zerotir", "env.max_tool_calls=0,2", "env.max_turns=5", "trainer.total_training_steps=12"]


class Runs:
    """Stands for main_ppo: writes what a run writes, or fails on request."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.began = codes, list[str]()

    def __call__(self, overrides: list[str]) -> int:
        config = load_config(overrides)
        name = config.trainer.experiment_name
        self.began.append(name)
        folder = Path(config.trainer.default_local_dir) / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(as_yaml(config, TRAIN))
        calls, metrics = config.env.max_tool_calls, folder / "metrics.jsonl"
        append_jsonl(metrics, {"step": 0, "val/aime/total": 0.1})
        for step in range(1, 13):
            row = {"step": step, "time/step_s": 300.0, "reward/total": step / 100, "tools/calls_mean": calls / 2}
            append_jsonl(metrics, row | ({"val/aime/total": 0.2 + calls / 10} if step == 12 else {}))
        return self.codes.get(name.replace("-", "_"), 0)


def study(tmp_path: Path, *overrides: str) -> sweep.Study:
    return sweep.plan([*STUDY, f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=study", *overrides])


def test_every_combination_is_a_point_with_its_own_overrides(tmp_path: Path) -> None:
    both = study(tmp_path, "model.path=Qwen/A,Qwen/B")
    assert both.folder == tmp_path / "study"
    assert [point.name for point in both.points] == [
        f"max_tool_calls-{calls}_model-{model}" for calls in (0, 2) for model in "AB"
    ]
    config = load_config(both.points[3].overrides)
    assert (config.env.max_tool_calls, config.model.path, config.rollout.n) == (2, "Qwen/B", 16)
    assert Path(config.trainer.default_local_dir) == both.folder
    assert config.trainer.experiment_name == "max_tool_calls-2_model-B"
    alike = study(tmp_path, "model.path=runs/a/hf,runs/b/hf").points
    assert [point.name for point in alike[:2]] == [
        "max_tool_calls-0_model-runs_a_hf",
        "max_tool_calls-0_model-runs_b_hf",
    ]
    usual = sweep.plan(STUDY)
    assert str(usual.folder) == "outputs/sweep_zerotir_max_tool_calls"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe=zerotir"], "nothing to sweep"),
        (["recipe=zerotirr", "env.max_tool_calls=0,2"], r"max_tool_calls-0: unknown recipe 'zerotirr'"),
        (["recipe=zerotir", "env.max_tool_cals=0,2"], "did you mean 'env.max_tool_calls'"),
        (["recipe=zerotir", "env.max_tool_calls=2,-1"], "max_tool_calls--1: env.max_tool_calls must be 0 or more"),
        (["recipe=zerotir", "env.max_tool_calls"], "is not key=value"),
        (["recipe=zerotir", "trainer.experiment_name=a,b"], "trainer.experiment_name cannot be swept"),
        (["recipe=zerotir", "model.path=a/m,a/m"], "two points would share the folder 'model-a_m'"),
    ],
)
def test_bad_arguments_are_one_error_before_anything_runs(
    overrides: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        sweep.plan(overrides)
    assert sweep.main(overrides) == 2 and capsys.readouterr().err.startswith("ConfigError: ")
    assert list(tmp_path.iterdir()) == []


def test_finished_points_are_skipped_and_others_go_on(tmp_path: Path) -> None:
    assert sweep.sweep(study(tmp_path), first := Runs(max_tool_calls_0=1)) == 1
    assert first.began == ["max_tool_calls-0", "max_tool_calls-2"]  # a run that fails does not end the study
    assert sweep.sweep(study(tmp_path), second := Runs()) == 0
    assert second.began == ["max_tool_calls-0"]
    assert sweep.sweep(study(tmp_path), third := Runs()) == 0 and third.began == []
    more = sweep.plan([word.replace("=0,2", "=0,2,4") for word in study_overrides(tmp_path)])
    assert sweep.sweep(more, fourth := Runs()) == 0 and fourth.began == ["max_tool_calls-4"]
    longer = study(tmp_path, "actor.optim.lr=1e-5")  # another run: main_ppo is to report that
    assert sweep.sweep(longer, fifth := Runs(max_tool_calls_0=2)) == 2
    assert fifth.began == ["max_tool_calls-0"]  # what the user has to correct ends it, as Ctrl-C does


def study_overrides(tmp_path: Path) -> list[str]:
    return [*STUDY, f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=study"]


def test_the_table_has_the_last_figures_and_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = study(tmp_path)
    sweep.sweep(made, Runs(max_tool_calls_2=130))
    sweep.report(made, None)
    found = json.loads((made.folder / "sweep.json").read_text())
    assert [row["status"] for row in found] == ["finished", "unfinished"]
    assert found[1]["values"] == {"env.max_tool_calls": "2"} and found[1]["steps"] == 12
    assert found[1]["hours"] == pytest.approx(1.0)
    figures = found[1]["figures"]
    assert figures["val/aime/total"] == pytest.approx(0.4) and figures["tools/calls_mean"] == 1.0
    assert figures["reward/total"] == pytest.approx(sum(range(3, 13)) / 1000)  # the mean over steps 3 to 12
    table = (made.folder / "sweep.md").read_text()
    assert table.startswith(
        "| env.max_tool_calls | status | steps | hours | val/aime/total | reward/total | tools/calls"
    )
    assert "| 2 | unfinished | 12 | 1.00 | 0.4 | 0.075 | 1 |" in table and table in capsys.readouterr().out


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = study(tmp_path)
    sweep.sweep(made, Runs())
    sweep.report(made, "tools/calls_mean")
    assert (made.folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no point has a metric 'no/such'"):
        sweep.draw(made, sweep.results(made), "no/such", tmp_path / "x.png")


def test_without_matplotlib_the_table_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    made = study(tmp_path)
    sweep.report(made, None)
    assert f"no sweep.png: the plot needs matplotlib; {sweep.INSTALL_PLOT}" in capsys.readouterr().err
    assert "not started" in (made.folder / "sweep.md").read_text()


def test_the_runs_exit_code_is_returned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert sweep.train(["recipe=no_such"]) == 2
    assert "unknown recipe 'no_such'" in capfd.readouterr().out


@pytest.mark.slow
def test_two_points_of_the_embedded_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "recipe=mini_grpo",
        "rollout.temperature=0.8,1.0",
        f"model.path={MINI / 'model'}",
        f"data.train_files=[{MINI / 'train.parquet'}]",
        "data.val_files=[]",
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=2",
        "rollout.name=hf",
        "trainer.device=cpu",
        "trainer.total_training_steps=1",
        "trainer.save_freq=0",
        "trainer.test_freq=0",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.experiment_name=study",
    ]
    assert sweep.main(overrides) == 0
    for name in ("temperature-0.8", "temperature-1.0"):
        assert [row["step"] for row in read_jsonl(tmp_path / "study" / name / "metrics.jsonl")] == [1]
        exported = tmp_path / "study" / name / "checkpoints" / "step-000001" / "hf"
        assert len(TrainTasks.read(str(exported)).traces) > 1000  # what it was trained on, and in the run's folder
        assert TrainTasks.read(str(exported)) == TrainTasks.read(str(tmp_path / "study" / name))
    found = json.loads((tmp_path / "study" / "sweep.json").read_text())
    assert [(row["status"], row["steps"]) for row in found] == [("finished", 1)] * 2
    capfd.readouterr()
    assert sweep.main(overrides) == 0  # nothing is left to do
    assert capfd.readouterr().out.count("already finished") == 2
