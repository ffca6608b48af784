"""Stand-ins for processes: ranks whose weights are a digest, engines that write tokens of it, and their transport.

The first tokens of every response are its draw and its index in the group, so that ranks know what they train.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from tests.simulation.world import World, WorldLoop
from verl.batch.packing import Shard
from verl.batch.token_batch import Floats, TokenBatch
from verl.errors import EngineError
from verl.rollout.engine import Sampling, each_of
from verl.single_controller.group import WorkerError, WorkerLostError, task_name
from verl.single_controller.process_watch import StopWatch
from verl.tracking.metric import Mean
from verl.transfer.bucket import NUM_SLOTS, BucketLayout, TensorSlice
from verl.types import Completion, FinishReason
from verl.workers.fsdp_engine import UpdateResult

VOCABULARY = 4096
END = 0
DRAWS, INDICES, TEXTS = 2048, 1024, 64  # first token of each kind, all of which follow one another
SEEDS_BETWEEN_PIECES = 1_000_033
SEEDS_BETWEEN_TURNS = 1_000_003_007
TOKEN_S = 0.1
NUM_BUCKETS = NUM_SLOTS + 1  # one waits for a slot


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def logprobs(weights: int, token_ids: Sequence[int]) -> Floats:
    """Of each token under these weights: stale ones show."""
    ids = np.asarray(token_ids, dtype=np.int64)
    values: Floats = (-0.5 - ((ids * 2654435761 + weights) % 1009) / 1009).astype(np.float32)
    return values


@dataclass(eq=False)
class Process:
    """What can happen to one. reason: why the health watch has killed it"""

    name: str
    pid: int
    world: World
    alive: bool = True
    stopped_until: float = 0.0
    reason: str = ""

    @property
    def stopped(self) -> bool:
        """By the time, not by an event, which would be late after a pause of the controller."""
        return self.alive and self.world.now < self.stopped_until

    @property
    def status(self) -> str:
        return str(psutil.STATUS_STOPPED if self.stopped else psutil.STATUS_RUNNING)

    def die(self) -> None:
        self.alive = False

    def stop(self, seconds: float) -> None:
        self.stopped_until = self.world.now + seconds

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Not while the process is stopped, and not once it is dead."""

        def when_due() -> None:
            if self.stopped:
                self.world.after(0.5, when_due)
            elif self.alive:
                action()

        self.world.after(seconds, when_due)


@dataclass(eq=False)
class Call:
    """A call of a worker on its way, being computed, or answered."""

    task: str
    answered: Callable[[Any, Exception | None], object]
    done: bool = False

    def end(self, value: Any, error: Exception | None = None) -> None:
        if not self.done:
            self.done = True
            self.answered(value, error)


