"""Talk to a model in this terminal, with tools that are run: toolrl chat RUN --tools mine.py:weather,stdio:COMMAND

    RUN        output folder of a training, or a model folder: sets model.path and the tool-call format
    --tools=   comma-separated: names, file.py:attribute, stdio:COMMAND or http(s):// of an MCP server
    --help     print this text and every key with its default
    --config FILE  settings of a YAML file, such as a run's config.yaml
    --user-code    run the code that this file names; it may be another author's
    --cfg job  print the resulting configuration and exit

The first line may be a system prompt; an empty line, or the end of the input, ends the conversation. With tools the
conversation is one episode: calls, results and later messages are rendered as in training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markup import escape

from toolrl.commands import CHAT
from verl.build.engines import standalone_engine, with_model_limits
from verl.build.env import build_episode_runner
from verl.build.run import load_chat_template
from verl.chat.template import ChatTemplate
from verl.config.schema import Config
from verl.envs.base import Env, EnvFactory, Observation, StepResult
from verl.episodes.episode import EpisodeRunner
from verl.errors import ConfigError
from verl.host.daemon import run_async
from verl.pretrained import read_tokenizer
from verl.rollout.engine import Generator, Sampling
from verl.scoring.pool import Fault
from verl.trainer.cli import CliArgs, check_engine, check_model, run_cli
from verl.types import Message, StopReason, Task

_NO_LIMIT = 10**9  # turns, calls and seconds: a person decides when the conversation ends


async def chat(config: Config, console: Console) -> None:
    """Talk until the input ends. Raises ConfigError like the training's environment."""
    console.print("starting the engine ...")
    config = with_model_limits(config)
    template = load_chat_template(config.model)
    runner = build_episode_runner(config, template) if config.env.tools else None
    try:
        async with standalone_engine(config, template) as (engine, sampling):
            console.print("System prompt (empty for none), then your messages; an empty line ends the conversation.")
            system = _read_line(console, "system")
            opening = (Message("system", system),) if system else ()
            if runner is None:
                await _talk(console, template, engine, sampling, opening)
            elif line := _read_line(console, "you"):
                await _talk_with_tools(console, runner, engine, sampling, (*opening, Message("user", line)))
    finally:
        if runner is not None:
            await runner.close()


async def _talk(
    console: Console, template: ChatTemplate, engine: Generator, sampling: Sampling, opening: Sequence[Message]
) -> None:
    messages = list(opening)
    while line := _read_line(console, "you"):
        messages.append(Message("user", line))
        (completion,) = await engine.generate(template.prompt_ids(messages), replace(sampling, n=1))
        response = template.response_text(completion.token_ids)
        messages.append(Message("assistant", response))
        console.print(f"[bold]model>[/] {escape(response)}")


async def _talk_with_tools(
    console: Console, runner: EpisodeRunner, engine: Generator, sampling: Sampling, opening: tuple[Message, ...]
) -> None:
    limits = replace(
        runner.limits, max_turns=_NO_LIMIT, max_tool_calls=_NO_LIMIT, turn_s=_NO_LIMIT, episode_s=_NO_LIMIT
    )
    runner = replace(runner, envs=TerminalEnvs(runner.envs, console), limits=replace(limits, retries=0))
    done = await runner.run(engine, sampling, Task("chat", opening, "", "chat"), 0, None)
    if isinstance(done, Fault):
        console.print(f"ended: {done.problem}", markup=False)
    elif done.stop_reason is not StopReason.STOP:
        console.print(f"ended: {done.stop_reason} (data.max_response_length is the length of a conversation)")


@dataclass(frozen=True)
class TerminalEnvs:
    """Makes environments of `envs` in which a message without a call is answered by the person at the terminal."""

    envs: EnvFactory
    console: Console

    def __call__(self, task: Task) -> Env:
        return TerminalEnv(self.envs(task), self.console)

    async def close(self) -> None:
        await self.envs.close()


