"""Whole runs of the command, on real Ray, real vLLM and real FSDP: what is written, what survives a kill."""

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
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT, need_vllm
from tests.support.commands import printed
from tests.support.every import every
from tests.support.metric_names import known
from tests.support.tiny import MINI, first_rows, run_overrides
from toolrl.analysis.report.loss import computed_loss, sum_check
from toolrl.analysis.samples.sample_files import read_samples, samples_path
from verl.tracking.jsonl import read_jsonl
from verl.trainer.main_ppo import main

COMMAND = [sys.executable, "-m", "verl.trainer.main_ppo"]


def start(overrides: list[str], **environment: str) -> subprocess.Popen[str]:
    code = "import sys; from verl.trainer.main_ppo import main; sys.exit(main(sys.argv[1:]))"
    return start_code(code, *overrides, **environment)


def start_code(code: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    """As a terminal starts a command: a process group of its own, which gets interrupts. Its input stays open."""
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen(
        [sys.executable, "-c", heeding + code, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )


def interrupted(process: subprocess.Popen[str], seconds: float) -> str:
    """What a command prints from Ctrl-C in a terminal on, where the whole foreground group gets it."""
    os.killpg(process.pid, signal.SIGINT)
    process.wait(seconds)  # its input still open
    output, _ = process.communicate()
    assert process.returncode == 130, output
    return output


def run(overrides: list[str], expected: int = 0, **environment: str) -> str:
    return printed(main, overrides, expected, **environment)


def rows(out: Path) -> list[dict[str, Any]]:
    return read_jsonl(out / "run" / "metrics.jsonl")


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    pointer = json.loads((out / "run" / "checkpoints" / "latest.json").read_text())
    return load_file(out / "run" / "checkpoints" / pointer["folder"] / "hf" / "model.safetensors")


@pytest.mark.long
def test_grpo_on_ray_vllm_and_two_fsdp_ranks(model: Path, tmp_path: Path) -> None:
    need_vllm()
    overrides = run_overrides(model, tmp_path, "vllm", steps=2)
    few = first_rows(MINI / "test.parquet", 16, tmp_path)
    overrides += ["trainer.n_gpus_per_node=2", "rollout.num_engines=1", f"data.val_files=[{few}]"]
    output = run([*overrides, f"eval.benchmarks=[{MINI / 'test_new_tools.parquet'}]", "eval.limit=3"])
    assert "a step: 4 prompts x 2 rollouts = 8 samples; 2 optimizer steps" in output
    assert "toolrl chat model.path=" in output
    zero, one, two = rows(tmp_path)
    assert zero["val/test/total"] < 0 and {"val/test/exact", "val/test/format"} <= two.keys()
    assert zero["eval/test_new_tools.parquet/score"] == two["eval/test_new_tools.parquet/score"] == 0.0
    assert one["engine/logprob_diff_mean"] < 1e-4 and two["engine/canary_logprob_diff"] < 1e-4
    assert one["actor/grad_norm"] > 0 and two["step"] == 2
    assert [name for row in (zero, one, two) for name in row if name not in ("step", "time") and not known(name)] == []
    folder = tmp_path / "run"
    (exported,) = (folder / "checkpoints").glob("step-000002/hf")
    trained = AutoModelForCausalLM.from_pretrained(exported)
    before = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(trained.lm_head.weight.float(), before.lm_head.weight.float())
    assert AutoTokenizer.from_pretrained(exported).chat_template
    assert len(read_jsonl(folder / "transcripts" / "step-000002.jsonl")) == 8
    kept = read_samples(samples_path(folder, 2))
    assert len(kept.samples) == 8 and sum(kept.loss.values()) == pytest.approx(two["actor/loss"], abs=1e-6)
    check = sum_check(kept, computed_loss(kept), two["actor/loss"])  # denominators that count the samples of both ranks
    assert check.agrees, check.text
    assert (folder / "config.yaml").is_file() and list((folder / "tensorboard").iterdir())


@pytest.mark.slow
def test_a_run_under_a_running_event_loop_in_an_empty_folder(model: Path, tmp_path: Path) -> None:
    """As a notebook's cell, whose kernel runs a loop in its main thread."""
    code = """
import asyncio, os, sys
from toolrl import load_config
from verl.tracking.console import Display
from verl.trainer.main_ppo import train
async def cell():
    train(load_config(sys.argv[2:]), Display(), only_preflight=False)
if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.exit(asyncio.run(cell()))
"""
    (tmp_path / "empty").mkdir()
    overrides = run_overrides(model, tmp_path, "vllm", steps=2)
    process = start_code(code, str(tmp_path / "empty"), *overrides, PYTHONPATH=str(ROOT))
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert rows(tmp_path)[-1]["step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "further", [[], ["lora.rank=4"], [f"teacher.path={MINI / 'model'}"]], ids=["whole", "adapter", "distilled"]
)
def test_a_killed_run_goes_on_bit_for_bit(model: Path, tmp_path: Path, further: list[str]) -> None:
    """Four steps = two steps, kill -9, resume, two steps."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    run([*run_overrides(model, straight, "hf", steps=4), *further])
    overrides = [*run_overrides(model, broken, "hf", steps=4), *further, "trainer.save_freq=2"]
    process = start(overrides)
    wait_for(lambda: (broken / "run" / "checkpoints" / "latest.json").exists(), process)
    kill_tree(process)
    run(overrides)
    assert [row["step"] for row in rows(broken)] == [1, 2, 3, 4]
    for one, two in zip(rows(straight), rows(broken), strict=True):
        timed = ("time", "perf", "memory")
        assert {k: v for k, v in one.items() if not k.startswith(timed)} == {
            k: v for k, v in two.items() if not k.startswith(timed)
        }
    resumed = final_weights(broken)
    assert every(torch.equal(weight, resumed[name]) for name, weight in final_weights(straight).items())


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_is_named(model: Path, tmp_path: Path) -> None:
    overrides = [
        *run_overrides(model, tmp_path, "vllm", steps=500),
        "trainer.n_gpus_per_node=2",
        "rollout.num_engines=1",
    ]
    process = start(overrides)
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(rows(tmp_path)) >= 1, process)
    workers = [each for each in psutil.Process(process.pid).children(recursive=True) if "ray::" in each.name()]
    engines = [each for each in workers if each.children()]
    trainers = [each for each in workers if not each.children() and "_Worker" in each.name()]
    assert len(engines) == 1 and len(trainers) == 2
    victim = trainers[1]
    killed = time.monotonic()
    victim.kill()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert process.returncode == 1
    assert "trainer rank" in output and "died during" in output and f"process {victim.pid}" in output


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupted_run_reports_it_ends_its_processes_and_resumes(
    presses: int, model: Path, tmp_path: Path
) -> None:
    overrides = [
        *run_overrides(model, tmp_path, "vllm", steps=500),
        "trainer.save_freq=1",
        "trainer.stall_timeout_s=100",
    ]
    process = start(overrides)
    wait_for((tmp_path / "run" / "checkpoints" / "latest.json").exists, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) > 5
    if presses == 2:
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1)
    output = interrupted(process, 90)
    assert "shutting down" in output and "interrupted: " in output and "Traceback" not in output
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    pointer = json.loads((tmp_path / "run" / "checkpoints" / "latest.json").read_text())
    again = run([*overrides[:-2], f"trainer.total_training_steps={pointer['step'] + 1}"])
    assert "toolrl chat" in again and rows(tmp_path)[-1]["step"] == pointer["step"] + 1


def test_the_first_interrupt_ends_what_waits_even_where_the_loop_stands_still() -> None:
    process = start_code(
        "import asyncio, sys, time; from verl.config.commands import TRAIN; from verl.trainer.cli import run_cli\n"
        "async def stand(): print('waiting', flush=True); time.sleep(100)\n"
        "sys.exit(run_cli([], '', TRAIN, lambda argv, console: asyncio.run(stand())))"
    )
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    output = interrupted(process, 60)
    assert output.strip().startswith("shutting down") and "interrupted: " in output


@pytest.mark.long
def test_a_chat_that_waits_for_its_user_is_interrupted(model: Path) -> None:
    overrides = [
        "--chat",
        f"model.path={model}",
        "rollout.name=hf",
        "model.compute_dtype=float32",
        "trainer.device=cpu",
    ]
    process = start_code(f"import sys; from verl.trainer.main_generation import main; sys.exit(main({overrides}))")
    assert process.stdout is not None
    while "System prompt" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(1)
    assert "interrupted: " in interrupted(process, 60)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def kill_tree(process: subprocess.Popen[str]) -> None:
    """The driver at once, then whatever it had started."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.total_steps=3"], "unknown key 'trainer.total_steps'"),
        (["model.path=./nowhere", "data.train_files=[x.parquet]"], "model.path: there is no folder './nowhere'"),
        (
            ["model.path=gpt", "data.train_files=[nowhere.parquet]"],
            "there is no file 'nowhere.parquet'; dataset/README.md ",
        ),
        (["--frobnicate"], "unknown option '--frobnicate'"),
        ([], "model.path is not set"),
    ],
)
def test_unusable_settings_are_reported_before_torch_is_imported(overrides: list[str], message: str) -> None:
    code = (
        "import sys; from verl.trainer.main_ppo import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'ray', 'transformers', 'pyarrow'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *overrides], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and message in done.stdout, done.stdout + done.stderr


def test_help_and_the_resolved_configuration() -> None:
    helped = subprocess.run([*COMMAND, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "actor.optim.lr" in helped.stdout and "recipe=NAME" in helped.stdout
    shown = subprocess.run(
        [*COMMAND, "rollout.n=7", "--cfg", "job"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "  n: 7\n" in shown.stdout
