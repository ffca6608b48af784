"""Builds the environment side of rollouts: tool-call format, environment, tools, sandbox."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from verl import plugins
from verl.chat.native import NativeFormat
from verl.chat.observations import Cut, ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.config.schema import Config, DataConfig, EnvConfig, SandboxConfig
from verl.data.lengths import PromptIds
from verl.envs.base import EnvFactory
from verl.envs.registry import ENVS, ClassFactory, build_env_factory
from verl.envs.sandbox import Limits, Sandbox
from verl.envs.single_turn import SingleTurnEnv
from verl.envs.task_envs import TaskEnvs
from verl.envs.tool_env import ToolEnvFactory
from verl.envs.tools.base import EpisodeTool, Tool
from verl.envs.tools.build import build_tools, tool_name
from verl.envs.tools.runner import ToolLimits, ToolRunner
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.episodes.start_check import check_gold_tokens, check_turns
from verl.errors import ConfigError, DataError
from verl.formats.base import ToolCallFormat, build_tool_call_format
from verl.formats.inline import InlineFormat
from verl.formats.plain import PLAIN, PlainFormat
from verl.formats.prompt import PromptTemplateMixin, TurnFormat
from verl.registry import resolve
from verl.scoring.rewards import Rewards
from verl.types import Message, Task, ToolSpec
from verl.utils.reward_score.base import Reward, TaskCheckingReward

# Fraction of a call's deadline after which a dead sandbox is reported; later it would count as the policy's timeout.
_HEALTH_SHARE = 0.8
AUTO = "auto"
STRICT = "strict"  # sandbox.isolation
_CONFINED = ("swe", "agent")  # environments that start confined programs themselves
_RETRIES = 2  # per episode after a service failure, and per tool call: enough for a restart, not for an outage
_SLOWEST_STEPS = 4  # an episode may take as long as this many of its slowest steps
_ANY_TOOL = ToolSpec("any", "", {"type": "object", "properties": {"argument": {"type": "string"}}})

# Assistant turns without a call in environments with a simulated user: the maximum of the BFCL scenarios.
_TURNS_WITHOUT_CALL = 8
_AGENT_TURNS = 16  # requests of an agent


def build_episode_runner(config: Config, chat: ChatTemplate) -> EpisodeRunner:
    """The runner of episodes, to be closed in the event loop that uses it. ConfigError for invalid names and options"""
    env, sandbox, health_timeout_s = config.env, config.sandbox, config.trainer.health_timeout_s
    tool_call_format = build_format(env.tool_call_format, env.tool_call_format_options, config.data.prompt_template)
    if isinstance(tool_call_format, TurnFormat) and chat.opens_thought:
        tool_call_format = replace(tool_call_format, in_thought=True)
    if isinstance(tool_call_format, NativeFormat):
        check_tools(chat, tool_call_format)
        tool_call_format = tool_call_format.bound(chat)
    sandbox_timeout_s = min(health_timeout_s, _HEALTH_SHARE * env.tool_timeout_s)
    pool = build_sandbox(sandbox, sandbox_timeout_s) if any(_runs_code(each) for each in env.tools) else None
    if pool is None and sandbox != _sandbox_of_runtimes(env, sandbox):
        own = f"; env.name={env.name} uses sandbox.isolation=strict alone" if env.name in _CONFINED else ""
        raise ConfigError(f"sandbox.* has no effect: none of env.tools runs code{own}")
    max_runs = env.max_concurrent_calls if sandbox.urls else _workers(sandbox)
    options = {name: {"require_cgroup": True} for name in _CONFINED} if sandbox.isolation == STRICT else {}
    envs = _build_envs(env, tool_call_format, pool, max_runs, health_timeout_s, options)
    observations = ObservationTokenizer(
        chat,
        tool_call_format,
        env.max_observation_tokens,
        Cut(env.cut.place),
        env.cut.chars,
        env.cut.gap,
    )
    check_turns(observations)
    max_turns = turn_limit(env, tool_call_format)
    if max_turns > 1 and env.name != "agent":  # fails early if the chat template has no tool turns
        observations.answer_ids((Message("tool", "7", tool="any"),), "", ended=True)
    if isinstance(envs, ToolEnvFactory | ClassFactory):
        check_tools(chat, tool_call_format, envs.specs)
    return EpisodeRunner(
        TaskEnvs(env.name, envs, options),
        observations,
        EpisodeLimits(
            max_turns=max_turns,
            max_tool_calls=env.call_limit,
            max_tokens=config.data.max_response_length,
            max_prompt_length=config.data.max_prompt_length,
            max_turn_tokens=env.max_turn_tokens,
            turn_s=env.turn_timeout_s,
            episode_s=_SLOWEST_STEPS * env.turn_timeout_s,
            judge_s=env.turn_timeout_s,
            retries=_RETRIES,
            feedback_on_parse_error=env.on_parse_error == "feedback",
        ),
        pool,
    )


def single_turn_runner(chat: ChatTemplate, max_tokens: int, tool_call_format: ToolCallFormat = PLAIN) -> EpisodeRunner:
    """The runner of episodes of one turn: a task's prompt of any length, a response of at most `max_tokens`."""
    limits = EpisodeLimits(max_turns=1, max_tokens=max_tokens, max_prompt_length=sys.maxsize)
    observations = ObservationTokenizer(chat, tool_call_format, max_observation_tokens=0)
    return EpisodeRunner(TaskEnvs("single_turn", ClassFactory(SingleTurnEnv)), observations, limits)