@dataclass(frozen=True)
class TerminalEnv:
    """Prints messages, calls and results."""

    env: Env
    console: Console

    async def reset(self) -> Observation:
        return await self.env.reset()

    async def step(self, message: Message) -> StepResult:
        self.console.print(f"[bold]model>[/] {escape(message.content)}")
        if not message.tool_calls:
            line = _read_line(self.console, "you")
            return StepResult((Message("user", line),)) if line else StepResult(done=True)
        result = await self.env.step(message)
        for each in result.messages:
            self.console.print(f"[bold]{escape(each.tool or each.role)}>[/] {escape(each.content)}")
        return result

    async def close(self) -> None:
        await self.env.close()


def _read_line(console: Console, role: str) -> str:
    """Read a line from the terminal; empty at end of file. It blocks the event loop, so that Ctrl-C takes effect."""
    try:
        return console.input(f"[bold]{role}>[/] ")
    except EOFError:
        return ""


def main(argv: Sequence[str]) -> int:
    arguments, options = _options(argv)
    runs = [
        argument for argument in arguments if "=" not in argument and not argument.startswith("-") and argument != "job"
    ]

    def run(args: CliArgs, console: Console) -> int:
        with TemporaryDirectory(prefix="toolrl-chat-") as folder:
            config = _of_run(args.config, runs, Path(folder))
            if options:
                config = replace(config, env=replace(config.env, tools=[*config.env.tools, *options]))
            check_model(config.model)
            check_engine(config.rollout.name)
            run_async(chat(_with_env(config), console))
        return 0

    return run_cli([argument for argument in arguments if argument not in runs], __doc__ or "", CHAT, run)


def _options(argv: Sequence[str]) -> tuple[list[str], list[Any]]:
    """(the other arguments, the tools)"""
    arguments, tools = [], []
    rest = iter(argv)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name != "--tools":
            arguments.append(argument)
            continue
        tools += [each.strip() for each in (value if equals else next(rest, "")).split(",") if each.strip()]
    return arguments, [_tool(each) for each in tools]


def _tool(name: str) -> Any:
    """The entry of env.tools."""
    if name.startswith("stdio:"):
        return {"name": "mcp", "command": name.removeprefix("stdio:")}
    return {"name": "mcp", "url": name} if name.startswith(("http://", "https://")) else name


def _of_run(config: Config, runs: Sequence[str], folder: Path) -> Config:
    """The configuration with model and format of a run; what the user sets stays. Raises ConfigError.

    folder: for the prompt of the training rows
    """
    from toolrl.serve.openai_server.served_model import find_model, trained_format
    from toolrl.serve.openai_server.serving_files import base_template

    named = [*runs, *filter(None, [config.model.path])]
    if len(named) > 1:
        raise ConfigError(f"one model at a time, got {', '.join(named)}")
    if not named or not (runs or Path(named[0]).is_dir()):  # none, or the hub's
        return config
    model = find_model(named[0])
    config = replace(config, model=replace(config.model, path=str(model.folder)))
    if config.env.tool_call_format is not None or not model.settings:
        return config
    trained = trained_format(model, base_template(read_tokenizer(str(model.folder)), with_tools=True))
    options = dict(trained.options)
    if trained.prompt is not None:
        options["prompt_template"] = str(folder / "prompt.txt")
        (folder / "prompt.txt").write_text(trained.prompt.text, encoding="utf-8")
    env = replace(config.env, tool_call_format=trained.name, tool_call_format_options=options)
    variables = {**trained.template_options, **config.model.chat_template_options}
    return replace(config, env=env, model=replace(config.model, chat_template_options=variables))


def _with_env(config: Config) -> Config:
    """Tools need an environment that runs them, and a format. Raises ConfigError without one."""
    if not config.env.tools:
        return config
    if config.env.tool_call_format is None:
        raise ConfigError("tools need the folder of a run, or env.tool_call_format (docs/tool_call_formats.md)")
    return replace(config, env=replace(config.env, name="tool"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
