"""Rejects settings that have no effect, because silently ignored values hide mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from verl.config.commands import Command, within
from verl.config.schema import Config, EnvConfig


class Rule(NamedTuple):
    keys: str  # separated by blanks, and all keys below them
    when: Callable[[Config], bool]
    why: str


def _on_hf(config: Config) -> bool:
    return config.rollout.name == "hf"


def _on_cpu(config: Config) -> bool:
    return config.trainer.device == "cpu"


def _on_gpu(config: Config) -> bool:
    return config.trainer.device == "cuda"


def _without_critic(config: Config) -> bool:
    from verl.algorithms.algorithm import load_preset  # imports torch

    return not load_preset(config.algorithm.advantage_of).needs_critic


def _no_evaluation(config: Config) -> bool:
    return _no_rows(config) and not config.eval.benchmarks


def _no_rows(config: Config) -> bool:
    return not config.data.val_files and not config.data.val_share


_NO_GPU = "there is no GPU with trainer.device=cpu"
_NO_VALIDATION = "there are no data.val_files to validate on"
_ONE_RESPONSE = "env.tool_call_format is not set, so an episode is a single response"
_SERVERS = "sandbox.urls names servers, which have their own settings"
_RULES = (
    Rule("trainer.test_freq", lambda c: c.trainer.test_freq > 0 and _no_evaluation(c), _NO_VALIDATION),
    Rule("trainer.keep_best", lambda c: c.trainer.keep_best > 0 and _no_evaluation(c), _NO_VALIDATION),
    Rule(
        "actor.ppo_mini_batch_size",
        lambda c: c.actor.ppo_mini_batch_size > c.data.train_batch_size,
        "it is above data.train_batch_size, so a step's only mini-batch is the batch; set it to that or less",
    ),
    Rule("trainer.num_threads", _on_gpu, "it applies to processes on CPU only"),
    Rule("critic trainer.critic_warmup", _without_critic, "the algorithm has no critic"),
    Rule(
        "rollout.on_weight_sync",
        lambda c: c.rollout.max_staleness == 0,
        "with rollout.max_staleness=0 no responses are in progress during a weight sync",
    ),
    Rule("rollout.kv_cache_gib", _on_hf, "the transformers engine has no preallocated cache"),
    Rule("rollout.kv_cache_gib", _on_gpu, "on a GPU rollout.gpu_memory_utilization applies"),
    Rule("rollout.gpu_memory_utilization", _on_hf, "the transformers engine allocates memory as needed"),
    Rule("rollout.gpu_memory_utilization", _on_cpu, _NO_GPU),
    Rule("rollout.max_num_batched_tokens", _on_hf, "the transformers engine has no chunked prefill"),
    Rule("rollout.engine_options", _on_hf, "the transformers engine takes none of vLLM's arguments"),
    Rule("rollout.speculation", _on_hf, "the transformers engine has no speculative decoding"),
    Rule("rollout.tensor_model_parallel_size", _on_hf, "the transformers engine has no tensor parallelism"),
    Rule("rollout.top_p rollout.top_k", lambda c: c.rollout.temperature == 0, "rollout.temperature=0 is greedy"),
    Rule("actor.offload critic.offload ref.offload_params", _on_cpu, _NO_GPU),
    Rule(
        "algorithm.kl_coefficient algorithm.kl_estimator",
        lambda c: c.algorithm.kl_placement == "none",
        "algorithm.kl_placement is none",
    ),
    Rule(
        "ref.offload_params",
        lambda c: c.algorithm.kl_placement == "none" and c.teacher.local is None,
        "algorithm.kl_placement is none",
    ),
    Rule("teacher.weight teacher.top_k", lambda c: c.teacher.path is None, "teacher.path is not set"),
    Rule(
        "lora.alpha lora.targets lora.base_dtype lora.sync",
        lambda c: not c.lora.enabled,
        "all weights are trained without lora.rank",
    ),
    Rule(
        "ref.offload_params",
        lambda c: c.lora.enabled and c.teacher.local is None,
        "with lora.rank the reference is the policy's frozen base",
    ),
    Rule("sft.beta", lambda c: c.sft.loss == "nll", "sft.loss is nll"),
    Rule("data.split_turns", lambda c: c.sft.loss == "dpo", "a row of sft.loss=dpo trains its two responses"),
    Rule("rollout.val_kwargs", _no_rows, _NO_VALIDATION),
    Rule(
        "rollout.val_kwargs.top_p rollout.val_kwargs.top_k",
        lambda c: c.rollout.val_kwargs.greedy,
        "validation is greedy",
    ),
    Rule(
        "actor.optim.min_lr_ratio",
        lambda c: c.actor.optim.schedule == "constant",
        "actor.optim.schedule is constant",
    ),
    Rule("sandbox.isolation sandbox.num_workers", lambda c: bool(c.sandbox.urls), _SERVERS),
)
_BENCHMARKS = "eval.limit eval.data_dir eval.allow_train_overlap"
_OF_BENCHMARKS = (Rule(_BENCHMARKS, lambda c: not c.eval.benchmarks, "eval.benchmarks is empty"),)
_BY_BENCHMARKS = "env.max_tool_calls sandbox data.prompt_template"  # used by benchmarks, too
_OF_TURNS = [
    f"env.{item.name}" for item in fields(EnvConfig) if item.name not in ("name", "tool_call_format", "max_tool_calls")
]
_OF_TRAINING = (Rule(_BY_BENCHMARKS, lambda c: not c.env.multi_turn, _ONE_RESPONSE),)
_OF_EPISODES = (
    Rule(" ".join(_OF_TURNS), lambda c: not c.env.multi_turn, _ONE_RESPONSE),
    Rule("env.tool_timeout_s", lambda c: c.env.name != "tool", "it applies to the tools of env.name=tool only"),
    Rule(
        "env.max_concurrent_calls",
        lambda c: c.env.name not in ("tool", "agent"),
        "it applies to the tools of env.name=tool and the programs of env.name=agent only",
    ),
    Rule(
        "env.max_observation_tokens env.observation_cut env.on_parse_error",
        lambda c: c.env.name == "agent",
        "the program decides what the policy sees, and what follows a call that cannot be parsed",
    ),
)


def unused_reasons(keys: Iterable[str], written: Mapping[str, Any], config: Config, command: Command) -> dict[str, str]:
    """{key: why} for written keys that the command does not use, or not at another value than the default."""
    rules = (
        *_RULES,
        *(_OF_BENCHMARKS if command.has("algorithm") else ()),
        *(_OF_EPISODES if command.has("env.name") else ()),
        *(_OF_TRAINING if command.has("env.name") and not command.has("eval.handler") else ()),
    )
    found = {key: command.refusal(key) for key in keys if not command.has(key)}
    return found | {
        key: rule.why
        for key in keys
        for rule in rules
        if key not in found
        and within(key, tuple(rule.keys.split()))
        and written[key] != command.default_of(key)
        and rule.when(config)
    }
