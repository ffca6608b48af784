"""Row 7: bytes/s of a weight sync / of a plain copy of the same tensors. CPU only.

    python bench/weight_sync.py [--model DIR] [--dtype float32] [--rounds 5] [--bucket-mib 64]

Two rows, one thread per process:

across processes   a real trainer rank and a receiver, two Ray actors: gathered, shared, checked, not loaded
in process         vLLM in the sending process: shared, checked, loaded and repacked by vLLM

Right before each sync, every tensor is copied into preallocated, touched memory for comparison. The trainer's tensors
are float32, so only --dtype float32 compares like with like; bfloat16 adds a cast. The second row also reports the time
from a real trainer rank to the first token of a real engine on new weights, and the difference of their log-probs.
Before each round all weights get a large random change. The default model is a random Qwen2 of the size of
SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import Result, Side, answer, report, requests
from torch import Tensor

from toolrl.check.preflight.scripted_engine import ScriptedEngine
from verl.rollout.engine import Sampling
from verl.rollout.pool import EnginePool
from verl.rollout.vllm_extension import WeightReceiver
from verl.single_controller.group import WorkerContext, WorkerView
from verl.single_controller.ray import Bundle, Cluster
from verl.trainer.policy import PackSettings, Policy
from verl.trainer.weight_sync import WeightSync
from verl.transfer.bucket import BucketHandle, BucketLayout, Receiver, plan
from verl.transfer.shared_memory import SharedMemory
from verl.workers.optim import OptimizerSettings
from verl.workers.rank import RankSpec, TrainingRank, build_rank

MAX_MODEL_LEN = 512
PROMPT = tuple(range(100, 132))
TOKENS = 8  # for the log-prob comparison
ACROSS, IN_PROCESS = 0.5, 0.25  # targets
MAX_GAP = {"float32": 1e-4, "bfloat16": 0.05}  # nats


def make_model(path: str) -> None:
    """A random Qwen2 with SmolLM2-135M's dimensions and a tied head."""
    from shapes import qwen2
    from transformers import Qwen2ForCausalLM

    Qwen2ForCausalLM(qwen2(576, 1536, 30, 9, 3, 49152, max_position_embeddings=2048)).save_pretrained(path)


class Sink(ScriptedEngine):
    """An engine that receives weights and ignores them."""

    def __init__(self, seat: WorkerContext) -> None:
        super().__init__(lambda prompt_ids, index: ())
        torch.set_num_threads(1)
        self._receiver = Receiver(torch.device("cpu"))

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        self._receiver.begin(layouts)

    async def load_bucket(self, layout: BucketLayout, *handles: BucketHandle) -> None:
        self._receiver.receive(layout, handles)

    async def end_weights(self, version: int) -> None:
        self._receiver.end()


async def start_vllm(path: str, dtype: str, seat: WorkerContext) -> Any:
    from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings

    return await VLLMEngine.start(VLLMSettings(path, MAX_MODEL_LEN, dtype, kv_cache_gib=1))


