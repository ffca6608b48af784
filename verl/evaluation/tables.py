"""Reports as tables: for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Grid:
    """A title, the names of the columns, and texts."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]

    def for_terminal(self) -> Table:
        """With numbers to the right, narrow enough for 80 characters."""
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for number, column in enumerate(self.columns):
            head = column.replace(" ", "\n")
            table.add_column(head, justify="right" if number else "left", no_wrap=number > 0, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        """With its title as a line in bold."""
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---", *["---:"] * (len(self.columns) - 1)])]
        return "\n".join([*lines, *(_line(row) for row in self.rows)]) + "\n"


def result_grid(result: Mapping[str, Any]) -> Grid:
    """Figures of one benchmark and one model, in percent, with 95 % intervals."""
    several = result["settings"]["n"] > 1
    extra = ("pass@n", "pass^n") if several else ()
    columns = ("", "rows", "%", "95 %", *extra, "tools run", "tokens", "cut off", "missing")
    rows = [
        (
            _short(name, result),
            str(found["rows"]),
            *_percent(found["figure"]),
            *(f"{100 * found[each]:.1f}" for each in extra),
            f"{found['tool_calls']:.2f}",
            f"{found['tokens']:.0f}",
            f"{100 * found['cut_off']:.1f}",
            str(found["missing"]),
        )
        for name, found in result["categories"].items()
    ]
    blank = ("",) * (len(columns) - 4)
    rows += [
        (_short(name, result), str(made["rows"]), *_percent(made["figure"]), *blank)
        for name, made in result["aggregates"].items()
    ]
    words = _words([found["play"] for found in result["categories"].values()], result["settings"])
    return Grid(f"{result['benchmark']}: {result['model']}, {words}", columns, rows)


def comparison_grid(comparison: Mapping[str, Any]) -> Grid:
    """Two models on the same tasks, in percent and percentage points."""
    rows = [
        (
            _short(name, comparison),
            str(found["rows"]),
            _percent(found["base"])[0],
            _percent(found["model"])[0],
            f"{100 * found['difference']['mean']:+.1f}",
            f"{100 * found['difference']['low']:+.1f} to {100 * found['difference']['high']:+.1f}",
        )
        for name, found in comparison["figures"].items()
    ]
    words = _words(comparison["plays"].values(), comparison["settings"]["model"])
    title = f"{comparison['benchmark']}: {comparison['model']} against {comparison['base']}, {words}"
    return Grid(title, ("", "rows", "base", "model", "difference", "95 %"), rows)


def _words(plays: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """In which words the models were asked."""
    return f"handler {settings['handler']}" if any(play["handled"] for play in plays) else "prompts as they are"


def _short(name: str, found: Mapping[str, Any]) -> str:
    """Without the benchmark, which the title names."""
    return name.removeprefix(f"{found['benchmark']}/")


def _percent(figure: Mapping[str, float]) -> tuple[str, str]:
    return f"{100 * figure['mean']:.1f}", f"{100 * figure['low']:.1f} to {100 * figure['high']:.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def probe_grids(found: Mapping[str, Any]) -> tuple[Grid, Grid]:
    """A probe: what the responses are like, and what groups of each size would teach and cost."""
    unknown = "the reward has no such part"
    told = {
        "rows, rollouts of each": f"{found['rows']}, {found['n']}",
        "reward": _interval(found["reward"], 1, 3),
        "reward, spread within groups and between rows": (
            f"{found['spread_within_groups']:.3f}, {found['spread_between_rows']:.3f}"
        ),
        "right, %": _interval(found["success"], 100, 1),
        "rows never right, always right, %": f"{100 * found['never_right']:.1f}, {100 * found['always_right']:.1f}",
        "replies in a valid format, %": unknown if found["format"] is None else f"{100 * found['format']:.1f}",
        "replies cut off, %": f"{100 * found['cut_off']:.1f}",
        "episodes with a malformed call, %": f"{100 * found['malformed']:.1f}",
        "tool calls of an episode": f"{found['tool_calls']:.2f}",
        "tokens of a reply": f"{found['tokens']:.0f}",
        "groups without a signal, %": _interval(found["without_signal"], 100, 1),
        "prompts too long, rows missing": f"{found['rows_too_long']}, {found['missing']}",
    }
    sizes = [
        (
            str(size["n"]),
            f"{100 * size['without_signal']:.1f}",
            size["how"],
            *(
                "" if size[name] is None else f"{size[name]:{form}}"
                for name, form in (("tokens", ".0f"), ("seconds", ".2f"))
            ),
        )
        for size in found["sizes"]
    ]
    title = f"probe: {found['model']} on {found['data']}"
    columns = (
        "n",
        "groups without a signal, %",
        "known by",
        "tokens per group with one",
        "engine seconds per such group",
    )
    return Grid(title, ("", "found"), list(told.items())), Grid("by group size", columns, sizes)


def _interval(figure: Mapping[str, float], scale: int, digits: int) -> str:
    mean, low, high = (f"{scale * figure[name]:.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"
