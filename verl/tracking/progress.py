"""Progress within a rollout: responses that are done, of those asked for, and the tokens that they have."""

import time
from collections.abc import Callable


class Progress:
    """Counts since `start`. Responses in flight at that moment count as asked for."""

    def __init__(self, on_done: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_done, self._clock = on_done, clock
        self.asked = self.done = self.tokens = 0
        self._started = clock()

    def start(self) -> None:
        self.asked, self.done, self.tokens = self.asked - self.done, 0, 0
        self._started = self._clock()

    def ask(self, responses: int) -> None:
        self.asked += responses

    def finish(self, tokens: int) -> None:
        """One response is scored, or lost: then it has no tokens."""
        self.done += 1
        self.tokens += tokens
        self.on_done()

    def __str__(self) -> str:
        speed = self.tokens / max(self._clock() - self._started, 1e-9)
        return f"{self.done} of {self.asked} responses, {speed:.0f} tokens/s"
