"""Starts the worker processes of a run: trainer ranks and rollout engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from verl.algorithms.algorithm import Algorithm
from verl.build.engines import compiling_pays, sequence_length, share_beside, speculation, start_engine, with_limits
from verl.build.ranks import abs_paths, rank_pool, start_ranks
from verl.build.transport import WeightTransport, cpu_transport, gpu_transport
from verl.config.schema import Config
from verl.errors import EngineError
from verl.host.daemon import run_async
from verl.rollout.engine_options import check_engine_options
from verl.single_controller.group import Method, ReplaceableGroup, WorkerError, WorkerGroup
from verl.single_controller.ray import Bundle, Cluster
from verl.workers.rank import TrainingRank

_log = logging.getLogger(__name__)
_CLOSE_S = 20.0


@dataclass(frozen=True)
class Workers:
    """The worker processes of a run."""

    trainer: WorkerGroup
    engines: ReplaceableGroup
    transport: WeightTransport

    async def restart_engine(self, rank: int) -> None:
        """Replace a dead engine. Raises EngineError where a new one could not receive weights: the NCCL group of
        ranks and engines ends with any of its members."""
        if self.transport.rendezvous is not None:
            raise EngineError(
                f"rollout engine {rank} died, and engines on dedicated GPUs cannot be replaced one by one. "
                "Run the same command to resume from the newest checkpoint"
            )
        await self._close_engine(rank)
        await self.engines.remake(rank)

    async def close_engines(self) -> None:
        """Let the engines shut down their subprocesses, for at most _CLOSE_S seconds."""
        await asyncio.gather(*(self._close_engine(rank) for rank in range(self.engines.size)))

    async def _close_engine(self, rank: int) -> None:
        with suppress(TimeoutError, WorkerError):
            async with asyncio.timeout(_CLOSE_S):
                await self.engines.submit(rank, Method("close"))

    def close(self) -> None:
        """Shut down all workers. Ranks first: a running update would take cores from the shutdown of the engines."""
        self.trainer.close()
        run_async(self.close_engines())
        self.engines.close()


def start_workers(
    config: Config,
    cluster: Cluster,
    algorithm: Algorithm,
    device: str,
    total_steps: int,
    on_phase: Callable[[str], None] = lambda _: None,
) -> Workers:
    """Trainer ranks and rollout engines, colocated or in placement groups of their own."""
    sequence_length(config)
    speculation(config.rollout, device)  # an engine would refuse this and the next only after the ranks have started
    check_engine_options(config.rollout.engine_options)
    config = abs_paths(config)
    gpus, parallel = (1.0 if device == "cuda" else 0.0), config.rollout.tensor_model_parallel_size
    colocated, on_gpus = config.rollout.colocated, device == "cuda" and config.rollout.name == "vllm"
    beside = device == "cuda" and colocated  # engines get the ranks' GPUs, and what these leave of them
    on_phase("ranks" if beside else "ranks and engine")
    pool, nodes = rank_pool(config, cluster, device)
    trainer = start_ranks(config, cluster, pool, nodes, algorithm, device, total_steps, wait=beside)
    share = share_beside(config, trainer) if on_gpus and colocated else None
    limited = config if share is None else with_limits(config, trainer, share)
    if beside:
        on_phase("engine")
    compiled = device == "cpu" and compiling_pays(config, total_steps)
    make = partial(start_engine, limited, device, share=share, compiled=compiled)
    if colocated:
        shared = [range(first * parallel, (first + 1) * parallel) for first in range(config.num_engines)]
        places = [nodes[ranks[0]] for ranks in shared]
        devices = [tuple(gpu for rank in ranks for gpu in trainer.gpus[rank]) for ranks in shared]
        engines = cluster.group("rollout", make, pool, Bundle(1.0, 0.0), places, devices, wait=False)
    else:
        bundle = Bundle(1.0, gpus * parallel)
        engines = cluster.group("rollout", make, cluster.pool([bundle] * config.num_engines), bundle, wait=False)
    trainer.started()  # first: it describes files that an engine cannot read either
    engines.started()
    if config.model.enable_gradient_checkpointing == "auto":
        number = trainer.call(TrainingRank.checkpointed_layers)[0]
        _log.warning("model.enable_gradient_checkpointing=auto: updates recompute %d layers", number)
    transport = gpu_transport(limited, trainer) if on_gpus else cpu_transport(trainer.nodes, engines.nodes)
    return Workers(trainer, engines, transport)