def change(rank: TrainingRank, seed: int) -> None:
    """Add noise with a tenth of each tensor's standard deviation."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in rank.policy.engine.module.parameters():
            local = parameter.to_local()
            local.add_(0.1 * local.std() * torch.randn_like(local))


def copy_s(tensors: Sequence[Tensor], rounds: int) -> float:
    """Seconds for copying all tensors into preallocated, touched memory."""
    places = [torch.zeros_like(tensor) for tensor in tensors]

    def once() -> float:
        started = time.perf_counter()
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        return time.perf_counter() - started

    return statistics.median(once() for _ in range(rounds))


def copy_of_rank_s(rank: TrainingRank, dtype: torch.dtype, rounds: int) -> float:
    weights = (parameter.to_local().detach() for parameter in rank.policy.engine.module.parameters())
    return copy_s([weight.to(dtype) for weight in weights], rounds)


async def across(arguments: argparse.Namespace, with_vllm: bool) -> dict[str, float]:
    """Weight sync between Ray actors."""
    dtype = getattr(torch, arguments.dtype)
    spec = RankSpec(arguments.model, torch.float32, 1.0, OptimizerSettings())
    with Cluster.start(2) as cluster:
        trainer = cluster.group("trainer", partial(build_rank, spec), cluster.pool([Bundle()]), Bundle())
        make = partial(start_vllm, arguments.model, arguments.dtype) if with_vllm else Sink
        engine = EnginePool(cluster.group("rollout", make, cluster.pool([Bundle()]), Bundle()), [[0]])
        policy = Policy(WorkerView(trainer, "policy"), PackSettings())
        layouts = policy.connect([SharedMemory], dtype, arguments.bucket_mib * 2**20)
        weight_sync = WeightSync(
            policy=policy,
            engine=engine,
            layouts=layouts,
            probes=[PROMPT],
            sampling=Sampling(TOKENS, 0.0),
            tolerance=1.0,
        )
        seconds, copies, answers = [], [], []
        for number in range(arguments.rounds + 1):  # the first warms up
            trainer.call(change, number)
            copies += trainer.call(copy_of_rank_s, dtype, 3)
            started = time.perf_counter()
            await weight_sync.push(number)
            seconds.append(time.perf_counter() - started)
            if with_vllm:
                await engine.generate(PROMPT, Sampling(1))
                answers.append(time.perf_counter() - started)
        found = figures(layouts, seconds[1:], copies[1:])
        if with_vllm:
            found["first_token_s"] = statistics.median(answers[1:])
            found["logprob_gap"] = await weight_sync.sync(arguments.rounds)
            await engine.close()
        return found


def in_process(arguments: argparse.Namespace) -> dict[str, float]:
    """Weight sync to vLLM in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    from vllm import LLM

    from verl.workers.model import load_causal_lm

    llm = LLM(
        arguments.model,
        skip_tokenizer_init=True,
        dtype=arguments.dtype,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        worker_extension_cls=f"{WeightReceiver.__module__}.{WeightReceiver.__qualname__}",
    )
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    named = list(load_causal_lm(arguments.model, dtype).named_parameters(remove_duplicate=False))
    weights = {name: weight.detach() for name, weight in named}
    layouts, sender = plan(named, dtype, arguments.bucket_mib * 2**20), SharedMemory()

    def sync() -> float:
        started = time.perf_counter()
        llm.collective_rpc(WeightReceiver.begin_weights.__name__, args=(pickle.dumps(layouts),))
        for layout in layouts:
            flat = sender.buffer(layout)
            for piece, view in layout.unpack(flat):
                view.copy_(weights[piece.names[0]])
            bucket = pickle.dumps((layout, [sender.send(layout, flat)]))
            llm.collective_rpc(WeightReceiver.load_bucket.__name__, args=(bucket,))
        assert llm.collective_rpc(WeightReceiver.end_weights.__name__) == [[]]
        return time.perf_counter() - started

    distinct = list({weight.data_ptr(): weight for weight in weights.values()}.values())
    seconds, copies = [], []
    for _ in range(arguments.rounds + 1):
        copies.append(copy_s(distinct, 3))
        seconds.append(sync())
    return figures(layouts, seconds[1:], copies[1:])


def figures(layouts: Sequence[BucketLayout], seconds: Sequence[float], copies: Sequence[float]) -> dict[str, float]:
    """Medians over the rounds."""
    size = sum(layout.num_bytes for layout in layouts)
    return {
        "ratio": statistics.median(copy / sync for copy, sync in zip(copies, seconds, strict=True)),
        "GB/s": size / statistics.median(seconds) / 1e9,
        "copy GB/s": size / statistics.median(copies) / 1e9,
        "s": statistics.median(seconds),
    }


def in_process_elsewhere(arguments: argparse.Namespace) -> dict[str, float]:
    """The same in a separate process, because vLLM configures its whole process."""
    options = [f"--{name}={getattr(arguments, name)}" for name in ("model", "dtype", "rounds")]
    command = [sys.executable, __file__, "--side", f"--bucket-mib={arguments.bucket_mib}", *options]
    with Side(command) as side:
        row: dict[str, float] = side.ask()
    return row


def row(name: str, found: dict[str, float], target: float, **more: Any) -> Result:
    """One row of the scoreboard."""
    ours = {"GB/s": found["GB/s"], "s": found["s"], **more.pop("ours", {})}
    return Result(7, f"weight sync / copy, {name}", found["ratio"], target, ours, {"GB/s": found["copy GB/s"]}, **more)


def measure(arguments: argparse.Namespace) -> None:
    """All rows."""
    size = f"{arguments.dtype}, buckets of {arguments.bucket_mib} MiB"
    report(row(f"across processes before repack, {size}", asyncio.run(across(arguments, with_vllm=False)), ACROSS))
    loaded = in_process_elsewhere(arguments)
    engine = asyncio.run(across(arguments, with_vllm=True))
    gap = {"log-prob gap to the engine": (engine["logprob_gap"], MAX_GAP[arguments.dtype])}
    report(
        row(
            f"in process with repack, {size}",
            loaded,
            IN_PROCESS,
            ours={"to another engine s": engine["s"], "until its first token s": engine["first_token_s"]},
            limits=gap,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, e.g. SmolLM2-135M; default: a random Qwen2 of its size")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="of the engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        next(requests())
        answer(in_process(arguments))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        if arguments.model is None:
            arguments.model = folder
            make_model(folder)
        measure(arguments)


if __name__ == "__main__":
    main()
