"""Workers as Ray actors: the verbs, what travels, and what a caller gets when a worker fails or dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch

import verl.single_controller.ray
from tests.conftest import ROOT
from tests.support.programs import need
from toolrl.check.preflight.local_group import LocalGroup
from verl.errors import ConfigError
from verl.registry import resolve
from verl.single_controller.group import WorkerContext, WorkerError, WorkerGroup, WorkerLostError, WorkerView
from verl.single_controller.ray import (
    Bundle,
    Cluster,
    OutOfMemoryError,
    PlacementGroup,
    RayGroup,
    ray,
    remove_placement_group,
)

Sockets = list[tuple[str, int, str]]  # (address, port, process name)
BUNDLE, SEATED = Bundle(1.0), Bundle(0.5)  # a place has room for two


class Worker:
    """What the tests' groups hold."""

    def __init__(self, seat: WorkerContext) -> None:
        self.seat = seat
        self.inner = {"rank": seat.rank}
        self.word, self.meeting = asyncio.Event(), asyncio.Barrier(2)


def rank_of(worker: Worker, *more: int) -> int:
    return worker.seat.rank + sum(more)


def add(worker: Worker, shard: int, more: int) -> int:
    return worker.seat.rank + shard + more


def apply(worker: Worker, function: Callable[[int], int], value: int) -> int:
    return function(value)


def inner_rank(inner: dict[str, int], more: int) -> int:
    return inner["rank"] + more


def variable(worker: Worker, name: str) -> str:
    return os.environ[name]


class Result:
    """Takes note of where it is unpacked."""

    def __reduce__(self) -> tuple[Any, ...]:
        return unpacked, (bytes(1 << 20),)  # more than travels inside an answer


unpackings: list[int] = []


def unpacked(content: bytes) -> Result:
    unpackings.append(os.getpid())
    return Result()


def result(worker: Worker) -> Result:
    return Result()


def fail(worker: Worker) -> None:
    if worker.seat.rank == 1:
        raise ValueError("seven")


def complain(worker: Worker) -> None:
    raise ConfigError("model.path is wrong")


def nap(worker: Worker, until: Path) -> None:
    while not until.exists():
        time.sleep(0.05)


async def listen(worker: Worker) -> bool:
    return await worker.word.wait()


async def set_word(worker: Worker) -> None:
    worker.word.set()


async def meet(worker: Worker) -> int:
    return await worker.meeting.wait()


def die(worker: Worker) -> None:
    if worker.seat.rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
    raise RuntimeError("connection closed by peer")


@pytest.fixture(scope="module")
def earlier() -> set[int]:
    """Ports that this process listened at before: other tests' process groups stay open."""
    return {port for _, port, _ in listening([psutil.Process()])}


@pytest.fixture(scope="module")
def cluster(earlier: set[int]) -> Iterator[Cluster]:
    with Cluster.start(4, {"WITHLENGTH": "1"}, call_timeout_s=300) as started:
        yield started


@pytest.fixture(scope="module")
def pool(cluster: Cluster) -> PlacementGroup:
    return cluster.pool([BUNDLE] * 2)


@pytest.fixture(scope="module")
def group(cluster: Cluster, pool: PlacementGroup) -> Iterator[RayGroup]:
    made = cluster.group("tester", Worker, pool, SEATED)
    yield made
    made.close()


def check_verbs(group: WorkerGroup) -> None:
    ranks = list(range(group.size))
    assert group.call(rank_of, 1, 2) == [rank + 3 for rank in ranks]
    assert group.scatter(add, [10 * rank for rank in ranks], 5) == [11 * rank + 5 for rank in ranks]
    assert asyncio.run(awaited(group)) == 7 + ranks[-1]
    assert WorkerView(group, "inner").call(inner_rank, 1) == [rank + 1 for rank in ranks]


def hold(worker: Worker, path: str) -> bool:
    """Blocks the worker until there is a file."""
    until = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < until:
        time.sleep(0.01)
    return Path(path).exists()


def release(worker: Worker, path: str) -> int:
    Path(path).touch()
    return worker.seat.rank


