"""The terms of tools and requests. A tool is a verb with a noun; no listed tool shares both with another."""

from __future__ import annotations

from zlib import crc32

VERBS = {  # as in descriptions: another word for it
    "find": "seek",
    "book": "reserve",
    "cancel": "drop",
    "check": "test",
    "open": "unlock",
    "close": "shut",
    "send": "ship",
    "order": "request",
    "rent": "hire",
    "move": "shift",
    "judge": "grade",
    "log": "record",
    "save": "keep",
    "show": "display",
    "clean": "wash",
    "sell": "trade",
    "count": "tally",
    "share": "post",
    "print": "copy",
    "pay": "settle",
}
_NOUNS = (
    "hotel flight train car table meal song film letter parcel desk lamp door window garden pool ticket bike boat bus "
    "taxi house shop museum park school course game match race concert news report file photo map plan party meeting "
    "phone bill loan card room"
)
_NEW_NOUNS = "office cafe camera kitchen poem market tower bridge tent medal"
NOUNS, NEW_NOUNS = tuple(_NOUNS.split()), tuple(_NEW_NOUNS.split())
TERMS = (*VERBS, *VERBS.values(), *NOUNS, *NEW_NOUNS)


def is_new(verb: str, noun: str) -> bool:
    """Whether the tool is held out: a fifth of the combinations, and all with a new noun."""
    if verb not in VERBS:
        return False
    return noun in NEW_NOUNS or (noun in NOUNS and crc32(f"{verb} {noun}".encode()) % 5 == 0)
