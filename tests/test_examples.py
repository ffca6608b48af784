"""The examples work as printed: short scripts, and notebooks in a kernel as a browser starts one."""

from __future__ import annotations

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.shapes import QWEN2_5, qwen2
from tests.conftest import ROOT, need_vllm
from tests.support.count_lines import count_lines
from tests.toolrl.serve.export.test_export import hub
from tests.toolrl.serve.openai_server.test_serve import make_run
from toolrl.api.run import load_run
from verl.config.load import load_config
from verl.config.schema import Config
from verl.data.tasks import TaskSet
from verl.scoring.rewards import build_rewards

FOLDER = ROOT / "examples"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.name != "grpo_from_scratch.py")
NOTEBOOKS = sorted((FOLDER / "notebooks").glob("*.ipynb"))
TRAINING = [path for path in SCRIPTS if "toolrl.train(" in path.read_text()]
MOST_LINES = 15
SECONDS = 600

# The hub as data sets of the name that is asked for: no network.
HUB = """
import huggingface_hub
from types import SimpleNamespace
huggingface_hub.HfApi.dataset_info = lambda self, name, revision: SimpleNamespace(sha="c0ffee")
"""
DATASETS = """
def load_dataset(path, *, name, split, revision, streaming):
    assert (path, name, split, revision, streaming) == ("openai/gsm8k", "main", "train", "c0ffee", True)
    return [{"question": f"What is {n} + {n}?", "answer": f"It is twice {n}.\\n#### {2 * n}"} for n in range(4)]
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the examples, this Python as `python`, and the command `toolrl`."""
    for script in FOLDER.glob("*.*"):
        shutil.copy(script, tmp_path)
    programs = {"toolrl": f'exec {sys.executable} -m toolrl "$@"', "python": f'exec {sys.executable} "$@"'}
    (tmp_path / "bin").mkdir()
    for name, line in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: str) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_example_is_short() -> None:
    assert {path.stem for path in SCRIPTS} >= {"openai_rows", "own_reward", "mcp_tool", "hub_data", "serve", "plot"}
    assert {path.name: count_lines(path) for path in SCRIPTS if count_lines(path) > MOST_LINES} == {}


@pytest.mark.parametrize("script", TRAINING, ids=lambda path: path.stem)
def test_an_example_resolves(script: Path, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the start of its process: settings are valid, rows are tasks, pickled objects and names resolve."""
    found: dict[str, Config] = {}

    def run_command(name: str, arguments: list[str]) -> None:
        found[name] = load_config(arguments)
        raise Started

    monkeypatch.setattr("toolrl.api.api.run_command", run_command)
    with pytest.raises(Started):
        runpy.run_path(script.name, run_name="__main__")
    config = found["train"]
    if "gsm8k" not in config.data.train_files[0]:
        assert len(TaskSet(config.data.train_files[0], data=config.data)) >= config.data.train_batch_size
    assert build_rewards(config.reward.name, config.reward.options)


class Started(Exception):  # noqa: N818  no error
    """Instead of a process."""


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAINING, ids=lambda path: path.stem)
def test_an_example_trains(script: Path, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if script.stem == "hub_data":
        (desk / "hub").mkdir()
        (desk / "hub" / "sitecustomize.py").write_text(HUB)
        (desk / "hub" / "datasets.py").write_text(DATASETS)
        monkeypatch.setenv("PYTHONPATH", f"{desk / 'hub'}:{ROOT}")
    output = run("python", script.name)
    assert [row["step"] for row in load_run(desk / "outputs" / "run-1").metrics] == [1, 2]
    check = CHECKS.get(script.stem)
    assert check is None or check(output)


def rewards_of(metrics: dict[str, float]) -> set[str]:
    return {name.removeprefix("reward/") for name in metrics if name.startswith("reward/")}


CHECKS = {  # script -> what its output must show beside two steps
    "own_reward": lambda output: {"right", "brief"} <= rewards_of(last_step()),
    "openai_rows": lambda output: {"format", "correctness"} <= rewards_of(last_step()) and "reward: calls;" in output,
    "own_tracker": lambda output: output.endswith(
        "".join(f"{row['step']} {row['reward/total']}\n" for row in steps()) + "\n"
    ),
    "own_tool": lambda output: "gold answer: " in output,
    "mcp_tool": lambda output: "gold answer: " in output,
}


def steps() -> list[dict[str, float]]:
    return load_run("outputs/run-1").metrics


def last_step() -> dict[str, float]:
    return steps()[-1]


@pytest.mark.long
def test_the_plot_of_a_run_is_a_picture(desk: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"step": step, "reward/total": step / 2, "response_length/mean": 9.0} for step in (1, 2)]
    (desk / "outputs" / "run-1").mkdir(parents=True)
    (desk / "outputs" / "run-1" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("python", "plot.py")
    assert (desk / "run-1.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_model_of_a_run_is_asked(desk: Path) -> None:
    need_vllm()
    folder = make_run(desk / "outputs" / "run-1")
    (folder / "metrics.jsonl").write_text('{"step": 48}\n')
    printed = run("python", "serve.py").splitlines()  # and the server's log, to its end
    (message,) = (line for line in printed if line.startswith("ChatCompletionMessage("))
    assert "ChatCompletionMessageFunctionToolCall(" in message and "function=Function(" in message  # any: it is tiny


@pytest.mark.long
def test_the_model_of_a_run_is_shared(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(desk / "outputs" / "run-1")
    with hub() as server:
        for name, value in {"HF_ENDPOINT": server.address, "HF_TOKEN": "secret", "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        run("bash", "share.sh", "outputs/run-1", "me/mini")
    assert server.created["visibility"] == "private"
    assert (desk / "outputs" / "run-1-hf" / "tool_parser.py").is_file()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    for cell in cells:
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel has a running event loop, and no main module."""
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pages = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(pages, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in pages.cells for output in cell.get("outputs", ())]
    assert "step 2/2" in "".join(each["text"] for each in shown if each["output_type"] == "stream")
    kinds = {kind for each in shown for kind in each.get("data", ())}
    assert "text/html" in kinds or "image/png" in kinds
    assert [row["step"] for row in load_run(next((tmp_path / "outputs").iterdir())).metrics][-2:] == [1, 2]


@pytest.mark.long
def test_an_adapter_of_a_7b_model_fits_on_one_small_gpu(desk: Path) -> None:
    """By the plan, which the example asks before it trains. The model has a tokenizer of fewer tokens."""
    model = Path(shutil.copytree(ROOT / "dataset/mini/model", desk / "model"))
    qwen2(*QWEN2_5["7B"]).save_pretrained(model)
    (desk / "bin" / "toolrl").write_text(
        f'#!/bin/sh\ntest "$1" = plan || exec echo "$@"\nexec {sys.executable} -m toolrl "$@"\n'
    )
    rows = ROOT / "dataset/mini/train.parquet"
    done = subprocess.run(["bash", "lora_24gb.sh", str(rows), str(model)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It fits." in done.stdout and done.stdout.splitlines()[-1].startswith(f"train data={rows} model={model} ")
