"""How many threads a process that computes on the CPU gets: one rule for trainer ranks and rollout engines.

More threads than free cores do not merely fail to help. Every parallel loop of OpenMP ends at a barrier where all wait
for the one thread that has no core; on two busy cores that made a small matrix product fifty times slower. So one core
is left to the controller, the reward and whoever else is there, and the others are dealt evenly to the processes that
compute at the same time. `trainer.num_threads` overrules it.
"""

from __future__ import annotations

import os
from pathlib import Path

from verl.config.schema import Config

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_threads(wanted: int | None, processes: int, cores: int | None = None) -> int:
    """Threads of each of `processes` that compute at once on one node: `wanted`, or its share of all cores but one."""
    return wanted or max(1, ((cores or available_cores()) - 1) // processes)


def threads_of(config: Config) -> int:
    """Threads of a rank or an engine. Beside each other they take turns; in pools of their own they compute at once.

    Engines in a pool of their own are taken to be dealt evenly to the nodes, and nodes to be like this one.
    """
    ranks, nodes = config.trainer.n_gpus_per_node, config.trainer.nnodes
    engines = -(-config.num_engines * config.rollout.tensor_model_parallel_size // nodes)
    at_once = max(ranks, engines) if config.rollout.colocated else ranks + engines
    return num_threads(config.trainer.num_threads, at_once)


def available_cores(quota: Path = _QUOTA) -> int:
    """Cores that this process may use: those it is bound to, or fewer where its container has a quota."""
    bound = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return bound
    return bound if allowed == "max" else max(1, min(bound, int(allowed) // int(period)))
