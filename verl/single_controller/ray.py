"""Workers as Ray actors, on one machine or on many. The only file that imports Ray.

    with Cluster.start(...) as cluster:
        pool = cluster.pool(bundles)                      # a placement group
        group = cluster.group("trainer", factory, pool)   # one actor per bundle, each holds `factory(context)`

Result tensors that are passed by reference go through Ray's shared memory once, zero-copy on the reading side; readers
must not write to them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import pickle
import re
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from verl.errors import ConfigError, EngineLostError
from verl.host.scratch import scratch_folder, variables
from verl.host.signals import kept_signals
from verl.registry import USER_MODULE

# Read by Ray: zero-copy tensors; no reports of unhandled errors, which are ours to report; no idle processes, one a
# core, which lack the environment of our workers and so would never get work.
_OF_EVERY_WORKER = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_OF_CONTROLLER = {
    **_OF_EVERY_WORKER,
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_prestart_worker_first_driver": "0",
}
# Read by Ray at import; named after the systems where it is the default: a Ray started here gets the loopback address,
# to which all its sockets are then bound. Ray would replace a node address of 127.0.0.1 without it.
_LOOPBACK_ADDRESSES = ("127.0.0.1", "::1")
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Also read at import: lines that Ray does not print. When a raylet dies, two other processes print the end of its log.
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
from ray.util.placement_group import PlacementGroup as PlacementGroup
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.single_controller.group import WorkerContext, WorkerError, WorkerLostError, task_name
from verl.single_controller.guard import Guard
from verl.single_controller.process_watch import StopWatch, machine, statuses

_log = logging.getLogger(__name__)
# Zero-copy tensors are read-only, and no code here writes to them.
_KNOWN_WARNINGS = ("Zero-copy tensor serialization is enabled", "The given NumPy array is not writable")
_DAEMONS = {"raylet": "raylet", "gcs_server": "control service of Ray"}  # process -> its name in messages
_PLACEMENT_S = 120.0
_REACH_S = 5.0  # Ray itself would retry an unreachable address for more than a minute
_GRACE_S = 5.0  # when one rank dies, the others fail because of it: time to wait for the report of the death itself
_LOGS = ("worker-*.err", "worker-*.out", "raylet.*", "gcs_server.*")
_TAIL_BYTES = 20_000
# Coroutines per worker. An engine may have more than Ray's default of 1000 requests in flight; a call to `interrupt`
# would then be queued behind them.
_BESIDE = "beside"  # Ray's concurrency group of calls beside others
_MAX_CONCURRENCY = 1_000_000
_POLL_S = 1.0  # interval of the checks for stopped workers
_STATUS_TIMEOUT_S = 10.0  # for another node to report the status of its workers
_RESTART_S = 300.0  # for the process of a replacement to start
_DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError)


@dataclass(frozen=True, slots=True)
class Bundle:
    num_cpus: float = 1.0
    num_gpus: float = 0.0


@dataclass(frozen=True)
class Cluster:
    call_timeout_s: float = 3600.0
    health_timeout_s: float = 30.0  # until a stopped worker counts as lost
    num_gpus: float | None = None  # in a joined cluster; None: Ray was started on this machine
    guard: Guard = field(default_factory=lambda: Guard({}, 0.0))  # for Ray's processes if they were started here

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
        """Start Ray on this machine with at least `num_cpus` slots, or join a running cluster.

        A cluster is joined if RAY_ADDRESS is set or `join` is true. Raises ConfigError if there is none.
        environment: variables set in every worker, independent of the cluster's own
        """
        for message in _KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        address = _address(join)
        every_worker = {**_OF_EVERY_WORKER, **(environment or {})}
        own = _local(num_cpus, every_worker, health_timeout_s) if address == "local" else _joined(address, every_worker)
        with variables(_OF_CONTROLLER), own as guard:
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            num_gpus = None if address == "local" else resources.get("GPU", 0.0)
            yield cls(call_timeout_s, health_timeout_s, num_gpus, guard)

    def pool(self, bundles: Sequence[Bundle], strategy: str = "PACK") -> PlacementGroup:
        """Reserve a placement group. Raises ConfigError if the cluster lacks the resources."""
        requested = [{"CPU": each.num_cpus, **({"GPU": each.num_gpus} if each.num_gpus else {})} for each in bundles]
        pool: PlacementGroup = placement_group(requested, strategy=strategy)
        ready, deadline = pool.ready(), time.monotonic() + _PLACEMENT_S
        while not ray.wait([ready], timeout=_POLL_S)[0]:
            if (problem := self.guard.check()) is not None:
                raise WorkerError(problem)
            if time.monotonic() < deadline:
                continue
            remove_placement_group(pool)
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"could not place {requested} within {_PLACEMENT_S:.0f} s; the cluster has {resources}. "
                "Use fewer ranks or engines, or start more nodes"
            )
        return pool

    def group(
        self,
        name: str,
        factory: Callable[[WorkerContext], Any],
        pool: PlacementGroup,
        bundle: Bundle,
        places: Sequence[int] | None = None,
        devices: Sequence[tuple[str, ...]] | None = None,
        wait: bool = True,
    ) -> RayGroup:
        """One worker in each of the pool's bundles `places` (default: all), created there by `factory(context)`.

        devices: accelerators of each worker if Ray should not choose them, because another group has reserved them
        wait: until all are created; else the group's `started` waits
        """
        _pickle_user_files_by_value()
        chosen = range(len(pool.bundle_specs)) if places is None else places

        def spawn(rank: int) -> Any:
            strategy = PlacementGroupSchedulingStrategy(pool, placement_group_bundle_index=chosen[rank])
            resources = {"num_cpus": bundle.num_cpus, "num_gpus": bundle.num_gpus}
            options = {**resources, "max_concurrency": _MAX_CONCURRENCY, "scheduling_strategy": strategy}
            remote: Any = ray.remote  # whose types lack concurrency groups
            return remote(concurrency_groups={_BESIDE: 1})(_Worker).options(**options).remote()

        size = len(chosen)
        group = RayGroup(name, spawn, size, self.call_timeout_s, self.health_timeout_s, self.guard)
        hosts, ports = zip(*group.addresses(), strict=True)
        contexts = [
            WorkerContext(rank, size, hosts[0], ports[0], devices[rank] if devices else (), hosts[rank])
            for rank in range(size)
        ]
        group.make(factory, contexts)
        if wait:
            group.started()
        return group


@contextmanager
def _joined(address: str, environment: Mapping[str, str]) -> Iterator[Guard]:
    """A running cluster, with its own authentication."""
    _check_reachable(address)
    with scratch_folder():
        try:
            _init(address, environment)
        except Exception as error:
            raise ConfigError(f"cannot join a Ray cluster ({error}); start one with `ray start --head`") from error
        try:
            with Guard({}, 0.0) as guard:
                yield guard
        finally:
            _shutdown()


@contextmanager
def _local(num_cpus: int, environment: Mapping[str, str], health_timeout_s: float) -> Iterator[Guard]:
    """On this machine, for this run: with its own token, bound to the loopback address."""
    with scratch_folder() as folder, _token(folder / "token"):
        slots = max(num_cpus, os.cpu_count() or 1)
        try:
            try:  # Ray makes its folder accessible to all users: it gets one inside ours
                _init("local", {**_loopback_variables(), **environment}, num_cpus=slots, _temp_dir=str(folder / "r"))
            except Exception as error:
                raise WorkerError(f"Ray did not start on this machine: {error}") from error
            if ray.util.get_node_ip_address() not in _LOOPBACK_ADDRESSES:  # type: ignore[no-untyped-call]
                _log.warning(
                    "Ray was imported before verl.single_controller.ray and listens on every address of this machine, "
                    "protected by its token only; import verl first"
                )
            children = psutil.Process().children()
            daemons = {_DAEMONS[each.name()]: each for each in children if each.name() in _DAEMONS}
            with Guard(daemons, health_timeout_s) as guard:
                yield guard
        finally:
            _shutdown()


def _pickle_user_files_by_value() -> None:
    """Send definitions of the user's files (`file.py:name`) whole: workers cannot import them."""
    for name, module in list(sys.modules.items()):
        if name.startswith(USER_MODULE):
            ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # Ray's


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
    """Ray's authentication: a new token, in a file that only this user can read."""
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32), encoding="ascii")
    try:
        with variables({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file), "RAY_AUTH_TOKEN": None}):
            _read_authentication()
            yield
    finally:
        _read_authentication()


