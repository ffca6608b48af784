"""Code shared by the tools of both domains."""

from typing import Annotated

from pydantic import Field

from verl.envs.tools.base import ToolError
from verl.envs.tools.calculator import value_of
from verl.kit.tau2.database import Database, Record

UserId = Annotated[str, Field(description="Id of a user, for example 'sara_doe_496'")]


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
    """The value of an expression, rounded to two decimals."""
    return str(round(float(value_of(expression)), 2))
