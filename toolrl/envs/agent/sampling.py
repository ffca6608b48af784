"""Sampling settings of requests: the run's count, because the policy is trained on its own distribution."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from toolrl.envs.agent.requests import bad_request
from verl.rollout.engine import Sampling

# What an engine can set for one request: {name: (the range, whether a value is in it)}
_ENGINE: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("from 0 to 100", lambda value: 0 <= value <= 100),
    "top_p": ("above 0, and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("that is whole and at least 1, or -1", lambda value: type(value) is int and (value == -1 or value >= 1)),
    "repetition_penalty": ("above 0, and at most 100", lambda value: 0 < value <= 100),
}


class OnSampling(StrEnum):
    """Treatment of request settings that differ from the run's."""

    REPLACE = "replace"  # use the run's; counted
    REFUSE = "refuse"  # the request gets an error
    HONOR = "honor"  # they count; the log-probs of its response are in no ratio


def differing(settings: Mapping[str, object], run: Sampling) -> list[str]:
    """The names of settings that would change the distribution."""
    return [name for name, value in settings.items() if name not in _ENGINE or value != getattr(run, name)]


def honored(settings: Mapping[str, Any], names: list[str], run: Sampling) -> Sampling:
    """The run's sampling with these settings. Raises ApiError for those that no engine has, or with another value."""
    for name in names:
        if name not in _ENGINE:
            raise bad_request("cannot be honored (env.options.on_sampling=honor)", name)
        expected, is_valid = _ENGINE[name]
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_valid(value):
            raise bad_request(f"must be a number {expected}", name)
    return replace(run, **{name: settings[name] for name in names})
