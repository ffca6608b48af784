"""Builds the pool of scoring processes from the configuration."""

from __future__ import annotations

from dataclasses import replace

from verl.config.schema import RewardConfig
from verl.scoring.pool import ScoringPool
from verl.scoring.process import ScoringLimits


def scoring_limits(reward: RewardConfig, health_timeout_s: float | None = None) -> ScoringLimits:
    """health_timeout_s: trainer.health_timeout_s; None: the default"""
    limits = ScoringLimits(reward.timeout_s, reward.memory_mib, reward.fault_policy)
    return limits if health_timeout_s is None else replace(limits, health_timeout_s=health_timeout_s)


def build_scorer(reward: RewardConfig, health_timeout_s: float | None = None) -> ScoringPool:
    """A started pool, to be closed by the caller. Raises ConfigError for an invalid reward."""
    return ScoringPool(reward.name, reward.options, reward.num_workers, scoring_limits(reward, health_timeout_s))
