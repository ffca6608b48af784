"""The reward lab: check a reward on your own data before spending a GPU hour on it.

    toolrl lab data=train.parquet [reward.name=rlla] [env.tool_call_format=toolrl] [model=PATH] [eval.limit=N]

    step=N         training step, for scheduled rewards
    show=N         number of violations and unusable rows to list
    --help         print this text and every key with its default
    --config FILE  settings of a YAML file, such as a run's config.yaml
    --user-code    run the code that this file names; it may be another author's
    --cfg job      print the resulting configuration and exit

With a model responses go through its tokens, as in training.
For every row the gold response must score the maximum, and every mutation that the reward declares must score less.
Unusable rows, and rows whose gold calls a tool that the prompt does not list, are reported too. A row that names its
own reward is checked with that one. Exit code 1: violations. 2: the data or the reward is unusable.
With env.name=swe the verdict is checked: on eval.limit tasks (3) the fix must score 1, and each of some 60 cheats 0.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from toolrl.commands import LAB
from verl.chat.native import NativeFormat
from verl.config.schema import Config
from verl.data.row_names import RowNames
from verl.data.tasks import TaskSet
from verl.episodes.episode import EpisodeRunner
from verl.episodes.written import as_trajectory, episode_of, written_response
from verl.errors import ConfigError, DataError, VerlError
from verl.formats.base import ToolCallFormat, build_tool_call_format
from verl.formats.plain import PLAIN
from verl.host.daemon import run_async
from verl.scoring.rewards import Rewards, build_rewards
from verl.trainer.cli import CliArgs, check_files, run_cli
from verl.types import Message, Task, Trajectory
from verl.utils.reward_score.base import LabReward

GOLD = "gold"
AUTO = "auto"
_STEP, _SHOW = "--step=", "--show="
_SHOWN = 20
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Violation:
    task_id: str
    response_kind: str  # GOLD or the name of a mutation
    score: float
    maximum: float

    def __str__(self) -> str:
        expected = "exactly" if self.response_kind == GOLD else "less than"
        return f"{self.task_id}: {self.response_kind} scores {self.score:g}, expected {expected} {self.maximum:g}"


@dataclass
class Stats:
    responses: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    at_maximum: int = 0

    def add(self, score: float, maximum: float) -> None:
        self.responses += 1
        self.total += score
        self.low, self.high = min(self.low, score), max(self.high, score)
        self.at_maximum += score >= maximum - _TOLERANCE


@dataclass
class LabReport:
    stats: dict[str, Stats] = field(default_factory=lambda: defaultdict(Stats))
    violations: list[Violation] = field(default_factory=list)


def _responses(reward: LabReward, task: Task, step: int, tool_call_format: ToolCallFormat) -> Iterator[tuple[str, str]]:
    """(kind, text) of the gold response and of all mutations; gold calls are also cut in half."""
    gold = reward.gold(task, step)
    text = written_response(gold, tool_call_format)
    yield GOLD, text
    for mutation in reward.mutations(task, step):
        with suppress(DataError):  # some chat templates render one call only, so no policy writes several
            yield mutation.name, written_response(mutation.text, tool_call_format)
    if isinstance(gold, Message) and gold.tool_calls:
        last = tool_call_format.render(gold.tool_calls[-1:])
        yield "half a call", text[: len(text) - len(last) // 2 - 1]


def try_rewards(
    rewards: Rewards,
    tasks: Iterable[Task],
    step: int = 0,
    tool_call_format: ToolCallFormat = PLAIN,
    runner: EpisodeRunner | None = None,
) -> LabReport:
    """Score gold responses and all mutations, with calls in this format.

    runner: of a model, through whose tokens they go as in training; None: as text
    Raises ConfigError for a reward that fails, or has no lab methods.
    """
    report = LabReport()
    for task in tasks:
        reward = rewards.of(task)
        if not isinstance(reward, LabReward):
            name = task.reward or rewards.name
            raise ConfigError(f"{task.id}: reward {name!r} does not define maximum(), gold() and mutations()")
        try:
            maximum = float(reward.maximum(task, step))
            responses = list(_responses(reward, task, step, tool_call_format))
            episodes = [_episode(task, text, tool_call_format, runner) for _, text in responses]
            scores = [float(reward.score(episode, task, step).total) for episode in episodes]
        except VerlError:
            raise
        except Exception as error:
            raise ConfigError(f"the reward fails on {task.id} ({type(error).__name__}: {error})") from error
        for (kind, _), score in zip(responses, scores, strict=True):
            report.stats[kind].add(score, maximum)
            # a NaN score fails both comparisons
            passed = math.isclose(score, maximum, abs_tol=_TOLERANCE) if kind == GOLD else score < maximum - _TOLERANCE
            if not passed:
                report.violations.append(Violation(task.id, kind, score, maximum))
    return report


def _episode(task: Task, text: str, tool_call_format: ToolCallFormat, runner: EpisodeRunner | None) -> Trajectory:
    return run_async(episode_of(runner, task, text)) if runner else as_trajectory(task, text, tool_call_format)


def _table(report: LabReport) -> Table:
    failed = {violation.response_kind for violation in report.violations}
    table = Table(title="Reward lab")
    for column in ("response", "count", "mean", "min", "max", "at maximum"):
        table.add_column(column, justify="left" if column == "response" else "right")
    for kind, stats in report.stats.items():
        scores = [f"{score:.3f}" for score in (stats.total / stats.responses, stats.low, stats.high)]
        share = f"{stats.at_maximum / stats.responses:.1%}"
        style = "red" if kind in failed else None
        table.add_row(escape(kind), str(stats.responses), *scores, share, style=style)
    return table


def main(argv: Sequence[str]) -> int:
    return run_cli(argv, __doc__ or "", LAB, run, (_STEP, _SHOW))


def run(args: CliArgs, console: Console) -> int:
    """1 if the reward, or a row, is not sound, else 0."""
    config, files = args.config, args.config.data.train_files
    check_files("data.train_files", files, needed=True)
    if len(files) > 1:
        raise ConfigError(f"data.train_files: the lab reads one file, got {len(files)}")
    step, show = _count(args, _STEP, 0), _count(args, _SHOW, _SHOWN)
    if config.env.name == "swe":
        return _run_cheats(config, show, console)
    rewards = build_rewards(config.reward.name, config.reward.options)
    tasks = TaskSet(files[0], max_bad_share=1.0, data=config.data, names=RowNames.of(config))
    count = len(tasks) if config.eval.limit is None else min(len(tasks), config.eval.limit)
    style, runner = _format(config, calls=any(task.gold is not None for task in islice(tasks, count)))
    report = try_rewards(rewards, track(islice(tasks, count), "Scoring", count, console=console), step, style, runner)
    console.print(_table(report))
    unusable, unlisted = tasks.report.bad, tasks.report.unlisted
    _print_rows("unusable: ", unusable, show, console)
    _print_rows("unlisted tool: ", unlisted, show, console)
    _print_rows("", report.violations, show, console)
    for note, number in tasks.report.notes.items():
        console.print(f"{number} rows {note}", markup=False, soft_wrap=True)
    rows = len({violation.task_id for violation in report.violations})
    counts = f"{len(unusable)} rows unusable, {len(unlisted)} call unlisted tools"
    console.print(f"{count} rows tried, {rows} with violations; {counts}", soft_wrap=True)
    return 1 if report.violations or unusable or unlisted else 0


def _run_cheats(config: Config, show: int, console: Console) -> int:
    from toolrl.check.lab.swe import SAMPLE, try_tasks  # needs what the environment needs

    tasks = TaskSet(config.data.train_files[0], max_bad_share=1.0, data=config.data, names=RowNames.of(config))
    count = min(len(tasks), SAMPLE if config.eval.limit is None else config.eval.limit)
    sample = track(islice(tasks, count), "Judging", count, console=console)
    report = run_async(try_tasks(config.env.options, sample))
    console.print(report.table())
    _print_rows("unusable: ", tasks.report.bad, show, console)
    _print_rows("", report.unfixed, show, console)
    held = sum(report.held) / len(report.held) if report.held else 0.0
    console.print(f"{count} tasks tried; {held:.0%} of their tests compare a value that the patch cannot read")
    return 0 if report.is_sound and count and not tasks.report.bad else 1


def _format(config: Config, calls: bool) -> tuple[ToolCallFormat, EpisodeRunner | None]:
    """The format, and with a model the runner of its episodes. calls: whether golds are turns, to be written in it"""
    env = config.env
    if env.tool_call_format == AUTO and not calls:
        env = replace(env, tool_call_format=None)
    if config.model.path is None:
        name = "toolrl" if env.tool_call_format == AUTO else env.tool_call_format
        style = PLAIN if name is None else build_tool_call_format(name, env.tool_call_format_options)
        if isinstance(style, NativeFormat):
            raise ConfigError("env.tool_call_format=native needs model=PATH, whose chat template renders the calls")
        return style, None
    from verl.build.env import build_episode_runner, with_tool_call_format  # heavy imports
    from verl.build.run import load_chat_template

    chat = load_chat_template(config.model)
    runner = build_episode_runner(with_tool_call_format(Config(model=config.model, env=env), chat), chat)
    return runner.observations.tool_call_format, runner


def _count(args: CliArgs, option: str, default: int) -> int:
    """The value of an option. Raises ConfigError if it is no whole number."""
    values = [each.removeprefix(option) for each in args.options if each.startswith(option)]
    if values and not (values[-1].isdigit() and values[-1].isascii()):
        raise ConfigError(f"{option}{values[-1]} is not a whole number >= 0")
    return int(values[-1]) if values else default


def _print_rows(prefix: str, items: Sequence[object], show: int, console: Console) -> None:
    for item in items[:show]:
        console.print(escape(f"{prefix}{item}"), soft_wrap=True)
    if len(items) > show:
        console.print(f"... and {len(items) - show} more (--show={len(items)} lists all)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
