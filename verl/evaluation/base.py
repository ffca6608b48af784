"""What a benchmark is: categories of tasks, how their episodes go, and how their figures are put together.

A new benchmark is one file with a function of a `BenchmarkContext`, named in `verl/evaluation/registry.py`. Episodes,
engines, formats and rewards are those of training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from verl.errors import DataError
from verl.types import Task


@dataclass(frozen=True, slots=True)
class BenchmarkContext:
    """What a benchmark may need beside the model; whoever lacks something says so in a ConfigError with the mend.

    data_dir: the folder under which data files are looked for (verl/evaluation/files.py)
    hub:      whether published data sets that do not lie there are loaded by name (verl/evaluation/hub.py)
    search:   options of the search tool; empty: BM25 over the passages in data_dir
    judge:    url, model and key_variable of an OpenAI-compatible endpoint that judges answers; empty: nobody does
    user:     options of tau2's user; empty: the scripted one
    reward, reward_options: of data files
    max_tool_calls: of an episode of math with Python and of search; None: as many as the benchmark is known for
    format:    the handler's (format_of), for benchmarks whose prompts hold earlier calls or are a format's own words
    """

    data_dir: Path
    hub: bool = False
    search: Mapping[str, Any] = field(default_factory=dict)
    judge: Mapping[str, Any] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    max_tool_calls: int | None = None
    tool_call_format: str = ""
    reward: str = "rlla"
    reward_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeConfig:
    """How the episodes of a category go, whatever the handler.

    handled: whether the handler's format tells of tools and reads calls; if not, an episode is the prompt and one
    response env, options, tools: as in the configuration's group `env`
    """

    reward: str
    reward_options: Mapping[str, Any] = field(default_factory=dict)
    uses_tools: bool = True
    env: str = "single_turn"
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Any, ...] = ()
    max_turns: int | None = None  # what max_tool_calls takes in the handler's format
    max_tool_calls: int = 16
    max_observation_tokens: int = 512  # of one answer; what is longer loses its middle
    feedback_on_parse_error: bool = True  # or the episode ends with a call that cannot be read


@dataclass(frozen=True, slots=True)
class Category:
    """Tasks that are played and judged alike. `metric`: the part of the score, or "total", that is its figure.

    The figure of an answer lies between 0 and 1, and is 1 when it is right.
    """

    name: str  # benchmark/category
    tasks: Callable[[], Sequence[Task]]
    play: EpisodeConfig
    metric: str = "total"

    def first(self, limit: int | None) -> list[Task]:
        """The tasks, at most `limit`. Raises DataError where there is none: no table would tell of the category."""
        found = list(islice(self.tasks(), limit))
        if not found:
            raise DataError(f"{self.name} has no task", "at least one", "Correct its files, or leave it out")
        return found


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A figure made of others: the mean of its members, or of all their rows.

    The members are names of categories, or of aggregates before this one; where one was not run there is no figure.
    """

    name: str
    members: tuple[str, ...]
    over: Literal["members", "rows"] = "members"

    @property
    def formula(self) -> str:
        """In words, for the report."""
        return f"{self.name} = mean over {self.over} of {', '.join(self.members)}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Categories, what is made of them, and what a reader of the figures must know."""

    name: str
    categories: tuple[Category, ...]
    aggregates: tuple[Aggregate, ...] = ()
    notes: tuple[str, ...] = ()
    files: Callable[[], tuple[str, ...]] = tuple  # what became of the rows of each data file, a line each
