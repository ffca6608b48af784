"""Workers as Ray actors, on one machine or on many. The only file that imports Ray.

    with Cluster.start(...) as cluster:
        pool = cluster.pool(bundles)                      # a placement group: where workers may sit
        group = cluster.group("trainer", factory, pool)   # one actor a bundle, each with what `factory(seat)` makes

Tensors of results that are passed on by reference go through Ray's shared memory once, without a copy on the reading
side; readers must not write to them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from verl.errors import ConfigError, EngineLostError
from verl.scratch import scratch_folder, variables
from verl.signals import kept_signals

# Read by Ray: hand tensors over without copies, and leave it to us to report errors.
_OF_EVERY_WORKER = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_OF_CONTROLLER = {**_OF_EVERY_WORKER, "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
# Read by Ray at its import, and named for the systems where it is the default: a Ray that is started here has the
# loopback address, to which all its sockets are then bound. A node address of 127.0.0.1 alone is replaced by Ray.
_LOOPBACK_ADDRESSES = ("127.0.0.1", "::1")
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Also read at import: what Ray is not to print. When a raylet dies, two other processes print the end of its log.
_UNPRINTED = {"RAY_DEDUP_LOGS_SKIP_REGEX": os.environ.get("RAY_DEDUP_LOGS_SKIP_REGEX", "^Raylet is terminated")}

with variables({**_OF_CONTROLLER, **_LOOPBACK, **_UNPRINTED}):
    import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled
from ray.exceptions import (
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.single_controller.group import Seat, WorkerError, WorkerLostError, task_name
from verl.single_controller.guard import Guard
from verl.single_controller.process_watch import StopWatch, machine, statuses

_log = logging.getLogger(__name__)
# Tensors handed over without copies cannot be written to, which nobody here does.
_KNOWN_WARNINGS = ("Zero-copy tensor serialization is enabled", "The given NumPy array is not writable")
_PLACEMENT_S = 120.0
_REACH_S = 5.0  # Ray itself would try an address where nobody listens for more than a minute
# When one rank dies, the others fail because of it: how long to wait for the death itself to be told.
_GRACE_S = 5.0
_LOGS = ("worker-*.err", "worker-*.out", "raylet.*", "gcs_server.*")
_TAIL_BYTES = 20_000
# Coroutines of one worker. Ray's own limit of 1000 is less than the replies that an engine may owe, behind which a word
# to the engine (interrupt) would then have to wait.
_SIDE_BY_SIDE = 1_000_000
_LOOK_S = 1.0  # between looks for stopped workers
_LOOK_TIMEOUT_S = 10.0  # for another node to say how its workers are
_RESTART_S = 300.0  # for the process of another worker to be there
_DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError)


Pool = PlacementGroup


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one worker needs of its machine."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """A running Ray, started here or joined."""

    call_timeout_s: float = 3600.0
    health_timeout_s: float = 30.0  # until a stopped worker counts as lost
    num_gpus: float | None = None  # of one that was joined; None: of one on this machine, which knows its own
    guard: Guard = field(default_factory=lambda: Guard({}, 0.0))  # of Ray's processes, where they are ours

    @classmethod
    @contextmanager
    def start(
        cls,
        num_cpus: int,
        environment: Mapping[str, str] | None = None,
        call_timeout_s: float = 3600.0,
        join: bool = False,
        health_timeout_s: float = 30.0,
    ) -> Iterator[Cluster]:
        """Start a Ray of our own on this machine with at least `num_cpus` slots, or join one that runs already.

        A cluster is joined where RAY_ADDRESS is set or `join` asks for it. Raises ConfigError if there is none.
        environment: variables that every worker gets, whatever the cluster was started with.
        health_timeout_s: how long a process of our own Ray may be stopped before it is an error.
        """
        for message in _KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        address = _address(join)
        every_worker = {**_OF_EVERY_WORKER, **(environment or {})}
        own = _own(num_cpus, every_worker, health_timeout_s) if address == "local" else _joined(address, every_worker)
        with variables(_OF_CONTROLLER), own as guard:
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            num_gpus = None if address == "local" else resources.get("GPU", 0.0)
            yield cls(call_timeout_s, health_timeout_s, num_gpus, guard)

    def pool(self, bundles: Sequence[Bundle], strategy: str = "PACK") -> PlacementGroup:
        """Reserve places. Raises ConfigError if the cluster does not have them."""
        asked = [{"CPU": each.num_cpus, **({"GPU": each.num_gpus} if each.num_gpus else {})} for each in bundles]
        pool: PlacementGroup = placement_group(asked, strategy=strategy)
        ready, deadline = pool.ready(), time.monotonic() + _PLACEMENT_S
        while not ray.wait([ready], timeout=_LOOK_S)[0]:
            if (problem := self.guard.look()) is not None:
                raise WorkerError(problem)
            if time.monotonic() < deadline:
                continue
            remove_placement_group(pool)
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"the cluster has no room for {asked} within {_PLACEMENT_S:.0f} s; it has {resources}. "
                "Ask for fewer ranks or engines, or start more nodes"
            )
        return pool

    def group(
        self,
        name: str,
        factory: Callable[[Seat], Any],
        pool: PlacementGroup,
        bundle: Bundle,
        places: Sequence[int] | None = None,
        devices: Sequence[tuple[str, ...]] | None = None,
    ) -> RayGroup:
        """One worker in each of the pool's `places` (all, if left out), made there by `factory(seat)`.

        devices: accelerators of each worker where Ray should not choose them, because another group has reserved them.
        """
        chosen = range(len(pool.bundle_specs)) if places is None else places

        def spawn(rank: int) -> Any:
            strategy = PlacementGroupSchedulingStrategy(pool, placement_group_bundle_index=chosen[rank])
            return (
                ray.remote(_Worker)
                .options(
                    num_cpus=bundle.num_cpus,
                    num_gpus=bundle.num_gpus,
                    max_concurrency=_SIDE_BY_SIDE,
                    scheduling_strategy=strategy,
                )
                .remote()
            )

        size = len(chosen)
        group = RayGroup(name, spawn, size, self.call_timeout_s, self.health_timeout_s, self.guard)
        host, port = group.addresses()[0]
        seats = [Seat(rank, size, host, port, devices[rank] if devices else ()) for rank in range(size)]
        group.make(factory, seats)
        return group


@contextmanager
def _joined(address: str, environment: Mapping[str, str]) -> Iterator[Guard]:
    """A cluster that runs already, with the authentication that it has."""
    _check_reachable(address)
    with scratch_folder():
        try:
            _init(address, environment)
        except Exception as error:
            raise ConfigError(f"no Ray cluster to join ({error}); start one with `ray start --head`") from error
        try:
            yield Guard({}, 0.0)
        finally:
            _shutdown()


@contextmanager
def _own(num_cpus: int, environment: Mapping[str, str], health_timeout_s: float) -> Iterator[Guard]:
    """A Ray of this run on this machine: behind a token of its own, bound to the loopback address."""
    with scratch_folder() as folder, _token(folder / "token"):
        slots = max(num_cpus, os.cpu_count() or 1)
        try:
            try:  # Ray opens its folder to all users: it gets one inside ours
                _init("local", {**_loopback_variables(), **environment}, num_cpus=slots, _temp_dir=str(folder / "r"))
            except Exception as error:
                raise WorkerError(f"Ray did not start on this machine: {error}") from error
            if ray.util.get_node_ip_address() not in _LOOPBACK_ADDRESSES:  # type: ignore[no-untyped-call]
                _log.warning(
                    "Ray was imported before verl.single_controller.ray and listens on every address of this machine, "
                    "behind its token alone; import verl first"
                )
            with Guard(_daemons(), health_timeout_s) as guard:
                yield guard
        finally:
            _shutdown()


def _daemons() -> dict[str, psutil.Process]:
    """Ray's processes that this one has started, by what they are called in messages."""
    names = {"raylet": "raylet", "gcs_server": "control service of Ray"}
    return {names[each.name()]: each for each in psutil.Process().children() if each.name() in names}


