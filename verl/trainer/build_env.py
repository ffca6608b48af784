"""From a configuration to what the policy acts in: codec, environment, tools, sandbox."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

from verl.config.schema import EnvConfig, SandboxConfig
from verl.data.chat import ChatCodec
from verl.data.codecs.base import Codec, build_codec
from verl.data.codecs.inline import InlineCodec
from verl.data.codecs.prompt import Prompted
from verl.data.codecs.turns import TurnsCodec
from verl.data.dialogue import Cut, Dialogue
from verl.data.lengths import PromptIds
from verl.envs.base import EnvFactory
from verl.envs.registry import ENVS, build_env_factory
from verl.envs.task_envs import TaskEnvs
from verl.envs.tool_env import ToolEnvFactory
from verl.envs.tools.base import EpisodeTool, Tool
from verl.envs.tools.build import TOOLS, build_tools, tool_name
from verl.envs.tools.runner import ToolLimits, ToolRunner
from verl.errors import ConfigError, DataError
from verl.registry import resolve
from verl.rollout.episode import Budgets, Interaction
from verl.sandbox.base import Limits, Sandbox
from verl.types import Message, Task, ToolSpec
from verl.utils.reward_score.rewards import Rewards

SHARE_OF_DEADLINE = (
    0.8  # of a call's, in which a sandbox that is gone is noticed: later it is a time-out of the policy's
)
_ANY_TOOL = ToolSpec("any", "", {"type": "object", "properties": {"argument": {"type": "string"}}})

# Assistant turns without a call where the environment answers them, too: as many as a BFCL scenario has at most.
_MESSAGES = 8


def build_interaction(
    env: EnvConfig,
    sandbox: SandboxConfig,
    chat: ChatCodec,
    max_prompt_length: int,
    max_response_length: int,
    prompt_template: str | None,
    health_timeout_s: float = 30.0,
) -> Interaction | None:
    """What episodes of several turns need; None where an episode is a prompt and one reply.

    health_timeout_s: how long a server of sandboxes or environments may be silent before it counts as gone

    Raises ConfigError for names and options that cannot be. To be closed in the event loop that uses it.
    """
    if env.codec is None:
        return None
    codec = _build_codec(env, prompt_template)
    if isinstance(codec, TurnsCodec) and chat.opens_thought:
        codec = replace(codec, in_thought=True)
    silent_s = min(health_timeout_s, SHARE_OF_DEADLINE * env.tool_timeout_s)
    box = build_sandbox(sandbox, silent_s) if any(_runs_code(each) for each in env.tools) else None
    if box is None and sandbox != SandboxConfig():
        raise ConfigError("sandbox.* has no effect: none of env.tools runs code")
    num_places = env.max_concurrent_calls if sandbox.urls else _workers(sandbox)
    envs = _build_envs(env, codec, box, num_places, health_timeout_s)
    dialogue = Dialogue(chat, codec, env.max_observation_tokens, Cut(env.observation_cut))
    dialogue.answer_ids((Message("tool", "7", tool="any"),), "", ended=True)  # a chat template may have no such turns
    if isinstance(envs, ToolEnvFactory):
        check_tools(chat, codec, envs.specs)
    return Interaction(
        TaskEnvs(env.name, envs),
        dialogue,
        Budgets(
            max_turns=turn_limit(env, codec),
            max_tool_calls=env.max_tool_calls,
            max_tokens=max_response_length,
            max_prompt_tokens=max_prompt_length,
            max_turn_tokens=env.max_turn_tokens,
            turn_s=env.turn_timeout_s,
            episode_s=env.episode_timeout_s,
            judge_s=env.judge_timeout_s,
            retries=env.retries,
            tell_malformed=env.on_malformed == "tell",
        ),
        box,
    )


def check_tools(chat: ChatCodec, codec: Codec, tools: Sequence[ToolSpec] = (_ANY_TOOL,)) -> None:
    """Raises ConfigError where the codec leaves it to a chat template to list the tools, which does not do it."""
    if codec.template_tools:
        chat.check_tools((Message("user", "a"),), tools)


def check_names(env: EnvConfig, prompt_template: str | None) -> None:
    """Raises ConfigError for what is named wrongly, before anything heavy is imported for `build_interaction`."""
    if env.codec is None:
        return
    turn_limit(env, _build_codec(env, prompt_template))
    if env.name != "tool":
        resolve("environment", env.name, ENVS)
    for each in env.tools:
        resolve("tool", tool_name(each), TOOLS)


def turn_limit(env: EnvConfig, codec: Codec) -> int:
    """Assistant turns of an episode: env.max_turns, or what env.max_tool_calls takes in the codec's format.

    Raises ConfigError for an env.max_turns in which so many calls could not be made.
    """
    in_sequence = env.max_tool_calls * codec.turns_per_call
    if env.max_turns is None:
        return in_sequence + (1 if env.name in ("tool", "single_turn") else _MESSAGES)
    at_once = min(env.max_tool_calls, 1) * codec.turns_per_call
    needed = (at_once if codec.parallel_calls else in_sequence) + 1
    if env.max_turns < needed:
        raise ConfigError(
            f"env.max_turns={env.max_turns} is too small for env.max_tool_calls={env.max_tool_calls}: with "
            f"env.codec={env.codec} they take {needed} assistant turns, the answer included; leave env.max_turns out, "
            "or lower env.max_tool_calls"
        )
    return env.max_turns


def _build_codec(env: EnvConfig, prompt_template: str | None) -> Codec:
    assert env.codec is not None
    told = {} if prompt_template is None else {"prompt_template": prompt_template}
    return build_codec(env.codec, {**env.codec_options, **told})


def opening_of(interaction: Interaction | None, chat: ChatCodec, reward: str = "") -> PromptIds:
    """Task -> the tokens of its prompt and tools, or of the task's messages where only a started episode knows more.

    Raises DataError for a task that its environment, or a row that the prompt, has no place for; ConfigError where the
    policy would not learn of its tools.

    reward: of tasks that name none, where they are to be scored
    """
    if interaction is None:
        return partial(_lone_prompt, chat)
    envs, dialogue = interaction.envs, interaction.dialogue
    assert isinstance(envs, TaskEnvs)

    def opening(task: Task) -> Sequence[int]:
        if task.tools and isinstance(dialogue.codec, InlineCodec):
            raise DataError("cannot be listed: env.codec writes calls of one tool alone", field="tools")
        envs.check_judged(task, reward)
        known = envs.known_opening(task)
        return chat.opening_ids(task.prompt) if known is None else dialogue.opening_ids(known)

    return opening


def truncating(
    truncation: str, max_prompt_length: int, chat: ChatCodec, interaction: Interaction | None
) -> tuple[ChatCodec, Interaction | None]:
    """What makes the prompts of episodes: with truncation=left none is longer than `max_prompt_length` tokens."""
    if truncation != "left":
        return chat, interaction
    chat = replace(chat, max_prompt_tokens=max_prompt_length)
    if interaction is not None:
        interaction = replace(interaction, dialogue=replace(interaction.dialogue, chat=chat))
    return chat, interaction


def _lone_prompt(chat: ChatCodec, task: Task) -> Sequence[int]:
    """The prompt of an episode that is one reply."""
    if task.env not in (None, "single_turn"):
        raise DataError(
            f"{task.env!r} needs env.codec, the format of its calls",
            mend="Set env.codec (docs/codecs.md)",
            field="env",
        )
    if task.reward == "env":
        raise DataError("needs an environment that judges", "the column env, and env.codec", field="reward")
    return chat.task_prompt_ids(task)


def services_of_rows(interaction: Interaction | None, rewards: Rewards, tasks: Iterable[Task]) -> list[object]:
    """What rows name, once they have been read: it may need services beside those of the run's own parts."""
    envs = interaction.envs.named if interaction and isinstance(interaction.envs, TaskEnvs) else ()
    return [*envs, *rewards.all_of(tasks)[1:]]


