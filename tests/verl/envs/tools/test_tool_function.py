"""Typed functions become tools: what the policy sees, and how a call reaches the function."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolrl.tools.calculator import calculator, value_of
from verl.envs.tools import function
from verl.envs.tools.base import ToolError
from verl.envs.tools.function import FunctionTool, tool
from verl.errors import ConfigError, ServiceDownError


@dataclass
class Point:
    x: int


@tool
def find(city: str, days: int = 3, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> dict[str, Any]:
    """Weather of a city.

    It is made up.

    Args:
        city: Where.
        days: How many days,
            counted from today.
    """
    return {"city": city, "days": days, "unit": unit, "tags": tags}


@tool(name="sum_of")
async def add(numbers: list[float], schema: bool = False) -> str:
    """Adds numbers."""
    return str(sum(numbers))


@tool
def move(point: Point) -> int:
    """Moves a point."""
    return point.x + 1


def call(tool: FunctionTool, **arguments: Any) -> str:
    return asyncio.run(tool.call(arguments))


def test_the_schema_follows_type_hints_defaults_and_docstring() -> None:
    assert (find.spec.name, find.spec.description) == ("find", "Weather of a city.\n\nIt is made up.")
    assert find.spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "days": {"type": "integer", "default": 3, "description": "How many days,\ncounted from today."},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": None},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_defaults_hold_and_answers_that_are_no_text_are_json() -> None:
    assert call(find, city="Zürich") == '{"city": "Zürich", "days": 3, "unit": "C", "tags": null}'
    assert call(add, numbers=[1, 2.5]) == "3.5" and add.spec.name == "sum_of"
    assert find(city="Rome")["days"] == 3  # still the function


def test_arguments_arrive_as_the_declared_types() -> None:
    assert call(find, city="a", days=2.0).startswith('{"city": "a", "days": 2,')  # JSON schema calls 2.0 an integer
    assert call(move, point={"x": 4}) == "5"
    with pytest.raises(ToolError, match="days: Input should be a valid integer"):
        call(find, city="a", days=2.5)


def undescribed(x: int) -> int:
    return x


def unannotated(x) -> int:  # type: ignore[no-untyped-def]
    """Something."""
    return 0


def unnamed(*x: int) -> int:
    """Something."""
    return 0


def untellable(x: threading.Thread) -> int:
    """Something."""
    return 0


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (undescribed, "needs a docstring"),
        (unannotated, "'x' needs a type hint"),
        (unnamed, "has no name"),
        (untellable, "have no form in JSON"),
    ],
)
def test_a_function_without_a_valid_schema_is_refused(bad: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FunctionTool(bad)


async def test_a_sync_function_leaves_the_loop_free_and_its_errors_arrive() -> None:
    release = threading.Event()

    @tool
    def wait() -> str:
        """Waits until the loop, which must be free for that, lets it go on."""
        assert release.wait(60)
        raise StopIteration

    waiting = asyncio.create_task(wait.call({}))
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(RuntimeError, match="StopIteration"):
        await waiting


async def test_hanging_threads_are_counted_logged_once_and_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "MAX_ABANDONED", 2)
    release = threading.Event()

    @tool
    def hang() -> str:
        """Hangs."""
        release.wait(60)
        return ""

    for count in (1, 2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hang.call({}), 0.01)
        assert hang.num_abandoned == count
    with pytest.raises(ServiceDownError, match="2 of its calls hang"):
        await hang.call({})
    assert len(caplog.records) == 1 and "keeps running until it returns" in caplog.text
    threads = set(hang._abandoned)
    release.set()
    for thread in threads:
        thread.join()
    assert hang.num_abandoned == 0


WORKED_OUT = {
    "1 + 2 * 3": "7",
    "0.1 + 0.2": "0.3",
    "-7 // 2": "-4",
    "2 ** -1": "0.5",
    "round(2.567, 2)": "2.57",
    "sqrt(2) ** 2": "2",
    "max(1, 2) % 2 + gcd(12, 18)": "6",
    " factorial(20)": "2432902008176640000",
}
REFUSED = {
    "9**9**9": "too large",
    "10.0**400": "too large",
    "10**1233 * 10**1233": "too large",
    "1e999": "not finite",
    "1/0": "division by zero",
    "(-8)**0.5": "not a real number",
    "sqrt(-1)": "domain",
    "2 +": "not an expression",
    "(" * 400 + ")" * 400: "not an expression",
    "-" * 999 + "1": "nested too deeply",
    "1" * 1001: "more than 1000",
    "factorial(10**9)": "factorial needs",
    "round(1, -10**9)": "round needs",
    "max()": "max expected",
    "x": "cannot work out",
    "__import__('os')": "cannot work out",
    "().__class__": "cannot work out",
    "'a' * 9": "not a number",
    "True": "not a number",
}


@pytest.mark.parametrize(("expression", "value"), WORKED_OUT.items())
def test_the_calculator_works_out(expression: str, value: str) -> None:
    assert call(calculator, expression=expression) == value


@pytest.mark.parametrize(("expression", "reason"), REFUSED.items())
def test_the_calculator_refuses(expression: str, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        value_of(expression)


@given(st.text(alphabet="0123456789.+-*/%() e,sqrtlogmaxround", max_size=60))
def test_any_calculation_ends_in_a_number_or_a_tool_error(expression: str) -> None:
    try:
        assert isinstance(value_of(expression), int | float)
    except ToolError as error:
        assert str(error)


def test_a_process_ends_although_a_thread_of_a_tool_hangs() -> None:
    code = """
import asyncio, threading
from verl.envs.tools.function import tool

@tool
def hang() -> str:
    "Hangs."
    threading.Event().wait()

async def main():
    try:
        await asyncio.wait_for(hang.call({}), 0.1)
    except TimeoutError:
        print("stopped", hang.num_abandoned)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "stopped 1\n"), ended.stderr
