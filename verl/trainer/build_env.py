"""From a configuration to what the policy acts in: codec, environment, tools, sandbox."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl.config.schema import EnvConfig, SandboxConfig
from verl.data.chat import ChatCodec
from verl.data.codecs.base import build_codec
from verl.data.codecs.prompt import Prompted
from verl.data.codecs.turns import TurnsCodec
from verl.data.dialogue import Cut, Dialogue
from verl.envs.base import EnvFactory
from verl.envs.registry import build_env_factory
from verl.envs.tool_env import ToolEnvFactory
from verl.errors import ConfigError
from verl.rollout.episode import Budgets, Interaction
from verl.sandbox.base import Limits, Sandbox


def build_interaction(
    env: EnvConfig,
    sandbox: SandboxConfig,
    chat: ChatCodec,
    max_prompt_length: int,
    max_response_length: int,
    prompt_template: str | None = None,
) -> Interaction | None:
    """What episodes of several turns need; None where an episode is a prompt and one reply.

    Raises ConfigError for names and options that cannot be. To be closed in the event loop that uses it.
    """
    if env.codec is None:
        return None
    options: Mapping[str, Any] = env.codec_options
    if prompt_template is not None:
        options = {**options, "prompt_template": prompt_template}
    codec = build_codec(env.codec, options)
    if isinstance(codec, TurnsCodec) and chat.opens_thought:
        codec = replace(codec, in_thought=True)
    box = build_sandbox(sandbox) if _needs_sandbox(env) else None
    return Interaction(
        _build_envs(env, box),
        Dialogue(chat, codec, env.max_observation_tokens, Cut(env.observation_cut)),
        Budgets(
            max_turns=env.max_turns,
            max_tool_calls=env.max_tool_calls,
            max_tokens=max_response_length,
            max_prompt_tokens=max_prompt_length,
            max_turn_tokens=env.max_turn_tokens,
            turn_s=env.turn_timeout_s,
            episode_s=env.episode_timeout_s,
            retries=env.retries,
            tell_malformed=env.on_malformed == "tell",
        ),
        box,
    )


def prompt_record(interaction: Interaction | None) -> dict[str, str]:
    """The prompt template's digest, for the run's record; empty where there is none."""
    codec = interaction.dialogue.codec if interaction else None
    prompt = codec.prompt if isinstance(codec, Prompted) else None
    return {"prompt_sha256": prompt.sha256} if prompt else {}


def build_sandbox(config: SandboxConfig) -> Sandbox:
    """Servers where URLs are given, else a pool on this machine."""
    limits = Limits(wall_s=config.timeout_s, cpu_s=config.timeout_s, memory_mib=config.memory_mib)
    if config.urls:
        from verl.sandbox.client import RemoteSandbox

        return RemoteSandbox(config.urls, limits=limits)
    from verl.sandbox.local import LocalSandbox

    workers = config.num_workers or len(os.sched_getaffinity(0))
    return LocalSandbox(workers, config.isolation, limits=limits)  # type: ignore[arg-type]  # checked by the schema


def _needs_sandbox(env: EnvConfig) -> bool:
    names = [each if isinstance(each, str) else each["name"] for each in env.tools]
    return not {"python", "python_session", "shell"}.isdisjoint(names)


def _build_envs(env: EnvConfig, sandbox: Sandbox | None) -> EnvFactory:
    if env.name != "tool":
        if env.tools:
            raise ConfigError(f"env.tools are for env.name=tool; env.name={env.name} brings its own")
        return build_env_factory(env.name, env.options)
    if env.options:
        raise ConfigError(f"env.options {sorted(env.options)}: env.name=tool takes its tools from env.tools")
    limits = {
        "deadline_s": env.tool_timeout_s,
        "max_concurrent": env.max_concurrent_calls,
        "retries": env.retries,
    }
    return ToolEnvFactory.from_options(env.tools, limits, sandbox=sandbox)
