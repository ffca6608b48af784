"""Records what verifiers hands to a rubric's function, in verifiers.json, with an interpreter that has verifiers 0.1:

    python record_verifiers.py

The environments are verifiers' own; the responses of a case take the place of its client's.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset
from tools import weather
from verifiers.types import Response, ResponseMessage, ToolCall

HERE = Path(__file__).parent
CASES = {case["name"]: case for case in json.loads((HERE / "cases.json").read_text())["cases"]}
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
LEFT_OUT = ("client", "timing", "usage_tracker", "trajectory_id", "sampling_args", "response", "token_usage")


class Played(vf.Client):
    """A client that writes one text after the other, as a server with a parser of Hermes' calls does."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(None)
        self.texts, self.ids = list(texts), count()

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Response:
        text = self.texts.pop(0)
        found = [json.loads(each) for each in CALL.findall(text)] if tools else []
        calls = [
            ToolCall(id=f"call_{next(self.ids)}", name=each["name"], arguments=json.dumps(each["arguments"]))
            for each in found
        ]
        content = text[: text.index("<tool_call>")].rstrip() if calls else text
        message = ResponseMessage(
            content=content, tool_calls=calls or None, finish_reason="stop", is_truncated=False, tokens=None
        )
        return Response(id="r", created=0, model=model, message=message)

    setup_client = to_native_tool = to_native_prompt = get_native_response = None  # type: ignore[assignment]
    raise_from_native_response = from_native_response = close = None  # type: ignore[assignment]


class User(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": "And?"}]


class Stock(vf.StatefulToolEnv):
    """Its tool has an argument that the policy does not see."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.add_tool(self.add, args_to_skip=["state"])

    async def setup_state(self, state: Any) -> None:
        state["value"] = 0

    def update_tool_args(self, name: str, arguments: Any, messages: Any, state: Any, **_: Any) -> Any:
        return {**arguments, "state": state}

    def add(self, number: int, state: dict) -> int:
        """Add a number."""
        state["value"] += number
        return state["value"]


def plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items() if key not in LEFT_OUT}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def record(kind: Any, case: dict[str, Any], **options: Any) -> dict[str, Any]:
    seen: list[dict[str, Any]] = []

    def everything(prompt: Any, completion: Any, **given: Any) -> float:
        is_text = isinstance(completion, str)
        access = {} if is_text else {"item": completion[0]["role"], "attribute": completion[0].role}
        given["parser"] = type(given["parser"]).__name__
        seen.append(plain({"prompt": prompt, "completion": completion, **given, "access": access}))
        return 0.5

    async def named(answer: Any, info: Any) -> bool:
        seen.append({"answer": answer, "info": plain(info)})
        return True

    def none(completion: Any) -> None:
        return None

    def broken(completion: Any) -> float:
        raise ValueError("odd")

    rubric = vf.Rubric([everything, named, none, broken], [1.0, 0.5, 1.0, 1.0])
    rows = Dataset.from_list([{"prompt": case["prompt"], **case["columns"]}])
    env = kind(dataset=rows, rubric=rubric, **options)
    (row,) = env.get_dataset()
    output = asyncio.run(env.run_rollout(row, Played(case["responses"]), "policy", {}))
    every, name = seen
    return {"given": every, "named": name, "reward": output["reward"], "metrics": plain(output["metrics"])}


def group(case: dict[str, Any]) -> dict[str, Any]:
    """What a function over all rollouts of a prompt gets."""
    seen: list[Any] = []

    def ranked(completions: Any, answers: Any, states: Any, infos: Any, prompts: Any) -> list[float]:
        seen.append(plain({"completions": completions, "answers": answers, "infos": infos, "prompts": prompts}))
        return [0.0, 1.0]

    rows = Dataset.from_list([{"prompt": case["prompt"], **case["columns"]}])
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([ranked]))
    (row,) = env.get_dataset()
    outputs = asyncio.run(env.run_group([row, row], Played(["2", "3"]), "policy", {}))
    (given,) = seen
    return {"given": given, "rewards": [each["reward"] for each in outputs]}


def main() -> None:
    one = CASES["a conversation"]
    info = {"answer": "2", "info": {"unit": "none", "deep": {"a": [1, None]}}, "level": 3}
    two = {**one, "responses": ["<think>\none\n</think>\n\n1", "2"]}
    stock = CASES["an environment"]
    tools = {"tools": [weather]}
    made = {
        "SingleTurnEnv": record(vf.SingleTurnEnv, one),
        "SingleTurnEnv, a text": record(vf.SingleTurnEnv, CASES["a text"], message_type="completion"),
        "SingleTurnEnv, info": record(vf.SingleTurnEnv, {**one, "columns": info}),
        "MultiTurnEnv": record(User, two, max_turns=2),
        "StatefulToolEnv": record(Stock, stock),
        **{
            f"ToolEnv, {name}": record(vf.ToolEnv, CASES[name], **tools)
            for name in ("a call", "thoughts and parallel calls", "three turns", "tools that are not called")
        },
    }
    text = {"version": vf.__version__, "given": made, "group": group(one)}
    (HERE / "verifiers.json").write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
