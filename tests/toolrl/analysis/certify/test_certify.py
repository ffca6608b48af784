"""The manifest of a run: computed again it is the same, and no forgery passes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.local_run import local_fit, local_trainer
from tests.support.tiny import MINI, run_overrides
from toolrl.analysis.certify.__main__ import main
from toolrl.analysis.certify.check import (
    StopAfter,
    check_inputs,
    compare_run,
    compare_step,
    compare_steps,
    elsewhere,
    settings_here,
    variables_of,
)
from toolrl.analysis.certify.manifest import (
    Manifest,
    digest,
    inputs_of,
    manifest_of,
    read_manifest,
    settings_of,
    steps_of,
    write_manifest,
)
from toolrl.analysis.collapse.collapse import CollapseWatch
from verl.config.commands import TRAIN
from verl.config.load import load_config
from verl.errors import ConfigError, DataError
from verl.tracking.jsonl import read_jsonl, write_jsonl
from verl.trainer.records import write_records

STEPS = 2
Rows = list[dict[str, Any]]


def trained(model: Path, out: Path, *overrides: str) -> Path:
    """The folder of a run of two steps, in this process."""
    config = load_config([*run_overrides(model, out, "hf", STEPS), "trainer.num_threads=1", *overrides])
    with local_trainer(config) as trainer:
        asyncio.run(local_fit(trainer, config, CollapseWatch()).run())
    write_records(out / "run", config, TRAIN, None)
    return out / "run"


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(model, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def manifest(run: Path) -> Manifest:
    return manifest_of(run)


@pytest.mark.long
def test_another_run_of_the_settings_is_the_same(
    model: Path, run: Path, manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = trained(model, tmp_path)
    assert compare_run(manifest, run) == compare_steps(manifest, again, STEPS) == []
    assert {**manifest, "run": "run"} == manifest_of(again)
    assert manifest["steps"]["2"]["metrics"]["actor/grad_norm"] > 0
    write_manifest(manifest, tmp_path / "m.json")
    assert main([str(run), "--check", str(tmp_path / "m.json")]) == 0
    assert "is what the manifest states" in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
@pytest.mark.parametrize(
    "override",
    ["actor.optim.lr=1.001e-2", "trainer.seed=1", "rollout.temperature=0.99", "actor.optim.weight_decay=0.02"],
)
def test_a_run_with_other_settings_differs(override: str, model: Path, manifest: Manifest, tmp_path: Path) -> None:
    """As a trainer with other code would, under the settings of the manifest."""
    assert compare_steps(manifest, trained(model, tmp_path, override), STEPS) != []


def reward(rows: Rows, random: Random) -> None:
    row = random.choice(rows)
    row["reward"] = row["score"]["total"] = math.nextafter(row["reward"], 9.0)


def text(field: str) -> Callable[[Rows, Random], None]:
    def change(rows: Rows, random: Random) -> None:
        message = random.choice(random.choice(rows)[field])
        place = random.randrange(len(message["content"]) + 1)
        message["content"] = f"{message['content'][:place]}!{message['content'][place:]}"

    return change


def gold(rows: Rows, random: Random) -> None:
    random.choice(rows)["answer"] += " "


def row_of_another_task(rows: Rows, random: Random) -> None:
    random.choice(rows)["task_id"] += "1"


def exchanged(rows: Rows, random: Random) -> None:
    one, other = random.sample(range(len(rows)), 2)
    rows[one], rows[other] = rows[other], rows[one]


def dropped(rows: Rows, random: Random) -> None:
    rows.pop(random.randrange(len(rows)))


def repeated(rows: Rows, random: Random) -> None:
    rows.append(random.choice(rows))


def length(rows: Rows, random: Random) -> None:
    random.choice(rows)["num_tokens"] += 1


ROLLOUTS = (reward, text("prompt"), text("responses"), gold, row_of_another_task, exchanged, dropped, repeated, length)


def forged_rollouts(run: Path, random: Random) -> None:
    path = run / "transcripts" / f"step-{random.randint(1, STEPS):06d}.jsonl"
    rows = read_jsonl(path)
    random.choice(ROLLOUTS)(rows, random)
    write_jsonl(path, rows)


def forged_metric(run: Path, random: Random) -> None:
    """By one unit in the last place, or left out."""
    rows = read_jsonl(run / "metrics.jsonl")
    row = random.choice(rows)
    repeated = steps_of(run)[str(row["step"])]["metrics"]
    name = random.choice([name for name, value in repeated.items() if value is not None])
    if random.random() < 0.5:
        row[name] = math.nextafter(row[name], math.inf)
    else:
        del row[name]
    write_jsonl(run / "metrics.jsonl", rows)


def forged_step(run: Path, random: Random) -> None:
    rows = read_jsonl(run / "metrics.jsonl")
    rows.pop(random.randrange(len(rows)))
    write_jsonl(run / "metrics.jsonl", rows)


@pytest.mark.long
def test_two_hundred_forgeries_are_found(run: Path, manifest: Manifest, tmp_path: Path) -> None:
    """In a folder with the manifest of the run; and with a manifest of its own, by the steps computed again."""
    random = Random(0)
    for number in range(200):
        forged = tmp_path / f"{number}"
        shutil.copytree(run, forged, ignore=shutil.ignore_patterns("checkpoints", "tensorboard", "samples"))
        random.choices((forged_rollouts, forged_metric, forged_step), (12, 6, 1))[0](forged, random)
        assert [each for each in compare_run(manifest, forged) if each.what != "model"], number
        assert compare_steps({**manifest, "steps": steps_of(forged)}, run, STEPS), number
        shutil.rmtree(forged)


@pytest.mark.long
def test_a_changed_model_is_found(run: Path, manifest: Manifest, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    [weights] = (tmp_path / "run" / "checkpoints" / f"step-{STEPS:06d}" / "hf").glob("*.safetensors")
    flip(weights, Random(0))
    assert [(each.step, each.what) for each in compare_run(manifest, tmp_path / "run")] == [(STEPS, "model")]


def flip(path: Path, random: Random) -> None:
    """One bit, in the second half of the file."""
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content) // 2, len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(bytes(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder as a training leaves it, of one step with four rollouts of two prompts."""
    run, files = tmp_path / "run", tmp_path / "files"
    (run / "transcripts").mkdir(parents=True)
    files.mkdir()
    shutil.copy(MINI / "test.parquet", files / "rows.parquet")
    shutil.copytree(MINI / "model", files / "model")
    settings = [f"model.path={files}/model", f"data.train_files=[{files}/rows.parquet]", "trainer.num_threads=1"]
    write_records(run, load_config(settings), TRAIN, None)
    write_jsonl(run / "metrics.jsonl", [{"step": 1, "time": 5.0, "actor/loss": 0.5, "time/step_s": 2.0}])
    use = {"name": "python", "status": "success", "seconds": 0.1}
    rows = [{"group": place // 2, "reward": float(place), "tool_uses": [use]} for place in range(4)]
    write_jsonl(run / "transcripts" / "step-000001.jsonl", rows)
    return run


def test_a_step_by_hand(folder: Path) -> None:
    """Prompts have mean rewards 0.5 and 2.5: their mean is 1.5, its standard error 1."""
    step = manifest_of(folder)["steps"]["1"]
    assert step["metrics"] == {"actor/loss": 0.5}
    assert {**step["rollouts"], "sha256": ""} == {"sha256": "", "num": 4, "reward": 1.5, "stderr": pytest.approx(1.0)}


def test_times_do_not_count(folder: Path) -> None:
    manifest = manifest_of(folder)
    write_jsonl(folder / "metrics.jsonl", [{"step": 1, "time": 6.0, "actor/loss": 0.5, "time/step_s": 3.0}])
    rows = read_jsonl(folder / "transcripts" / "step-000001.jsonl")
    rows[0]["tool_uses"][0]["seconds"] = 7.0
    write_jsonl(folder / "transcripts" / "step-000001.jsonl", rows)
    assert manifest_of(folder) == manifest
    rows[0]["tool_uses"][0]["status"] = "timeout"
    write_jsonl(folder / "transcripts" / "step-000001.jsonl", rows)
    assert [each.what for each in compare_run(manifest, folder)] == ["rollouts"]


@pytest.mark.parametrize("kind", ["weights", "tokenizer", "rows"])
def test_other_inputs_are_refused(kind: str, folder: Path) -> None:
    manifest = manifest_of(folder)
    settings = settings_here(manifest, {})
    check_inputs(manifest, settings)
    files = folder.parent / "files"
    names = {"weights": "model/model.safetensors", "tokenizer": "model/tokenizer.json", "rows": "rows.parquet"}
    if kind == "rows":
        shutil.copy(MINI / "train.parquet", files / names[kind])
    else:
        flip(files / names[kind], Random(1))
    with pytest.raises(
        DataError, match=r"data\.train_files=" if kind == "rows" else r"model\.path=.*: model\.|tokenizer"
    ):
        check_inputs(manifest, settings)


def test_files_may_lie_elsewhere_and_nothing_else_may_change(folder: Path, tmp_path: Path) -> None:
    manifest = manifest_of(folder)
    shutil.move(folder.parent / "files", tmp_path / "moved")
    own = {"model.path": f"{tmp_path}/moved/model", "data.train_files": [f"{tmp_path}/moved/rows.parquet"]}
    check_inputs(manifest, settings_here(manifest, own))
    with pytest.raises(ConfigError, match=r"those that name files \(.*model.path\), got trainer.seed"):
        settings_here(manifest, {"trainer.seed": 3})


@pytest.mark.parametrize("name", ["files/model", "files/rows.parquet"])
def test_an_input_that_is_gone_is_one_error(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = folder.parent / "m.json"
    write_manifest(manifest_of(folder), manifest)
    shutil.move(folder.parent / name, folder.parent / "gone")
    for arguments in ([str(folder)], ["--check", str(manifest), "--steps", "1"]):
        assert main(arguments) == 2
        assert f"{folder.parent / name}" in capsys.readouterr().err


def test_embedded_files_have_their_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_records(run, load_config(["recipe=composed_grpo"]), TRAIN, None)
    (run / "metrics.jsonl").touch()
    manifest = manifest_of(run)
    assert manifest["settings"]["model.path"] == "embedded:composed/model"
    assert str(ROOT) not in json.dumps(manifest)
    check_inputs(manifest, settings_here(manifest, {}))


def test_a_change_of_a_manifest_is_noticed(folder: Path, tmp_path: Path) -> None:
    manifest, path = manifest_of(folder), tmp_path / "m.json"
    write_manifest(manifest, path)
    assert read_manifest(path) == manifest
    for old, new in (("0.5", "0.6"), ('"trainer.seed": 0', '"trainer.seed": 1'), ('"threads": 1', '"threads": 2')):
        changed = path.read_text().replace(old, new)
        assert changed != path.read_text()
        (tmp_path / "changed.json").write_text(changed)
        with pytest.raises(DataError, match="was changed after it was written"):
            read_manifest(tmp_path / "changed.json")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sha256": 1}', "{", "\x00"])
def test_other_files_are_no_manifests(content: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(content)
    with pytest.raises(DataError, match="is no manifest"):
        read_manifest(path)


def test_a_manifest_of_another_format(folder: Path, tmp_path: Path) -> None:
    manifest = {**manifest_of(folder), "format": 2}
    del manifest["sha256"]
    write_manifest({**manifest, "sha256": digest(manifest)}, tmp_path / "m.json")
    with pytest.raises(DataError, match="format 2; expected format 1"):
        read_manifest(tmp_path / "m.json")


def outcome(mean: float, digest: str, num: int = 8) -> dict[str, Any]:
    return {"metrics": {}, "rollouts": {"sha256": digest, "num": num, "reward": mean, "stderr": 0.3}}


def test_means_agree_within_four_standard_errors() -> None:
    """Of their difference: 0.3 * sqrt(2) = 0.424, so up to 1.697."""
    near, far, fewer = (
        compare_step(1, outcome(1.0, "a"), each)
        for each in (outcome(2.69, "b"), outcome(2.7, "b"), outcome(1.0, "b", 7))
    )
    assert [each.tolerated for differences in (near, far, fewer) for each in differences] == [True, False, False]


def test_a_closing_validation_is_no_difference() -> None:
    validation = outcome(1.0, "v")["rollouts"]
    found = {"metrics": {"val/test/total": 1.0, "actor/loss": 0.5}, "validation": validation}
    stated: dict[str, Any] = {"metrics": {"actor/loss": 0.5}}
    assert list(compare_step(2, stated, found)) == []
    changed = {**found, "validation": {**validation, "sha256": "w"}}
    assert [each.what for each in compare_step(2, changed, found)] == ["validation"]
    assert [each.what for each in compare_step(2, found, stated)] == ["validation", "val/test/total"]
    assert [each.what for each in compare_step(2, stated, None)] == ["step"]


def test_why_bits_may_differ(folder: Path) -> None:
    manifest = manifest_of(folder)
    settings = settings_here(manifest, {})
    assert elsewhere(manifest, settings) == ["engine was vllm, here hf"]
    manifest["made_by"]["torch"] = "1.0"
    assert [each.partition(" ")[0] for each in elsewhere(manifest, settings)] == ["torch", "engine"]


def test_the_last_step_ends_a_check() -> None:
    stop = StopAfter(2)
    assert stop.on_step(1, {}) is None and stop.on_step(2, {}) == "the first 2 steps are computed"


@pytest.fixture
def missing(folder: Path) -> Iterator[Callable[[str], Path]]:
    def without(name: str) -> Path:
        (folder / name).unlink()
        return folder

    yield without


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "code_version.json", "transcripts/step-000001.jsonl"])
def test_a_folder_without_a_file_is_refused(
    name: str, missing: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(missing(name))]) == 2
    assert Path(name).parts[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "transcripts/step-000001.jsonl"])
def test_a_file_that_is_none_is_refused(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert main([str(folder)]) == 2
    assert f"{name}: is a pipe" in capsys.readouterr().err


@pytest.mark.parametrize("row", ['{"step": "x"}', "{}", "[]", "5", '{"step": 1, "reward": null}'])
@pytest.mark.parametrize("name", ["metrics.jsonl", "transcripts/step-000001.jsonl"])
def test_rows_of_another_form_are_refused(
    row: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_text(f"{row}\n")
    assert main([str(folder)]) == (0 if name == "metrics.jsonl" and "1" in row else 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["- 1\n", "a: [\n", "a: &a [1]\nb: {c: " + "[*a," * 3000])
def test_settings_that_cannot_be_read(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.yaml").write_text(text)
    assert main([str(folder)]) == 2
    assert "config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--check", "m.json"], ["run", "--steps", "3"], ["run", "--check", "m.json", "--out", "n.json"]]
)
def test_what_does_not_go_together(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


def test_a_manifest_sets_no_other_variable(folder: Path) -> None:
    manifest = manifest_of(folder)
    manifest["variables"] = {"LD_PRELOAD": "evil.so", "WITHLENGTH": "1", "CORRECTMAX1": "0"}
    assert variables_of(manifest) == {"WITHLENGTH": "1"}


def test_inputs_are_by_setting(folder: Path) -> None:
    assert {"data.train_files", "model.path"} == inputs_of(settings_of(folder)).keys()


@pytest.mark.long
def test_the_command_trains_again(tmp_path: Path) -> None:
    """Two of three steps with Ray, under ToolRL's variables; then with the weights of another start."""
    command = [sys.executable, "-m", "toolrl.analysis.certify"]
    shutil.copytree(MINI / "model", tmp_path / "model")
    settings = [*run_overrides(tmp_path / "model", tmp_path, "hf", 3), "trainer.num_threads=1"]
    on = {**os.environ, "WITHLENGTH": "1"}
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *settings], env=on, check=True, cwd=ROOT)
    subprocess.run([*command, tmp_path / "run"], check=True, cwd=ROOT)
    check = [*command, "--check", tmp_path / "run" / "manifest.json", "--steps", "2"]
    again = subprocess.run(check, capture_output=True, text=True, cwd=ROOT)
    assert again.returncode == 0 and "the first 2 steps are the same, bit for bit" in again.stdout, again.stdout
    flip(tmp_path / "model" / "model.safetensors", Random(0))
    other = subprocess.run(check, capture_output=True, text=True, cwd=ROOT)
    assert other.returncode == 2 and "model.safetensors differ" in other.stderr