def _init(address: str, environment: Mapping[str, str], **options: Any) -> None:
    with kept_signals():
        ray.init(
            address=address,
            runtime_env={"env_vars": dict(environment)},
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
            **options,
        )


def _shutdown() -> None:
    with kept_signals():
        try:
            ray.shutdown()
        except BaseException:  # hurried: the interpreter's end would finish it, and make the removed folder anew
            ray.shutdown()
            raise


@contextmanager
def _token(file: Path) -> Iterator[None]:
    """Ray's authentication of this process and its children: a new token, in a file that only this user can read."""
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32), encoding="ascii")
    try:
        with variables({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file), "RAY_AUTH_TOKEN": None}):
            _read_authentication()
            yield
    finally:
        _read_authentication()


def _read_authentication() -> None:
    """Ray keeps what it has once read of these variables and of the token."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _loopback_variables() -> dict[str, str]:
    """Where gloo and vLLM listen on one machine, unless the user has chosen."""
    wanted = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


class _Worker:
    """The actor: holds one worker object and runs functions on it. Coroutines run side by side."""

    def __init__(self) -> None:
        os.setpgrp()  # Ctrl-C in a terminal is for the controller, which ends its workers in order
        # Ray unpickles arguments in other threads. If one of them is the first to import torch, the first tensor that a
        # worker sends without copies ends its process (torch 2.11).
        import torch  # noqa: F401

        self._object: Any = None

    async def address(self) -> tuple[str, int]:
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind(("", 0))
            return host, probe.getsockname()[1]

    async def facts(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return {"pid": os.getpid(), "node": context.get_node_id(), "gpus": gpus, "machine": machine()}

    async def make(self, factory: Callable[[Seat], Any], seat: Seat) -> None:
        made = factory(seat)
        self._object = await made if inspect.isawaitable(made) else made

    @ray.method(num_returns=2)
    async def run(self, function: Callable[..., Any], *args: Any) -> tuple[None, Any]:
        """A mark and the result, two objects for Ray: whoever waits for the mark hears of the end, or of the error."""
        result = function(self._object, *args)
        return None, await result if inspect.isawaitable(result) else result


class _NodeWatch:
    """An actor on a node that is not the controller's: looks at the processes there."""

    def statuses(self, pids: Sequence[int]) -> dict[int, str]:
        return statuses(pids)


