"""Two Ray nodes on one machine: where ranks and engines sit, beside each other and in pools of their own."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
import torch
from rich.console import Console

from tests.support.every import every
from tests.support.service import free_port
from tests.support.tiny import run_overrides, save_tiny_model
from tests.toolrl.envs.agent.test_agent import ASK
from tests.toolrl.envs.agent.test_pull import WRITTEN
from tests.verl.trainer.test_healing import figures, weights
from toolrl.envs.agent.inside import puller
from verl.build.run import load_inputs, start_run
from verl.config.load import load_config
from verl.host.services import TOKEN_VARIABLE
from verl.single_controller.group import WorkerView
from verl.single_controller.ray import RayGroup
from verl.tracking.console import Display
from verl.tracking.jsonl import read_jsonl

pytestmark = pytest.mark.slow


@contextmanager
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Two nodes, and what kills the second one, without the controller on it, and returns its id."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    _, second = (cluster.add_node(num_cpus=2) for _ in range(2))
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)

    def kill() -> str:
        cluster.remove_node(second, allow_graceful=False)
        return str(second.node_id)

    yield kill
    cluster.shutdown()


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nodes(monkeypatch):
        yield


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_two_steps_on_two_nodes(
    placement: str, two_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WITHLENGTH", "1")
    overrides = run_overrides(save_tiny_model(tmp_path / "model"), tmp_path, "hf", steps=2)
    config = load_config([*overrides, "trainer.nnodes=2", f"rollout.placement={placement}", "rollout.num_engines=2"])
    with start_run(config, load_inputs(config), tmp_path / "run", Display(None, Console())) as fit:
        member = fit.trainer.learner.policy.workers
        assert isinstance(member, WorkerView) and isinstance(member.group, RayGroup)
        trainer, engines = member.group, fit.trainer.rollouts.rollout.engine._workers  # type: ignore[attr-defined]
        pids = {*trainer.pids, *engines.pids}
        assert len(pids) == 4 and os.getpid() not in pids
        assert len(set(trainer.nodes)) == 2  # one rank a node
        if placement == "colocated":
            assert engines.nodes == trainer.nodes
        asyncio.run(fit.run())
        assert fit.trainer.step == 2
        assert trainer.call(_switch) == ["1", "1"]
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "hf" / "model.safetensors").is_file()


def test_agents_elsewhere_reach_a_run_on_two_nodes(
    two_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the address that the run advertises, with its token."""
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token")
    port = free_port()
    url = f"http://{ray.util.get_node_ip_address()}:{port}"
    overrides = [
        *run_overrides(save_tiny_model(tmp_path / "model"), tmp_path, "hf", steps=2),
        *("env.name=agent", "env.tool_call_format=toolrl", "reward.name=env", "data.max_response_length=64"),
        f"env.options={{pull: true, host: 0.0.0.0, port: {port}, url: '{url}'}}",
        *("trainer.nnodes=2", "rollout.placement=separate", "rollout.num_engines=2"),
    ]
    config = load_config(overrides)
    command = [sys.executable, "-I", "-S", puller.__file__, url, sys.executable, "-I", "-c", ASK + WRITTEN]
    with start_run(config, load_inputs(config), tmp_path / "run", Display(None, Console())) as fit:
        agents = [subprocess.Popen([*command, "{task_json}"]) for _ in range(2)]
        try:
            asyncio.run(fit.run())
        finally:
            for each in agents:
                each.kill()
                each.wait()
        assert fit.trainer.step == 2
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["agent/requests"] for row in rows if "agent/requests" in row] == [1.0, 1.0]


def _switch(worker: object) -> str:
    return os.environ["WITHLENGTH"]


def test_weights_reach_an_engine_on_a_node_without_a_rank(two_nodes: None, tmp_path: Path) -> None:
    overrides = run_overrides(save_tiny_model(tmp_path / "model"), tmp_path, "hf", steps=1)
    config = load_config([*overrides, "rollout.placement=separate", "rollout.num_engines=2"])
    with start_run(config, load_inputs(config), tmp_path / "run", Display(None, Console())) as fit:
        engines, trainer = fit.trainer.rollouts.rollout.engine._workers, fit.trainer.learner.policy.workers.group  # type: ignore[attr-defined]
        assert not set(engines.nodes) <= set(trainer.nodes)
        asyncio.run(fit.run())  # its canary probes both engines
        assert fit.trainer.step == 1


def trained(overrides: Sequence[str], out: Path, kill: Callable[[], str] | None = None) -> tuple[int, str, str]:
    """Exit code and console of the training command, and the id of the node that `kill` kills after the first step."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, "trainer.nnodes=2", "trainer.save_freq=1"]
    metrics, killed = out / "run" / "metrics.jsonl", ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        while kill is not None and not (metrics.exists() and metrics.read_text().count("\n")):
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.05)
        if kill is not None:
            killed = kill()
        console = run.communicate(timeout=300)[0]
    return run.returncode, console, killed


def test_a_node_that_is_killed_ends_the_run_which_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last lines name the node; on new nodes the same command ends as a run that nothing broke."""
    model, unbroken, broken = save_tiny_model(tmp_path / "model"), tmp_path / "unbroken", tmp_path / "broken"
    with nodes(monkeypatch):
        code, console, _ = trained(run_overrides(model, unbroken, "hf", steps=5), unbroken)
    assert code == 0, console
    with nodes(monkeypatch) as kill:
        code, console, node = trained(run_overrides(model, broken, "hf", steps=5), broken, kill)
    assert code == 1 and "Traceback (" not in console, console
    (error,) = (line for line in console.splitlines() if line.startswith("Worker"))
    assert re.search(rf"trainer rank [01] of 2 .* died .*: its node {node[:8]} at \S+ has left the cluster", error)
    assert f"The same command resumes from {broken}/run/checkpoints/step-00000" in console
    assert 1 <= len(read_jsonl(broken / "run" / "metrics.jsonl")) < 5
    with nodes(monkeypatch):
        code, console, _ = trained(run_overrides(model, broken, "hf", steps=5), broken)
    assert code == 0, console
    assert figures(broken) == figures(unbroken)
    assert every(torch.equal(weight, weights(broken)[name]) for name, weight in weights(unbroken).items())
