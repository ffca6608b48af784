"""Whole runs on real Ray whose rollout engines are killed or stopped: they go on, and end as they would have."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from tests.conftest import need_vllm
from tests.support.every import every
from tests.support.tiny import run_overrides
from verl.build.run import load_inputs, start_run
from verl.config.load import load_config
from verl.rollout.pool import EnginePool
from verl.single_controller.group import WorkerError
from verl.tracking.console import Display
from verl.tracking.jsonl import read_jsonl
from verl.trainer.loop import TrainingRun

pytestmark = pytest.mark.slow
STOPPED = "has not responded for 3 s; its process is stopped"


@pytest.fixture(scope="module")
def unbroken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    trained(run_overrides(model, out, "hf", steps=3))
    return out


class Attack(threading.Thread):
    """Sends a signal to a process of the run in the rollout of the second step, and remembers to which."""

    def __init__(self, fit: TrainingRun, signum: int, who: str = "engine") -> None:
        super().__init__(daemon=True)
        self.fit, self.signum, self.who = fit, signum, who
        self.hit: list[int] = []

    def run(self) -> None:
        pool = self.fit.trainer.rollouts.rollout.engine
        assert isinstance(pool, EnginePool)
        victim = self.fit.checkpointing.workers.pids[0] if self.who == "rank" else pool._workers.pids[0]  # type: ignore[attr-defined]
        if self.who == "core":
            (victim,) = (each.pid for each in psutil.Process(victim).children() if "EngineCore" in each.name())
        while self.fit.trainer.step < 1 or not any(pool._in_flight):
            time.sleep(0.001)
        os.kill(victim, self.signum)
        self.hit.append(victim)


def trained(overrides: list[str], signum: int = 0, who: str = "engine") -> Attack | None:
    """Train in this process, so that the moment can be chosen."""
    config = load_config(overrides)
    folder = Path(config.trainer.default_local_dir) / config.trainer.experiment_name
    with start_run(config, load_inputs(config), folder, Display(None, Console(file=io.StringIO()))) as fit:
        attack = Attack(fit, signum, who) if signum else None
        if attack is not None:
            attack.start()
        asyncio.run(fit.run())
    return attack


def figures(out: Path) -> list[dict[str, Any]]:
    """All metrics but those of time and of losses."""
    other = ("time", "perf", "memory", "rollout/")
    return [{k: v for k, v in row.items() if not k.startswith(other)} for row in read_jsonl(out / "run/metrics.jsonl")]


def weights(out: Path) -> dict[str, torch.Tensor]:
    checkpoints = out / "run" / "checkpoints"
    pointer = json.loads((checkpoints / "latest.json").read_text())
    return load_file(checkpoints / pointer["folder"] / "hf" / "model.safetensors")


def losses(out: Path) -> list[tuple[float, float]]:
    names = ("rollout/engine_restarts", "rollout/requests_retried")
    return [(row[names[0]], row[names[1]]) for row in read_jsonl(out / "run/metrics.jsonl")]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_killed_or_stopped_in_a_rollout_changes_nothing(
    signum: int, model: Path, unbroken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attack = trained([*run_overrides(model, tmp_path, "hf", steps=3), "trainer.health_timeout_s=3"], signum)
    assert attack is not None
    assert [restarts for restarts, _ in losses(tmp_path)] == [0, 1, 0] and losses(tmp_path)[1][1] >= 1
    reason = "died during" if signum == signal.SIGKILL else STOPPED
    assert f"rollout rank 0 of 1 (process {attack.hit[0]} " in caplog.text and reason in caplog.text
    assert figures(tmp_path) == figures(unbroken)
    assert every(torch.equal(weight, weights(tmp_path)[name]) for name, weight in weights(unbroken).items())


def test_an_engine_that_is_killed_while_the_policy_learns_is_replaced(model: Path, tmp_path: Path) -> None:
    overrides = run_overrides(model, tmp_path, "hf", steps=4)
    trained([*overrides, "rollout.max_staleness=1", "rollout.num_engines=1"], signal.SIGKILL)
    rows = losses(tmp_path)
    assert len(rows) == 4 and sum(restarts for restarts, _ in rows) == 1


def test_a_stopped_rank_ends_the_run_and_is_named(model: Path, tmp_path: Path) -> None:
    overrides = [*run_overrides(model, tmp_path, "hf", steps=500), "trainer.health_timeout_s=3"]
    started = time.monotonic()
    with pytest.raises(
        WorkerError,
        match=r"trainer rank 0 of 1 \(process \d+ on .*\) has not responded for 3 s; its process is stopped",
    ):
        trained(overrides, signal.SIGSTOP, "rank")
    assert time.monotonic() - started < 300


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_vllm_whose_core_is_killed_or_stopped_in_a_rollout_is_replaced(
    signum: int, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    need_vllm()
    attack = trained([*run_overrides(model, tmp_path, "vllm", steps=3), "trainer.health_timeout_s=3"], signum, "core")
    assert attack is not None
    assert [restarts for restarts, _ in losses(tmp_path)] == [0, 1, 0]
    reason = "was killed by SIGKILL" if signum == signal.SIGKILL else STOPPED
    assert f"vLLM process {attack.hit[0]} {reason}" in caplog.text
    assert not psutil.pid_exists(attack.hit[0])
