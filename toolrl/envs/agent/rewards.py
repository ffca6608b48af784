"""Rewards that a program returns, posts or writes to a file."""

from collections.abc import Mapping

from verl.rollout.finite import finite_score
from verl.types import Score

_MOST_PARTS, _MOST_CHARS = 64, 100  # each name of a part is a metric of every step
_EXPECTED = "expected a finite number, or {reward: .., parts: {name: ..}}"


def read_reward(value: object) -> Score:
    """Parses a number, or an object with `reward` and optional named `parts`. Raises ValueError."""
    if isinstance(value, Mapping):
        unknown = sorted(map(str, value.keys() - {"reward", "parts"}))
        if unknown or "reward" not in value:
            raise ValueError(f"a reward {'has no reward' if not unknown else f'with {unknown[0]!r}'}; {_EXPECTED}")
        total, parts = value["reward"], {} if value.get("parts") is None else value["parts"]
    else:
        total, parts = value, {}
    if not isinstance(parts, Mapping) or any(isinstance(each, bool) for each in (total, *parts.values())):
        raise ValueError(f"{value!r:.200} is not a reward; {_EXPECTED}")
    if len(parts) > _MOST_PARTS or any(len(str(name)) > _MOST_CHARS for name in parts):
        raise ValueError(
            f"a reward has {len(parts)} parts; at most {_MOST_PARTS}, with names of {_MOST_CHARS} characters"
        )
    try:
        return finite_score(Score(total, dict(parts)))
    except ValueError as error:
        raise ValueError(f"{value!r:.200} is not a reward; {_EXPECTED}") from error
