"""Measurements of bench/gpu/short.py that take no time, in processes as real ones: python .. DRIVER OPTIONS"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu import short
from bench.gpu.measurements import Figures, Measurement, Session, UnexpectedError
from bench.gpu.place import Place

HERE = "tests.support.fake_measurements"
START_S = 1


class Quick:
    """Counts its calls in the work folder."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def one(self) -> Figures:
        return self._counted("one")

    async def two(self) -> Figures:
        return self._counted("two")

    def wrong(self) -> Figures:
        raise UnexpectedError("2 is not 3", self._counted("wrong"))

    def recovers(self) -> Figures:
        """Fails in the first process of its session, and leaves it unusable."""
        figures = self._counted("recovers")
        if not self.place.again:
            raise OSError("no such device")
        return figures

    def _counted(self, name: str) -> Figures:
        with (self.place.work / "calls").open("a") as file:
            file.write(f"{name} {os.getpid()}\n")
        return {"a value: ms": 1.5}


class Slow(Quick):
    """Leaves a daemon in a session of its own, whose number is in the work folder, and does not end."""

    def warm(self) -> Figures:
        return self._counted("warm")

    def waits(self) -> Figures:
        return self.hangs()

    def hangs(self) -> Figures:
        self._counted("hangs")
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (written := self.place.work / "daemon.new").write_text(str(daemon.pid))
        written.rename(self.place.work / "daemon")  # there is none without its number
        time.sleep(600)
        return {}

    def dies(self) -> Figures:
        self._counted("dies")
        print("the last line", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


class Broken(Quick):
    """No process of it gets ready, or none before one has broken."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if not place.again or (place.work / "never").exists():
            with (place.work / "starts").open("a") as file:
                file.write("start\n")
            raise OSError("no engine")

    def begins(self) -> Figures:
        return self._counted("begins")

    def follows(self) -> Figures:
        return self._counted("follows")

    def ends(self) -> Figures:
        return self._counted("ends")


class Last(Quick):
    """Of a package that is nowhere, and too long for any call."""

    def lacks(self) -> Figures:
        return self._counted("lacks")

    def long(self) -> Figures:
        return {}

    def late(self) -> Figures:
        return self._counted("late")


SESSIONS = (
    Session(
        f"{HERE}:Quick",
        START_S,
        (),
        (
            Measurement("one", "the first", 1, 10),
            Measurement("wrong", "a bound", 1, 10),
            Measurement("recovers", "a second try", 1, 10),
            Measurement("two", "the second", 1, 10),
        ),
    ),
    Session(
        f"{HERE}:Slow",
        START_S,
        (),
        (
            Measurement("warm", "a start", 1, 10),
            Measurement("hangs", "a limit", 1, 2),
            Measurement("dies", "a signal", 1, 10),
            Measurement("waits", "an end of the call", 1, 1000),
        ),
    ),
    Session(
        f"{HERE}:Broken",
        START_S,
        (),
        (
            Measurement("begins", "a process that does not start", 1, 10),
            Measurement("follows", "what needs it, too", 1, 10),
            Measurement("ends", "and this", 1, 10),
        ),
    ),
    Session(
        f"{HERE}:Last",
        START_S,
        (),
        (
            Measurement("lacks", "a package", 1, 10, ("package_of_a_tree",)),
            Measurement("long", "an estimate", 10_000, 10_000),
            Measurement("late", "the last", 1, 10),
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(short.main(sys.argv[1:], SESSIONS))


def calls(work: Path) -> list[str]:
    """Names of the measurements that ran, in order."""
    path = work / "calls"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []
