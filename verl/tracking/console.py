"""Console output of a run: live on a terminal, plain dated lines elsewhere; and the final table."""

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl.text import printable
from verl.tracking.names import STDERR, reward_parts
from verl.tracking.progress import Progress
from verl.tracking.tracker import Tracker

_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 40  # progress bar and sparkline
_ROLLOUT_CHARS = 600  # per text of a printed rollout
_QUIET_S = 30.0  # between two lines on the same rollout
_SHORT_S = 0.05  # shorter phases are not listed
LOG_TIME = "%Y-%m-%d %H:%M:%S"


class Display(Tracker):
    """Prints to the console from the first phase of the start on.

    On a terminal a few lines stay below all other output. Elsewhere the phases of the start, progress within rollouts
    and steps are a line each.

    total_steps: None until the data is read; `with_rollouts`: whether one rollout of every step is printed, too
    (trainer.logger names "rollouts")
    """

    def __init__(
        self, total_steps: int | None = None, console: Console | None = None, with_rollouts: bool = False
    ) -> None:
        self.console = console or Console(emoji=False)
        self.total_steps, self._with_rollouts = total_steps, with_rollouts
        self.running, self.phase_started = "", time.monotonic()
        self._reported = self.phase_started  # when the last line on a rollout was printed
        self._start: dict[str, float] | None = {}  # seconds of the start's phases; None: it is over
        self._progress = Progress()
        self._live: Live | None = None
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._step, self._left = step, ""
        self._shown: dict[str, str] = {}
        self._phases, self._rewards = "", list[float]()
        self._first, self._first_time = step, time.monotonic()

    def phase(self, name: str) -> None:
        """Set the current phase."""
        self._end_phase()
        self.running, self.phase_started, self._reported = name, time.monotonic(), time.monotonic()
        self._progress.start()
        if self.console.is_interactive and self._live is None:
            self._live = Live(self, console=self.console, refresh_per_second=2)
            self._live.start()
        elif self._start is not None and not self.console.is_interactive:
            self._print(f"start: {name}")

    def started(self) -> None:
        """The start is over: no line per phase from now on."""
        self._end_phase()
        if self._start and not self.console.is_interactive:
            self._print(f"started in {duration(sum(self._start.values()))}: {_seconds(self._start)}")
        self._start = None

    def _end_phase(self) -> None:
        if self._start is not None and self.running:
            seconds = time.monotonic() - self.phase_started
            self._start[self.running] = self._start.get(self.running, 0.0) + seconds

    def watch(self, progress: Progress) -> None:
        """Show the progress of rollouts."""
        self._progress, progress.on_change = progress, self._report

    def _report(self) -> None:
        """A line on the running rollout, if the last one is a while ago."""
        now = time.monotonic()
        if not self.console.is_interactive and now - self._reported >= _QUIET_S:
            self._reported = now
            self._print(f"step {self._step + 1}/{self.total_steps}, {self._now()}")

    def _now(self) -> str:
        """The running phase with its seconds, and how far it is."""
        progress = f": {self._progress}" if self._progress.asked else ""
        return f"{self.running} ({duration(time.monotonic() - self.phase_started)}){progress}"

    def _print(self, line: str) -> None:
        self.console.print(f"{time.strftime(LOG_TIME)} {line}", markup=False, highlight=False, soft_wrap=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step; step 0 is the validation before training."""
        self._step, self._shown, self._phases = step, highlights(metrics), phase_times(metrics)
        self._rewards += [reward] if math.isfinite(reward := metrics.get("reward/total", math.nan)) else []
        if step > self._first:
            seconds = (time.monotonic() - self._first_time) / (step - self._first) * ((self.total_steps or step) - step)
            self._left = duration(seconds)
        else:
            self._first_time = time.monotonic()
        if not self.console.is_interactive:
            took = {"took": f"{self._shown['took']} ({self._phases})"} if self._phases and "took" in self._shown else {}
            left = {"left": self._left} if self._left else {}
            shown = {"step": f"{step}/{self.total_steps}", **self._shown, **took, **left}
            self._print(", ".join(f"{name} {value}" for name, value in shown.items()))

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows[:1] if self._with_rollouts else ():
            texts = ((name, printable(_cut(row[name]))) for name in ("prompt", "response", "answer"))
            body = [Text.assemble((f"{name}: ", "bold"), text) for name, text in texts]
            title = Text(printable(f"step {step}, {row['task']}: {row['score']:.3g}"))
            self.console.print(Panel(Group(*body), title=title, title_align="left"))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = None

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Estimate the remaining time from the steps of this session only."""
        self._begin(max(step, 0))
        if step > 0:
            self._print(f"resuming after step {step}/{self.total_steps}")

    def __rich__(self) -> Table:
        rows: dict[str, RenderableType] = {}
        if self._start:
            rows["start"] = Text(_seconds(self._start))
        if (total := self.total_steps) is not None:
            left = f"{total - self._step} left" + (f", {self._left}" if self._left else "")
            bar = Table.grid(padding=(0, 2))
            bar.add_row(ProgressBar(total, self._step, width=_BAR_WIDTH), Text(f"{self._step}/{total}, {left}"))
            rows["step"] = bar
        if len(self._rewards) > 1 and not self.console.options.ascii_only:
            rows["rewards"] = Text(sparkline(self._rewards))
        rows |= {name: Text(value) for name, value in self._shown.items()}
        if self._phases:
            rows["phases"] = Text(self._phases)
        rows["now"] = Text(self._now())
        table = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            table.add_row(Text(name, style="bold cyan"), value)
        return table


def sparkline(values: Sequence[float], width: int = _BAR_WIDTH) -> str:
    """A character per value, from the lowest to the highest; of more than `width` values, per mean of some."""
    count = min(width, len(values))
    edges = [round(len(values) * number / count) for number in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BLOCKS[round((mean - low) / (span or 1.0) * (len(_BLOCKS) - 1))] for mean in means)


def phase_times(metrics: Mapping[str, float]) -> str:
    """Seconds of each phase of a step that took any, in their order."""
    matches = [(re.fullmatch(r"time/(\w+?)_s", name), value) for name, value in metrics.items() if value >= _SHORT_S]
    return _seconds(
        {match[1]: value for match, value in matches if match and match[1] != "step" and not match[1].endswith("_cpu")}
    )


def _seconds(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())


def highlights(metrics: Mapping[str, float]) -> dict[str, str]:
    shown: dict[str, str] = {}
    if "reward/total" in metrics:
        parts = ", ".join(f"{name} {value:.3f}" for name, value in reward_parts(metrics).items())
        shown["reward"] = f"{metrics['reward/total']:.3f}" + (f" ({parts})" if parts else "")
    elif "actor/loss" in metrics:
        shown["loss"] = f"{metrics['actor/loss']:.4f}"
    totals = [(name[4:-6], value) for name, value in metrics.items() if re.fullmatch("val/[^/]+/total", name)]
    if totals:
        shown["validation"] = ", ".join(f"{name} {value:.3f}" for name, value in totals)
    if "perf/tokens_per_s" in metrics:
        shown["speed"] = f"{metrics['perf/tokens_per_s']:.0f} tokens/s"
    if "time/step_s" in metrics:
        shown["took"] = f"{metrics['time/step_s']:.1f} s"
    return shown


def duration(seconds: float) -> str:
    """A readable duration: 45 s, 12 min, 3 h 05 min."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def metrics_by_set(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """val/<set>/<metric> -> {set: {metric: value}}; eval/<category>/score -> {"benchmarks": {category: value}}.

    Without the standard errors, which the model card has.
    """
    sets: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        kind, _, rest = name.partition("/")
        if name.endswith(STDERR):
            continue
        if kind == "eval":
            sets.setdefault("benchmarks", {})[rest.removesuffix("/score")] = value
        elif kind == "val":
            chosen, _, metric = rest.partition("/")
            sets.setdefault(chosen, {})[metric] = value
    return sets


def before_after_table(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]], title: str = "Validation"
) -> Table:
    """Before, after and change of every metric of every validation set (set -> metric -> value).

    Of a data source that has an `exact`, without `total`: a set may have many sources.
    """
    table = Table(title=title)
    for name in ("set", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in dict.fromkeys((*before, *after)):
        first, last = before.get(name, {}), after.get(name, {})
        metrics = [name for name in dict.fromkeys((*first, *last)) if not _is_total_beside_exact(name, {*first, *last})]
        for number, metric in enumerate(metrics):
            old, new = ("" if metric not in each else f"{each[metric]:.3f}" for each in (first, last))
            change = f"{last[metric] - first[metric]:+.3f}" if old and new else ""
            table.add_row(Text("" if number else name), Text(metric), old, new, change)
        table.add_section()
    return table


def _is_total_beside_exact(metric: str, metrics: Collection[str]) -> bool:
    source, _, name = metric.rpartition("/")
    return bool(source) and name == "total" and f"{source}/exact" in metrics


def _cut(text: str) -> str:
    """The text without its middle, if it is long."""
    left, half = len(text) - _ROLLOUT_CHARS, _ROLLOUT_CHARS // 2
    return text if left <= 0 else f"{text[:half]} [{left} more characters] {text[-half:]}"