def prompt_record(interaction: Interaction | None) -> dict[str, str]:
    """The prompt template's digest, for the run's record; empty where there is none."""
    codec = interaction.dialogue.codec if interaction else None
    prompt = codec.prompt if isinstance(codec, Prompted) else None
    return {"prompt_sha256": prompt.sha256} if prompt else {}


def build_sandbox(config: SandboxConfig, health_timeout_s: float = 30.0) -> Sandbox:
    """Servers where URLs are given, else a pool on this machine.

    health_timeout_s: for which no server may answer; less than the deadline of a call, which is the policy's time-out
    """
    limits = Limits(wall_s=config.timeout_s, cpu_s=config.timeout_s, memory_mib=config.memory_mib)
    if config.urls:
        from verl.sandbox.client import RemoteSandbox

        return RemoteSandbox(config.urls, patience_s=health_timeout_s, limits=limits, health_timeout_s=health_timeout_s)
    from verl.sandbox.local import LocalSandbox

    return LocalSandbox(
        _workers(config),
        config.isolation,  # type: ignore[arg-type]  # checked before
        limits=limits,
        require_cgroup=config.require_cgroup,
    )


def _workers(config: SandboxConfig) -> int:
    return config.num_workers or len(os.sched_getaffinity(0))


def _runs_code(tool: str | Mapping[str, Any]) -> bool:
    found = resolve("tool", tool_name(tool), TOOLS)
    return isinstance(found, type) and "sandbox" in signature(found).parameters


