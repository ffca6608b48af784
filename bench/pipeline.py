"""Row 14: wall time of a step, synchronous (max_staleness=0) / asynchronous rollouts.

    python bench/pipeline.py [--rounds 3] [--steps 4] [--token-ms 4] [--tool-ms 130]

The loop is the real one: PPOTrainer, RolloutManager with its slots, an EnginePool over two engines and a trainer rank,
each a Ray actor, weight sync with checks through shared memory during generation, episodes of three tool calls and an
answer. The policy is tiny and really trained. Only time is simulated:

- an engine generates a token of each response every --token-ms and decodes at most half of a step's episodes at once,
  others are queued; prefill is free, and a response interrupted by a weight sync is continued
  (`on_weight_sync=continue`);
- an update takes as long as the mean episode (it sleeps for the remaining time): rollout and training cost the same;
- a tool sleeps in the controller: always for the mean (no tails), or for a lognormal time with that mean, sigma 1,
  equal for the same call of the same episode on all sides.

Results are means over --steps steps, after the steps in which the lookahead grows. Every step must train the same
number of samples, and no token may come from weights older than max_staleness allows.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from async_tools import ANSWER, CALL, MINI, SlowTool
from common import Result, console, medians, report
from local import PLAIN_GRPO, join_alone, worker_of
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from toolrl.check.preflight.scripted_engine import ScriptedEngine
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.config.schema import ActorConfig, Config, DataConfig, RolloutConfig, TrainerConfig
from verl.data.tasks import TaskStream
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RolloutManager
from verl.formats.base import build_tool_call_format
from verl.rollout.engine import Sampling
from verl.rollout.pool import EnginePool, OnWeightSync
from verl.scoring.pool import DirectScorer
from verl.single_controller.group import WorkerContext, WorkerGroup
from verl.single_controller.ray import Bundle, Cluster
from verl.trainer.learner import Learner
from verl.trainer.policy import PackSettings, Policy
from verl.trainer.ppo import PPOTrainer
from verl.trainer.weight_sync import WeightSync
from verl.transfer.bucket import BucketHandle, BucketLayout, Receiver
from verl.transfer.shared_memory import SharedMemory
from verl.types import Completion, FinishReason, Message, Score, Task, Trajectory, TrajectoryGroup
from verl.workers.attention import PACKED, register
from verl.workers.fsdp_engine import FSDPEngine, Packs, UpdateResult
from verl.workers.policy_worker import PolicyWorker

PROMPTS, RESPONSES, CALLS, ENGINES = 8, 4, 3, 2
SAMPLES = PROMPTS * RESPONSES
THOUGHT = "so " * 15  # long enough for responses to be interrupted
TARGETS = {(False, 1): 1.5, (True, 1): 1.5, (True, 4): 2.0}  # (whether tools have tails, max_staleness)


@dataclass(frozen=True)
class Pace:
    """The simulated times."""

    token_s: float
    tool_s: float  # mean per call
    update_s: float  # the duration of the mean episode


@dataclass(frozen=True)
class Script:
    """The scripted policy: CALLS calls, then an answer."""

    call: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Response tokens per episode."""
        return CALLS * len(self.call) + len(self.answer)

    def __call__(self, prompt_ids: Sequence[int], number: int) -> tuple[int, ...]:
        """The rest of an interrupted response at the end of the prompt, or the next response."""
        ids, size = tuple(prompt_ids), len(self.call)
        calls = sum(ids[at : at + size] == self.call for at, first in enumerate(ids) if first == self.call[0])
        response = self.call if calls < CALLS else self.answer
        return response[max(done for done in range(len(response)) if ids[len(ids) - done :] == response[:done]) :]


class PacedEngine(ScriptedEngine):
    """Generates a token per response every `token_s`, with limited slots; receives weights only to check them."""

    def __init__(self, script: Script, token_s: float, places: int) -> None:
        super().__init__(script)
        self._token_s, self._places = token_s, asyncio.Semaphore(places)
        self._interruption = asyncio.Event()  # the next one
        self._receiver = Receiver(torch.device("cpu"))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        interruption = self._interruption
        (whole,) = await super().generate(prompt_ids, sampling)
        async with self._places:
            started = time.perf_counter()
            with suppress(TimeoutError):
                await asyncio.wait_for(interruption.wait(), len(whole.token_ids) * self._token_s)
                written = int((time.perf_counter() - started) / self._token_s)
                return (broken_off(whole, min(written, len(whole.token_ids) - 1)),)
        return (whole,)

    async def interrupt(self) -> None:
        self._interruption.set()
        self._interruption = asyncio.Event()

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        self._receiver.begin(layouts)

    async def load_bucket(self, layout: BucketLayout, *handles: BucketHandle) -> None:
        self._receiver.receive(layout, handles)


