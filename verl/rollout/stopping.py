"""Stop strings in tokens: a response ends at the token that completes one."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_TOKENS_OF_A_CHARACTER = 4  # maximum, for byte tokens; a partial character decodes to something else


def reach(stop: str) -> int:
    """Number of trailing tokens that must contain a stop string which has just ended: a token has at least a byte."""
    return len(stop.encode()) + _TOKENS_OF_A_CHARACTER


def tokens_to_stop(decode: Decode, before: Sequence[int], after: Sequence[int], stops: Sequence[str]) -> int | None:
    """Number of tokens of `after` up to the one that completes the first stop string of `before + after`; else None.

    before: contains no stop string, but may end with the start of one. Only tokens near the boundary are examined.
    """
    longest = max(map(reach, stops), default=0)
    tail, head = before[max(0, len(before) - longest) :], after[:longest]

    def holds(count: int) -> bool:
        text = decode([*tail, *head[:count]])
        return any(stop in text for stop in stops)

    return next((count for count in range(1, len(head) + 1) if holds(count)), None) if holds(len(head)) else None