def _read_authentication() -> None:
    """Make Ray read the variables and the token again, which it caches."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _loopback_variables() -> dict[str, str]:
    wanted = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


class _Worker:
    """Holds one worker object and runs functions on it. Coroutines run concurrently."""

    def __init__(self) -> None:
        os.setpgrp()  # Ctrl-C in a terminal must reach only the controller, which stops its workers in order
        # Ray unpickles arguments in other threads. If one of them is the first to import torch, the first zero-copy
        # tensor that a worker sends crashes its process (torch 2.11).
        import torch  # noqa: F401

        self._object: Any = None

    async def address(self) -> tuple[str, int]:
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind(("", 0))
            return host, probe.getsockname()[1]

    async def info(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return {"pid": os.getpid(), "node": context.get_node_id(), "gpus": gpus, "machine": machine()}

    async def make(self, factory: Callable[[WorkerContext], Any], context: WorkerContext) -> None:
        made = factory(context)
        self._object = await made if inspect.isawaitable(made) else made

    @ray.method(num_returns=2)
    async def run(self, function: Callable[..., Any], *args: Any) -> tuple[None, Any]:
        """A mark and the result: waiting for the mark reports the end, or the error."""
        result = function(self._object, *args)
        return None, await result if inspect.isawaitable(result) else result

    @ray.method(num_returns=2, concurrency_group=_BESIDE)
    async def run_beside(self, function: Callable[..., Any], *args: Any) -> tuple[None, Any]:
        """`run` in an event loop, and so a thread, of its own."""
        return None, function(self._object, *args)

    @ray.method(num_returns=2)
    async def run_on(self, shard: Any, call: bytes) -> tuple[None, Any]:
        """`run` of a call that was pickled once for all ranks. Ray pickles every argument of every task on its own."""
        function, args = pickle.loads(call)  # noqa: S301  from the controller
        result: tuple[None, Any] = await self.run(function, shard, *args)
        return result


class _NodeWatch:
    """An actor on a node other than the controller's: reports the status of processes there."""

    def statuses(self, pids: Sequence[int]) -> dict[int, str]:
        return statuses(pids)


