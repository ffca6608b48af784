"""The batch script for Slurm, with stand-ins for srun and scontrol: what it starts, and what it requeues."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.programs import need
from tests.support.service import free_port
from tests.support.tiny import run_overrides, save_tiny_model
from verl.tracking.jsonl import read_jsonl

SCRIPT = ROOT / "examples" / "slurm" / "grpo.sbatch"
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then tr , '\\n' <<<"$3"; else echo "$@" >>"$RECORD"; fi
"""
ECHO = '#!/bin/bash\necho "$(basename "$0") $*" >>"$RECORD"\n'
PYTHON = """#!/bin/bash
if [[ $1 == - ]]; then until (($(cat "$RECORD" 2>/dev/null | wc -l) >= $2)); do sleep 0.05; done; fi
echo 0f
"""  # waits until each node's step is recorded, and makes the token
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def prepared(folder: Path, nodes: str, **programs: str) -> dict[str, str]:
    """Variables of a job, with programs of these texts on PATH."""
    for name, text in {"scontrol": SCONTROL, **programs}.items():
        path = folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "grpo", "SLURM_JOB_NODELIST": nodes, "SLURM_CPUS_ON_NODE": "2"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_"))}
    return {**kept, **job, "VENV": str(folder), "RECORD": str(folder / "record"), "PYTHONPATH": str(ROOT)}


def test_it_starts_ray_on_every_node_and_the_run_once(tmp_path: Path) -> None:
    environment = prepared(tmp_path, "a1,a2,a3", srun=ECHO, toolrl=ECHO, python=PYTHON)
    environment["SLURM_GPUS_ON_NODE"] = "8"
    done = subprocess.run(["bash", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted((tmp_path / "record").read_text().splitlines())
    step = "srun --overlap --nodes=1 --ntasks=1 --cpus-per-task=2 --nodelist={} ray start {} --num-gpus=8"
    end = " --disable-usage-stats --block"
    assert lines == [
        step.format("a1", "--head --port=6379") + end,
        step.format("a2", "--address=a1:6379") + end,
        step.format("a3", "--address=a1:6379") + end,
        "toolrl train trainer.experiment_name=grpo-7 trainer.nnodes=3 trainer.n_gpus_per_node=8 "
        "trainer.save_on_signal=true recipe=toolrl_grpo",
    ]
    assert not list(tmp_path.glob(".ray-token*"))


@pytest.mark.parametrize(("code", "requeued"), [(143, True), (1, False), (0, False)])
def test_only_a_run_that_the_signal_ended_is_requeued(code: int, requeued: bool, tmp_path: Path) -> None:
    """After the signal the run saves for a second, then ends with this code."""
    saving = (
        f'#!/bin/bash\ntrap "sleep 1; exit {code}" TERM\ntouch "$RECORD"\nfor _ in {{1..300}}; do sleep 0.1; done\n'
    )
    environment = prepared(tmp_path, "a1", srun=ECHO, toolrl=f"#!/bin/bash\n{saving}", python=PYTHON)
    process = subprocess.Popen(["bash", SCRIPT, "recipe=mini_grpo"], cwd=tmp_path, env=environment)
    record = tmp_path / "record"
    while not record.exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)  # the script is waiting for the run by then
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == code
    assert ("requeue 7" in record.read_text()) is requeued


def test_shellcheck(tmp_path: Path) -> None:
    need("shellcheck")
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_its_settings_are_documented_ones() -> None:
    text = SCRIPT.read_text()
    assert re.findall(r"^#SBATCH (--(?:requeue|signal)\S*)", text, re.MULTILINE) == ["--requeue", "--signal=B:TERM@300"]


@pytest.mark.slow
def test_two_nodes_train_are_stopped_and_go_on_where_they_were(tmp_path: Path) -> None:
    """Both nodes are this machine, as are their Ray processes."""
    environment = prepared(tmp_path, "127.0.0.1,localhost", srun=SRUN)
    binaries = Path(sys.executable).parent
    environment |= {"PATH": f"{binaries}:{environment['PATH']}", "RAY_PORT": str(free_port()), "NAME": "run"}
    overrides = [
        *run_overrides(save_tiny_model(tmp_path / "model"), tmp_path / "out", "hf", steps=200),
        "trainer.n_gpus_per_node=1", "rollout.placement=separate", "rollout.num_engines=1",
    ]  # fmt: skip
    metrics = tmp_path / "out" / "run" / "metrics.jsonl"

    def job(steps: int, until: int) -> int:
        command = ["bash", SCRIPT, *overrides, f"trainer.total_training_steps={steps}"]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment)
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            if until and metrics.exists() and len(read_jsonl(metrics)) >= until:
                process.send_signal(signal.SIGTERM)
                until = 0
        return process.wait(timeout=60)

    assert job(200, until=2) == 143
    assert (tmp_path / "record").read_text() == "requeue 7\n"
    saved = len(read_jsonl(metrics))
    assert job(saved + 2, until=0) == 0
    assert [row["step"] for row in read_jsonl(metrics)] == list(range(1, saved + 3))
