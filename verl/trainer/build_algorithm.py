"""From a configuration to an algorithm: the preset, and what overrides it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from verl.algorithms import ALGORITHMS
from verl.algorithms.advantage import gae
from verl.algorithms.aggregate import Aggregation
from verl.algorithms.algorithm import Algorithm, KLPlacement, KLTerm, OldLogprobs
from verl.algorithms.kl import AdaptiveKL
from verl.algorithms.policy_loss import clipped
from verl.config.schema import AlgorithmConfig
from verl.errors import ConfigError
from verl.registry import resolve


def pays_kl(algorithm: Algorithm) -> bool:
    """Whether a reference policy is needed."""
    return algorithm.kl.placement is not KLPlacement.NONE


def build_algorithm(config: AlgorithmConfig, max_response_length: int) -> Algorithm:
    """The preset with what overrides it. Raises ConfigError for an override that the preset has no use for.

    max_response_length: tokens; the constant length of losses that are divided by one, where nothing else gives it
    """
    algorithm = resolve("algorithm", config.name, ALGORITHMS)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm.name={config.name!r} is not an Algorithm but a {type(algorithm).__name__}")
    clips = {
        name: getattr(config, name)
        for name in ("clip_low", "clip_high", "dual_clip")
        if getattr(config, name) is not None
    }
    discounts = {name: getattr(config, name) for name in ("gamma", "lam") if getattr(config, name) is not None}
    changes: dict[str, Any] = {}
    if clips:
        changes["policy_loss"] = _rebound(algorithm.policy_loss, clipped, clips, config.name)
    if discounts:
        changes["advantage"] = _rebound(algorithm.advantage, gae, discounts, config.name)
    mode = algorithm.aggregation if config.aggregation is None else _aggregation(config.aggregation)
    length = _aggregation_length(config, mode, algorithm.aggregation_length or max_response_length)
    changes |= {"aggregation": mode, "aggregation_length": length}
    if config.old_logprobs is not None:
        if config.old_logprobs not in list(OldLogprobs):
            raise ConfigError(
                f"algorithm.old_logprobs must be one of {', '.join(OldLogprobs)}, got {config.old_logprobs!r}"
            )
        changes["old_logprobs"] = OldLogprobs(config.old_logprobs)
    if config.entropy_coefficient is not None:
        changes["entropy_coefficient"] = config.entropy_coefficient
    changes["kl"] = _kl_term(config, algorithm.kl)
    return replace(algorithm, **changes)


def _rebound(given: Any, function: Any, settings: dict[str, float], name: str) -> Any:
    if getattr(given, "func", given) is not function:
        keys = ", ".join(f"algorithm.{key}" for key in settings)
        raise ConfigError(f"{keys} has no effect: algorithm {name!r} does not use {function.__name__}")
    return partial(function, **{**getattr(given, "keywords", {}), **settings})


def _aggregation(name: str) -> Aggregation:
    if name not in list(Aggregation):
        raise ConfigError(f"algorithm.aggregation must be one of {', '.join(Aggregation)}, got {name!r}")
    return Aggregation(name)


def _aggregation_length(config: AlgorithmConfig, mode: Aggregation, default: float) -> float | None:
    if mode is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
        return config.aggregation_length or default
    if config.aggregation_length is not None:
        raise ConfigError(f"algorithm.aggregation_length has no effect: {mode} does not divide by a constant length")
    return None


def _kl_term(config: AlgorithmConfig, preset: KLTerm) -> KLTerm:
    placement = preset.placement if config.kl_placement is None else _placement(config.kl_placement)
    if placement is KLPlacement.NONE:
        return KLTerm()
    coefficient = preset.coefficient if config.kl_coefficient is None else config.kl_coefficient
    estimator = config.kl_estimator or (preset.estimator if preset.placement is placement else "k1")
    if coefficient <= 0:
        raise ConfigError("algorithm.kl_coefficient must be positive; switch KL off with algorithm.kl_placement=none")
    if placement is KLPlacement.REWARD and estimator != "k1":
        raise ConfigError(f"algorithm.kl_estimator={estimator}: KL in the reward is k1; the others belong in the loss")
    return KLTerm(placement, estimator, coefficient)


def _placement(name: str) -> KLPlacement:
    if name not in list(KLPlacement):
        raise ConfigError(f"algorithm.kl_placement must be one of {', '.join(KLPlacement)}, got {name!r}")
    return KLPlacement(name)


def build_kl_control(config: AlgorithmConfig, algorithm: Algorithm) -> AdaptiveKL | None:
    """The controller of the KL coefficient, where a target is set."""
    if config.kl_target is None:
        return None
    if algorithm.kl.placement is not KLPlacement.REWARD:
        raise ConfigError("algorithm.kl_target has no effect: it adapts the coefficient of KL in the reward")
    return AdaptiveKL(algorithm.kl.coefficient, config.kl_target, config.kl_horizon)