def category_runner(config: Config, env: EnvConfig, chat: ChatTemplate) -> EpisodeRunner:
    """The episode runner of a benchmark category with this environment. Raises ConfigError like
    `build_episode_runner`, and for a chat template that does not list tools if the format needs it."""
    sandbox = config.sandbox if env.tools else _sandbox_of_runtimes(env, config.sandbox)
    runner = build_episode_runner(replace(config, env=env, sandbox=sandbox), chat)
    if env.multi_turn:
        check_tools(chat, runner.observations.tool_call_format)
    return runner


def check_tools(chat: ChatTemplate, tool_call_format: ToolCallFormat, tools: Sequence[ToolSpec] = (_ANY_TOOL,)) -> None:
    """Raises ConfigError if the format needs a chat template that lists the tools, but this one does not."""
    if tool_call_format.template_tools:
        chat.check_tools((Message("user", "a"),), tools)


def with_tool_call_format(config: Config, chat: ChatTemplate) -> Config:
    """env.tool_call_format=auto decided: the model's own format if its chat template lists tools, else ToolRL's."""
    if config.env.tool_call_format != AUTO:
        return config
    try:
        check_tools(chat, PLAIN)
        name = "native"
    except ConfigError:
        name = "toolrl"
    return replace(config, env=replace(config.env, tool_call_format=name))


def check_names(env: EnvConfig, prompt_template: str | None) -> None:
    """Raises ConfigError for unknown names, before the heavy imports of `build_episode_runner`."""
    if env.tool_call_format != AUTO:
        turn_limit(env, build_format(env.tool_call_format, env.tool_call_format_options, prompt_template))
    if env.name != "tool":
        resolve("environment", env.name, ENVS)
    for each in env.tools:
        resolve("tool", tool_name(each), plugins.TOOLS)


def turn_limit(env: EnvConfig, tool_call_format: ToolCallFormat) -> int:
    """Max assistant turns of an episode: env.max_turns, or those needed for env.max_tool_calls.

    Raises ConfigError if env.max_turns is too small for env.max_tool_calls.
    """
    if env.name == "agent":  # its tools are its own
        return env.max_turns or _AGENT_TURNS
    in_sequence = env.call_limit * tool_call_format.turns_per_call
    if env.max_turns is None:
        return in_sequence + (1 if env.name in ("tool", "single_turn") else _TURNS_WITHOUT_CALL)
    at_once = min(env.call_limit, 1) * tool_call_format.turns_per_call
    needed = (at_once if tool_call_format.parallel_calls else in_sequence) + 1
    if env.max_turns < needed:
        raise ConfigError(
            f"env.max_turns={env.max_turns} is too small for env.max_tool_calls={env.call_limit}: with "
            f"env.tool_call_format={env.tool_call_format} they need {needed} assistant turns, including the answer; "
            "unset env.max_turns, or lower env.max_tool_calls"
        )
    return env.max_turns


