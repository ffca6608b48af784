"""Progress within a rollout: responses that are done, of those asked for, and the tokens written so far."""

import time
from collections.abc import Callable


class Progress:
    """Counts since `start`. Responses in flight at that moment count as asked for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self.asked = self.done = self._of_done = 0
        self._written = self._before = 0  # tokens since the run's start, and those of before `start`
        self._started = clock()

    def start(self) -> None:
        self.asked, self.done, self._of_done = self.asked - self.done, 0, 0
        self._before = self._written
        self._started = self._clock()

    def ask(self, responses: int) -> None:
        self.asked += responses

    def finish(self, tokens: int) -> None:
        """One response is scored, or lost: then it has no tokens."""
        self.done += 1
        self._of_done += tokens
        self.on_change()

    def write(self, tokens: int) -> None:
        """tokens: of all responses since the run's start, those in progress included"""
        self._written = max(tokens, self._written)  # one that ends while it is counted may be counted twice
        self.on_change()

    @property
    def tokens(self) -> int:
        return max(self._of_done, self._written - self._before)

    def __str__(self) -> str:
        speed = self.tokens / max(self._clock() - self._started, 1e-9)
        return f"{self.done} of {self.asked} responses, {self.tokens} tokens, {speed:.0f} tokens/s"
