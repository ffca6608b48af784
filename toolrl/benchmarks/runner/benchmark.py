"""Benchmark definitions: categories of tasks, their episode settings, and the aggregation of their scores.

A new benchmark is one file with a function that takes a `BenchmarkContext`, registered in
`toolrl/benchmarks/runner/registry.py`. Episodes, engines, formats and rewards are those of training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from verl.config.schema import DataConfig, EnvConfig
from verl.data.row_names import RowNames
from verl.data.source import AS_WRITTEN
from verl.data.tasks import KNOWN_NAMES
from verl.errors import DataError
from verl.types import Task


@dataclass(frozen=True, slots=True)
class BenchmarkContext:
    """Resources of a benchmark besides the model. A benchmark that lacks one raises ConfigError with a hint.

    data_dir: the folder that is searched for data files (files.py); published data sets missing there are
              loaded by name (hub.py)
    search:   options of the search tool; empty: BM25 over the passages in data_dir
    judge:    url, model and key_variable of an OpenAI-compatible endpoint that judges answers; empty: no judge
    user:     options of tau2's user simulator; empty: the scripted one
    reward, reward_options, data: for data files; env: that of their episodes, None for a prompt and one response
    names:    that rows of data files may use
    max_tool_calls: per episode of math with Python and of search; None: the benchmark's usual number
    tool_call_format: the handler's (tool_call_format_of), for benchmarks with earlier calls in the prompt
    """

    data_dir: Path
    search: Mapping[str, Any] = field(default_factory=dict)
    judge: Mapping[str, Any] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    max_tool_calls: int | None = None
    tool_call_format: str = ""
    reward: str = "auto"
    reward_options: Mapping[str, Any] = field(default_factory=dict)
    data: DataConfig = AS_WRITTEN
    env: EnvConfig | None = None
    names: RowNames = KNOWN_NAMES


@dataclass(frozen=True, slots=True)
class EpisodeConfig:
    """Episode settings of a category, independent of the handler.

    uses_tools: whether the handler's format lists tools and parses calls; else an episode is a prompt and one response
    env, options, tools: as in the configuration's group `env`
    """

    reward: str
    reward_options: Mapping[str, Any] = field(default_factory=dict)
    uses_tools: bool = True
    env: str = "single_turn"
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Any, ...] = ()
    max_turns: int | None = None  # default: what max_tool_calls needs in the handler's format
    max_tool_calls: int = 16
    max_observation_tokens: int = 512  # per observation; longer ones are cut in the middle
    feedback_on_parse_error: bool = True  # false: a parse error terminates the episode
    own_env: EnvConfig | None = None  # the settings of training, in place of all above but the reward


@dataclass(frozen=True, slots=True)
class Category:
    """Tasks with the same episode settings. metric: a part of the score, or "total": 0 to 1, and 1 if right

    answer_of: the answer in a response's text, if any, for the vote of several rollouts (maj@n)
    """

    name: str  # benchmark/category
    tasks: Callable[[], Sequence[Task]]
    episode: EpisodeConfig
    metric: str = "total"
    answer_of: Callable[[str], str | None] | None = None

    def first(self, limit: int | None) -> list[Task]:
        """The tasks, at most `limit`. Raises DataError if there are none: the table would omit the category."""
        tasks = list(islice(self.tasks(), limit))
        if not tasks:
            raise DataError(f"{self.name} has no tasks", "at least one", "Correct its files, or leave it out")
        return tasks


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The mean score of its members (categories, or earlier aggregates; all must have been run) or of their rows."""

    name: str
    members: tuple[str, ...]
    over: Literal["members", "rows"] = "members"

    @property
    def formula(self) -> str:
        return f"{self.name} = mean over {self.over} of {', '.join(self.members)}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Categories, aggregates, and notes for readers of the scores."""

    name: str
    categories: tuple[Category, ...]
    aggregates: tuple[Aggregate, ...] = ()
    notes: tuple[str, ...] = ()
    files: Callable[[], tuple[str, ...]] = tuple  # one line per data file on its used and dropped rows