def build_format(name: str | None, options: Mapping[str, Any], prompt_template: str | None) -> ToolCallFormat:
    """The tool-call format with its prompt template; None: the plain one, and the format's own template."""
    if name is None:
        return PLAIN
    if prompt_template is None:
        return build_tool_call_format(name, options)
    try:
        return build_tool_call_format(name, {**options, "prompt_template": prompt_template})
    except ConfigError as error:  # recipes set it, too
        given = f"data.prompt_template={prompt_template}; null is the format's own"
        raise ConfigError(f"env.tool_call_format={name} with {given}: {error}") from error


def prompt_fn(episode_runner: EpisodeRunner, rewards: Rewards | None = None) -> PromptIds:
    """The function task -> tokens of its initial observation, or of its messages if that needs a started episode.

    It raises DataError for a task that its environment or prompt template cannot represent, that its reward cannot
    score, or whose gold response no policy can write; ConfigError if the tools would not be listed.

    rewards: for tasks that are scored
    """
    envs, observations = episode_runner.envs, episode_runner.observations
    assert isinstance(envs, TaskEnvs)

    def prompt_ids(task: Task) -> Sequence[int]:
        if task.tools and isinstance(observations.tool_call_format, InlineFormat):
            raise DataError("cannot be listed: env.tool_call_format supports one tool only", field="tools")
        if isinstance(observations.tool_call_format, PlainFormat) and envs.name_of(task) != "single_turn":
            hint = "Set env.tool_call_format (docs/tool_call_formats.md)"
            raise DataError(f"{task.env!r} needs env.tool_call_format", hint=hint, field="env")
        envs.check_judged(task, rewards.names(task) if rewards else (task.reward or "",))
        if rewards:
            _check_scored(rewards.of(task), task, observations.tool_call_format)
            check_gold_tokens(episode_runner, rewards, task)
        known = envs.known_initial_observation(task)
        return observations.chat.initial_ids(task.prompt) if known is None else observations.prompt_ids(known)

    return prompt_ids


def _check_scored(reward: Reward, task: Task, tool_call_format: ToolCallFormat) -> None:
    """Raises DataError if the reward cannot score the task, ConfigError if it compares calls that nothing parses."""
    if getattr(reward, "reads_calls", False) and isinstance(tool_call_format, PlainFormat):
        raise ConfigError("the reward compares parsed calls, so it needs env.tool_call_format")
    if isinstance(reward, TaskCheckingReward):
        reward.check_task(task)


def truncating(config: DataConfig, runner: EpisodeRunner) -> EpisodeRunner:
    """The runner with prompt truncation to the last tokens; of data.truncation=auto, only such prompts are left."""
    if config.truncation not in ("left", AUTO):
        return runner
    chat = replace(runner.chat, max_prompt_tokens=config.max_prompt_length)
    return replace(runner, observations=replace(runner.observations, chat=chat))


def services_of_rows(episode_runner: EpisodeRunner, rewards: Rewards, tasks: Iterable[Task]) -> list[object]:
    """Environments and rewards named in data rows, which may need more services than the run's own."""
    assert isinstance(episode_runner.envs, TaskEnvs)
    return [*episode_runner.envs.named, *rewards.for_tasks(tasks)[1:]]


def prompt_record(tool_call_format: ToolCallFormat) -> dict[str, str]:
    """The hash of the prompt template for the run record; empty if there is none."""
    prompt = tool_call_format.prompt if isinstance(tool_call_format, PromptTemplateMixin) else None
    return {"prompt_sha256": prompt.sha256} if prompt else {}


