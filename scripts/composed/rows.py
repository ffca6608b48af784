"""Rows in ToolRL's schema, from tasks."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

from scripts.composed.mistakes import Mistakes
from scripts.composed.tasks import Source, Task
from scripts.raw.rlla import dialogue, to_row, tool_list

INSTRUCTION = "Call tools or respond."
Row = dict[str, Any]


def system_text(task: Task) -> str:
    """The instruction and the list of tools."""
    return f"{INSTRUCTION}\n\n{tool_list(tool.listed for tool in task.tools)}"


def as_row(task: Task, response: str, split: str, index: int) -> Row:
    """The row of a task with this response. Its data source is the family, as metrics are by data source."""
    example = {"instruction": system_text(task), "input": dialogue(task.turns), "output": response}
    return to_row(example, split, index) | {"data_source": task.family}


def build(seed: int) -> dict[str, list[Row]]:
    """The rows of all files; no prompt occurs twice."""
    prompts: set[tuple[str, str]] = set()
    files = {
        "test": (200, {"held_out": True}, False),
        "test_new_tools": (200, {"held_out": True, "new_tools": True}, False),
        "train": (2400, {}, False),
        "sft": (4800, {}, True),
    }
    built = {}
    for name, (count, options, with_mistakes) in files.items():
        random = Random(f"{seed}/{name}")
        tasks = _distinct(Source(random, **options), count, prompts)
        mistakes = Mistakes(random, float(with_mistakes))
        built[name] = [as_row(task, mistakes.demonstrate(task), name, place) for place, task in enumerate(tasks)]
    return built


def _distinct(source: Source, count: int, prompts: set[tuple[str, str]]) -> Iterable[Task]:
    while count:
        task = source.draw()
        prompt = (system_text(task), dialogue(task.turns))
        if prompt not in prompts:
            prompts.add(prompt)
            count -= 1
            yield task
