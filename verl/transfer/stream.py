"""The way of buckets from a rank to its engines without the controller: one connection per pair, for one weight sync.

The rank sends a message per bucket, its layout and handle; the engine answers with a byte once it has loaded it. So a
rank knows when the memory of a bucket is free. The bucket itself is in that memory, which the handle names, or in the
handle.

Engines connect before the ranks start to send. So a rank knows for whom it waits, and a lost one hangs up.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import EngineError

if TYPE_CHECKING:  # some engines do not need torch
    from verl.transfer.bucket import BucketHandle, BucketLayout

Address = tuple[str, int]  # host and port of a rank

_KEY_BYTES = 16
_SIZE = struct.Struct("!Q")
_LOADED = b"\0"  # an engine's answer to a bucket
_REACH_S = 10.0  # for a connection
_QUEUE = 1024  # engines that have connected while the rank is busy
_SILENT_S = 120.0  # until a machine is gone; longer than an engine stays stopped, or loads a bucket: it reads none then


class Outlet:
    """A rank's end of the connections to its engines, for one weight sync."""

    def __init__(self, host: str, num_slots: int) -> None:
        """Raises EngineError if the host is not this machine's.

        host: of this rank, as engines reach it; num_slots: buckets alive at once
        """
        self._num_slots = num_slots
        try:
            self._listening = socket.create_server((host, 0), family=_family(host), backlog=_QUEUE)
        except OSError as error:
            raise EngineError(
                f"a trainer rank cannot listen on {host}, which Ray has as its node's address ({error}); start Ray on "
                "that node with the address of one of its networks: ray start --node-ip-address"
            ) from error
        self._loaded: dict[socket.socket, int] = {}  # number of buckets, by engine

    @property
    def address(self) -> Address:
        host, port, *_ = self._listening.getsockname()
        return host, port

    def send(self, keys: Collection[bytes], buckets: Iterable[tuple[BucketLayout, BucketHandle | None]]) -> None:
        """Send all buckets to the engines with these keys, and wait until they are loaded. An engine that hangs up is
        left out: the caller of the engine gets its error.

        buckets: each is taken when its slot is free
        """
        sent = 0
        with closing(self):
            self._accept(keys)
            for bucket in buckets:
                self._send(bucket)
                sent += 1
                self._wait(sent - self._num_slots + 1)
            self._wait(sent)

    def close(self) -> None:
        for each in (self._listening, *self._loaded):
            each.close()
        self._loaded.clear()

    def _accept(self, keys: Collection[bytes]) -> None:
        """They have connected by now. One that does not show up is taken for lost; if it is not, it misses buckets.

        Strangers, of a weight sync that was given up, too, are listened to beside each other: none delays the engines.
        """
        missing, deadline = set(keys), time.monotonic() + _REACH_S
        self._listening.setblocking(False)
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listening, selectors.EVENT_READ)
            while missing and (ready := waiting.select(max(0.0, deadline - time.monotonic()))):
                for each, _ in ready:
                    connection = each.data
                    if connection is None:
                        with suppress(BlockingIOError, ConnectionError):  # it has gone again
                            connection, _ = self._listening.accept()
                            waiting.register(connection, selectors.EVENT_READ, connection)
                        continue
                    waiting.unregister(connection)
                    if (key := _key(connection)) not in missing:
                        connection.close()
                        continue
                    missing.remove(key)
                    _watch(connection)
                    self._loaded[connection] = 0
            for each in waiting.get_map().values():
                if each.data is not None:
                    each.data.close()

    def _send(self, bucket: tuple[BucketLayout, BucketHandle | None]) -> None:
        parts = _parts(bucket)
        for connection in [*self._loaded]:
            try:
                for part in parts:
                    connection.sendall(part)
            except OSError:
                self._drop(connection)

    def _wait(self, count: int) -> None:
        """Until every engine has loaded that many buckets."""
        for connection in [*self._loaded]:
            while connection in self._loaded and self._loaded[connection] < count:
                try:
                    answers = len(connection.recv(self._num_slots))
                except OSError:
                    answers = 0
                if answers:
                    self._loaded[connection] += answers
                else:
                    self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._loaded[connection]
        connection.close()


