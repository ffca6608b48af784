"""Host memory that this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes: what is free on this machine, or less if its container has a limit. Cached files count as free."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
        parts = dict(line.split() for line in (cgroup / "memory.stat").read_text("ascii").splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    return max(0, min(free, limit - used + int(parts.get("inactive_file", 0))))
