"""Reports as tables: for a terminal, and as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Grid:
    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]

    def for_terminal(self) -> Table:
        """A rich table with right-aligned numbers, narrow enough for 80 characters."""
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for number, column in enumerate(self.columns):
            head = column.replace(" ", "\n")
            table.add_column(head, justify="right" if number else "left", no_wrap=number > 0, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---", *["---:"] * (len(self.columns) - 1)])]
        return "\n".join([*lines, *(_line(row) for row in self.rows)]) + "\n"


def result_grid(result: Mapping[str, Any]) -> Grid:
    """Scores of one benchmark and one model, in percent, with 95 % intervals."""
    several = result["settings"]["rollout.n"] > 1
    votes = any("maj@n" in found for found in result["categories"].values())
    extra = ("pass@n", "pass^n", *(("maj@n",) if votes else ())) if several else ()
    columns = ("", "rows", "%", "95 %", *extra, "tool calls", "tokens", "cut off", "missing")
    rows = [
        (
            _short(name, result),
            str(found["rows"]),
            *_percent(found["score"]),
            *(f"{100 * found[each]:.1f}" if each in found else "" for each in extra),
            f"{found['tool_calls']:.2f}",
            f"{found['tokens']:.0f}",
            f"{100 * found['cut_off']:.1f}",
            str(found["missing"]),
        )
        for name, found in result["categories"].items()
    ]
    blank = ("",) * (len(columns) - 4)
    rows += [
        (_short(name, result), str(made["rows"]), *_percent(made["score"]), *blank)
        for name, made in result["aggregates"].items()
    ]
    prompts = _prompts([found["episode"] for found in result["categories"].values()], result["settings"])
    return Grid(f"{result['benchmark']}: {result['model']}, {prompts}", columns, rows)


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
        for name, found in comparison["scores"].items()
    ]
    prompts = _prompts(comparison["episodes"].values(), comparison["settings"]["model"])
    title = f"{comparison['benchmark']}: {comparison['model']} against {comparison['base']}, {prompts}"
    return Grid(title, ("", "rows", "base", "model", "difference", "95 %"), rows)


def _prompts(episodes: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    uses_tools = any(each["uses_tools"] for each in episodes)
    return f"handler {settings['eval.handler']}" if uses_tools else "prompts as they are"


def _short(name: str, found: Mapping[str, Any]) -> str:
    """The name without the benchmark, which is in the title."""
    return name.removeprefix(f"{found['benchmark']}/")


def _percent(score: Mapping[str, float]) -> tuple[str, str]:
    return f"{100 * score['mean']:.1f}", f"{100 * score['low']:.1f} to {100 * score['high']:.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def probe_grids(found: Mapping[str, Any]) -> tuple[Grid, Grid]:
    unknown = "the reward has no such part"
    cells = {
        "rows, rollouts of each": f"{found['rows']}, {found['n']}",
        "reward": _interval(found["reward"], 1, 3),
        "reward, std within groups": f"{found['spread_within_groups']:.3f}",
        "reward, std between rows": f"{found['spread_between_rows']:.3f}",
        "right, %": _interval(found["success"], 100, 1),
        "rows never right, always right, %": f"{100 * found['never_right']:.1f}, {100 * found['always_right']:.1f}",
        "responses in a valid format, %": unknown if found["format"] is None else f"{100 * found['format']:.1f}",
        "responses truncated, %": f"{100 * found['cut_off']:.1f}",
        "episodes with a parse error, %": f"{100 * found['malformed']:.1f}",
        "tool calls per episode": f"{found['tool_calls']:.2f}",
        "response length, tokens": f"{found['tokens']:.0f}",
        "zero-variance groups, %": _interval(found["zero_variance"], 100, 1),
        "prompts too long, rows missing": f"{found['rows_too_long']}, {found['missing']}",
    }
    sizes = []
    for size in found["sizes"]:
        costs = [(size["tokens"], ".0f"), (size["seconds"], ".2f")]
        formatted = ["" if cost is None else f"{cost:{form}}" for cost, form in costs]
        sizes.append((str(size["n"]), f"{100 * size['zero_variance']:.1f}", size["how"], *formatted))
    title = f"probe: {found['model']} on {found['data']}"
    columns = ("n", "zero-variance groups, %", "method", "tokens per other group", "engine seconds per other group")
    return Grid(title, ("", "value"), list(cells.items())), Grid("by group size", columns, sizes)


def _interval(score: Mapping[str, float], scale: int, digits: int) -> str:
    mean, low, high = (f"{scale * score[name]:.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"