class Inlet:
    """An engine's end of its connections to the ranks that send to it. Made by `connect`."""

    def __init__(self, key: bytes, connections: list[socket.socket]) -> None:
        self.key = key  # by which the ranks know this engine
        self._connections = connections

    @classmethod
    async def connect(cls, addresses: Iterable[Address]) -> Inlet:
        """Raises EngineError if a rank cannot be reached."""
        inlet = cls(secrets.token_bytes(_KEY_BYTES), [])
        try:
            for address in addresses:
                await inlet._connect(*address)
        except BaseException:
            inlet.close()
            raise
        return inlet

    async def _connect(self, host: str, port: int) -> None:
        connection, loop = socket.socket(_family(host)), asyncio.get_running_loop()
        self._connections.append(connection)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(_REACH_S):
                await loop.sock_connect(connection, (host, port))
                await loop.sock_sendall(connection, self.key)
        except OSError as error:  # as is a timeout
            raise EngineError(
                f"the weight sync cannot reach a trainer rank at {host}:{port} ({error!r}); engines connect to the "
                "nodes of the ranks, on any port"
            ) from error
        _watch(connection)

    async def receive(self) -> tuple[BucketLayout, Sequence[BucketHandle]] | None:
        """The next bucket, with a handle from each rank; None once a rank has hung up."""
        try:
            messages = [await _receive(each) for each in self._connections]
        except (EOFError, OSError):
            return None
        layouts, handles = zip(*messages, strict=True)
        return layouts[0], handles  # the digest of a handle for another bucket will not match

    async def loaded(self) -> None:
        """Report to the ranks that the bucket is loaded. One that has hung up has a failure of its own to report."""
        loop = asyncio.get_running_loop()
        for each in self._connections:
            with suppress(OSError):
                await loop.sock_sendall(each, _LOADED)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for each in self._connections:
            if each.fileno() >= 0:  # the loop would take the next socket of this number for one that it watches
                loop.remove_reader(each)
            each.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _key(connection: socket.socket) -> bytes:
    """What an engine sends first; empty if it has hung up."""
    try:
        return connection.recv(_KEY_BYTES)
    except OSError:
        return b""


def _watch(connection: socket.socket) -> None:
    """A machine that is gone does not hang up: the kernel asks it every 5 s, and gives up after two minutes.

    It does not ask while bytes are under way, and would send them again for a quarter of an hour.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_SILENT_S * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _parts(message: Any) -> list[Any]:
    """A message as bytes: the number of its blocks, their sizes, and the blocks. Large arrays are not copied."""
    blocks: list[Any] = []
    whole = pickle.dumps(message, protocol=5, buffer_callback=lambda each: blocks.append(each.raw()))
    blocks.insert(0, whole)
    sizes = (len(blocks), *(memoryview(each).nbytes for each in blocks))
    return [b"".join(map(_SIZE.pack, sizes)), *blocks]


async def _receive(connection: socket.socket) -> Any:
    """A message. Raises EOFError if there is none."""
    (count,) = _SIZE.unpack(await _exactly(connection, _SIZE.size))
    sizes = await _exactly(connection, count * _SIZE.size)
    whole, *buffers = [await _exactly(connection, size) for (size,) in _SIZE.iter_unpack(sizes)]
    return pickle.loads(whole, buffers=buffers)  # noqa: S301  from a rank whose address came from the controller


async def _exactly(connection: socket.socket, size: int) -> Any:
    """[size] bytes, in memory that is not filled before."""
    memory, loop, place = np.empty(size, np.uint8), asyncio.get_running_loop(), 0
    while place < size:
        count = await loop.sock_recv_into(connection, memory[place:].data)
        if not count:
            raise EOFError
        place += count
    return memory
