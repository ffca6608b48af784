"""Builds the pool of scoring processes from the configuration."""

from __future__ import annotations

from verl.config.schema import Config
from verl.scoring.pool import ScoringPool
from verl.scoring.process import ScoringLimits


def scoring_limits(config: Config) -> ScoringLimits:
    reward = config.reward
    return ScoringLimits(reward.timeout_s, reward.memory_mib, reward.fault_policy, config.trainer.health_timeout_s)


def build_scorer(config: Config) -> ScoringPool:
    """A started pool, to be closed by the caller."""
    return ScoringPool(config.reward.name, config.reward.options, config.reward.num_workers, scoring_limits(config))