def broken_off(whole: Completion, written: int) -> Completion:
    """The completion, interrupted after `written` tokens."""
    kept = {"token_ids": whole.token_ids[:written], "logprobs": whole.logprobs[:written]}
    return replace(whole, finish_reason=FinishReason.ABORT, **kept)  # type: ignore[arg-type]


class PacedTraining:
    """A rank's engine with updates of `update_s`."""

    def __init__(self, engine: FSDPEngine, update_s: float) -> None:
        self._engine, self._update_s = engine, update_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update(self, packs: Packs, loss: Any) -> UpdateResult:
        """An update of the tiny policy, extended to the time of a larger one."""
        started = time.perf_counter()
        result = self._engine.update(packs, loss)
        time.sleep(max(0.0, self._update_s - (time.perf_counter() - started)))
        return result


def start_engine(script: Script, pace: Pace, seat: WorkerContext) -> PacedEngine:
    """Build an engine in its process."""
    return PacedEngine(script, pace.token_s, SAMPLES // seat.size)


def start_rank(vocabulary: int, pace: Pace, seat: WorkerContext) -> PolicyWorker:
    """Build the trainer rank in its process."""
    join_alone()
    register()
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocabulary, **shape)
    worker = worker_of(AutoModelForCausalLM.from_config(config, attn_implementation=PACKED), torch.float32)
    worker.engine = PacedTraining(worker.engine, pace.update_s)  # type: ignore[assignment]
    return worker


class Tools:
    """Environments with slow calls; latencies are equal for the nth episode of a task on all sides."""

    def __init__(self, mean_s: float, tails: bool, seed: int) -> None:
        self._mean_s, self._tails, self._seed = mean_s, tails, seed
        self._made: Counter[str] = Counter()
        self._places = asyncio.Semaphore(2**20)

    def __call__(self, task: Task) -> SlowTool:
        self._made[task.id] += 1
        draw = random.Random(f"{self._seed} {task.id} {self._made[task.id]}")
        mu = math.log(self._mean_s) - 0.5
        drawn = (draw.lognormvariate(mu, 1.0) if self._tails else self._mean_s for _ in range(CALLS))
        return SlowTool(tuple(drawn), self._places)

    async def close(self) -> None:
        """No-op: no shared resources."""


class EveryOther:
    """A reward with nonzero advantages in every group."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(float(trajectory.index % 2), {})


@dataclass(frozen=True)
class Processes:
    """The actors, shared by all sides in turn."""

    engines: WorkerGroup
    policy: Policy
    layouts: Sequence[BucketLayout]
    chat: ChatTemplate
    pace: Pace

    def trainer(self, staleness: int, tails: bool, seed: int, num_prompts: int) -> PPOTrainer:
        """A run before its first step."""
        on_weight_sync = OnWeightSync.CONTINUE if staleness else None
        pool = EnginePool(self.engines, [[0]] * ENGINES, on_weight_sync, self.chat.tokenizer.decode)
        observations = ObservationTokenizer(
            self.chat, build_tool_call_format("search_r1", {"prompt_template": None}), max_observation_tokens=64
        )
        setting = EpisodeRunner(Tools(self.pace.tool_s, tails, seed), observations, EpisodeLimits(CALLS + 1, CALLS + 1))
        rollout = GroupRollout(pool, DirectScorer(EveryOther()), Sampling(1024), setting)
        tasks = [Task(str(number), (Message("user", "?"),), "a", "bench") for number in range(num_prompts)]
        config = Config(
            data=DataConfig(train_batch_size=PROMPTS),
            actor=ActorConfig(ppo_mini_batch_size=PROMPTS),
            rollout=RolloutConfig(name="hf", n=RESPONSES, max_staleness=staleness),  # with seeds
            trainer=TrainerConfig(seed=seed),
        )
        rollouts = RolloutManager(config, PLAIN_GRPO, TaskStream([tasks], seed=seed), rollout)
        probes, probe_sampling = [self.chat.prompt_ids(tasks[0].prompt)], Sampling(4)
        # The script has no real log-probs: the canary runs, with an infinite tolerance.
        weight_sync = WeightSync(
            policy=self.policy,
            engine=pool,
            layouts=self.layouts,
            probes=probes,
            sampling=probe_sampling,
            tolerance=math.inf,
        )
        learner = Learner(config=config, algorithm=PLAIN_GRPO, policy=self.policy)
        return PPOTrainer(rollouts=rollouts, learner=learner, weight_sync=weight_sync)

    def measure(self, staleness: int, tails: bool, seed: int, steps: int) -> dict[str, float]:
        """Seconds per step and phase, and the staleness of the oldest token in versions."""
        unmeasured = max(1, staleness * (staleness + 2))  # the lookahead may grow until then
        trainer = self.trainer(staleness, tails, seed, PROMPTS * (unmeasured + steps + staleness + 1))
        return asyncio.run(run(trainer, unmeasured, steps))


async def run(trainer: PPOTrainer, unmeasured: int, steps: int) -> dict[str, float]:
    """Means over the measured steps; the maximum staleness."""
    await trainer.weight_sync.sync(0)
    measured: list[dict[str, float]] = []
    lag = 0
    try:
        for _ in range(unmeasured + steps):
            started = time.perf_counter()
            result = await trainer.train_step()
            metrics = result.metrics
            phases = {f"{name} s": metrics[f"time/{name}_s"] for name in ("rollout", "update", "weight_sync")}
            measured.append({"step s": time.perf_counter() - started, **phases})
            num_trained = metrics["actor/computed_share"] * sum(len(each.trajectories) for each in result.groups)
            assert num_trained == SAMPLES, f"a step trained {num_trained} samples instead of {SAMPLES}"
            lag = max(lag, trainer.step - 1 - oldest_version(result.groups))
    finally:
        await trainer.rollouts.close()
        await trainer.weight_sync.engine.interrupt()
    return {name: statistics.mean(each[name] for each in measured[unmeasured:]) for name in measured[0]} | {
        "versions": lag
    }


def oldest_version(groups: Sequence[TrajectoryGroup]) -> int:
    """The oldest weight version in the groups' tokens."""
    turns = (turn for group in groups for each in group.trajectories for turn in each.turns)
    return min(version for turn in turns for version in turn.completion.versions)