class RayGroup:
    """A WorkerGroup of Ray actors. One that stays stopped is killed, and so reported as dead."""

    def __init__(
        self,
        name: str,
        spawn: Callable[[int], Any],
        size: int,
        timeout_s: float,
        health_timeout_s: float,
        guard: Guard,
    ) -> None:
        """spawn: starts the actor of a rank"""
        self._name, self._spawn, self._timeout_s, self._guard = name, spawn, timeout_s, guard
        self.finished_calls = 0
        self._actors = [spawn(rank) for rank in range(size)]
        self._infos: list[dict[str, Any]] = [{} for _ in self._actors]
        self._infos = self._gather([actor.info.remote() for actor in self._actors], "start")
        self._home_nodes = self.nodes  # nodes of the workers and of their replacements
        self._factory: Callable[[WorkerContext], Any] | None = None
        self._contexts: Sequence[WorkerContext] = ()
        self._made: Sequence[Any] = ()
        self._reasons: dict[int, str] = {}  # by process id: reason why a worker was killed
        self._closed = threading.Event()
        watch = StopWatch(health_timeout_s)
        self._thread = threading.Thread(target=self._watch, args=(watch,), name=f"health of {name}", daemon=True)
        self._thread.start()
        guard.call_at_exit(self._stop_watching)

    @property
    def size(self) -> int:
        return len(self._actors)

    @property
    def pids(self) -> list[int]:
        return [info["pid"] for info in self._infos]

    @property
    def nodes(self) -> list[str]:
        """Ray's name of each worker's node, in rank order."""
        return [info["node"] for info in self._infos]

    @property
    def gpus(self) -> list[tuple[str, ...]]:
        return [info["gpus"] for info in self._infos]

    def addresses(self) -> list[tuple[str, int]]:
        """(host, a recently free port) of every worker."""
        return self._gather([actor.address.remote() for actor in self._actors], "address")

    def make(self, factory: Callable[[WorkerContext], Any], contexts: Sequence[WorkerContext]) -> None:
        """Have the workers created, and return at once."""
        self._factory, self._contexts = factory, contexts
        self._made = [each.make.remote(factory, context) for each, context in zip(self._actors, contexts, strict=True)]

    def started(self) -> None:
        """Wait until all workers are created. Raises their first error."""
        self._gather(self._made, "start")

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._results([actor.run.remote(function, *args) for actor in self._actors], task_name(function))

    def call_beside(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._results([actor.run_beside.remote(function, *args) for actor in self._actors], task_name(function))

    def scatter(self, function: Callable[..., Any], shards: Iterable[Any], *args: Any) -> list[Any]:
        call: bytes = ray.cloudpickle.dumps((function, args))  # type: ignore[no-untyped-call]  # Ray's
        started = [actor.run_on.remote(shard, call) for actor, shard in zip(self._actors, shards, strict=True)]
        return self._results(started, task_name(function))

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        _, result = self._actors[rank].run.remote(function, *args)
        return self._await_result(rank, result, task_name(function))

    async def remake(self, rank: int) -> None:
        """Replace a lost worker; its state and pending calls are lost. Raises WorkerError if that fails."""
        assert self._factory is not None
        node = self._home_nodes[rank]
        if (lost := _lost_node(node)) is not None:
            raise WorkerError(f"{self._name} rank {rank} cannot be replaced: {lost}")
        ray.kill(self._actors[rank])
        actor, self._infos[rank] = self._spawn(rank), {}
        self._actors[rank] = actor
        timeout_s = min(_RESTART_S, self._timeout_s)
        self._infos[rank] = await self._await_result(rank, actor.info.remote(), "start", timeout_s)
        await self._await_result(rank, actor.make.remote(self._factory, self._contexts[rank]), "start")

    def _stop_watching(self) -> None:
        """A thread that frees the group after Ray's end would end the process: `GetCoreWorker` exits without one."""
        self._closed.set()
        self._thread.join(_GRACE_S)

    def close(self) -> None:
        self._stop_watching()
        if self._guard.check() is not None:
            return  # Ray is down, and its workers end with it
        for actor in self._actors:
            ray.kill(actor)

    def _watch(self, watch: StopWatch) -> None:
        """Kill workers that stay stopped; pending calls then fail with their death."""
        nodes: dict[str, Any] = {}  # an actor on each other node
        while not self._closed.wait(_POLL_S) and ray.is_initialized():
            for rank, pid in watch.lost(self._statuses(nodes)):
                if self._infos[rank].get("pid") == pid:
                    self._reasons[pid] = watch.reason
                    ray.kill(self._actors[rank])

    def _statuses(self, nodes: dict[str, Any]) -> dict[tuple[int, int], str]:
        """{(rank, process id): status} of the workers, as far as known."""
        found: dict[tuple[int, int], str] = {}
        known = [(rank, info) for rank, info in enumerate(self._infos) if info]
        for place, node in {info["machine"]: info["node"] for _, info in known}.items():
            ranks = {info["pid"]: rank for rank, info in known if info["machine"] == place}
            found |= {(ranks[pid], pid): status for pid, status in _statuses_at(place, node, [*ranks], nodes).items()}
        return found

    async def _await_result(self, rank: int, ref: Any, task: str, timeout_s: float | None = None) -> Any:
        info = self._infos[rank]  # the worker may be replaced by the time that this call fails
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        result: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
        try:
            with self._guard.cancelling(result):
                async with asyncio.timeout(timeout_s):  # Python 3.11's wait_for forgets a cancellation beside a result
                    return await result
        except asyncio.CancelledError:
            if self._guard.problem is None:
                raise
            raise WorkerError(self._guard.problem) from None
        except TimeoutError as error:
            raise WorkerError(f"{self._name} rank {rank} did not finish {task} within {timeout_s:.0f} s") from error
        except RayError as error:
            raise self._failure(rank, task, error, info) from self._traceback_cause(error)

    def _results(self, started: Sequence[tuple[Any, Any]], task: str) -> list[Any]:
        """Of calls, each a completion marker and a result. Raises WorkerError as `_wait` does, and if a result was lost
        since, or is a large error on another node."""
        self._wait([marker for marker, _ in started], task)
        results = []
        for rank, (_, ref) in enumerate(started):
            try:
                results.append(ray.get(ref, timeout=self._timeout_s))
            except RayError as error:
                raise self._failure(rank, task, error) from self._traceback_cause(error)
        return results

    def _gather(self, refs: Sequence[Any], task: str) -> list[Any]:
        """Small results, which need no mark."""
        self._wait(refs, task)
        results: list[Any] = ray.get(list(refs))
        return results

    def _wait(self, refs: Sequence[Any], task: str) -> None:
        """Raises WorkerError for the first that fails, without waiting for the others."""
        pending, deadline = list(refs), time.monotonic() + self._timeout_s
        while pending:
            left = max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, timeout=min(left, _POLL_S), fetch_local=False)
            if not done and (problem := self._guard.check()) is not None:
                raise WorkerError(problem)
            if not done and left <= _POLL_S:
                late = [rank for rank, ref in enumerate(refs) if ref in pending]
                raise WorkerError(f"{self._name} ranks {late} did not finish {task} within {self._timeout_s:.0f} s")
            for ref in done:
                if (error := _error_of(ref)) is not None:
                    rank, error = self._first_cause(refs, list(refs).index(ref), error, pending)
                    raise self._failure(rank, task, error) from self._traceback_cause(error)
        self.finished_calls += 1

    def _first_cause(self, refs: Sequence[Any], rank: int, error: RayError, pending: list[Any]) -> tuple[int, RayError]:
        """A dead rank causes its neighbors' errors, even if those are reported first."""
        if pending and not isinstance(error, RayActorError | OutOfMemoryError):
            for ref in ray.wait(pending, num_returns=len(pending), timeout=_GRACE_S)[0]:
                other = _error_of(ref)
                if isinstance(other, RayActorError | OutOfMemoryError):
                    return list(refs).index(ref), other
        return rank, error

    def _traceback_cause(self, error: RayError) -> RayError | None:
        """The error to raise from, if its traceback adds information; that of a death adds none."""
        redundant = self._guard.problem is not None or isinstance(error, RayActorError | OutOfMemoryError)
        return None if redundant else error

    def _failure(self, rank: int, task: str, error: RayError, info: Mapping[str, Any] | None = None) -> Exception:
        if (problem := self._guard.check()) is not None:
            return WorkerError(problem)
        cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
        if isinstance(cause, ConfigError):
            return cause  # for the user to fix; the rank does not matter
        info = self._infos[rank] if info is None else info
        place = f" (process {info['pid']} on node {info['node'][:8]})" if info else ""
        who = f"{self._name} rank {rank} of {self.size}{place}"
        if isinstance(error, OutOfMemoryError):
            return WorkerLostError(f"{who} was killed during {task}: {_format_memory(error)}")
        if isinstance(error, RayActorError):
            if info and (reason := self._reasons.get(info["pid"])):
                return WorkerLostError(f"{who} {reason} (during {task})")
            lost = _lost_node(info["node"]) if info else None
            return WorkerLostError(f"{who} died during {task}" + (f": {lost}" if lost else ""))
        kind = WorkerLostError if isinstance(error, _DEATHS) or isinstance(cause, EngineLostError) else WorkerError
        return kind(f"{who} failed in {task}: {type(cause).__name__}: {cause}")