class RayGroup:
    """A WorkerGroup whose workers are Ray actors. A worker that stays stopped is killed, and so found dead."""

    def __init__(
        self,
        name: str,
        spawn: Callable[[int], Any],
        size: int,
        timeout_s: float,
        health_timeout_s: float,
        guard: Guard,
    ) -> None:
        """spawn: starts the actor of a rank in its place"""
        self._name = name
        self._spawn = spawn
        self._actors = [spawn(rank) for rank in range(size)]
        self._timeout_s = timeout_s
        self._guard = guard
        self._facts: list[dict[str, Any]] = [{} for _ in self._actors]
        self._facts = self._gather([actor.facts.remote() for actor in self._actors], "start")
        self._homes = self.nodes  # where workers are, and others in their places will be
        self._factory: Callable[[Seat], Any] | None = None
        self._seats: Sequence[Seat] = ()
        self._reasons: dict[int, str] = {}  # by process id: why a worker was killed
        self._closed = threading.Event()
        watch = StopWatch(health_timeout_s)
        threading.Thread(target=self._watch, args=(watch,), name=f"health of {name}", daemon=True).start()

    @property
    def size(self) -> int:
        return len(self._actors)

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [facts["pid"] for facts in self._facts]

    @property
    def nodes(self) -> list[str]:
        """Ray's name of each worker's node, in rank order."""
        return [facts["node"] for facts in self._facts]

    @property
    def gpus(self) -> list[tuple[str, ...]]:
        """Accelerators that Ray gave to each worker."""
        return [facts["gpus"] for facts in self._facts]

    def addresses(self) -> list[tuple[str, int]]:
        """(host, a port that was free a moment ago) of every worker."""
        return self._gather([actor.address.remote() for actor in self._actors], "address")

    def make(self, factory: Callable[[Seat], Any], seats: Sequence[Seat]) -> None:
        """Let every worker make its object."""
        self._factory, self._seats = factory, seats
        made = [actor.make.remote(factory, seat) for actor, seat in zip(self._actors, seats, strict=True)]
        self._gather(made, "start")

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._fetched(self.refer(function, *args), task_name(function, args))

    def scatter(self, function: Callable[..., Any], shards: Sequence[Any], *args: Any) -> list[Any]:
        pairs = zip(self._actors, shards, strict=True)
        started = [actor.run.remote(function, shard, *args) for actor, shard in pairs]
        task = task_name(function, args)
        return self._fetched(self._ended(started, task), task)

    def refer(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._ended([actor.run.remote(function, *args) for actor in self._actors], task_name(function, args))

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        _, result = self._actors[rank].run.remote(function, *args)
        return self._explained(rank, result, task_name(function, args))

    async def remake(self, rank: int) -> None:
        """Put another process in the place of a worker that is lost, and let it make its object.

        Raises WorkerError if that fails; what the old one held or was asked is lost.
        """
        assert self._factory is not None
        node = self._homes[rank]
        if not any(each["NodeID"] == node and each["Alive"] for each in ray.nodes()):  # type: ignore[no-untyped-call]
            raise WorkerError(f"{self._name} rank {rank} cannot be replaced: its node {node[:8]} has left the cluster")
        ray.kill(self._actors[rank])
        actor, self._facts[rank] = self._spawn(rank), {}
        self._actors[rank] = actor
        self._facts[rank] = await self._explained(rank, actor.facts.remote(), "start", min(_RESTART_S, self._timeout_s))
        await self._explained(rank, actor.make.remote(self._factory, self._seats[rank]), "start")

    def close(self) -> None:
        self._closed.set()
        if self._guard.look() is not None:
            return  # they end with Ray, which nobody can ask any more
        for actor in self._actors:
            ray.kill(actor)

    def _watch(self, watch: StopWatch) -> None:
        """Kill what stays stopped; whoever waits for it hears of a death."""
        nodes: dict[str, Any] = {}  # an actor on each other node
        while not self._closed.wait(_LOOK_S) and ray.is_initialized():
            for rank, pid in watch.lost(self._statuses(nodes)):
                if self._facts[rank].get("pid") == pid:
                    self._reasons[pid] = watch.reason
                    ray.kill(self._actors[rank])

    def _statuses(self, nodes: dict[str, Any]) -> dict[tuple[int, int], str]:
        """By rank and process id: how the workers are, as far as it can be seen."""
        found: dict[tuple[int, int], str] = {}
        known = [(rank, facts) for rank, facts in enumerate(self._facts) if facts]
        for place, node in {facts["machine"]: facts["node"] for _, facts in known}.items():
            ranks = {facts["pid"]: rank for rank, facts in known if facts["machine"] == place}
            found |= {(ranks[pid], pid): status for pid, status in _look(place, node, list(ranks), nodes).items()}
        return found

    async def _explained(self, rank: int, ref: Any, task: str, timeout_s: float | None = None) -> Any:
        facts = self._facts[rank]  # another process may be in its place by the time that this one fails
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        result: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
        try:
            with self._guard.cancelling(result):
                return await asyncio.wait_for(result, timeout_s)
        except asyncio.CancelledError:
            if self._guard.problem is None:
                raise
            raise WorkerError(self._guard.problem) from None
        except TimeoutError as error:
            raise WorkerError(f"{self._name} rank {rank} did not end {task} within {timeout_s:.0f} s") from error
        except RayError as error:
            raise self._failure(rank, task, error, facts) from self._shown(error)

    def _ended(self, started: Sequence[tuple[Any, Any]], task: str) -> list[Any]:
        """References to the results, none of which is brought here. Raises WorkerError as `_wait` does."""
        self._wait([mark for mark, _ in started], task)
        return [result for _, result in started]

    def _fetched(self, refs: Sequence[Any], task: str) -> list[Any]:
        """Results of calls that have ended. Raises WorkerError if one was lost since, or is a large error from afar."""
        results = []
        for rank, ref in enumerate(refs):
            try:
                results.append(ray.get(ref, timeout=self._timeout_s))
            except RayError as error:
                raise self._failure(rank, task, error) from self._shown(error)
        return results

    def _gather(self, refs: Sequence[Any], task: str) -> list[Any]:
        """What is small, and needs no mark."""
        self._wait(refs, task)
        results: list[Any] = ray.get(list(refs))
        return results

    def _wait(self, refs: Sequence[Any], task: str) -> None:
        """Until all are there. Raises WorkerError for the first that fails, without waiting for the others."""
        pending, deadline = list(refs), time.monotonic() + self._timeout_s
        while pending:
            left = max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, timeout=min(left, _LOOK_S), fetch_local=False)
            if not done and (problem := self._guard.look()) is not None:
                raise WorkerError(problem)
            if not done and left <= _LOOK_S:
                late = [rank for rank, ref in enumerate(refs) if ref in pending]
                raise WorkerError(f"{self._name} ranks {late} did not end {task} within {self._timeout_s:.0f} s")
            for ref in done:
                error = _error_of(ref)
                if error is not None:
                    rank, error = self._first_cause(refs, list(refs).index(ref), error, pending)
                    raise self._failure(rank, task, error) from self._shown(error)

    def _first_cause(self, refs: Sequence[Any], rank: int, error: RayError, pending: list[Any]) -> tuple[int, RayError]:
        """A rank that died is the cause of what its neighbours complain of, even if they were heard first."""
        if isinstance(error, RayActorError | OutOfMemoryError):
            return rank, error
        others, _ = ray.wait(pending, num_returns=len(pending), timeout=_GRACE_S) if pending else ([], [])
        for ref in others:
            other = _error_of(ref)
            if isinstance(other, RayActorError | OutOfMemoryError):
                return list(refs).index(ref), other
        return rank, error

    def _shown(self, error: RayError) -> RayError | None:
        """The error as a cause, where its traceback says more than the failure. A death has none that does."""
        told = self._guard.problem is not None or isinstance(error, RayActorError | OutOfMemoryError)
        return None if told else error

    def _failure(self, rank: int, task: str, error: RayError, facts: Mapping[str, Any] | None = None) -> Exception:
        if (problem := self._guard.look()) is not None:
            return WorkerError(problem)
        cause = _cause(error)
        if isinstance(cause, ConfigError):
            return cause  # the user's to mend; whoever noticed it does not matter
        facts = self._facts[rank] if facts is None else facts
        place = f" (process {facts['pid']} on node {facts['node'][:8]})" if facts else ""
        who = f"{self._name} rank {rank} of {self.size}{place}"
        if isinstance(error, OutOfMemoryError):
            return WorkerLostError(f"{who} was killed during {task}: {_memory_of(error)}")
        if isinstance(error, RayActorError):
            reason = self._reasons.get(facts["pid"]) if facts else None
            return WorkerLostError(f"{who} {reason} (during {task})" if reason else f"{who} died during {task}")
        kind = WorkerLostError if isinstance(error, _DEATHS) or isinstance(cause, EngineLostError) else WorkerError
        return kind(f"{who} failed in {task}: {type(cause).__name__}: {cause}")