class Group:
    """A worker group of processes in the world: calls take time, and fail as Ray's do."""

    def __init__(
        self, world: World, name: str, size: int, make: Callable[[int, Process], Any], timeouts_s: tuple[float, float]
    ) -> None:
        """make: the worker of a rank; timeouts_s: of a call, and of a stopped process"""
        self.world, self.name, self.size = world, name, size
        self.finished_calls = 0
        self._make, (self._timeout_s, health_s) = make, timeouts_s
        self._watch = StopWatch(health_s, lambda: world.now)
        self._next_pid = 1000 if name == "trainer" else 2000
        self.processes = [self._process(rank) for rank in range(size)]
        self.workers = [make(rank, process) for rank, process in enumerate(self.processes)]
        self.pending: list[dict[Call, None]] = [{} for _ in range(size)]  # in order
        self._watching = False
        self.slow_until, self.slow_s = -1.0, 0.0  # how long answers take more, and until when
        self.twice = 0  # requests that will arrive twice

    def _process(self, rank: int) -> Process:
        self._next_pid += 1
        return Process(f"{self.name} rank {rank} of {self.size}", self._next_pid, self.world)

    # What may happen to a worker.

    def kill(self, rank: int) -> None:
        process = self.processes[rank]
        self.world.after(self.world.delay(0.0, 5.0), lambda: self._report(rank, process))
        process.die()

    def stop(self, rank: int, seconds: float) -> None:
        self.processes[rank].stop(seconds)
        if not self._watching:
            self._watching = True
            self._look()

    def cut(self, rank: int) -> None:
        """The connection: the process lives, but calls in flight fail."""
        self._fail_pending(rank, "died")

    def _look(self) -> None:
        """Once a second, as long as a process is stopped: RayGroup's own watch."""
        states = {(rank, process.pid): process.status for rank, process in enumerate(self.processes) if process.alive}
        for rank, _ in self._watch.lost(states):
            self.processes[rank].reason = self._watch.reason
            self.world.note(f"{self.name} {rank} is killed: it was stopped")
            self.kill(rank)
        self._watching = any(process.stopped for process in self.processes)
        if self._watching:
            self.world.after(1.0, self._look)

    def _report(self, rank: int, process: Process) -> None:
        if self.processes[rank] is process:
            self._fail_pending(rank, process.reason or "died")

    def _fail_pending(self, rank: int, how: str) -> None:
        pending, self.pending[rank] = self.pending[rank], {}
        for call in pending:
            call.end(None, self._lost(rank, how, call.task))

    def _lost(self, rank: int, how: str, task: str) -> WorkerLostError:
        process = self.processes[rank]
        return WorkerLostError(f"{process.name} (process {process.pid} on node sim) {how} during {task}")

    # The interface of a worker group.

    def _start(
        self, rank: int, task: str, args: Sequence[Any], answered: Callable[[Any, Exception | None], object]
    ) -> None:
        call, process, worker, world = Call(task, answered), self.processes[rank], self.workers[rank], self.world
        self.pending[rank][call] = None
        method = task.rpartition(".")[2]

        def answer(value: Any, error: Exception | None = None) -> None:
            def arrive() -> None:
                if self.processes[rank] is process:
                    self.pending[rank].pop(call, None)
                call.end(value, error)

            more = self.slow_s if world.now < self.slow_until else 0.0
            world.after(world.delay(0.0005, 0.002) + more, arrive)

        world.note(f"{self.name} {rank} gets {method}")
        for _ in range(2 if self.twice and method == "generate" else 1):
            process.later(world.delay(0.0005, 0.002), lambda: getattr(worker, method)(answer, *args))
        self.twice -= self.twice > 0
        if not process.alive:
            world.after(world.delay(0.0, 1.0), lambda: self._report(rank, process))

        def late() -> None:
            if not call.done:
                self.pending[rank].pop(call, None)
                problem = f"{self.name} rank {rank} did not finish {task} within {self._timeout_s:.0f} s"
                call.end(None, WorkerError(problem))

        if self._timeout_s < float("inf"):
            world.after(self._timeout_s, late)

    def _collected(self, task: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        """args: by rank"""
        if self.world.killed:
            return [None] * self.size
        results: dict[int, Any] = {}
        errors: list[Exception] = []

        def answered(rank: int) -> Callable[[Any, Exception | None], object]:
            def end(value: Any, error: Exception | None) -> None:
                results[rank] = value
                errors.extend([error] if error is not None else [])

            return end

        for rank, each in enumerate(args):
            self._start(rank, task, each, answered(rank))
        self.world.wait(lambda: len(results) == self.size or bool(errors))
        if errors:
            raise errors[0]
        self.finished_calls += 1
        return [results[rank] for rank in range(self.size)]

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._collected(task_name(function), [args] * self.size)

    def call_beside(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.call(function, *args)

    def scatter(self, function: Callable[..., Any], shards: Iterable[Any], *args: Any) -> list[Any]:
        every = list(shards)
        return self._collected(task_name(function), [(every, rank, *args) for rank in range(self.size)])

    def call_ref(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.call(function, *args)

    async def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        if self.world.killed:
            return None
        loop = asyncio.get_running_loop()
        if not isinstance(loop, WorldLoop):  # after the run, where engines are closed
            return None
        result: asyncio.Future[Any] = loop.create_future()

        def answered(value: Any, error: Exception | None) -> None:
            if not result.done() and not loop.is_closed():
                if error is not None:
                    loop.call_soon(lambda: result.done() or result.set_exception(error))
                else:
                    loop.call_soon(lambda: result.done() or result.set_result(value))

        self._start(rank, task_name(function), args, answered)
        return await result

    async def remake(self, rank: int) -> None:
        world, process = self.world, self._process(rank)
        self.processes[rank].die()
        self.processes[rank], self.pending[rank] = process, {}
        world.note(f"{self.name} {rank} is started again")
        await asyncio.sleep(world.delay(2.0, 10.0))
        if not process.alive or self.processes[rank] is not process:
            raise self._lost(rank, "died", "start")
        self.workers[rank] = self._make(rank, process)

    def close(self) -> None:
        """Processes end with their group."""
        for process in self.processes:
            process.die()


Answer = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Trained:
    """A sample of an update, read from its tokens."""

    draw: int
    index: int


@dataclass(eq=False)
class Ranks:
    """What all ranks have in common: they hold the same weights. A rank of its own is a place in a collective."""

    world: World
    weights: int
    updates: int = 0
    staged: tuple[Path, dict[str, Any]] = (Path(), {})  # of the checkpoint that is being written
    history: list[list[Trained]] = field(default_factory=list)  # of every update since the first
    waiting: dict[str, list[tuple[Rank, Answer]]] = field(default_factory=dict)

    def meet(self, task: str, rank: Rank, answer: Answer, work: Callable[[], list[Any]], longest: float = 0.3) -> None:
        """The results of `work`, by rank, once all ranks have come and have computed."""
        came = self.waiting.setdefault(task, [])
        came.append((rank, answer))
        if len(came) == rank.size:
            del self.waiting[task]
            results = work()
            for each, resume in came:
                each.process.later(self.world.delay(0.1, longest), partial(resume, results[each.rank]))


@dataclass(eq=False)
class Connection:
    """Between the first rank and an engine, for one weight sync. sent: weights that wait; ended: the engine's call"""

    rank: Process
    engine: Engine
    sent: list[int] = field(default_factory=list)
    loaded: int = 0
    is_open: bool = True
    ended: Callable[[], object] = lambda: None

    def hang_up(self) -> None:
        self.is_open = False
        self.ended()

    def watch(self) -> None:
        """The engine notices a dead rank."""
        if self.is_open and self.rank.alive:
            self.engine.process.later(1.0, self.watch)
        elif self.is_open:
            self.hang_up()


@dataclass(eq=False)
class Rank:
    """A trainer rank, by the names of the methods of `PolicyWorker` and `TrainingRank`."""

    shared: Ranks
    rank: int
    size: int
    process: Process

    def score(self, answer: Answer, shards: Sequence[Shard], rank: int) -> None:
        self._together("score", answer, lambda: [self._scored(shard) for shard in shards])

    def _scored(self, shard: Shard) -> Floats:
        batch = shard.batch
        return logprobs(self.shared.weights, batch.token_ids[batch.action_mask])

    def update(self, answer: Answer, shards: Sequence[Shard], rank: int, *_: object) -> None:
        def work() -> list[Any]:
            shared, before = self.shared, [self._scored(shard) for shard in shards]
            parts = [(each.batch.token_ids.tobytes(), _advantages(each.batch).tobytes()) for each in shards]
            shared.weights = digest(shared.weights, shared.updates, parts)
            del shared.history[shared.updates :]  # of a run that began anew
            shared.history.append([sample for shard in shards for sample in trained(shard)])
            shared.updates += 1
            loss = (shared.weights % 1000) / 1000
            metrics = {"actor/entropy": Mean(loss)}
            pending = [each.batch.advantages is None for each in shards]
            return [
                UpdateResult(loss=loss, grad_norm=loss, lr=1e-6, metrics=metrics, logprobs=known if waits else None)
                for known, waits in zip(before, pending, strict=True)
            ]

        self._together("update", answer, work)

    def connect(self, answer: Answer, *_: object) -> None:
        slices = [TensorSlice((f"w{number}",), (1,), 0) for number in range(NUM_BUCKETS)]
        answer([BucketLayout(number, torch.float32, (each,), 64) for number, each in enumerate(slices)])

    def begin_weight_sync(self, answer: Answer) -> None:
        answer(None if self.rank else self.process)

    def send_weights(self, answer: Answer, connections: Sequence[Sequence[Connection]], rank: int, _: int) -> None:
        self._send_from(0, connections[rank], answer)

    def _send_from(self, number: int, connections: Sequence[Connection], answer: Answer) -> None:
        """The buckets from this one on. Before each, and at the end, all engines that live have loaded others."""
        needed = number if number == NUM_BUCKETS else number - NUM_SLOTS + 1
        if any(each.engine.process.alive and each.loaded < needed for each in connections):
            self.process.later(0.01, lambda: self._send_from(number, connections, answer))
        elif number == NUM_BUCKETS:
            for each in connections:
                each.hang_up()
            answer(None)
        else:

            def gathered(weights: int) -> None:
                for each in connections:
                    each.engine.receive(each, weights)
                self._send_from(number + 1, connections, answer)

            self._together(f"bucket {number}", gathered, lambda: [self.shared.weights] * self.size)

    def end_weight_sync(self, answer: Answer) -> None:
        answer(None)

    def memory_gib(self, answer: Answer) -> None:
        answer(1.0)

    def checkpointed_layers(self, answer: Answer) -> None:
        answer(0)

    def stage(self, answer: Answer, folder: Path) -> None:
        def work() -> list[Any]:
            self.shared.staged = folder, {"weights": self.shared.weights, "updates": self.shared.updates}
            return [None] * self.size

        self._together("stage", answer, work)

    def write(self, answer: Answer) -> None:
        def work() -> list[Any]:
            folder, state = self.shared.staged
            for name in ("actor", "hf"):
                (folder / name).mkdir()
            (folder / "actor" / "state.json").write_text(json.dumps(state))
            (folder / "actor" / ".metadata").touch()
            (folder / "hf" / "config.json").write_text("{}")
            return [None] * self.size

        def failing() -> list[Any]:
            try:
                return work()
            except OSError as error:
                return [WorkerError(f"{self.process.name} failed in TrainingRank.write: {error}")] * self.size

        def written(value: Any) -> None:
            answer(None, value)

        self.shared.meet("write", self, written, failing, longest=30.0)  # as several steps

    def load(self, answer: Answer, folder: Path) -> None:
        def work() -> list[Any]:
            state = json.loads((folder / "actor" / "state.json").read_text())
            self.shared.weights, self.shared.updates = state["weights"], state["updates"]
            del self.shared.history[self.shared.updates :]
            return [None] * self.size

        self._together("load", answer, work)

    def _together(self, task: str, answer: Answer, work: Callable[[], list[Any]]) -> None:
        self.shared.meet(task, self, answer, work)


def trained(shard: Shard) -> list[Trained]:
    batch, found = shard.batch, []
    for low, high in zip(batch.bounds.tokens[:-1], batch.bounds.tokens[1:], strict=True):
        written = batch.token_ids[low:high][batch.action_mask[low:high]]
        found.append(Trained(int(written[0]) - DRAWS, int(written[1]) - INDICES))
    return found


@dataclass(eq=False)
class _Request:
    prompt: tuple[int, ...]
    sampling: Sampling
    answer: Answer
    began: float
    tokens: list[list[int]]  # of each response


@dataclass(eq=False)
class Engine:
    """A rollout engine, by the names of its methods."""

    world: World
    process: Process
    n: int  # rollouts of a prompt
    base_seed: int
    asked: list[tuple[int, int]]  # (draw, index) of every request that any engine has got
    weights: int = -1
    version: int = -1
    connection: Connection | None = None
    incoming: dict[int, int] | None = None
    running: list[_Request] = field(default_factory=list)
    written: int = 0

    def generate(self, answer: Answer, prompt: Sequence[int], sampling: Sampling) -> None:
        if self.incoming is not None:
            answer(None, EngineError("a request in a weight sync"))
            return
        tokens = [self._tokens(tuple(prompt), each) for each in each_of(sampling)]
        request = _Request(tuple(prompt), sampling, answer, self.world.now, tokens)
        self.running.append(request)
        seconds = TOKEN_S * max(map(len, tokens)) * self.world.delay(0.8, 1.2)
        self.process.later(seconds, lambda: self._finish(request))

    def _tokens(self, prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
        """A function of weights, prompt and seed. A first part begins with draw and index."""
        seed = sampling.seed
        greedy = sampling.temperature == 0 or seed is None
        source = random.Random(digest(self.weights, prompt, None if greedy else seed))
        length = min(sampling.max_tokens, source.randint(3, 8))
        tokens = [source.randrange(TEXTS) + 1 for _ in range(length)]
        if not greedy and seed is not None:
            offset = seed - self.base_seed
            pieces, offset = offset % SEEDS_BETWEEN_TURNS // SEEDS_BETWEEN_PIECES, offset % SEEDS_BETWEEN_TURNS
            number = offset % SEEDS_BETWEEN_PIECES
            if 0 <= offset < SEEDS_BETWEEN_TURNS and number < self.n * (INDICES - TEXTS):
                draw, index = divmod(number, self.n)
                self.asked.append((draw, index))
                if not pieces:
                    tokens = [DRAWS + draw, INDICES + index, *tokens][: sampling.max_tokens]
        if len(tokens) < sampling.max_tokens:
            tokens.append(END)
        return tokens

    def _finish(self, request: _Request) -> None:
        if request in self.running:
            self.running.remove(request)
            self._answer(request, request.tokens, None)

    def _answer(self, request: _Request, tokens: list[list[int]], reason: FinishReason | None) -> None:
        completions = []
        for each in tokens:
            why = reason or (FinishReason.STOP if each[-1] == END else FinishReason.LENGTH)
            values = array("f", logprobs(self.weights, each)) if each else array("f")
            completions.append(Completion(array("i", each), values, why, self.version))
            self.written += len(each)
        request.answer(tuple(completions))

    def interrupt(self, answer: Answer) -> None:
        running, self.running = self.running, []
        for request in running:
            so_far = int((self.world.now - request.began) / TOKEN_S)
            cut = [each[: max(0, min(so_far, len(each) - 1))] for each in request.tokens]
            self._answer(request, [_whole_head(each) for each in cut], FinishReason.ABORT)
        answer(None)

    def connect(self, answer: Answer, addresses: dict[int, Process]) -> None:
        self.connection = Connection(addresses[0], self)
        self.connection.watch()
        answer({0: [self.connection]})

    def begin_weights(self, answer: Answer, layouts: Sequence[BucketLayout]) -> None:
        self.incoming = {}
        answer(None)

    def load_weights(self, answer: Answer) -> None:
        connection = self.connection
        assert connection is not None
        connection.ended = lambda: self.process.later(self.world.delay(0.0005, 0.002), lambda: answer(None))
        if not connection.is_open:
            connection.ended()

    def receive(self, connection: Connection, weights: int) -> None:
        connection.sent.append(weights)
        if len(connection.sent) == 1:
            self._load_from(connection)

    def _load_from(self, connection: Connection) -> None:
        def loaded() -> None:
            assert self.incoming is not None
            self.incoming[connection.loaded] = connection.sent.pop(0)
            connection.loaded += 1
            if connection.sent:
                self._load_from(connection)

        self.process.later(self.world.delay(0.01, 0.05), loaded)

    def end_weights(self, answer: Answer, version: int) -> None:
        assert self.incoming is not None
        received = set(self.incoming.values())
        complete = len(self.incoming) == NUM_BUCKETS and len(received) == 1
        if not complete:
            answer(None, EngineError(f"weights of {len(received)} versions in {len(self.incoming)} buckets"))
            return
        (self.weights,), self.version, self.incoming = received, version, None
        answer(None)

    def tokens_written(self, answer: Answer) -> None:
        answer(self.written)

    def metrics(self, answer: Answer) -> None:
        answer({})

    def sleep(self, answer: Answer) -> None:
        answer(None)

    def close(self, answer: Answer) -> None:
        answer(None)


def _whole_head(tokens: list[int]) -> list[int]:
    """A first part of a response is cut behind its draw and index, or before them."""
    return [] if len(tokens) == 1 and tokens[0] >= DRAWS else tokens


def _advantages(batch: TokenBatch) -> Floats:
    """[A] of the shard; 0 where the update estimates them."""
    return np.zeros(int(batch.num_trained.sum()), dtype=np.float32) if batch.advantages is None else batch.advantages
