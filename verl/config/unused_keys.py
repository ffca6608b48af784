"""Rejects settings that have no effect in the current mode, because silently ignored values hide mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
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
    """A condition under which a key has no effect."""

    key: str  # and all keys below it
    when: Callable[[Any], bool]  # condition on the configuration
    why: str


def _always(config: Any) -> bool:
    return True


def _on_cpu(config: Config) -> bool:
    return config.trainer.device == "cpu"


def _without_critic(config: Config) -> bool:
    return config.algorithm.advantage_of in WITHOUT_CRITIC


def _without_kl(config: Config) -> bool:
    return config.algorithm.kl_placement == "none"


_NO_GPU = "there is no GPU with device=cpu"
_MULTI_TURN_KEYS = [item.name for item in fields(EnvConfig) if item.name not in ("name", "tool_call_format")]
_ONE_RESPONSE = "env.tool_call_format is not set, so an episode is a single response"
_SERVERS = "sandbox.urls names servers, which have their own settings"
_OF_EPISODES = (
    *(Rule(f"env.{name}", lambda c: not c.env.multi_turn, _ONE_RESPONSE) for name in _MULTI_TURN_KEYS),
    *(
        Rule(key, lambda c: c.env.name != "tool", "it applies to the tools of env.name=tool only")
        for key in ("env.tool_timeout_s", "env.max_concurrent_calls")
    ),
    Rule("env.judge_timeout_s", lambda c: c.env.name in ("single_turn", "tool"), "this environment does not judge"),
    Rule("sandbox", lambda c: not c.env.multi_turn, _ONE_RESPONSE),
    *(Rule(f"sandbox.{name}", lambda c: bool(c.sandbox.urls), _SERVERS) for name in ("isolation", "num_workers")),
)
_NO_VALIDATION = "there are no data.val_files to validate on"


def _no_evaluation(config: Config | SFTConfig) -> bool:
    benchmarks = config.trainer.eval_benchmarks if isinstance(config, Config) else ()
    return not config.data.val_files and not benchmarks


def _of_memory(group: str, hf: Callable[[Any], bool], device: Callable[[Any], str]) -> tuple[Rule, ...]:
    """Rules for the memory settings of an engine's KV cache."""
    utilization = f"{group}gpu_memory_utilization"
    return (
        Rule(f"{group}kv_cache_gib", hf, "the transformers engine has no preallocated cache"),
        Rule(f"{group}kv_cache_gib", lambda c: device(c) == "cuda", f"on a GPU {utilization} applies"),
        Rule(utilization, hf, "the transformers engine allocates memory as needed"),
        Rule(utilization, lambda c: device(c) == "cpu", _NO_GPU),
    )


def _of_cosine(key: str, optim: Callable[[Any], OptimConfig]) -> Rule:
    return Rule(f"{key}.min_lr_ratio", lambda c: optim(c).schedule == "constant", f"{key}.schedule is constant")