def _lost_node(node: str) -> str | None:
    """None for one that is in the cluster. Ray lists a lost one for some seconds more, so its raylet is asked, too."""
    info = next(each for each in ray.nodes() if each["NodeID"] == node)  # type: ignore[no-untyped-call]
    host = info["NodeManagerAddress"]
    refusal = _refusal(host, info["NodeManagerPort"]) if info["Alive"] else None
    if info["Alive"] and refusal is None:
        return None
    return f"its node {node[:8]} at {host} has left the cluster" + (f" ({refusal})" if refusal else "")


def _statuses_at(place: str, node: str, pids: Sequence[int], nodes: dict[str, Any]) -> dict[int, str]:
    """Status of the processes of one machine; {} if it does not respond in time."""
    if place == machine():
        return statuses(pids)
    if place not in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        nodes[place] = ray.remote(_NodeWatch).options(num_cpus=0, max_restarts=-1, scheduling_strategy=there).remote()
    with suppress(RayError):  # Ray itself detects a lost node
        found: dict[int, str] = ray.get(nodes[place].statuses.remote(pids), timeout=_STATUS_TIMEOUT_S)
        return found
    return {}


def joins(requested: bool) -> bool:
    """Whether a cluster is joined, not started."""
    return _address(requested) != "local"


def _address(join: bool) -> str:
    return os.environ.get("RAY_ADDRESS") or ("auto" if join else "local")


