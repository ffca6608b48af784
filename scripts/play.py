"""Play an environment by hand, in place of the policy:

    python scripts/play.py shop
    python scripts/play.py bfcl --task-option category=miss_func --task 3
    python scripts/play.py tau2 --option data=DIR --task-option data=DIR --task-option domain=airline
    python scripts/play.py single_turn --data train.parquet
    python scripts/play.py remote --option urls=http://host:8100 --tasks-of shop

Type a message, or `tool_name {"json": "arguments"}` to call a tool; an empty line lists the tools again, end of file
(Ctrl-D) quits. At the end the score is printed, if the environment judges.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from verl.data.row_names import RowNames
from verl.data.tasks import TaskSet
from verl.envs.base import Env, Judge, TaskChecker
from verl.envs.registry import ClassFactory, build_env_factory, build_tasks
from verl.errors import ConfigError, VerlError
from verl.host.services import check_services
from verl.registry import option
from verl.types import Message, Task, ToolCall, ToolSpec

_console = Console(width=120)
_COLORS = {"system": "dim", "user": "green", "tool": "cyan"}


def read_message(line: str, tools: Iterable[str]) -> Message:
    """Parse a typed line: a tool name, or any identifier followed by an object, is a call; else it is text.

    Raises ValueError if a tool name is not followed by a JSON object.
    """
    name, _, rest = line.strip().partition(" ")
    if name not in tools and not (name.isidentifier() and rest.lstrip().startswith("{")):
        return Message("assistant", line)
    arguments = json.loads(rest) if rest.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be a JSON object")
    return Message("assistant", line, (ToolCall(name, arguments),))


async def play(env: Env) -> bool:
    """Run one episode. Returns False if the input ended first."""
    opening = await env.reset()
    tools = {spec.name: spec for spec in opening.tools}
    _show(opening.messages)
    _show_tools(tools.values())
    while (line := await asyncio.to_thread(_ask)) is not None:
        if not line.strip():
            _show_tools(tools.values())
            continue
        try:
            message = read_message(line, tools)
        except ValueError as error:
            _console.print(f"[red]cannot read the arguments: {escape(str(error))}[/]")
            continue
        result = await env.step(message)
        _show(result.messages)
        if result.tools:
            tools |= {spec.name: spec for spec in result.tools}
            _show_tools(result.tools)
        if result.done:
            return True
    return False


def _ask() -> str | None:
    try:
        return _console.input("[bold]policy> [/]")
    except EOFError:
        return None


def _show(messages: Iterable[Message]) -> None:
    for message in messages:
        title = f"{message.role} {message.tool or ''}".strip()
        color = _COLORS.get(message.role, "white")
        _console.print(Panel(escape(message.content), title=escape(title), title_align="left", border_style=color))


def _show_tools(tools: Iterable[ToolSpec]) -> None:
    for spec in tools:
        properties = spec.parameters.get("properties", {})
        needed = spec.parameters.get("required", [])
        names = ", ".join(name if name in needed else f"{name}?" for name in properties)
        _console.print(f"[bold]{escape(spec.name)}[/]({escape(names)})  [dim]{escape(spec.description)}[/]")


async def _print_score(env: Env) -> None:
    score = await env.judge() if isinstance(env, Judge) else None
    if score is None:
        _console.print("done; this environment does not judge, a reward function scores its episodes")
    else:
        parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
        _console.print(f"done: score {score.total:g} ({escape(parts)})")


def _find_task(arguments: argparse.Namespace) -> Task:
    name = arguments.tasks_of or arguments.env
    names = RowNames((), (arguments.env,), arguments.user_code)
    tasks = TaskSet(arguments.data, names=names) if arguments.data else build_tasks(name, dict(arguments.task_option))
    if not 0 <= arguments.task < len(tasks):
        raise ConfigError(f"there is no task {arguments.task}: valid numbers are 0 to {len(tasks) - 1}")
    task: Task = tasks[arguments.task]
    return task


async def _play(arguments: argparse.Namespace) -> None:
    task = _find_task(arguments)
    factory = build_env_factory(arguments.env, dict(arguments.option))
    checker = factory.env_class if isinstance(factory, ClassFactory) else factory
    if isinstance(checker, TaskChecker):
        checker.check_task(task)
    await check_services([factory])
    env = factory(task)
    try:
        if await play(env):
            await _print_score(env)
        else:
            _console.print("quit before the end")
        await env.close()
    finally:
        await factory.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Play one episode. Returns 1 on a user error."""
    parser = argparse.ArgumentParser(prog="python scripts/play.py", description="Play an environment by hand.")
    parser.add_argument("env", help="a known name, package.module:Class or path/to/file.py:Class")
    parser.add_argument(
        "--option", type=option, action="append", default=[], metavar="KEY=VALUE", help="option of the environment"
    )
    parser.add_argument("--data", help="a file of tasks; default: the environment's bundled tasks")
    parser.add_argument("--user-code", action="store_true", help="let the rows of --data name code, which is run")
    parser.add_argument("--tasks-of", metavar="ENV", help="use the bundled tasks of this environment")
    parser.add_argument("--task-option", type=option, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--task", type=int, default=0, metavar="N", help="task number, from 0")
    try:
        asyncio.run(_play(parser.parse_args(argv)))
    except VerlError as error:
        _console.print(f"[red]error:[/] {escape(str(error))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
