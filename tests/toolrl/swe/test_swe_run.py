"""Whole runs with repositories: training while a runtime server is killed, and SmolLM2 in real programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.data.quixbugs import convert
from tests.conftest import ROOT, need_vllm, real_data, smollm2
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import pytest_environment
from tests.toolrl.swe.test_swe_remote import TOKEN, free_port, serving
from verl.data.rows import read_rows

pytestmark = pytest.mark.slow
NUM_STEPS = 3
FAST = ["trainer.device=cpu", "model.compute_dtype=float32"]
SFT = {
    "model.path": "dataset/mini/model",
    "data.train_batch_size": 16,
    "data.max_prompt_length": 256,
    "data.max_response_length": 80,
    "actor.optim.lr": 2e-3,
    "trainer.total_training_steps": 120,
    "trainer.experiment_name": "sft",
}


def command(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def runtimes_of(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [each for each in psutil.Process(server.pid).children(recursive=True) if each.name() == "bwrap"]


def test_a_run_goes_on_when_one_of_two_runtime_servers_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its episodes start again on the other one: no rollout is missing, none scores 0 for it."""
    need_vllm()
    need_bubblewrap()
    monkeypatch.setenv("VERL_SERVICE_TOKEN", TOKEN)
    environment = pytest_environment(tmp_path)
    data, out = tmp_path / "data", tmp_path / "outputs"
    command("scripts/swe/make_mini.py", "--out", str(data), "--environment", environment)
    place = f"trainer.default_local_dir={out}"
    settings = [f"{key}={value}" for key, value in SFT.items()]
    command(
        "-m", "verl.trainer.main_sft", *FAST, place, *settings, f"data.train_files=[{data / 'demonstrations.jsonl'}]"
    )
    policy = out / "sft" / "checkpoints" / f"step-{SFT['trainer.total_training_steps']:06}" / "hf"
    with contextlib.ExitStack() as stack:
        ports, servers = [free_port(), free_port()], []
        for port in ports:
            server = [sys.executable, "-m", "toolrl.swe.server", "--port", str(port), "--capacity", "4"]
            server += ["--environments", str(Path(environment).parent), "--folder", str(tmp_path / f"server{port}")]
            servers.append(stack.enter_context(serving(server, port, tmp_path / f"{port}.log")))
        urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        argv = [sys.executable, "-m", "verl.trainer.main_ppo", "recipe=swe_mini", place, f"model.path={policy}"]
        argv += [f"data.train_files=[{data / 'train.jsonl'}]", f"+env.options.urls=[{urls}]", "rollout.n=4", *FAST]
        argv += ["data.train_batch_size=8", "actor.ppo_mini_batch_size=8"]
        argv += [f"trainer.total_training_steps={NUM_STEPS}"]
        log = (tmp_path / "run.log").open("wb")
        run = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        stack.callback(_end, run)
        while not (metrics_of(out / "swe_mini") and runtimes_of(servers[0])):
            assert run.poll() is None, (tmp_path / "run.log").read_text()[-3000:]
            time.sleep(0.05)
        killed = runtimes_of(servers[0])
        os.killpg(servers[0].pid, signal.SIGKILL)
        assert run.wait(300) == 0, (tmp_path / "run.log").read_text()[-3000:]
        steps = metrics_of(out / "swe_mini")
        assert len(steps) == NUM_STEPS and killed
        assert not any(each.is_running() for each in killed)
        assert runtimes_of(servers[1]) == []
    assert f"runtime server http://127.0.0.1:{ports[0]}" in (tmp_path / "run.log").read_text()
    assert all(step["reward/infrastructure_faults"] == 0 for step in steps)
    assert all(step["reward/swe/resolved"] + step["reward/swe/unresolved"] > 0 for step in steps)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def demonstration(row: dict[str, Any]) -> dict[str, Any]:
    """A first step: a look at the program."""
    program = row["problem_statement"].partition("`")[2].partition("`")[0]
    call = {"name": "bash", "arguments": {"command": f"cat {program}"}}
    text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return {"messages": [{"role": "user", "content": row["problem_statement"]}, {"role": "assistant", "content": text}]}


def test_smollm2_plays_quixbugs_to_the_end(tmp_path: Path) -> None:
    """Eight programs: every episode ends with a verdict, none with a fault, and nothing is left running."""
    need_vllm()
    need_bubblewrap()
    environment = pytest_environment(tmp_path)
    rows = [convert(raw, tmp_path / "tasks", environment) for raw in read_rows(str(real_data("swe", "quixbugs.jsonl")))]
    tasks, steps, prompt, answers = (
        tmp_path / name for name in ("tasks.jsonl", "steps.jsonl", "prompt", "answers.jsonl")
    )
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows[::5]))
    steps.write_text("".join(json.dumps(demonstration(row)) + "\n" for row in rows))
    prompt.write_text("{question}")
    calls = "env.tool_call_format=tool_n1"
    sft = ["data.train_batch_size=4", "data.max_prompt_length=512", "actor.optim.lr=1e-4", "trainer.total_epochs=2"]
    sft += [f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=sft", f"data.train_files=[{steps}]"]
    command("-m", "verl.trainer.main_sft", *FAST, f"model.path={smollm2()}", calls, *sft)
    command(
        *("-m", "verl.trainer.main_generation", *FAST, f"model={tmp_path / 'sft'}", f"data.val_files=[{tasks}]", calls),
        *("data.map=toolrl.swe.tasks:as_task_row", "env.name=swe", "reward.name=env", "env.options.style=mini"),
        *(f"env.options.prompt={prompt}", "env.max_turns=4", "env.max_turn_tokens=64", f"eval.output={answers}"),
        *("data.max_prompt_length=2048", "data.max_response_length=3072"),
    )
    episodes = list(read_rows(str(answers)))
    for each in episodes:
        print(each["reward"], each["stop_reason"], [use["status"] for use in each["tool_uses"]])
    assert len(episodes) == len(rows[::5]) and {each["outcome"] for each in episodes} == {"scored"}
    assert all(each["reward"] in (0.0, 1.0) for each in episodes)
    assert sum(len(each["tool_uses"]) for each in episodes) >= len(episodes)
    left = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert not [argv for argv in left if str(tmp_path) in " ".join(argv or [])]
