"""Runtimes that clients hold: started for a lease, renewed by requests, ended without them."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from fastapi import HTTPException

from toolrl.swe import wire
from toolrl.swe.image import ImageStore, prepare_image
from toolrl.swe.local import LocalRuntime, LocalRuntimes
from toolrl.swe.runtime import RuntimeLimits
from toolrl.swe.tasks import Repository, SweTask

SHARED = "shared"  # the lease of clients that know none
SHARED_IDLE_S = 3600.0
LARGEST = RuntimeLimits(
    memory_mib=16_384, processes=4_096, file_mib=65_536, files=2_000_000, command_s=14_400.0, output_chars=1_000_000
)
OPTIONS = {"memory_mib": "--max-memory-mib", "file_mib": "--max-file-mib", "command_s": "--max-timeout-s"}
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Leased:
    """A runtime that a client holds, with the answers to its last requests."""

    runtime: LocalRuntime
    limit_s: float
    held: ExitStack  # its slot and its image
    renewed: float = field(default_factory=time.monotonic)
    sessions: set[str] = field(default_factory=set)
    answers: OrderedDict[str, asyncio.Task[Any]] = field(default_factory=OrderedDict)
    in_flight: int = 0


class Leases:
    """At most `capacity` runtimes; `queue` more requests wait for one."""

    def __init__(
        self,
        runtimes: LocalRuntimes,
        capacity: int,
        queue: int,
        lease_s: float,
        environments: Path | None,
        max_body_mib: int,
        max_images_gib: float,
        largest: RuntimeLimits = LARGEST,
    ) -> None:
        self.runtimes, self.lease_s = runtimes, lease_s
        self._largest = largest
        self.max_body_mib, self._max_images_gib = max_body_mib, max_images_gib
        self._slots, self._queue, self._environments = asyncio.Semaphore(capacity), queue, environments
        self._waiting = 0
        self._open: dict[str, Leased] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._open)

    @cached_property
    def images(self) -> ImageStore:
        return ImageStore(self.runtimes.folder / "images", self.runtimes.episodes, self._max_images_gib)

    async def start(self, request: wire.LeaseRequest) -> wire.Lease:
        """Once, even if the client repeats the request. Raises HTTPException if it cannot start here."""
        async with self._starting(request.lease):
            if request.lease not in self._open:
                await self._start(request)
        return wire.Lease(lease=request.lease, lease_s=self.lease_s)

    def check_seconds(self, *given: float | None) -> None:
        """Raises HTTPException for the time limits of a command beyond the server's."""
        for seconds in given:
            if seconds is not None and not 0 <= seconds <= self._largest.command_s:
                most = f"from 0 to {self._largest.command_s:g} s on this server (--max-timeout-s)"
                raise HTTPException(wire.REFUSED, f"a time limit of {seconds:g} s; expected {most}")

    async def _start(self, request: wire.LeaseRequest) -> None:
        for name, most in asdict(self._largest).items():
            if (given := getattr(request.limits, name)) > most:
                expected = f"at most {most:.15g} on this server ({OPTIONS.get(name, 'not adjustable')})"
                raise HTTPException(wire.REFUSED, f"limits.{name} is {given:.15g}; expected {expected}")
        image = self.images.folder / request.image
        if not image.is_dir():
            limit = {wire.MAX_BODY: str(self.max_body_mib)}
            raise HTTPException(wire.NO_IMAGE, f"there is no image {request.image}", limit)
        environment = ""
        if request.environment:
            folder = self._environments and self._environments / request.environment
            if folder is None or not folder.is_dir():
                raise HTTPException(wire.REFUSED, f"no environment {request.environment!r} in --environments {folder}")
            environment = str(folder)
        task = SweTask(
            request.lease,
            "",
            ("",),
            environment=environment,
            setup=request.setup,
            limits=request.limits,
            workdir=request.workdir,
        )
        await self._add(request.lease, image, task, self.lease_s)

    async def of(self, name: str) -> Leased:
        """A lease, renewed. Raises HTTPException if it has ended."""
        if name == SHARED:
            async with self._starting(SHARED):
                if SHARED not in self._open:
                    await self._add(SHARED, await self._empty_image(), SweTask(SHARED, "", ("",)), SHARED_IDLE_S)
        if name not in self._open:
            raise HTTPException(wire.NO_LEASE, f"there is no lease {name}: it was closed, or not renewed in time")
        leased = self._open[name]
        leased.renewed = time.monotonic()
        return leased

    async def end(self, name: str) -> None:
        if found := self._open.pop(name, None):
            with found.held:
                await found.runtime.close()

    async def reap(self) -> None:
        """End the leases whose clients have vanished, forever."""
        while True:
            await asyncio.sleep(self.lease_s / 4)
            now = time.monotonic()
            for name, found in list(self._open.items()):
                working = name == SHARED and found.in_flight  # other clients renew during commands, too
                if not working and now - found.renewed > found.limit_s:
                    log.warning("lease %s was not renewed for %g s; ending its runtime", name[:8], found.limit_s)
                    await self.end(name)

    async def close(self) -> None:
        for name in list(self._open):
            await self.end(name)
        await self.runtimes.close()

    def _starting(self, name: str) -> asyncio.Lock:
        """Of a lease: the second of two equal requests waits for the first."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def _add(self, name: str, image: Path, task: SweTask, limit_s: float) -> None:
        if self._slots.locked() and self._waiting >= self._queue:
            raise HTTPException(wire.FULL, "all runtimes are in use", {"Retry-After": "1"})
        with ExitStack() as held:
            held.enter_context(self.images.used(image.name))
            self._waiting += 1
            try:
                await self._slots.acquire()
            finally:
                self._waiting -= 1
            held.callback(self._slots.release)
            runtime = await self.runtimes.start_from(image, task)
            self._open[name] = Leased(runtime, limit_s, held.pop_all())

    async def _empty_image(self) -> Path:
        def make() -> Path:
            with tempfile.TemporaryDirectory() as folder:
                task = SweTask(SHARED, "", ("",), repository=Repository(folder))
                return prepare_image(task, self.images.folder)

        return await asyncio.to_thread(make)
