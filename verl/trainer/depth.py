"""How many steps ahead prompts begin: one, and more only while that spares the trainer waiting for rollouts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)
_STARVED = 0.05  # share of the time that is spent waiting
_HELPED = 0.8  # of that share, if the last step ahead was worth it
_PAUSE = 50  # steps until another is tried, if it was not


@dataclass
class LookaheadController:
    """Every step ahead makes samples a version older, so that one that spares nobody a wait is a loss.

    Where long episodes, or filters that drop prompts, make the trainer wait, another step's prompts begin. Where
    engines have all they can do that does not help, and it is taken back. Both are judged over as many steps as are in
    flight, once the prompts that the last change added have had their turn.

    most: rollout.max_staleness, less the versions in which groups are used again
    """

    most: int
    now: int = field(init=False)
    _ended: float | None = None  # when the last step had its rollouts
    _from: int = 0  # first step that counts
    _waited: float = 0.0
    _lasted: float = 0.0
    _share_before: float | None = None  # of waiting, with one step less

    def __post_init__(self) -> None:
        self.now = min(1, self.most)

    def update(self, step: int, waited: float, now: float) -> None:
        """A step has its rollouts `now`, in seconds of some clock, for `waited` of which it did nothing else."""
        before, self._ended = self._ended, now
        if before is None:  # all begin at once, and nothing could have been ready
            self._count_from(step + self.now)
        elif step >= self._from:
            self._waited += waited
            self._lasted += now - before
            if step >= self._from + self.now:
                self._judge(step, self._waited / max(self._lasted, 1e-9))

    def _judge(self, step: int, share: float) -> None:
        told = (step + 1, 100 * share)
        if self._share_before is not None and share > max(_STARVED, _HELPED * self._share_before):
            self.now -= 1
            self._count_from(step + _PAUSE)
            self._share_before = None
            _log.warning("step %d: training still waits for rollouts %.0f %% of its time: %s", *told, self._begin())
        elif share > _STARVED and self.now < self.most:
            self.now += 1
            self._count_from(step + self.now + 1)
            self._share_before = share
            _log.warning("step %d: training waits for rollouts %.0f %% of its time: %s", *told, self._begin())
        else:
            self._count_from(step + 1)
            self._share_before = None

    def _begin(self) -> str:
        return f"prompts begin {self.now} of {self.most} steps ahead now"

    def _count_from(self, step: int) -> None:
        self._from, self._waited, self._lasted = step, 0.0, 0.0

    def begin_again(self) -> None:
        """Nothing is in flight any more."""
        self._ended = None
