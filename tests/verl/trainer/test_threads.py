"""Threads of processes on CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from verl.build.threads import available_cores, num_threads, threads_of
from verl.config.schema import Config, RolloutConfig, TrainerConfig


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(1, 1, 1), (2, 1, 1), (8, 1, 7), (8, 2, 3), (8, 16, 1), (64, 4, 15)]
)
def test_all_cores_but_one_are_dealt_evenly(cores: int, processes: int, threads: int) -> None:
    assert num_threads(None, processes, cores) == threads
    assert num_threads(5, processes, cores) == 5


def test_separate_pools_compute_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.build.threads.available_cores", lambda: 13)
    together = Config(trainer=TrainerConfig(n_gpus_per_node=2), rollout=RolloutConfig(num_engines=2))
    assert threads_of(together) == 6
    assert threads_of(replace(together, rollout=RolloutConfig(num_engines=2, placement="separate"))) == 3


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("", None)]
)
def test_a_containers_quota_counts(text: str, cores: int | None, tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert available_cores(quota) == (cores or len(os.sched_getaffinity(0)))
    assert available_cores(tmp_path / "none") == len(os.sched_getaffinity(0))
