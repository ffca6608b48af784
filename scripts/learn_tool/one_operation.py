"""A calculator that works out one operation a call, for the questions of scripts/learn_tool.sh that need several."""

import re

from toolrl.tools.calculator import value_of
from verl.envs.tools.base import ToolError
from verl.envs.tools.function import tool

_OPERATION = re.compile(r"-?\d+\s*[-+*]\s*-?\d+")


@tool(name="calculator")
async def one_operation(expression: str) -> str:
    """Works out one operation of two whole numbers, such as "12 * 34".

    Args:
        expression: A number, one of + - *, and a number.
    """
    if not _OPERATION.fullmatch(expression.strip()):
        raise ToolError(f"{expression[:80]!r} is not one operation of two whole numbers, such as 12 * 34")
    return str(value_of(expression))
