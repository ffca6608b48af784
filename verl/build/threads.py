"""Number of threads per process that computes on the CPU: one rule for trainer ranks and rollout engines.

Oversubscription is expensive: every parallel loop of OpenMP ends at a barrier where all threads wait for the one
without a core. So one core is reserved for the controller, the reward and other processes, and the others are divided
evenly among the processes that compute concurrently. `trainer.num_threads` overrides it.
"""

from __future__ import annotations

import os
from pathlib import Path

from verl.config.schema import Config

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_threads(override: int | None, processes: int, cores: int | None = None) -> int:
    """Threads for each of `processes` that compute concurrently on a node: an even share of cores - 1, unless given."""
    return override or max(1, ((cores or available_cores()) - 1) // processes)


def threads_of(config: Config) -> int:
    """Threads of a rank or an engine. Colocated ones alternate; in separate pools they compute concurrently.

    Assumes that engines of a separate pool are spread evenly over the nodes, and that all nodes are like this one.
    """
    ranks, nodes = config.trainer.n_gpus_per_node, config.trainer.nnodes
    engines = -(-config.num_engines * config.rollout.tensor_model_parallel_size // nodes)
    at_once = max(ranks, engines) if config.rollout.colocated else ranks + engines
    return num_threads(config.trainer.num_threads, at_once)


def available_cores(quota: Path = _QUOTA) -> int:
    """Cores that this process may use: its CPU affinity, or fewer if its container has a quota."""
    bound = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return bound
    return bound if allowed == "max" else max(1, min(bound, int(allowed) // int(period)))
