"""Environments by name, functions as tools, and the two smallest environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, with_config
from typing_extensions import TypedDict

from tests.support.episodes import call, calls, respond, run
from verl.envs.registry import build_env_factory, build_tasks
from verl.envs.tools.base import ToolError
from verl.envs.tools.functions import Toolbox, answer_calls
from verl.envs.tools.signature import read_signature
from verl.errors import ConfigError
from verl.types import Message, Task, ToolCall, ToolStatus

OWN = """
from verl.envs.base import Observation, StepResult
from verl.types import Score


class Echo:
    def __init__(self, task, bonus=1.0):
        self.task, self.bonus = task, bonus

    async def reset(self):
        return Observation(self.task.prompt)

    async def step(self, message):
        self.right = message.content == self.task.answer
        return StepResult(done=True)

    async def judge(self):
        return Score(self.bonus * self.right, {"right": float(self.right)})

    async def close(self):
        pass
"""


@with_config(extra="forbid")
class Leg(TypedDict):
    number: Annotated[str, Field(description="Of a flight")]
    seats: int


class Desk:
    def book(self, legs: list[Leg], cabin: Literal["a", "b"] = "a", price: float = 1.0) -> dict[str, float]:
        """Book it."""
        if price < 0:
            raise ToolError("too cheap")
        return {"price": price * len(legs)}

    def note(self) -> str:
        """Returns ümlaut."""
        return "ümlaut"

    def _secret(self) -> str:
        return "secret"


def test_a_methods_signature_is_its_schema() -> None:
    spec, _ = read_signature(Desk.book)
    assert (spec.name, spec.description) == ("book", "Book it.")
    leg = {"number": {"type": "string", "description": "Of a flight"}, "seats": {"type": "integer"}}
    closed = {"type": "object", "additionalProperties": False}
    assert spec.parameters == {
        **closed,
        "$defs": {"Leg": {**closed, "title": "Leg", "properties": leg, "required": ["number", "seats"]}},
        "properties": {
            "legs": {"type": "array", "items": {"$ref": "#/$defs/Leg"}},
            "cabin": {"type": "string", "enum": ["a", "b"], "default": "a"},
            "price": {"type": "number", "default": 1.0},
        },
        "required": ["legs"],
    }


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("_secret", {}, "there is no function '_secret'"),
        ("__init__", {}, "there is no function '__init__'"),
        ("__class__", {}, "there is no function"),
        ("bookk", {}, "did you mean 'book'?"),
        ("book", {}, "'book': 'legs' is a required property"),
        ("book", {"legs": [], "self": 1}, "'self' was unexpected"),
        ("book", {"legs": [{"number": 3, "seats": 1}]}, "'book': 3 is not of type 'string' (at $.legs[0].number)"),
        ("book", {"legs": [], "cabin": "c"}, "'c' is not one of"),
        ("book", {"legs": [], "price": -1}, "too cheap"),
    ],
)
def test_wrong_calls_are_answers(name: str, arguments: dict[str, object], problem: str) -> None:
    toolbox = Toolbox.of(Desk)
    result = answer_calls([ToolCall(name, arguments)], lambda made: toolbox.call(Desk(), made))
    (message,), (use,) = result.messages, result.tool_uses
    assert message.role == "tool" and message.tool == name
    assert message.content.startswith("Error: ") and problem in message.content
    assert use.status is ToolStatus.USER_ERROR


def test_arguments_that_cannot_be_shown_are_an_answer() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for odd in (deep, 10**5000, "x" * 10**6):
        with pytest.raises(ToolError) as found:
            Toolbox.of(Desk).check(ToolCall("book", {"legs": odd}))
        assert len(str(found.value)) < 400


def test_calls_are_answered_in_their_order_and_texts_stay_texts() -> None:
    toolbox = Toolbox.of(Desk)
    assert list(toolbox.specs) == ["book", "note"]
    made = [ToolCall("note", {}), ToolCall("book", {"legs": [{"number": "x", "seats": 1}], "price": 2.5})]
    result = answer_calls(made, lambda one: toolbox.call(Desk(), one))
    assert [message.content for message in result.messages] == ["ümlaut", '{"price": 2.5}']
    assert [use.status for use in result.tool_uses] == [ToolStatus.SUCCESS] * 2


def test_single_turn_ends_with_the_first_message() -> None:
    task = Task("t", (Message("user", "hi"),), "gold", "test")
    played = run(build_env_factory("single_turn"), task, respond())
    (result,) = played
    assert result.done and played.score is None and not result.messages


def test_the_shop_is_won_by_buying_what_was_asked_for() -> None:
    shop = build_env_factory("shop")
    for task in build_tasks("shop", {"count": 20}):
        wanted = json.loads(task.answer)
        buy = [ToolCall("set_quantity", {"product_id": id, "quantity": number}) for id, number in wanted.items()]
        played = run(shop, task, calls(*buy), call("checkout"), respond())
        *_, paid, end = played
        bill = sum(task.extra["products"][id]["price"] * number for id, number in wanted.items())
        assert json.loads(paid.messages[0].content) == {"paid": bill}
        assert end.done and played.score is not None and played.score.total == 1.0
        for spoiled in ([respond()], [calls(*buy), respond()], [calls(*buy[1:]), call("checkout"), respond()]):
            lost = run(shop, task, *spoiled).score
            assert lost is not None and lost.total == 0.0


def test_two_episodes_of_a_task_have_carts_of_their_own() -> None:
    (task,) = build_tasks("shop", {"count": 1})
    first = run(build_env_factory("shop"), task, call("checkout"), call("checkout"))
    again = run(build_env_factory("shop"), task, call("checkout"))
    assert "paid already" in first[1].messages[0].content
    assert again[0].tool_uses[0].status is ToolStatus.SUCCESS


def test_a_class_in_a_file_is_an_environment(tmp_path: Path) -> None:
    file = tmp_path / "own_env.py"
    file.write_text(OWN)
    task = Task("t", (Message("user", "write so"),), "so", "test")
    played = run(build_env_factory(f"{file}:Echo", {"bonus": 2.0}), task, respond("so"))
    assert played.score is not None and played.score.total == 2.0
    with pytest.raises(ConfigError, match="has no option 'malus'; its options are bonus"):
        build_env_factory(f"{file}:Echo", {"malus": 1})
    with pytest.raises(ConfigError, match="must be a class with `reset`, `step`"):
        build_env_factory(f"{file}:Score", {})


def test_an_unknown_name_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="unknown environment 'shopp'; did you mean 'shop'"):
        build_env_factory("shopp")
    with pytest.raises(ConfigError, match="has no option 'number'; its options are count, seed"):
        build_tasks("shop", {"number": 3})
