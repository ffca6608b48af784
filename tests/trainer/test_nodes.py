"""Two Ray nodes on one machine: where ranks and engines sit, beside each other and in pools of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.tiny import run_words, save_tiny_model
from verl.config.load import load_config
from verl.single_controller.group import WorkerView
from verl.single_controller.ray import RayGroup
from verl.trainer.builders.run import built, load_inputs

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield
    cluster.shutdown()


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_two_steps_on_two_nodes(
    placement: str, two_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WITHLENGTH", "1")
    words = run_words(save_tiny_model(tmp_path / "model"), tmp_path, "hf", steps=2)
    config = load_config([*words, "trainer.nnodes=2", f"rollout.placement={placement}", "rollout.num_engines=2"])
    with built(config, load_inputs(config), tmp_path / "run", Console()) as fit:
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


def _switch(worker: object) -> str:
    return os.environ["WITHLENGTH"]


def test_weights_reach_an_engine_on_a_node_without_a_rank(two_nodes: None, tmp_path: Path) -> None:
    words = run_words(save_tiny_model(tmp_path / "model"), tmp_path, "hf", steps=1)
    config = load_config([*words, "rollout.placement=separate", "rollout.num_engines=2"])
    with built(config, load_inputs(config), tmp_path / "run", Console()) as fit:
        engines, trainer = fit.trainer.rollouts.rollout.engine._workers, fit.trainer.learner.policy.workers.group  # type: ignore[attr-defined]
        assert not set(engines.nodes) <= set(trainer.nodes)
        asyncio.run(fit.run())  # its canary probes both engines
        assert fit.trainer.step == 1