def test_a_call_beside_runs_while_another_one_blocks_the_worker(group: RayGroup, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(group.call, hold, str(tmp_path / "released"))
        time.sleep(1)
        assert group.call_beside(release, str(tmp_path / "released")) == [0, 1]
        assert blocked.result() == [True, True]


async def awaited(group: WorkerGroup) -> Any:
    return await group.submit(group.size - 1, rank_of, 7)


@pytest.mark.long
def test_verbs_on_actors(group: RayGroup) -> None:
    check_verbs(group)
    assert len(set(group.pids) | {os.getpid()}) == 3
    assert group.call(variable, "WITHLENGTH") == ["1", "1"]


@pytest.mark.long
def test_functions_of_the_users_files_travel(cluster: Cluster, pool: PlacementGroup, tmp_path: Path) -> None:
    file = tmp_path / "travels.py"
    file.write_text("def twice(x):\n    return 2 * x\n\n\ndef fourfold(x):\n    return twice(twice(x))\n")
    fourfold = resolve("function", f"{file}:fourfold", {})
    group = cluster.group("users", Worker, pool, SEATED)
    assert group.call(apply, fourfold, 3) == [12, 12]
    group.close()


class Late:
    """A worker that starts once the other one's file is there, and leaves its own."""

    def __init__(self, own: Path, others: Path, seat: WorkerContext) -> None:
        own.touch()
        deadline = time.monotonic() + 60
        while not others.exists():
            assert time.monotonic() < deadline, "the other group did not start"
            time.sleep(0.05)


@pytest.mark.long
def test_two_groups_start_at_the_same_time(cluster: Cluster, tmp_path: Path) -> None:
    files, pools = (tmp_path / "a", tmp_path / "b"), [cluster.pool([BUNDLE]) for _ in range(2)]
    groups = [
        cluster.group("late", partial(Late, *each), pool, SEATED, wait=False)
        for each, pool in zip((files, files[::-1]), pools, strict=True)
    ]
    for group in groups:
        group.started()
        group.close()
    for pool in pools:
        remove_placement_group(pool)


def test_verbs_in_this_process() -> None:
    check_verbs(LocalGroup(Worker(WorkerContext(0, 1))))


def test_coroutines_of_one_worker_run_side_by_side(group: RayGroup) -> None:
    """Neither ends before the other has started."""

    async def both() -> list[int]:
        return await asyncio.wait_for(asyncio.gather(group.submit(0, meet), group.submit(0, meet)), 60)

    assert sorted(asyncio.run(both())) == [0, 1]


@pytest.mark.long
def test_a_call_to_a_worker_does_not_wait_for_its_pending_calls(group: RayGroup) -> None:
    async def all_set() -> list[bool]:
        waiting = [asyncio.ensure_future(group.submit(0, listen)) for _ in range(1500)]
        await asyncio.wait_for(group.submit(0, set_word), 60)
        return await asyncio.gather(*waiting)

    assert all(asyncio.run(all_set()))


def test_an_exception_names_the_rank_and_what_it_was_doing(group: RayGroup) -> None:
    with pytest.raises(WorkerError, match=r"tester rank 1 of 2 \(process \d+ on node \w+\) failed in fail: .*seven"):
        group.call(fail)
    with pytest.raises(ConfigError, match=r"model\.path is wrong"):
        group.call(complain)
    with pytest.raises(WorkerError, match=r"rank 1 .* failed in fail"):
        asyncio.run(group.submit(1, fail))  # type: ignore[arg-type]


def test_results_are_unpacked_once(group: RayGroup) -> None:
    unpackings.clear()
    group.call(result)
    assert unpackings == [os.getpid()] * group.size


@pytest.mark.long
def test_calls_have_a_deadline_and_a_killed_worker_is_reported_as_the_cause(
    cluster: Cluster, pool: PlacementGroup, tmp_path: Path
) -> None:
    group = cluster.group("tester", Worker, pool, SEATED)
    group._timeout_s = 1.0
    with pytest.raises(WorkerError, match=r"ranks \[0, 1\] did not finish nap within 1 s"):
        group.call(nap, tmp_path / "awake")
    (tmp_path / "awake").touch()
    group._timeout_s = 60.0
    with pytest.raises(WorkerError, match=r"tester rank 1 of 2 .* died during die"):
        group.call(die)
    group.close()


def counted(worker: Worker) -> int:
    worker.inner["rank"] += 1
    return worker.inner["rank"]


@pytest.mark.long
def test_a_worker_that_stays_stopped_is_lost_and_one_that_goes_on_in_time_is_not(pool: PlacementGroup) -> None:
    patient = Cluster(60.0, health_timeout_s=60.0).group("tester", Worker, pool, SEATED)
    os.kill(patient.pids[1], signal.SIGSTOP)
    threading.Timer(1.5, os.kill, (patient.pids[1], signal.SIGCONT)).start()
    assert patient.call(rank_of) == [0, 1]
    patient.close()
    group = Cluster(60.0, health_timeout_s=2.0).group("tester", Worker, pool, SEATED)
    pid, started = group.pids[1], time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(
        WorkerLostError,
        match=rf"tester rank 1 of 2 \(process {pid} .*\) has not responded for 2 s; its process is stopped",
    ):
        group.call(rank_of)
    assert time.monotonic() - started >= 2.0
    group.close()


@pytest.mark.slow
def test_a_stopped_worker_is_found_from_another_machine(pool: PlacementGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl.single_controller.ray, "machine", lambda: "elsewhere")
    group = Cluster(60.0, health_timeout_s=3.0).group("tester", Worker, pool, SEATED)
    os.kill(group.pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match=r"tester rank 0 of 2 .* its process is stopped"):
        group.call(rank_of)
    group.close()


@pytest.mark.slow
def test_another_worker_takes_the_place_of_a_dead_one(pool: PlacementGroup) -> None:
    async def replaced(group: RayGroup) -> None:
        before = group.pids
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=rf"rank 1 of 2 \(process {before[1]} .* died during counted"):
            await group.submit(1, counted)
        await group.remake(1)
        assert group.pids[0] == before[0] and group.pids[1] != before[1]
        assert await group.submit(1, counted) == 2 and await group.submit(1, seat_of) == seats[1]

    group = Cluster(60.0).group("tester", Worker, pool, SEATED)
    seats = group.call(seat_of)
    assert group.call(counted) == [1, 2]
    asyncio.run(replaced(group))
    assert group.call(counted) == [2, 3]
    group.close()


