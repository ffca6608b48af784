"""Where a response ends that stop strings are to end: at the token that completes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_TOKENS_OF_A_CHARACTER = 4  # at most, where tokens are bytes; a cut one decodes to something else


def reach(stop: str) -> int:
    """As many of the last tokens hold a stop string that has just ended, for a token has a byte at least."""
    return len(stop.encode()) + _TOKENS_OF_A_CHARACTER


def tokens_to_stop(decode: Decode, before: Sequence[int], after: Sequence[int], stops: Sequence[str]) -> int | None:
    """Tokens of `after` up to the one that completes the first stop string in what both say together, if there is any.

    before: what holds none by itself, and may begin one. Only the tokens on either side of the seam are looked at.
    """
    longest = max(map(reach, stops), default=0)
    tail, head = before[max(0, len(before) - longest) :], after[:longest]

    def holds(count: int) -> bool:
        text = decode([*tail, *head[:count]])
        return any(stop in text for stop in stops)

    return next((count for count in range(1, len(head) + 1) if holds(count)), None) if holds(len(head)) else None
