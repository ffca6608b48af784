"""Real processes, as ranks are. They fork from one that has imported torch and transformers, which takes seconds."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

IMPORTED = ["transformers.models.auto.modeling_auto", "verl.workers.rank", "pytest", "hypothesis"]
LIMIT_S = 300.0  # for ranks that wait for each other


def in_ranks(world: int, job: Callable[..., object], folder: Path, *args: Any) -> None:
    """`job(rank, world, folder, *args)` in `world` processes that form a group. Raises what one of them does."""
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    in_processes(world, _in_group, world, job, folder, *args)


def in_processes(count: int, function: Callable[..., object], *args: Any) -> None:
    """`function(number, *args)` in each process, with this one's variables. Raises what one of them does."""
    get_context("forkserver").set_forkserver_preload(IMPORTED)
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = start_processes(_with_variables, (variables, function, *args), count, False, start_method="forkserver")
    end = time.monotonic() + LIMIT_S
    try:
        while not started.join(max(0.0, end - time.monotonic())):
            assert time.monotonic() < end, f"not finished within {LIMIT_S:.0f} s"
    finally:
        for process in started.processes:
            process.kill()


def _with_variables(number: int, variables: Mapping[str, str], function: Callable[..., object], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)
    function(number, *args)


def _in_group(rank: int, world: int, job: Callable[..., object], folder: Path, *args: Any) -> None:
    """One rank's life. What holds the process group goes first, then all ranks together, then the group itself:
    a rank that leaves while another still talks to it, or with the group in use, may abort at its exit."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    job(rank, world, folder, *args)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
