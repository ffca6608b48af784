"""Whether a metric is in the table of docs/metrics.md."""

import re

from verl.tracking.names import METRICS

_FREE = {"data_source": r".+", "set": r".+", "category": r".+"}  # these may hold slashes


def _pattern(name: str) -> str:
    pieces = re.split(r"<(\w+)>", name)  # text, placeholder, text, ...
    pieces[::2] = map(re.escape, pieces[::2])
    pieces[1::2] = [_FREE.get(placeholder, r"[^/]+") for placeholder in pieces[1::2]]
    return "".join(pieces)


_KNOWN = re.compile("|".join(_pattern(metric.name) for metric in METRICS))


def known(name: str) -> bool:
    """Whether the table has this name, with placeholders filled in."""
    return "<" not in name and _KNOWN.fullmatch(name) is not None
