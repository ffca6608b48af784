"""How long a checkpoint keeps a rank from training: until all is on disk, or until it is copied to memory.

    python bench/checkpoint.py MODEL [--ranks 1] [--folder FOLDER]

Every rank trains the model's weights in float32 with AdamW, so a checkpoint holds 12 bytes a parameter and the exported
model of 2. Copies are made and then written while nothing else runs, so that both times can be added. Hashes and
the rename, which are the controller's in the background too, belong to the write.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from verl.checkpoint.checkpoint import CheckpointStore
from verl.single_controller.group import WorkerContext
from verl.workers.optim import OptimizerSettings
from verl.workers.rank import RankSpec, TrainingRank, build_rank

REPEATS = 3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def step(rank: TrainingRank) -> None:
    """Fills the optimizer's state, as a step would."""
    engine = rank.policy.engine
    for each in engine.module.parameters():
        each.grad = torch.zeros_like(each)
    engine._optimizer.step()
    engine._optimizer.zero_grad(set_to_none=True)


def measure(number: int, world: int, port: int, model: str, folder: Path) -> None:
    spec = RankSpec(model, torch.bfloat16, 1.0, OptimizerSettings(lr=0.0))
    rank = build_rank(spec, WorkerContext(number, world, port=port))
    step(rank)
    barrier = torch.distributed.barrier
    store = CheckpointStore(folder / "checkpoints", 1, 0) if number == 0 else None
    for repeat in range(1, REPEATS + 1):
        times = []
        for staged in (False, True):
            barrier()
            target, began = folder / f"{repeat}-{staged}", time.perf_counter()
            if not staged:
                rank.save(target)
                barrier()
                in_loop = time.perf_counter() - began
            else:
                rank.stage(target)
                barrier()
                in_loop = time.perf_counter() - began
                rank.write()
            barrier()
            if store is not None:
                with store.writing(repeat) as unfinished:
                    target.rename(unfinished.folder / "ranks")
                    unfinished.write_state({})
            times += [in_loop, time.perf_counter() - began]
            barrier()
        if number == 0:
            _, whole, copied, background = times
            size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()) / 2**20
            print(
                f"| {repeat} | {size:,.0f} | {whole:.2f} | {copied:.2f} | {copied / whole:.3f} | {background:.2f} |",
                flush=True,
            )
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary one")
    arguments = parser.parse_args()
    print("| repeat | MiB | at once, s | in the loop, s | share | copy and write, s |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        run = partial(measure, world=arguments.ranks, port=free_port(), model=arguments.model, folder=Path(name))
        mp.spawn(_call, (run,), arguments.ranks)


def _call(number: int, run: partial[None]) -> None:
    run(number)


if __name__ == "__main__":
    main()