def with_processes(token_s: float, tool_s: float, work: Callable[[Processes], None]) -> None:
    """Start the actors, run `work` with them, and stop them."""
    chat = ChatTemplate(AutoTokenizer.from_pretrained(MINI / "tokenizer"))
    responses = [f"<think> {THOUGHT}</think> {text}" for text in (CALL, ANSWER)]
    script = Script(*(tuple(chat.response_ids(text)[0]) for text in responses))
    pace = Pace(token_s, tool_s, script.num_tokens * token_s + CALLS * tool_s)
    with Cluster.start(1 + ENGINES, {"OMP_NUM_THREADS": "1"}) as cluster:
        one = Bundle()
        places = cluster.pool([one] * (1 + ENGINES))
        rank = cluster.group("trainer", partial(start_rank, len(chat.tokenizer), pace), places, one, [0])
        engines = cluster.group("rollout", partial(start_engine, script, pace), places, one, range(1, 1 + ENGINES))
        policy = Policy(rank, PackSettings())
        layouts = policy.connect([SharedMemory], torch.float32, 2**20)
        work(Processes(engines, policy, layouts, chat, pace))
        engines.close()
        rank.close()


def compared(figures: Mapping[tuple[bool, int], Sequence[Mapping[str, float]]], pace: Pace) -> None:
    """A row for each asynchronous side against the synchronous one."""
    for (tails, staleness), target in TARGETS.items():
        ours, theirs = figures[tails, staleness], figures[tails, 0]
        ratios = [one["step s"] / other["step s"] for one, other in zip(theirs, ours, strict=True)]
        tools = "tools lognormal, sigma 1" if tails else "tools without tails"
        report(
            Result(
                row=14,
                name=f"a step, max_staleness=0 / {staleness}, {SAMPLES} episodes of {CALLS} calls, {tools}",
                ratio=statistics.median(ratios),
                target=target,
                ours=medians(ours),
                theirs=medians(theirs),
                limits={"versions behind": (max(each["versions"] for each in ours), float(staleness))},
                note=f"simulated: time of decoding, of tools, of an update, {pace.update_s:.3g} s as the mean episode",
            )
        )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs per side")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per run")
    parser.add_argument("--token-ms", type=float, default=4.0)
    parser.add_argument("--tool-ms", type=float, default=130.0)
    arguments = parser.parse_args()

    def measured(processes: Processes) -> None:
        sides = [(False, 0), (False, 1), (True, 0), (True, 1), (True, 4)]
        figures: dict[tuple[bool, int], list[dict[str, float]]] = {side: [] for side in sides}
        for seed in range(arguments.rounds):
            for tails, staleness in sides:
                figure = processes.measure(staleness, tails, seed, arguments.steps)
                figures[tails, staleness].append(figure)
                console.print(f"round {seed + 1}, max_staleness={staleness}, tails {tails}: {figure['step s']:.3g} s")
        compared(figures, processes.pace)

    with_processes(arguments.token_ms / 1000, arguments.tool_ms / 1000, measured)


if __name__ == "__main__":
    main()
