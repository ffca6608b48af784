"""What long responses are penalised by."""

from __future__ import annotations

from dataclasses import dataclass

_BUFFER_SHARE = 0.2  # DAPO's 4,096 of 20,480


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): a slope before the limit.

    penalty = 0 up to max_tokens - buffer, -factor * (num_tokens - max_tokens + buffer) / buffer up to max_tokens,
    -factor beyond. Tokens are those that the policy wrote: what an environment says makes no response long.
    """

    max_tokens: int | None = None  # the longest response that a run allows if left out
    buffer: int | None = None  # tokens; a fifth of max_tokens if left out
    factor: float = 1.0  # points at the limit

    def with_max_tokens(self, max_response_length: int) -> Overlong:
        """The same with its lengths settled for a run."""
        longest = self.max_tokens or max_response_length
        return Overlong(longest, self.buffer or max(1, round(_BUFFER_SHARE * longest)), self.factor)

    def penalty(self, num_tokens: int) -> float:
        """What is added to the reward of a response of `num_tokens`."""
        assert self.max_tokens is not None and self.buffer is not None, "lengths are settled by `with_max_tokens`"
        excess = num_tokens - (self.max_tokens - self.buffer)
        return -self.factor * min(max(excess / self.buffer, 0.0), 1.0)
