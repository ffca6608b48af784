"""Buckets on their way from ranks to engines: in order, no more of them than slots, and a lost engine is left out."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.weight_sync import filled
from verl.errors import EngineError
from verl.host.daemon import run_in_daemon_thread
from verl.transfer import stream
from verl.transfer.bucket import NUM_SLOTS, BucketHandle, BucketLayout, BucketSender, Receiver, plan
from verl.transfer.shared_memory import ByValue, SharedMemory
from verl.transfer.stream import Inlet, Outlet

NUMBERS = {f"w{number}": torch.randn(40, generator=torch.Generator().manual_seed(number)) for number in range(6)}


@dataclass
class Sending:
    """A rank that gathers buckets; counts those that it has started."""

    sender: BucketSender
    host: str = "127.0.0.1"
    version: int = 3
    dtype: torch.dtype = torch.float32
    fails_at: int | None = None
    started: int = 0

    def __post_init__(self) -> None:
        layouts = plan(NUMBERS.items(), self.dtype, 200)
        self.layouts = [replace(each, version=self.version) for each in layouts]
        self.outlet = Outlet(self.host, NUM_SLOTS)

    def buckets(self) -> Iterator[tuple[BucketLayout, BucketHandle]]:
        for layout in self.layouts:
            self.started += 1
            if layout.number == self.fails_at:
                raise RuntimeError("out of memory")
            yield layout, self.sender.send(layout, filled(layout, self.sender, NUMBERS))

    def to(self, *inlets: Inlet) -> asyncio.Task[None]:
        keys = [each.key for each in inlets]
        return asyncio.create_task(run_in_daemon_thread(self.outlet.send, keys, self.buckets()))


async def taken(inlet: Inlet, layouts: Sequence[BucketLayout]) -> dict[str, Tensor]:
    """As an engine: all that comes, by the product's own receiver."""
    receiver, found = Receiver(torch.device("cpu")), {}
    receiver.begin(layouts)
    while (bucket := await inlet.receive()) is not None:
        layout, handles = bucket
        found |= {name: view.clone() for name, view in layout.named(receiver.receive(layout, handles))}
        await inlet.loaded()
    inlet.close()
    receiver.end()
    return found


