"""Code shared by the tools of both domains."""

from typing import Annotated

from pydantic import Field

from toolrl.benchmarks.tau2.database import Database, Record
from toolrl.tools.calculator import value_of
from verl.envs.tools.base import ToolError

UserId = Annotated[str, Field(description="Id of a user, for example 'sara_doe_496'")]


class ServiceTools:
    """Tools that operate on one episode's database. A domain names those that it takes over, in its own order."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def _find(self, table: str, kind: str, key: str) -> Record:
        """A record, read-only."""
        if key not in self._database[table]:
            raise ToolError(f"{kind} {key} not found")
        return self._database[table][key]

    def calculate(self, expression: Annotated[str, Field(description="Numbers, + - * / and parentheses")]) -> str:
        """Calculate an expression."""
        return str(round(float(value_of(expression)), 2))

    def transfer_to_human_agents(self, summary: Annotated[str, Field(description="What the user wants")]) -> str:
        """Hand the user over to a human, only where the request is out of your reach."""
        return "Transfer successful"
