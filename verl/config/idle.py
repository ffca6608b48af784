"""Settings that do nothing in the chosen mode: a value that is ignored is a mistake that nobody notices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.config.schema import Config
from verl.errors import ConfigError

WITHOUT_CRITIC = ("grpo", "toolrl_grpo")

# (key or beginning of keys, when it is idle, why)
_IDLE: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    ("critic.", lambda c: c.algorithm.name in WITHOUT_CRITIC, "the algorithm has no critic"),
    ("trainer.critic_warmup", lambda c: c.algorithm.name in WITHOUT_CRITIC, "the algorithm has no critic"),
    ("rollout.kv_cache_gib", lambda c: c.rollout.name == "hf", "the transformers engine has no such cache"),
    ("rollout.gpu_memory_utilization", lambda c: c.rollout.name == "hf", "the transformers engine takes what it needs"),
    ("rollout.gpu_memory_utilization", lambda c: c.trainer.device == "cpu", "there is no GPU with trainer.device=cpu"),
    ("actor.offload_params", lambda c: c.trainer.device == "cpu", "there is no GPU with trainer.device=cpu"),
    ("actor.offload_optimizer", lambda c: c.trainer.device == "cpu", "there is no GPU with trainer.device=cpu"),
    ("ref.offload_params", lambda c: c.trainer.device == "cpu", "there is no GPU with trainer.device=cpu"),
    ("ref.offload_params", lambda c: c.algorithm.kl_placement == "none", "algorithm.kl_placement is none"),
    ("algorithm.kl_coefficient", lambda c: c.algorithm.kl_placement == "none", "algorithm.kl_placement is none"),
    ("algorithm.kl_estimator", lambda c: c.algorithm.kl_placement == "none", "algorithm.kl_placement is none"),
    ("algorithm.kl_horizon", lambda c: c.algorithm.kl_target is None, "algorithm.kl_target is not set"),
    ("actor.optim.min_lr_ratio", lambda c: c.actor.optim.schedule == "constant", "actor.optim.schedule is constant"),
    ("critic.optim.min_lr_ratio", lambda c: c.critic.optim.schedule == "constant", "critic.optim.schedule is constant"),
)


def refuse_idle(written: Mapping[str, Any], config: Config) -> None:
    """Raises ConfigError for a key that was written, differs from its default and has no effect in this mode."""
    for key, value in written.items():
        for begin, idle, why in _IDLE:
            concerned = key == begin or (begin.endswith(".") and key.startswith(begin))
            if concerned and idle(config) and value != _default(key):
                raise ConfigError(f"{key}={value} has no effect: {why}")


def _default(key: str) -> Any:
    value: Any = Config()
    for name in key.split("."):
        value = getattr(value, name)
    return value
