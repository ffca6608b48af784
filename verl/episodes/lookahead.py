"""How many steps ahead prompts are prefetched: one, and more only while that reduces the trainer's waiting time."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)
_STARVED = 0.05  # fraction of time that the trainer waits for rollouts
_HELPED = 0.8  # an additional step must reduce the waiting fraction to this factor
_PAUSE = 50  # steps until the next try after a revert


@dataclass
class LookaheadController:
    """Adapts the number of prefetched steps. Each makes samples one version more off-policy, so it has to pay off.

    If long episodes or filters make the trainer wait, the prompts of another step are prefetched. If the engines are
    saturated, that does not help and is reverted. Both decisions use as many steps as are in flight, starting once
    the prompts added by the last change have been trained on.

    max_steps_ahead: rollout.max_staleness minus the versions reserved for reusing groups
    """

    max_steps_ahead: int
    steps_ahead: int = field(init=False)
    _ended: float | None = None  # time at which the last step had its rollouts
    _first: int = 0  # first step of the measurement
    _waited: float = 0.0
    _elapsed: float = 0.0
    _fraction_before: float | None = None  # waiting fraction with one step less

    def __post_init__(self) -> None:
        self.steps_ahead = min(1, self.max_steps_ahead)

    def update(self, step: int, waited: float, now: float) -> None:
        """Record that a step has its rollouts at time `now`, after `waited` seconds of waiting for them."""
        before, self._ended = self._ended, now
        if before is None:  # the first prompts all start at once, so no group could be ready
            self._measure_from(step + self.steps_ahead)
        elif step >= self._first:
            self._waited += waited
            self._elapsed += now - before
            if step >= self._first + self.steps_ahead:
                self._decide(step, self._waited / max(self._elapsed, 1e-9))

    def _decide(self, step: int, fraction: float) -> None:
        before, self._fraction_before = self._fraction_before, None
        if before is not None and fraction > max(_STARVED, _HELPED * before):
            self.steps_ahead -= 1
            self._measure_from(step + _PAUSE)
            waits = "still waits"
        elif fraction > _STARVED and self.steps_ahead < self.max_steps_ahead:
            self.steps_ahead += 1
            self._measure_from(step + self.steps_ahead + 1)
            self._fraction_before, waits = fraction, "waits"
        else:
            self._measure_from(step + 1)
            return
        depth = f"prompts are now prefetched {self.steps_ahead} of at most {self.max_steps_ahead} steps ahead"
        _log.warning("step %d: trainer %s for rollouts %.0f %% of its time: %s", step + 1, waits, 100 * fraction, depth)

    def _measure_from(self, step: int) -> None:
        self._first, self._waited, self._elapsed = step, 0.0, 0.0

    def reset(self) -> None:
        """Restart the measurement: no prompts are in flight."""
        self._ended = None