def _check_reachable(address: str) -> None:
    """Connects to `host:port` or `ray://host:port`, else ConfigError; other addresses are left to Ray."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    if (error := _refusal(host.strip("[]"), int(port))) is not None:
        raise ConfigError(
            f"RAY_ADDRESS={address} is unreachable ({error}); "
            "start a cluster there with `ray start --head`, or unset RAY_ADDRESS to train on this machine only"
        ) from error


def _refusal(host: str, port: int) -> Exception | None:
    """Why nothing listens at this address, or None."""
    try:
        socket.create_connection((host, port), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        return error
    return None


def log_tails(problem: str) -> str:
    """The ends of the workers' and Ray's logs, workers named in `problem` first; empty if Ray is not running."""
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
    """The error of a finished call, or None. Only for small results, because it fetches them."""
    try:
        ray.get(ref, timeout=0)
    except GetTimeoutError:
        return None  # ready, but on another node; if it is an error, the fetch raises it
    except RayError as error:
        return error
    return None


def _format_memory(error: OutOfMemoryError) -> str:
    """Memory use of the node, from Ray's message, without its list of programs."""
    found = re.search(r"([\d.]+) ?GB used / ([\d.]+) ?GB limit", str(error))
    used = f" ({found[1]} of {found[2]} GB)" if found else ""
    return (
        f"its node was nearly out of memory{used}, used by this run or another program, and Ray kills a worker before "
        "the kernel does. Free memory on the node, or reduce the run's memory use"
    )
