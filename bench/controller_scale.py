"""Row 16: CPU microseconds of the controller's thread per sample, lower is better.

    python bench/controller_scale.py [--sizes 512x4,2048x8,8192x16] [--ranks 8,512] [--tokens 900,250] [--rounds 3]

From collected groups to the last submit to the ranks, on the trainer's own classes: samples, batch, advantages,
assignment to ranks, slices, pickling. GRPO with the KL penalty in the loss, so that the step scores the batch with a
reference and updates on it. Only the receiving end is simulated: ranks return scores of the right shape at no cost.
Memory is the growth of the process until the last submit, per token and column, beside the groups themselves. Each size
runs in a process of its own. There is no second side: the figure has a limit, and must be linear in samples. A rank
costs something, too, which shows where it gets a few samples only.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from common import Result, Side, answer, report, requests

from verl.algorithms.estimators.grpo import GRPO
from verl.batch.packing import Shard
from verl.batch.samples import to_batch
from verl.config.schema import Config, DataConfig
from verl.trainer.learner import Learner
from verl.trainer.policy import PackSettings, Policy
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from verl.workers.fsdp_engine import UpdateResult
from verl.workers.policy_worker import PolicyWorker

MAX_MICROSECONDS, MAX_BYTES, MAX_GROWTH = 40.0, 6.0, 1.25
VOCABULARY = 32_000
COLUMNS = ("token_ids", "action_mask", "rollout_logprobs", "rewards", "ref_logprobs", "advantages", "loss_weights")


@dataclass
class Clock:
    """CPU seconds of this thread until the last submit, without the simulation, and the peak memory."""

    started: float = 0.0
    simulated: float = 0.0
    until_submit: float = 0.0
    peak_bytes: int = 0

    def start(self) -> None:
        """Collect garbage, and start."""
        gc.collect()
        self.started, self.simulated = time.thread_time(), 0.0

    def submitted(self) -> None:
        """A rank has its share."""
        now = time.thread_time()
        self.until_submit = now - self.started - self.simulated
        self.peak_bytes = max(self.peak_bytes, psutil.Process().memory_info().rss)
        self.simulated += time.thread_time() - now


@dataclass(frozen=True)
class SimulatedRanks:
    """A worker group whose ranks only receive: arguments are pickled as for a real one."""

    size: int
    clock: Clock
    store: npt.NDArray[np.uint8]  # as Ray's object store, memory that is used again

    def scatter(self, function: Callable[..., Any], shards: Iterable[Shard], *args: Any) -> list[Any]:
        """Pickle the call, and every rank's shard with it, as `RayGroup` does."""
        call = pickle.dumps((function, args))
        return [self._submit(function, shard, call) for shard in shards]

    def _submit(self, function: Callable[..., Any], shard: Shard, call: bytes) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        pickle.dumps((shard, call), protocol=5, buffer_callback=buffers.append)
        for buffer in buffers:
            array_of_bytes = np.frombuffer(buffer, np.uint8)
            self.store[: len(array_of_bytes)] = array_of_bytes
        self.clock.submitted()
        started = time.thread_time()
        try:
            if function is PolicyWorker.score:
                return np.full(int(shard.batch.num_trained.sum()), -1.0, dtype=np.float32)
            return UpdateResult(loss=0.0, grad_norm=0.0, lr=0.0, metrics={})
        finally:
            self.clock.simulated += time.thread_time() - started


