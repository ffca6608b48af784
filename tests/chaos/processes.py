"""The processes of a run that have no list in the run itself, found by their command lines."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil


def scorers(controller: int) -> list[int]:
    """Process ids of the rewards' processes."""
    return [each["pid"] for each in children(controller) if "spawn_main" in " ".join(each["cmdline"] or ())]


def sandboxes(controller: int) -> list[int]:
    """Process ids of the sandbox's workers, each followed by those in which it does its work."""
    boxes = [each["pid"] for each in children(controller) if each["name"] == "bwrap"]
    return [pid for box in boxes for pid in (box, *(each["pid"] for each in below(box)))]


def children(pid: int) -> list[dict[str, Any]]:
    """Those that a process has started itself."""
    return [each for each in below(pid) if each["ppid"] == pid]


def below(pid: int) -> list[dict[str, Any]]:
    """The processes below one, without those that end meanwhile. Raises NoSuchProcess if it has ended itself."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.append(each.as_dict(["pid", "ppid", "name", "cmdline"]))
    return found
