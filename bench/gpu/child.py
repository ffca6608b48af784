"""The process of a session: python -m bench.gpu.child DRIVER ANSWERS MODULE:CLASS WORK [--rehearse] [--again]

Reads names and limits of measurements from standard input, and writes the outcome of each as a line to the file
descriptor ANSWERS. It ends with its driver.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import versions
from bench.gpu.measurements import FAILED, OK, Figures, UnexpectedError
from bench.gpu.place import Place
from bench.gpu.process import adopt_orphans, kill_descendants

_LOOK_S = 0.5  # interval of the check that the driver lives


def main() -> None:
    """Answer requests until there are no more."""
    adopt_orphans()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("driver", type=int, help="a process number: the parent's, which may have ended already")
    parser.add_argument("answers", type=int, help="a file descriptor")
    parser.add_argument("location", help="module:class")
    parser.add_argument("work", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--again", action="store_true", help="a measurement of this session failed before")
    options = parser.parse_args()
    threading.Thread(target=_end_with, args=(options.driver,), daemon=True).start()
    place = Place(options.work, options.rehearse, options.again)
    module, _, kind = options.location.partition(":")
    session = getattr(importlib.import_module(module), kind)(place)
    os.set_inheritable(options.answers, False)
    with os.fdopen(options.answers, "w") as answers, asyncio.Runner() as runner:
        for line in sys.stdin:
            name, limit = line.split()
            session.place = replace(place, limit=float(limit))
            print(json.dumps(outcome(runner, session, name)), file=answers, flush=True)
        if hasattr(session, "close"):
            runner.run(session.close())


def outcome(runner: asyncio.Runner, session: Any, name: str) -> dict[str, Any]:
    """What the driver records of a measurement, and whether the process can measure on: an error may have broken it."""
    started = time.perf_counter()
    state, reason, figures, is_usable = OK, None, Figures(), True
    try:
        found = getattr(session, name)()
        figures = plain(runner.run(found) if asyncio.iscoroutine(found) else found)
    except UnexpectedError as error:
        _print_traceback()
        state, reason, figures = FAILED, str(error), plain(error.figures)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is, the driver records it and goes on
        _print_traceback()
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())[:500]
        reason = f"{type(error).__name__}: {message} ({Path(where.filename).name}:{where.lineno})"
        state, is_usable = FAILED, False
    seconds = time.perf_counter() - started
    row = {"state": state, "reason": reason, "figures": figures, "seconds": seconds, "versions": versions()}
    return {"row": row, "is_usable": is_usable}


def plain(figures: Figures) -> dict[str, float | str | None]:
    """Numbers of any type, tensors included, as JSON's; null where they are not finite."""
    return {name: value if isinstance(value, str) else _finite(float(value)) for name, value in figures.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print_traceback() -> None:
    with suppress(OSError):  # the disk may be full
        traceback.print_exc()


def _end_with(driver: int) -> None:
    """A killed driver kills nothing: this process then kills all that it started, and itself."""
    while os.getppid() == driver:
        time.sleep(_LOOK_S)
    kill_descendants()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