def _build_envs(
    env: EnvConfig, codec: Codec, sandbox: Sandbox | None, num_places: int, health_timeout_s: float
) -> EnvFactory:
    """num_places: pieces of code that run at a time"""
    if env.name != "tool":
        if env.tools:
            raise ConfigError(f"env.tools are for env.name=tool; env.name={env.name} brings its own")
        silence = {"health_timeout_s": health_timeout_s} if env.name == "remote" else {}
        return build_env_factory(env.name, {**silence, **env.options})
    if env.options:
        raise ConfigError(f"env.options {sorted(env.options)}: env.name=tool takes its tools from env.tools")
    if not env.tools:
        raise ConfigError(f"env.tools is empty: env.name=tool needs one at least; known: {', '.join(sorted(TOOLS))}")
    limits = ToolLimits(env.tool_timeout_s, max_concurrent=env.max_concurrent_calls, retries=env.retries)
    # A call that has to wait for the sandbox waits before its deadline begins.
    few = replace(limits, max_concurrent=min(limits.max_concurrent, num_places))
    tools: list[Tool | EpisodeTool] = []
    of_code: dict[str, ToolLimits] = {}
    for each in env.tools:
        made = build_tools([each], sandbox)
        tools += made
        of_code |= {tool.spec.name: few for tool in made} if _runs_code(each) else {}
    if isinstance(codec, InlineCodec):
        _check_tool_of(codec, env.codec, tools)
    return ToolEnvFactory(tools, ToolRunner(limits, of_code))


def _check_tool_of(codec: InlineCodec, name: str | None, tools: Sequence[Tool | EpisodeTool]) -> None:
    """Raises ConfigError if all that such a codec can call is not there."""
    for tool in tools:
        if tool.spec.name == codec.tool and codec.argument in tool.spec.parameters.get("properties", {}):
            return
    offered = ", ".join(f"{tool.spec.name}({', '.join(tool.spec.parameters.get('properties', {}))})" for tool in tools)
    raise ConfigError(
        f"env.codec={name} calls {codec.tool}({codec.argument}) alone, but env.tools offers {offered}; offer it, or "
        "name what there is with env.codec_options={tool: .., argument: ..}"
    )