def is_whole(found: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> bool:
    return found.keys() == NUMBERS.keys() and all(torch.equal(found[name], NUMBERS[name].to(dtype)) for name in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("open_sender", [SharedMemory, ByValue])
async def test_every_engine_gets_all_buckets(open_sender: Any, host: str, dtype: torch.dtype) -> None:
    rank = Sending(open_sender(), host, dtype=dtype)
    engines = [await Inlet.connect([rank.outlet.address]) for _ in range(3)]
    sending = rank.to(*engines)
    found = await asyncio.gather(*(taken(each, rank.layouts) for each in engines))
    assert all(is_whole(each, dtype) for each in found)
    await sending


async def test_no_bucket_is_gathered_before_all_engines_have_left_its_slot() -> None:
    rank = Sending(SharedMemory())
    quick, slow = [await Inlet.connect([rank.outlet.address]) for _ in range(2)]
    sending, loading = rank.to(quick, slow), asyncio.create_task(taken(quick, rank.layouts))
    for number in range(len(rank.layouts)):
        await slow.receive()
        allowed = min(number + NUM_SLOTS, len(rank.layouts))
        while rank.started < allowed:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert rank.started == allowed and not sending.done()
        await slow.loaded()
    assert is_whole(await loading)
    await sending


async def test_handles_of_all_ranks_come_with_a_bucket() -> None:
    """As of ranks on several GPUs, each for the engine's worker there."""
    ranks = [Sending(ByValue()) for _ in range(2)]
    inlet = await Inlet.connect([each.outlet.address for each in ranks])
    sending = [each.to(inlet) for each in ranks]
    bucket = await inlet.receive()
    assert bucket is not None and len(bucket[1]) == 2
    await inlet.loaded()
    assert await inlet.receive() is not None
    inlet.close()
    await asyncio.gather(*sending)


@pytest.mark.parametrize("buckets", range(3))
async def test_an_engine_that_is_lost_is_left_out(buckets: int) -> None:
    """Before the ranks start, too, when its connection has not been looked at."""
    rank = Sending(SharedMemory())
    lost, other = [await Inlet.connect([rank.outlet.address]) for _ in range(2)]
    if not buckets:
        lost.close()
    sending, loading = rank.to(lost, other), asyncio.create_task(taken(other, rank.layouts))
    for _ in range(buckets):
        assert await lost.receive() is not None
        await lost.loaded()
    lost.close()
    assert is_whole(await loading)
    await asyncio.wait_for(sending, 60)


async def test_ranks_without_an_engine_gather_all_buckets() -> None:
    """A collective must not lose one of them."""
    rank = Sending(SharedMemory())
    await asyncio.wait_for(rank.to(), 60)
    assert rank.started == len(rank.layouts)


async def test_an_engine_misses_the_buckets_of_a_rank_that_failed() -> None:
    rank = Sending(SharedMemory(), fails_at=3)
    inlet = await Inlet.connect([rank.outlet.address])
    sending = rank.to(inlet)
    with pytest.raises(EngineError, match=r"weight bucket 3 .* of version 3 is missing, and 2 others"):
        await asyncio.wait_for(taken(inlet, rank.layouts), 60)
    with pytest.raises(RuntimeError, match="out of memory"):
        await sending


async def test_an_answer_to_a_rank_that_has_hung_up_is_no_error() -> None:
    """The engine's error would hide the rank's."""
    rank = Sending(SharedMemory(), fails_at=1)
    inlet = await Inlet.connect([rank.outlet.address])
    sending = rank.to(inlet)
    assert await inlet.receive() is not None
    await inlet.loaded()
    with pytest.raises(RuntimeError, match="out of memory"):
        await sending
    for _ in range(3):
        await inlet.loaded()
        await asyncio.sleep(0.05)
    assert await inlet.receive() is None
    inlet.close()


async def test_a_bucket_of_other_weights_is_not_due() -> None:
    rank = Sending(SharedMemory(), version=2)
    inlet = await Inlet.connect([rank.outlet.address])
    sending = rank.to(inlet)
    with pytest.raises(EngineError, match="of version 2 is not due"):
        await taken(inlet, [replace(each, version=3) for each in rank.layouts])
    inlet.close()
    await asyncio.wait_for(sending, 60)


async def test_ranks_of_different_buckets_are_noticed() -> None:
    ranks = [Sending(SharedMemory(), version=version) for version in (3, 2)]
    inlet = await Inlet.connect([each.outlet.address for each in ranks])
    sending = [each.to(inlet) for each in ranks]
    bucket = await inlet.receive()
    assert bucket is not None
    receiver, (layout, handles) = Receiver(torch.device("cpu")), bucket
    receiver.begin(ranks[0].layouts)
    with pytest.raises(EngineError, match="checksum mismatch"):
        receiver.receive(layout, handles[1:])
    inlet.close()
    await asyncio.gather(*sending)


async def test_strangers_and_engines_of_other_weight_syncs_get_nothing() -> None:
    """Silent ones do not delay the others."""
    rank = Sending(SharedMemory())
    silent = [socket.create_connection(rank.outlet.address) for _ in range(5)]
    with socket.create_connection(rank.outlet.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        earlier, inlet = [await Inlet.connect([rank.outlet.address]) for _ in range(2)]
        before, sending = time.monotonic(), rank.to(inlet)
        assert is_whole(await taken(inlet, rank.layouts))
        assert time.monotonic() - before < stream._REACH_S / 2
        assert await earlier.receive() is None
        earlier.close()
        await sending
    for each in silent:
        with each:
            assert each.recv(1) == b""


async def test_an_engine_whose_connection_never_arrives_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often others connect."""
    monkeypatch.setattr(stream, "_REACH_S", 2.0)
    rank = Sending(SharedMemory())
    inlet = await Inlet.connect([rank.outlet.address])
    sending = asyncio.create_task(
        run_in_daemon_thread(rank.outlet.send, [inlet.key, b"of a lost machine"], rank.buckets())
    )
    loading = asyncio.create_task(taken(inlet, rank.layouts))
    for _ in range(150):  # longer than a rank waits
        if rank.started:
            break
        with suppress(OSError), socket.create_connection(rank.outlet.address):
            await asyncio.sleep(0.2)
    assert rank.started
    assert is_whole(await loading)
    await asyncio.wait_for(sending, 60)


async def test_a_rank_that_cannot_be_reached_is_an_error() -> None:
    outlet = Outlet("127.0.0.1", NUM_SLOTS)
    outlet.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
    with pytest.raises(EngineError, match=rf"cannot reach a trainer rank at 127\.0\.0\.1:{port} \(ConnectionRefused"):
        await Inlet.connect([(host, port)])


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"cannot listen on 192\.0\.2\.1, .*Cannot assign .*--node-ip-address"):
        Outlet("192.0.2.1", NUM_SLOTS)  # of documentation (RFC 5737)


async def test_an_engine_that_connects_again_gets_all_buckets() -> None:
    """Its new connections have the numbers of those that it still waited for."""
    stuck, rank = [Sending(SharedMemory()) for _ in range(2)]
    earlier = await Inlet.connect([stuck.outlet.address])
    waiting = asyncio.create_task(earlier.receive())
    await asyncio.sleep(0.05)
    earlier.close()
    inlet = await Inlet.connect([rank.outlet.address])
    sending = rank.to(inlet)
    assert is_whole(await asyncio.wait_for(taken(inlet, rank.layouts), 60))
    await sending
    waiting.cancel()
    stuck.outlet.close()


async def test_a_connection_is_given_up_while_bytes_are_under_way() -> None:
    """The kernel would send them again for a quarter of an hour, and asks for no sign of life meanwhile."""
    rank = Sending(SharedMemory())
    inlet = await Inlet.connect([rank.outlet.address])
    sending = rank.to(inlet)
    assert await inlet.receive() is not None
    for each in (*inlet._connections, *rank.outlet._loaded):
        assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
    inlet.close()
    await sending


async def test_a_canceled_engine_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    rank = Sending(SharedMemory())
    inlet = await Inlet.connect([rank.outlet.address])
    sending = rank.to(inlet)

    async def waits_forever() -> None:
        try:
            await inlet.receive()
            await asyncio.Event().wait()
        finally:
            inlet.close()

    loading = asyncio.create_task(waits_forever())
    await asyncio.sleep(0.05)
    loading.cancel()
    await asyncio.wait_for(sending, 60)
    while not set(threading.enumerate()) <= before:  # else a test that hangs fails
        await asyncio.sleep(0.01)