def _look(place: str, node: str, pids: Sequence[int], nodes: dict[str, Any]) -> dict[int, str]:
    """How the processes of one machine are, asked on it; nothing where it does not say so in time."""
    if place == machine():
        return statuses(pids)
    if place not in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        nodes[place] = ray.remote(_NodeWatch).options(num_cpus=0, max_restarts=-1, scheduling_strategy=there).remote()
    with suppress(RayError):  # Ray itself finds a node that is gone
        found: dict[int, str] = ray.get(nodes[place].statuses.remote(pids), timeout=_LOOK_TIMEOUT_S)
        return found
    return {}


def joins(asked: bool) -> bool:
    """Whether a cluster is joined rather than started: RAY_ADDRESS names one, or it is asked for."""
    return _address(asked) != "local"


def _address(join: bool) -> str:
    return os.environ.get("RAY_ADDRESS") or ("auto" if join else "local")


def _check_reachable(address: str) -> None:
    """Raises ConfigError if nobody listens at `host:port` or `ray://host:port`; other words are for Ray to judge."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"RAY_ADDRESS={address}: nobody answers there ({error}); "
            "start a cluster there with `ray start --head`, or unset RAY_ADDRESS to train on this machine alone"
        ) from error


def last_words(problem: str) -> str:
    """The ends of the logs of this machine's workers and of Ray; empty where no Ray runs.

    problem: workers whose process it names come first
    """
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    folder = Path(context.get_temp_dir(), context.get_session_name(), "logs")
    named = set(re.findall(r"\d+", problem))
    logs = [path for pattern in _LOGS for path in folder.glob(pattern) if path.is_file() and path.stat().st_size]
    logs.sort(key=lambda path: path.stem.rpartition("-")[2] not in named)
    return "\n\n".join(f"== {path.name}\n{_tail(path)}" for path in logs)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _error_of(ref: Any) -> RayError | None:
    """What a call has ended with; to be asked of what is small, because it is brought here."""
    try:
        ray.get(ref, timeout=0)
    except GetTimeoutError:
        return None  # there, but on another node; if it is an error, whoever fetches it is told
    except RayError as error:
        return error
    return None


def _memory_of(error: OutOfMemoryError) -> str:
    """How full the memory was, from Ray's message; nothing of it on other programs."""
    found = re.search(r"([\d.]+) ?GB used / ([\d.]+) ?GB limit", str(error))
    held = f" ({found[1]} of {found[2]} GB)" if found else ""
    return (
        f"the memory of its node was nearly used up{held}, by this run or by another program, and Ray ends a worker "
        "before the kernel does. Free memory there, or ask for less"
    )


def _cause(error: RayError) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
