"""Timing of a step by phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Wall seconds of each phase, and CPU seconds of this process. Phases do not nest; repeated ones add up."""

    def __init__(
        self,
        on_phase: Callable[[str], None] | None = None,
        wall: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._on_phase, self._wall, self._cpu = on_phase, wall, cpu
        self._running = ""
        self.start()

    def start(self) -> None:
        self.wall_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}
        self._started = self._wall()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert not self._running, f"phase {name} inside of {self._running}"
        self._running = name
        if self._on_phase is not None:
            self._on_phase(name)
        wall, cpu = self._wall(), self._cpu()
        try:
            yield
        finally:
            self.wall_s[name] = self.wall_s.get(name, 0.0) + self._wall() - wall
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + self._cpu() - cpu
            self._running = ""

    def metrics(self) -> dict[str, float]:
        """time/<phase>_s, time/<phase>_cpu_s, time/step_s and time/overhead_s since `start`."""
        step_s = self._wall() - self._started
        return {
            **{f"time/{name}_s": seconds for name, seconds in self.wall_s.items()},
            **{f"time/{name}_cpu_s": seconds for name, seconds in self.cpu_s.items()},
            "time/step_s": step_s,
            "time/overhead_s": step_s - sum(self.wall_s.values()),
        }