def build_sandbox(config: SandboxConfig, health_timeout_s: float = 30.0) -> Sandbox:
    """A client of remote servers if URLs are set, else a local pool.

    health_timeout_s: time without answer after which a server counts as dead; below the deadline of a call
    """
    limits = Limits(wall_s=config.timeout_s, cpu_s=config.timeout_s, memory_mib=config.memory_mib)
    make: Callable[..., Sandbox] = resolve("sandbox", "remote" if config.urls else "local", plugins.SANDBOXES)
    if config.urls:
        return make(config.urls, patience_s=health_timeout_s, limits=limits, health_timeout_s=health_timeout_s)
    strict = config.isolation == STRICT
    isolation = "bubblewrap" if strict else config.isolation
    return make(_workers(config), isolation, limits=limits, require_cgroup=strict)


def _sandbox_of_runtimes(env: EnvConfig, sandbox: SandboxConfig) -> SandboxConfig:
    """The settings that an environment without env.tools uses: the default ones, or its own strict isolation."""
    is_used = env.name in _CONFINED and sandbox.isolation == STRICT
    return SandboxConfig(isolation=STRICT) if is_used else SandboxConfig()


def _workers(config: SandboxConfig) -> int:
    return config.num_workers or len(os.sched_getaffinity(0))


def _runs_code(tool: str | Mapping[str, Any]) -> bool:
    tool_class = resolve("tool", tool_name(tool), plugins.TOOLS)
    return isinstance(tool_class, type) and "sandbox" in signature(tool_class).parameters


def _build_envs(
    env: EnvConfig,
    tool_call_format: ToolCallFormat,
    sandbox: Sandbox | None,
    max_runs: int,
    health_timeout_s: float,
    options: Mapping[str, Mapping[str, Any]],
) -> EnvFactory:
    """max_runs: concurrent sandbox executions. options: by environment, beside env.options, which cannot undo them"""
    if env.name != "tool":
        if env.tools:
            raise ConfigError(f"env.tools needs env.name=tool; env.name={env.name} has its own tools")
        own: Mapping[str, Any] = {}
        if env.name == "remote":
            own = {"health_timeout_s": health_timeout_s}
        elif env.name == "agent":
            own = {"agent": env.agent, "command": env.command, "max_concurrent": env.max_concurrent_calls}
        return build_env_factory(env.name, {**own, **env.options, **options.get(env.name, {})})
    if env.options:
        raise ConfigError(f"env.options {sorted(env.options)}: env.name=tool is configured by env.tools")
    if not env.tools:
        raise ConfigError(
            f"env.tools is empty: env.name=tool needs at least one; known: {', '.join(sorted(plugins.TOOLS))}"
        )
    limits = ToolLimits(env.tool_timeout_s, max_concurrent=env.max_concurrent_calls)
    # Waiting for a free sandbox does not count against the deadline of a call.
    code_limits = replace(limits, max_concurrent=min(limits.max_concurrent, max_runs))
    built = [(build_tools([each], sandbox), _runs_code(each)) for each in env.tools]
    tools = [tool for members, _ in built for tool in members]
    tool_limits = {tool.spec.name: code_limits for members, runs_code in built if runs_code for tool in members}
    if isinstance(tool_call_format, InlineFormat):
        _check_inline_tool(tool_call_format, env.tool_call_format, tools)
    return ToolEnvFactory(tools, ToolRunner(limits, tool_limits))


def _check_inline_tool(tool_call_format: InlineFormat, name: str | None, tools: Sequence[Tool | EpisodeTool]) -> None:
    """Raises ConfigError if the one tool that the format can call is missing."""
    arguments = {tool.spec.name: tuple(tool.spec.parameters.get("properties", {})) for tool in tools}
    if tool_call_format.argument in arguments.get(tool_call_format.tool, ()):
        return
    offered = ", ".join(f"{tool}({', '.join(names)})" for tool, names in arguments.items())
    raise ConfigError(
        f"env.tool_call_format={name} calls only {tool_call_format.tool}({tool_call_format.argument}), but env.tools "
        f"offers {offered}; add it, or select another with env.tool_call_format_options={{tool: .., argument: ..}}"
    )
