"""Functions of verifiers' rubrics, (completion, ..): messages whose fields are items and attributes, and a state."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any

from verl.types import FinishReason, Message, Task, Trajectory, Turn
from verl.utils.reward_score.functions import Form, Log, rounds, row_columns

Round = tuple[Turn, tuple[Message, ...]]  # a turn, and what the policy read after it


class Fields(dict[str, Any]):
    """A mapping whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def _arguments(trajectory: Trajectory, task: Task, step: int, log: Log) -> dict[str, Any]:
    """What verifiers 0.1 passes, but for `parser` and `example_id`, which belong to its own environment."""
    row = row_columns(task)
    is_text = trajectory.task.text_prompt
    prompt = [Fields(role="text" if is_text else each.role, content=each.content) for each in trajectory.prompt]
    info = row.get("info") or {}
    columns = {**row, "prompt": prompt}
    if "info" in row:
        columns["info"] = info = json.loads(info) if isinstance(info, str) else info
    steps = list(_steps(prompt, rounds(trajectory)))
    completion = [message for step in steps for message in (*step["completion"], *step.pop("observed"))]
    state = {
        **(vars(pickle.loads(trajectory.environment)) if trajectory.environment else {}),  # noqa: S301  of this run
        **columns,
        "input": columns,
        "task": columns,
        "info": info,
        "completion": completion,
        "trajectory": steps,
        "is_completed": True,
        "is_truncated": any(turn.completion.finish_reason is FinishReason.LENGTH for turn in trajectory.turns),
        **dict.fromkeys(("reward", "metrics", "error", "final_env_response")),
    }
    given = {"prompt": prompt, "completion": completion, "info": info, "state": Fields(state), "task": columns}
    return {**columns, **given}


def _steps(prompt: Sequence[Fields], turns: Iterable[Round]) -> Iterator[dict[str, Any]]:
    """verifiers' `trajectory`, with what was observed after each step."""
    known, asked = list(prompt), 0
    for turn, observed in turns:
        calls = () if turn.parsed is not None and turn.parsed.error is not None else turn.message.tool_calls
        content = turn.message.content
        if calls and turn.parsed is not None:
            content = turn.parsed.content.rstrip()
        made = [
            Fields(id=f"call_{place}", name=call.name, arguments=json.dumps(dict(call.arguments)))
            for place, call in enumerate(calls, asked)
        ]
        message = Fields(role="assistant", content=content, reasoning_content=None, thinking_blocks=None)
        message["tool_calls"] = made or None
        ids = iter([call.id for call in made])
        asked += len(made)
        read = [
            Fields(role="tool", tool_call_id=next(ids, ""), content=each.content)
            if each.role == "tool"
            else Fields(role=each.role, content=each.content)
            for each in observed
        ]
        cut = turn.completion.finish_reason is FinishReason.LENGTH
        step = {"prompt": list(known), "completion": [message], "tokens": None, "reward": None, "advantage": None}
        yield {**step, "is_truncated": cut, "extras": {}, "observed": read}
        known += [message, *read]


def _check_parser(parameters: Mapping[str, Parameter], options: Mapping[str, Any]) -> None:
    """A rubric's parser is of its environment: another one would give other scores without a word."""
    parser = parameters.get("parser")
    if parser is not None and parser.default is Parameter.empty and "parser" not in options:
        raise TypeError("`parser` is the rubric's own; give it a default, such as parser=vf.XMLParser(['answer'])")


RUBRIC = Form(
    parameter="completion",
    arguments=_arguments,
    names=("prompt", "completion", "info", "state", "task"),
    optional=True,
    check=_check_parser,
)