def seat_of(worker: Worker) -> WorkerContext:
    return worker.seat


@pytest.mark.long
def test_a_failing_worker_factory_is_an_error(cluster: Cluster, pool: PlacementGroup) -> None:
    with pytest.raises(WorkerError, match=r"failed in start: .*KeyError"):
        cluster.group("tester", broken_factory, pool, SEATED)


FAILED_START = """
import threading
import verl.single_controller.ray as ours
from tests.verl.single_controller.test_ray import BUNDLE, WorkerError, broken_factory

def show():
    print("health of tester" in [each.name for each in threading.enumerate()], flush=True)

def shutdown(whole=ours.ray.shutdown):
    show()
    whole()

ours.ray.shutdown = shutdown
with ours.Cluster.start(1) as cluster:
    try:
        cluster.group("tester", broken_factory, cluster.pool([BUNDLE]), BUNDLE)
    except WorkerError:
        show()
"""


@pytest.mark.long
def test_no_thread_of_a_group_is_there_when_ray_ends() -> None:
    """Also of one whose start has failed. A thread that freed Ray's objects after its end would end this process."""
    done = subprocess.run([sys.executable, "-c", FAILED_START], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "[::1]:{port}", "127.0.0.1:99999"])
def test_a_cluster_address_without_a_listener_is_an_error_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # taken, but not listened at
        address = address.format(port=free.getsockname()[1])
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray itself would try for a minute"))
        with pytest.raises(ConfigError, match=rf"RAY_ADDRESS={re.escape(address)} is unreachable.*ray start --head"):
            Cluster.start(1).__enter__()


def broken_factory(seat: WorkerContext) -> None:
    raise KeyError("no such thing")


def test_an_actor_that_ray_killed_for_memory_is_one_paragraph_without_the_programs_of_others(group: RayGroup) -> None:
    report = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, ID: 5005) "
        "was 22.91GB used / 23.50GB limit (0.975), which exceeds the threshold\nTop 10 memory users: PID MEM(GB) "
        "COMMAND\n4711 12.00 python secret.py --password=1234\n"
    ) + "more\n" * 50
    error = group._failure(1, "step", OutOfMemoryError(report))
    assert re.fullmatch(
        r"tester rank 1 of 2 \(process \d+ on node \w+\) was killed during step: its node was nearly out of "
        r"memory \(22\.91 of 23\.50 GB\), used by this run or another program, .*or reduce the run's memory use",
        str(error),
    )
    assert group._traceback_cause(OutOfMemoryError(report)) is None


def rendezvous(port: int) -> torch.distributed.TCPStore:
    from verl.workers.rank import _store  # here: every worker's process imports this module

    return _store(WorkerContext(0, 1, "127.0.0.1", port), timedelta(seconds=30))


def test_ranks_of_one_machine_meet_on_the_loopback_address() -> None:
    with socket.socket() as held:  # no other process gets the port, and one that also reuses it may listen there
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        store = rendezvous(port)
        store.set("a", "b")
        assert [host for host, other, _ in listening([psutil.Process()]) if other == port] == ["127.0.0.1"]


def test_a_port_that_was_taken_before_the_ranks_met_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"rendezvous port {port} of 127.0.0.1 was taken"):
            rendezvous(port)


def listening(processes: list[psutil.Process]) -> Sockets:
    """(address, port, process name) of every TCP socket that is listened at. A process may end meanwhile."""
    found: Sockets = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += [
                (each.laddr.ip.removeprefix("::ffff:"), each.laddr.port, process.name())
                for each in process.net_connections("inet")
                if each.status == psutil.CONN_LISTEN
            ]
    return found


