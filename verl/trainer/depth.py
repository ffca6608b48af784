"""How many steps ahead prompts begin: one, and more only while the trainer has to wait for rollouts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)
_STARVED = 0.05  # share of a step's time that is spent waiting


@dataclass
class Depth:
    """Every step ahead makes samples a version older, so that one that nobody waits for would be older for nothing.

    Tails and filters that drop prompts are what makes a trainer wait. Then another step's prompts begin, and whether
    that was enough is judged once they have their turn. It never falls again: what was slow once may be again.

    most: rollout.max_staleness, less the versions in which groups are used again
    """

    most: int
    now: int = field(init=False)
    _ended: float | None = None
    _judged_from: int = 0

    def __post_init__(self) -> None:
        self.now = min(1, self.most)

    def saw(self, step: int, waited: float, now: float) -> None:
        """A step has its rollouts `now`, in seconds of some clock, for `waited` of which it did nothing else."""
        before, self._ended = self._ended, now
        if before is None:  # all begin at once, and nothing could have been ready
            self._judged_from = step + self.now
            return
        share = waited / max(now - before, 1e-9)
        if share <= _STARVED or step < self._judged_from or self.now == self.most:
            return
        self.now += 1
        self._judged_from = step + self.now + 1
        told = (step + 1, 100 * share, self.now, self.most)
        _log.warning("step %d waited for rollouts %.0f %% of its time: prompts begin %d steps ahead now, of %d", *told)

    def begin_again(self) -> None:
        """Nothing is in flight any more."""
        self._ended = None
