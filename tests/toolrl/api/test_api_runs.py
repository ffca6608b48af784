"""`toolrl.train` in whole runs: a script without a main guard, twice, on Ray of the caller's, interrupted, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from toolrl.api.run import load_run

pytestmark = pytest.mark.slow

# No main guard; the reward uses a global of the script.
START = """
import sys, toolrl
LIMIT = 50
rows = [{"messages": [{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": "a"}]} for n in range(4)]
settings = {"rollout.name": "hf", "rollout.n": 2, "data.train_batch_size": 2, "actor.ppo_mini_batch_size": 2,
            "data.max_prompt_length": 64, "data.max_response_length": 8, "trainer.device": "cpu",
            "model.compute_dtype": "float32", "actor.optim.lr": 1e-3}
def train(**more):
    return toolrl.train(sys.argv[1], rows, reward=lambda response, answer: len(response) / LIMIT,
                        settings=settings | more.pop("settings", {}), **more)
"""


def start(code: str, model: Path, folder: Path) -> subprocess.Popen[str]:
    script = folder / "mine.py"
    script.write_text(START + code)
    return subprocess.Popen(
        [sys.executable, str(script), str(model)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )


def test_two_runs_in_a_process_and_one_on_a_ray_that_is_left_running(model: Path, tmp_path: Path) -> None:
    code = """
import ray
first = train(steps=1)
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
address = ray.get_runtime_context().gcs_address
second = train(steps=1)
assert ray.is_initialized() and ray.get_runtime_context().gcs_address == address
assert ray.get(ray.remote(lambda: 7).remote()) == 7
print("folders", first.folder.name, second.folder.name, "torch" in sys.modules)
ray.shutdown()
"""
    process = start(code, model, tmp_path)
    printed, _ = process.communicate(timeout=500)
    assert process.returncode == 0, printed
    assert "folders run-1 run-2 False" in printed
    for name in ("run-1", "run-2"):
        run = load_run(tmp_path / "outputs" / name)
        assert [row["step"] for row in run.metrics] == [1]
        assert run.rollouts()[0].reward == pytest.approx(len(run.rollouts()[0].messages[-1]["content"]) / 50)


def test_an_interrupt_ends_the_run_and_its_name_resumes_it(model: Path, tmp_path: Path) -> None:
    code = """
try:
    run = train(steps=4, name="named", settings={"trainer.save_freq": 1})
except KeyboardInterrupt:
    print("interrupted cell")
else:
    print("done", run.model_path)
"""
    process = start(code, model, tmp_path)
    latest = tmp_path / "outputs" / "named" / "checkpoints" / "latest.json"
    while not latest.exists() and process.poll() is None:
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "interrupted cell" in printed, printed
    psutil.wait_procs(children, timeout=30)
    assert not [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    printed, _ = (again := start(code, model, tmp_path)).communicate(timeout=400)
    assert again.returncode == 0, printed
    assert "step-000004/hf" in printed and "step 1/4" not in printed
    assert [row["step"] for row in load_run(tmp_path / "outputs" / "named").metrics] == [1, 2, 3, 4]


CELL = """
import os, sys, ray, toolrl
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
rows = [{"messages": [{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": "a"}]} for n in range(4)]
settings = {"rollout.name": "hf", "rollout.n": 2, "data.train_batch_size": 2, "actor.ppo_mini_batch_size": 2,
            "data.max_prompt_length": 64, "data.max_response_length": 8, "trainer.device": "cpu",
            "model.compute_dtype": "float32", "trainer.save_on_signal": True}
def train(model, steps):
    return toolrl.train(model, rows, reward=lambda response, answer: 1.0, steps=steps, name="cell", settings=settings)
"""


def test_the_stop_button_of_a_notebook_ends_the_run_and_leaves_ray(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kernel, client = manager.start_new_kernel(cwd=str(tmp_path))
    try:
        assert cell(client, CELL)[1] is None
        before = psutil.Process(kernel.provisioner.process.pid).children(recursive=True)
        printed, error = cell(client, f"train({str(model)!r}, 99)", lambda text: "step 1/99" in text, kernel)
        assert error == "KeyboardInterrupt", printed
        assert "saving a checkpoint" in printed and "\x1b[2K" not in printed  # lines, not a live display
        left = {*psutil.Process(kernel.provisioner.process.pid).children(recursive=True)} - {*before}
        assert not [each for each in left if "verl" in " ".join(each.cmdline())]
        assert cell(client, "print(ray.get(ray.remote(lambda: 7).remote()))") == ("7\n", None)
        step = json.loads((tmp_path / "outputs/cell/checkpoints/latest.json").read_text())["step"]
        printed, error = cell(client, f"print(train({str(model)!r}, {step + 1}).metrics[-1]['step'])")
        assert error is None and printed.endswith(f"\n{step + 1}\n") and "step 1/" not in printed
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def cell(
    client: Any, code: str, until: Callable[[str], bool] | None = None, kernel: Any = None
) -> tuple[str, str | None]:
    """What a cell prints, and the name of its error. `kernel` is interrupted once `until` holds for the text."""
    request, printed, error = client.execute(code), "", None
    while True:
        message = client.get_iopub_msg(timeout=500)
        if message["parent_header"].get("msg_id") != request:
            continue
        kind, content = message["msg_type"], message["content"]
        printed += content["text"] if kind == "stream" else ""
        error = content["ename"] if kind == "error" else error
        if kind == "status" and content["execution_state"] == "idle":
            return printed, error
        if until is not None and until(printed):
            kernel.interrupt_kernel()
            until = None
