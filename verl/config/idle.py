"""Settings that do nothing in the chosen mode: a value that is ignored is a mistake that nobody notices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from verl.config.schema import (
    WITHOUT_CRITIC,
    Config,
    EnvConfig,
    EvalConfig,
    GenerationConfig,
    OptimConfig,
    ProbeConfig,
    SFTConfig,
)
from verl.errors import ConfigError


class Rule(NamedTuple):
    """When a key has no effect."""

    key: str  # and all keys below it
    idle: Callable[[Any], bool]  # of the configuration
    why: str


def _always(config: Any) -> bool:
    return True


def _on_cpu(config: Config) -> bool:
    return config.trainer.device == "cpu"


def _without_critic(config: Config) -> bool:
    return config.algorithm.name in WITHOUT_CRITIC


def _without_kl(config: Config) -> bool:
    return config.algorithm.kl_placement == "none"


_NO_GPU = "there is no GPU with device=cpu"
_OF_SEVERAL_TURNS = [item.name for item in fields(EnvConfig) if item.name not in ("name", "codec")]
_ONE_REPLY = "env.codec is not set, so an episode is one reply"
_SERVERS = "sandbox.urls names servers, which have their own"
_OF_EPISODES = (
    *(Rule(f"env.{name}", lambda c: not c.env.several_turns, _ONE_REPLY) for name in _OF_SEVERAL_TURNS),
    *(
        Rule(key, lambda c: c.env.name != "tool", "it is for the tools of env.name=tool")
        for key in ("env.tool_timeout_s", "env.max_concurrent_calls")
    ),
    Rule("env.judge_timeout_s", lambda c: c.env.name in ("single_turn", "tool"), "this environment does not judge"),
    Rule("sandbox", lambda c: not c.env.several_turns, _ONE_REPLY),
    *(Rule(f"sandbox.{name}", lambda c: bool(c.sandbox.urls), _SERVERS) for name in ("isolation", "num_workers")),
)
_NO_VALIDATION = "there are no data.val_files to validate on"


def _untested(config: Config | SFTConfig) -> bool:
    benchmarks = config.trainer.eval_benchmarks if isinstance(config, Config) else ()
    return not config.data.val_files and not benchmarks


def _of_memory(group: str, hf: Callable[[Any], bool], device: Callable[[Any], str]) -> tuple[Rule, ...]:
    """What says how much memory an engine's cache may take."""
    utilization = f"{group}gpu_memory_utilization"
    return (
        Rule(f"{group}kv_cache_gib", hf, "the transformers engine has no such cache"),
        Rule(f"{group}kv_cache_gib", lambda c: device(c) == "cuda", f"on a GPU {utilization} decides"),
        Rule(utilization, hf, "the transformers engine takes what it needs"),
        Rule(utilization, lambda c: device(c) == "cpu", _NO_GPU),
    )


def _of_cosine(key: str, optim: Callable[[Any], OptimConfig]) -> Rule:
    return Rule(f"{key}.min_lr_ratio", lambda c: optim(c).schedule == "constant", f"{key}.schedule is constant")


_OF_TRAINING = (
    Rule("trainer.test_freq", lambda c: c.trainer.test_freq > 0 and _untested(c), _NO_VALIDATION),
    Rule("trainer.keep_best", lambda c: c.trainer.keep_best > 0 and _untested(c), _NO_VALIDATION),
    Rule("trainer.num_threads", lambda c: c.trainer.device == "cuda", "it is for processes on CPU"),
)
_OF_A_LONE_ENGINE = (
    Rule("model.compute_dtype", _always, "dtype says what the engine computes in"),
    Rule("model.enable_gradient_checkpointing", _always, "nothing is trained"),
    *_of_memory("", lambda c: c.engine == "hf", lambda c: c.device),
    Rule("tensor_model_parallel_size", lambda c: c.engine == "hf", "the transformers engine is not split"),
    Rule("num_threads", lambda c: c.device == "cuda", "it is for processes on CPU"),
)
_OF_LONE_EPISODES = (
    *_OF_EPISODES,
    *_OF_A_LONE_ENGINE,
    Rule("prompt_template", lambda c: not c.env.several_turns, _ONE_REPLY),
    Rule("env.train_on_observations", _always, "nothing is trained"),
)
_RULES: Mapping[type, tuple[Rule, ...]] = {
    Config: (
        *_OF_TRAINING,
        *(
            Rule(f"trainer.{name}", lambda c: not c.trainer.eval_benchmarks, "trainer.eval_benchmarks names none")
            for name in ("eval_limit", "eval_data_dir", "eval_hub")
        ),
        *(Rule(key, _without_critic, "the algorithm has no critic") for key in ("critic", "trainer.critic_warmup")),
        Rule(
            "rollout.on_publish",
            lambda c: c.rollout.max_staleness == 0,
            "with rollout.max_staleness=0 no reply is being written when weights are published",
        ),
        *_of_memory("rollout.", lambda c: c.rollout.name == "hf", lambda c: c.trainer.device),
        *(Rule(f"{group}.offload_params", _on_cpu, _NO_GPU) for group in ("actor", "critic", "ref")),
        *(Rule(f"{group}.offload_optimizer", _on_cpu, _NO_GPU) for group in ("actor", "critic")),
        *(
            Rule(key, _without_kl, "algorithm.kl_placement is none")
            for key in ("ref.offload_params", "algorithm.kl_coefficient", "algorithm.kl_estimator")
        ),
        *_OF_EPISODES,
        Rule("data.prompt_template", lambda c: not c.env.several_turns, _ONE_REPLY),
        Rule("algorithm.kl_horizon", lambda c: c.algorithm.kl_target is None, "algorithm.kl_target is not set"),
        _of_cosine("actor.optim", lambda c: c.actor.optim),
        _of_cosine("critic.optim", lambda c: c.critic.optim),
    ),
    SFTConfig: (*_OF_TRAINING, _of_cosine("optim", lambda c: c.optim)),
    GenerationConfig: _OF_LONE_EPISODES,
    EvalConfig: _OF_A_LONE_ENGINE,
    ProbeConfig: _OF_LONE_EPISODES,
}
IN_A_CHAT = tuple(
    Rule(key, _always, "a chat has neither files nor scores")
    for key in ("files", "output", "limit", "on_bad_row", "n", "prompt_template", "reward", "env", "sandbox")
)


def refuse_idle(written: Mapping[str, tuple[str, Any]], config: Any, more: tuple[Rule, ...] = ()) -> None:
    """Raises ConfigError for a key that was written, differs from its default and has no effect in this mode.

    written: {key: (as the user spelled it, value)}
    more: rules of this run beside those of the configuration's kind
    """
    for key, (spelled, value) in written.items():
        for rule in (*_RULES[type(config)], *more):
            concerned = f"{key}.".startswith(f"{rule.key}.")
            if concerned and rule.idle(config) and value != _default(type(config), key):
                raise ConfigError(f"{spelled}={value} has no effect: {rule.why}")


def _default(kind: type, key: str) -> Any:
    """None for what lies below a key that takes any."""
    value: Any = kind()
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