@pytest.fixture
def of_the_run(group: RayGroup, earlier: set[int]) -> Sockets:
    there = listening([psutil.Process(), *psutil.Process().children(recursive=True)])
    return [each for each in there if each[1] not in earlier]


def test_every_socket_of_a_run_listens_on_the_loopback_address(of_the_run: Sockets) -> None:
    sockets = of_the_run
    assert {"gcs_server", "raylet"} <= {name for _, _, name in sockets}
    assert len(sockets) >= 6 and {host for host, _, _ in sockets} <= {"127.0.0.1", "::1"}


@pytest.fixture
def elsewhere() -> Iterator[tuple[list[str], str]]:
    """How to run a command in a network namespace, and this machine's address there. Not those of another test run."""
    need("ip")
    if os.geteuid():
        pytest.skip("a network namespace needs root")
    name, number = f"verl{os.getpid()}", 4 * (os.getpid() % (1 << 14))
    here, there = (f"198.18.{number >> 8}.{(number & 255) + each}" for each in (1, 2))
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        for arguments in (
            f"link add {name}a type veth peer name {name}b netns {name}",
            f"addr add {here}/30 dev {name}a",
            f"link set {name}a up",
            f"-n {name} addr add {there}/30 dev {name}b",
            f"-n {name} link set {name}b up",
        ):
            subprocess.run(["ip", *arguments.split()], check=True)
        yield ["ip", "netns", "exec", name], here
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


CONNECT = """
import json, socket, sys
def answers(port):
    try:
        socket.create_connection((sys.argv[1], port), timeout=5).close()
        return True
    except OSError:
        return False
print(json.dumps([port for port in json.loads(sys.argv[2]) if answers(port)]))
"""


def test_from_another_address_no_socket_of_a_run_answers(of_the_run: Sockets, elsewhere: tuple[list[str], str]) -> None:
    within, here = elsewhere
    with socket.create_server(("0.0.0.0", 0)) as control:
        open_port = control.getsockname()[1]
        ports = json.dumps([open_port, *(port for _, port, _ in of_the_run if port != open_port)])
        command = [*within, sys.executable, "-c", CONNECT, here, ports]
        assert json.loads(subprocess.run(command, capture_output=True, check=True).stdout) == [open_port]


def test_the_token_is_for_this_user_alone(cluster: Cluster) -> None:
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert len(token.read_text()) == 64 and not token.is_relative_to(Path.home())


INTRUDER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=0)
def intrude():
    open(sys.argv[2], "w").close()
ray.get(intrude.remote(), timeout=60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_token", ["none", "wrong", "right"])
def test_no_caller_runs_anything_without_the_token(with_token: str, cluster: Cluster, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    variables |= verl.single_controller.ray._LOOPBACK  # else Ray looks for it at another address of this machine
    variables |= {
        "none": {"RAY_AUTH_MODE": "disabled"},
        "wrong": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        "right": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": os.environ["RAY_AUTH_TOKEN_PATH"]},
    }[with_token]
    mark, address = tmp_path / "mark", ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", INTRUDER.replace("sys.argv[2]", repr(str(mark))), address]
    ended = subprocess.run(command, env=variables, capture_output=True, timeout=200, check=False)
    assert (ended.returncode == 0, mark.exists()) == (with_token == "right", with_token == "right"), ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("token", [None, "0" * 64])
def test_raw_calls_without_the_token_are_refused(token: str | None, of_the_run: Sockets) -> None:
    calls = (
        "CoreWorkerService/PushTask",
        "NodeManagerService/RequestWorkerLease",
        "InternalKVGcsService/InternalKVGet",
    )
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    refused = set()
    with ExitStack() as open_channels:
        channels = [
            (name, open_channels.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")))
            for _, port, name in of_the_run
        ]
        answers = [  # at once: what does not speak this protocol answers nothing
            (name, channel.unary_unary(f"/ray.rpc.{call}").future(b"", timeout=20, metadata=metadata))
            for name, channel in channels
            for call in calls
        ]
        for name, answer in answers:
            with pytest.raises(grpc.RpcError) as error:
                answer.result()
            if error.value.code() is grpc.StatusCode.UNAUTHENTICATED:
                refused.add(name)
    assert {"gcs_server", "raylet"} <= refused and any(name.startswith("ray::_Worker") for name in refused)


@pytest.mark.long
def test_ray_agents_refuse_requests_without_the_token(of_the_run: Sockets) -> None:
    answers = set()
    for _, port, name in of_the_run:
        if "RuntimeEnvAgent" in name:
            url = f"http://127.0.0.1:{port}/get_or_create_runtime_env"
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(urllib.request.Request(url, data=b"", method="POST"), timeout=20)
            answers.add(error.value.code)
    assert answers == {401}