def groups_of(prompts: int, n: int, prompt: int, response: int) -> list[TrajectoryGroup]:
    """Groups as the rollouts return them: random tokens, `response` of them on average, and random rewards."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(response // 2, response + response // 2, size=(prompts, n))
    return [_group(draw, number, prompt, lengths[number].tolist()) for number in range(prompts)]


def _group(draw: np.random.Generator, number: int, prompt: int, lengths: list[int]) -> TrajectoryGroup:
    task = Task(f"t{number}", (), "", "simulated")
    prompt_ids = array("i", draw.integers(VOCABULARY, size=prompt, dtype=np.int32).tobytes())
    message = Message("assistant", "")
    trajectories = []
    for index, length in enumerate(lengths):
        token_ids = array("i", draw.integers(VOCABULARY, size=length, dtype=np.int32).tobytes())
        logprobs = array("f", (-draw.random(length, dtype=np.float32)).tobytes())
        turns = (Turn(prompt_ids, Completion(token_ids, logprobs, FinishReason.STOP, 0), message),)
        trajectories.append(Trajectory(task, index, turns, StopReason.STOP, Outcome.SCORED))
    rewards = tuple(draw.random(len(lengths)).tolist())
    return TrajectoryGroup(task, tuple(trajectories), tuple(Score(each, {}) for each in rewards), rewards)


def measure(prompts: int, n: int, ranks: int, prompt: int, response: int, rounds: int) -> dict[str, float]:
    """In this process: microseconds per sample, and bytes per token and column."""
    torch.set_num_threads(1)
    groups, clock = groups_of(prompts, n, prompt, response), Clock()
    num_tokens = sum(
        prompt + len(each.turns[0].completion.token_ids) for group in groups for each in group.trajectories
    )
    size = max(4 * num_tokens, 1 << 20)  # at least for the small arrays of a shard, which share a buffer
    store = np.ones(size, dtype=np.uint8)  # written once: its pages exist
    policy, reference = (Policy(SimulatedRanks(ranks, clock, store), PackSettings()) for _ in range(2))
    learner = Learner(
        config=Config(data=DataConfig(train_batch_size=1)), algorithm=GRPO, policy=policy, reference=reference
    )
    found = []
    for _ in range(rounds + 1):
        before = psutil.Process().memory_info().rss
        clock.start()
        clock.peak_bytes = 0
        learner.learn(to_batch(groups), 0)
        found.append(
            {
                "us/sample": 1e6 * clock.until_submit / (prompts * n),
                "bytes/token/column": (clock.peak_bytes - before) / (num_tokens * len(COLUMNS)),
            }
        )
    fastest = min(found[1:], key=lambda each: each["us/sample"])  # other work on the machine only adds
    return {**fastest, "bytes/token/column": found[0]["bytes/token/column"]}


def measured(*arguments: int) -> dict[str, float]:
    """The same in a process of its own."""
    with Side([sys.executable, __file__, "--measure", json.dumps(arguments)]) as side:
        found: dict[str, float] = side.ask()
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="512x4,2048x8,8192x16", help="prompts x responses")
    parser.add_argument("--ranks", default="8,512")
    parser.add_argument("--tokens", default="900,250", help="prompt, mean response")
    parser.add_argument("--rounds", type=int, default=3, help="after one warm-up step, in which memory is measured")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # in its own process
    arguments = parser.parse_args()
    if arguments.measure:
        next(requests())
        answer(measure(*json.loads(arguments.measure)))
        return
    prompt, response = map(int, arguments.tokens.split(","))
    sizes = [tuple(map(int, size.split("x"))) for size in arguments.sizes.split(",")]
    found: dict[tuple[int, ...], dict[str, float]] = {}
    for prompts, n in sizes:
        for ranks in map(int, arguments.ranks.split(",")):
            found[prompts, n, ranks] = measured(prompts, n, ranks, prompt, response, arguments.rounds)
    report(result_of(found, f"{prompt} + {response} tokens"))


def result_of(found: dict[tuple[int, ...], dict[str, float]], tokens: str) -> Result:
    """The row: the largest size, with the most ranks, against the limit; more samples must not cost more each."""
    times = {size: each["us/sample"] for size, each in found.items()}
    sizes = list(found)
    last, few_ranks = sizes[-1], sizes[0][-1]
    alike = [time for size, time in times.items() if size[-1] == few_ranks]
    return Result(
        row=16,
        name=f"the controller's CPU microseconds per sample, {tokens}, {named(last)}",
        ratio=times[last],
        target=MAX_MICROSECONDS,
        ours={f"{named(size)}: us": time for size, time in times.items()},
        theirs={},
        lower_is_better=True,
        limits={
            "bytes per token and column": (max(each["bytes/token/column"] for each in found.values()), MAX_BYTES),
            f"largest / smallest size on {few_ranks} ranks": (alike[-1] / alike[0], MAX_GROWTH),
        },
    )


def named(size: tuple[int, ...]) -> str:
    """A size as text."""
    prompts, n, ranks = size
    return f"{prompts} x {n} on {ranks} ranks"


if __name__ == "__main__":
    main()
