"""Typed access to rows of a run's files: values have the expected type, and numbers are finite."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

_LARGEST_STEP = 2**53  # which the browser's numbers hold
_REQUIRED = ("step", "task_id", "index", "responses")  # fields of a rollout
_TYPES: Mapping[str, Any] = {
    "task_id": str,
    "data_source": str,
    "index": int,
    "group": int,
    "prompt": list,
    "responses": list,
    "answer": str,
    "tools": list,
    "segments": list,
    "turn_rewards": list,
    "exceeded": str,
    "score": dict | None,
    "stop_reason": str | None,
    "num_tokens": int,
    "tool_uses": list,
}


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_STEP


def is_rollout(row: Mapping[str, Any]) -> bool:
    """Whether a transcript's row can be shown."""
    return all(name in row for name in _REQUIRED) and is_step(row["step"]) and _is_typed(row)


def is_scored(row: Mapping[str, Any]) -> bool:
    """Whether a validation's row can be shown, and has a finite score."""
    score = row.get("score")
    known = isinstance(score, dict) and number(score.get("total")) is not None
    return known and number(row.get("exact", 0)) is not None and _is_typed(row)


def _is_typed(row: Mapping[str, Any]) -> bool:
    if not all(isinstance(row[name], types) for name, types in _TYPES.items() if name in row):
        return False
    score = row.get("score") or {}
    parts = score.get("parts", {})
    return (
        all(map(_is_message, (*row.get("prompt", ()), *row.get("responses", ()))))
        and all(isinstance(each, dict) for each in row.get("tool_uses", ()))
        and all(isinstance(each, int) for each in row.get("segments", ()))
        and isinstance(parts, dict)
        and _are_numbers((*parts.values(), row.get("reward"), row.get("num_tokens"), score.get("total")))
        and _are_numbers(row.get("turn_rewards", ()))
    )


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
        return False
    calls = message.get("tool_calls", [])
    return isinstance(calls, list) and all(isinstance(call, dict) for call in calls)


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(value is None or number(value) is not None for value in values)
