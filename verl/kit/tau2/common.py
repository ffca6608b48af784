"""Code shared by the tools of both domains."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from verl.envs.tools.base import ToolError
from verl.kit.tau2.database import Database, Record

UserId = Annotated[str, Field(description="Id of a user, for example 'sara_doe_496'")]
_LONGEST_EXPRESSION = 200
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ServiceTools:
    """Tools that operate on one episode's database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def _find(self, table: str, kind: str, key: str) -> Record:
        """A record, read-only."""
        if key not in self._database[table]:
            raise ToolError(f"{kind} {key} not found")
        return self._database[table][key]


def calculate(expression: str) -> str:
    """Evaluates numbers, + - * / and parentheses by walking the syntax tree; rounds to two decimals."""
    try:
        if len(expression) > _LONGEST_EXPRESSION:
            raise ToolError(f"the expression is longer than {_LONGEST_EXPRESSION} characters")
        return str(round(float(_value(ast.parse(expression.strip(), mode="eval").body)), 2))
    except (SyntaxError, ValueError, ArithmeticError) as error:
        raise ToolError(f"cannot calculate {expression!r}: {error}") from error


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]  # checked above
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ToolError("only numbers, + - * / and parentheses are understood")
