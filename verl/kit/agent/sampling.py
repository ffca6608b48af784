"""Sampling settings of requests: the run's count, because the policy is trained on its own distribution."""

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from verl.kit.agent.requests import bad_request
from verl.rollout.engine import Sampling

_ENGINE = ("temperature", "top_p", "top_k", "repetition_penalty")  # what an engine can set for one request


class OnSampling(StrEnum):
    """What happens to a request's settings that differ from the run's."""

    REPLACE = "replace"  # by the run's; counted
    REFUSE = "refuse"  # the request gets an error
    HONOR = "honor"  # they count; the log-probs of its response are in no ratio


def differing(settings: Mapping[str, object], run: Sampling) -> list[str]:
    """The names of settings that would change the distribution."""
    return [name for name, value in settings.items() if name not in _ENGINE or value != getattr(run, name)]


def honored(settings: Mapping[str, Any], names: list[str], run: Sampling) -> Sampling:
    """The run's sampling with these settings. Raises ApiError for those that no engine has, or of another type."""
    for name in names:
        if name not in _ENGINE:
            raise bad_request("cannot be honored (env.on_sampling=honor)", name)
        if isinstance(settings[name], bool) or not isinstance(settings[name], int | float):
            raise bad_request("must be a number", name)
    return replace(run, **{name: settings[name] for name in names})