_OF_TRAINING = (
    Rule("trainer.test_freq", lambda c: c.trainer.test_freq > 0 and _no_evaluation(c), _NO_VALIDATION),
    Rule("trainer.keep_best", lambda c: c.trainer.keep_best > 0 and _no_evaluation(c), _NO_VALIDATION),
    Rule("trainer.num_threads", lambda c: c.trainer.device == "cuda", "it applies to processes on CPU only"),
)
_OF_STANDALONE_ENGINE = (
    Rule("model.compute_dtype", _always, "the engine uses dtype"),
    Rule("model.enable_gradient_checkpointing", _always, "nothing is trained"),
    *_of_memory("", lambda c: c.engine == "hf", lambda c: c.device),
    Rule("tensor_model_parallel_size", lambda c: c.engine == "hf", "the transformers engine has no tensor parallelism"),
    Rule("num_threads", lambda c: c.device == "cuda", "it applies to processes on CPU only"),
    *(Rule(name, lambda c: c.temperature == 0, "temperature=0 is greedy") for name in ("top_p", "top_k", "min_p")),
)
_OF_STANDALONE_EPISODES = (
    *_OF_EPISODES,
    *_OF_STANDALONE_ENGINE,
    Rule("prompt_template", lambda c: not c.env.multi_turn, _ONE_RESPONSE),
    Rule("env.train_on_observations", _always, "nothing is trained"),
)
_RULES: Mapping[type, tuple[Rule, ...]] = {
    Config: (
        *_OF_TRAINING,
        *(
            Rule(f"trainer.{name}", lambda c: not c.trainer.eval_benchmarks, "trainer.eval_benchmarks is empty")
            for name in ("eval_limit", "eval_data_dir", "eval_hub", "allow_train_overlap")
        ),
        *(Rule(key, _without_critic, "the algorithm has no critic") for key in ("critic", "trainer.critic_warmup")),
        Rule(
            "rollout.on_weight_sync",
            lambda c: c.rollout.max_staleness == 0,
            "with rollout.max_staleness=0 no responses are in progress during a weight sync",
        ),
        *_of_memory("rollout.", lambda c: c.rollout.name == "hf", lambda c: c.trainer.device),
        Rule(
            "rollout.max_num_batched_tokens",
            lambda c: c.rollout.name == "hf",
            "the transformers engine has no chunked prefill",
        ),
        *(Rule(f"{group}.offload_params", _on_cpu, _NO_GPU) for group in ("actor", "critic", "ref")),
        *(Rule(f"{group}.offload_optimizer", _on_cpu, _NO_GPU) for group in ("actor", "critic")),
        *(
            Rule(key, _without_kl, "algorithm.kl_placement is none")
            for key in ("ref.offload_params", "algorithm.kl_coefficient", "algorithm.kl_estimator")
        ),
        Rule("rollout.val_kwargs", lambda c: not c.data.val_files, _NO_VALIDATION),
        *(
            Rule(f"rollout.val_kwargs.{name}", lambda c: c.rollout.val_kwargs.greedy, "validation is greedy")
            for name in ("top_p", "top_k")
        ),
        *_OF_EPISODES,
        Rule("data.prompt_template", lambda c: not c.env.multi_turn, _ONE_RESPONSE),
        Rule("algorithm.kl_horizon", lambda c: c.algorithm.kl_target is None, "algorithm.kl_target is not set"),
        _of_cosine("actor.optim", lambda c: c.actor.optim),
        _of_cosine("critic.optim", lambda c: c.critic.optim),
    ),
    SFTConfig: (*_OF_TRAINING, _of_cosine("optim", lambda c: c.optim)),
    GenerationConfig: _OF_STANDALONE_EPISODES,
    EvalConfig: _OF_STANDALONE_ENGINE,
    ProbeConfig: _OF_STANDALONE_EPISODES,
}
IN_A_CHAT = tuple(
    Rule(key, _always, "a chat has neither files nor scores")
    for key in (
        *("files", "output", "limit", "truncation", "max_bad_share", "n"),
        *("prompt_template", "reward", "env", "sandbox"),
    )
)


def unused_reasons(
    keys: Iterable[str], written: Mapping[str, Any], config: Any, more: tuple[Rule, ...] = ()
) -> dict[str, str]:
    """{key: why} for the written keys that differ from their default and have no effect in this mode.

    written: {key: value}
    more: rules of this run, besides those of the configuration's kind
    """
    rules = (*_RULES[type(config)], *more)
    return {
        key: rule.why
        for key in keys
        for rule in rules
        if f"{key}.".startswith(f"{rule.key}.") and rule.when(config) and written[key] != default_of(type(config), key)
    }


def reject_unused_keys(written: Mapping[str, Any], config: Any, more: tuple[Rule, ...] = ()) -> None:
    """Raises ConfigError for the keys of `unused_reasons`."""
    for key, why in unused_reasons(written, written, config, more).items():
        raise ConfigError(f"{key}={written[key]} has no effect: {why}")


@cache
def _defaults(kind: type) -> Any:
    return kind()


def default_of(kind: type, key: str) -> Any:
    """The default of a key; None below a key that accepts any."""
    value: Any = _defaults(kind)
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
