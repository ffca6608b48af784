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
    votes = any("maj@n" in category for category in result["categories"].values())
    extra = ("pass@n", "pass^n", *(("maj@n",) if votes else ())) if several else ()
    columns = ("", "rows", "%", "95 %", *extra, "tool calls", "tokens", "cut off", "missing")
    rows = [
        (
            _short(name, result),
            str(category["rows"]),
            *_percent(category["score"]),
            *(f"{100 * category[each]:.1f}" if each in category else "" for each in extra),
            f"{category['tool_calls']:.2f}",
            f"{category['tokens']:.0f}",
            f"{100 * category['cut_off']:.1f}",
            str(category["missing"]),
        )
        for name, category in result["categories"].items()
    ]
    blank = ("",) * (len(columns) - 4)
    rows += [
        (_short(name, result), str(score["rows"]), *_percent(score["score"]), *blank)
        for name, score in result["aggregates"].items()
    ]
    prompts = _prompts([category["episode"] for category in result["categories"].values()], result["settings"])
    return Grid(f"{result['benchmark']}: {result['model']}, {prompts}", columns, rows)


def comparison_grid(comparison: Mapping[str, Any]) -> Grid:
    """Two models on the same tasks, in percent and percentage points."""
    rows = [
        (
            _short(name, comparison),
            str(score["rows"]),
            _percent(score["base"])[0],
            _percent(score["model"])[0],
            f"{100 * score['difference']['mean']:+.1f}",
            f"{100 * score['difference']['low']:+.1f} to {100 * score['difference']['high']:+.1f}",
        )
        for name, score in comparison["scores"].items()
    ]
    prompts = _prompts(comparison["episodes"].values(), comparison["settings"]["model"])
    title = f"{comparison['benchmark']}: {comparison['model']} against {comparison['base']}, {prompts}"
    return Grid(title, ("", "rows", "base", "model", "difference", "95 %"), rows)


def _prompts(episodes: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    uses_tools = any(each["uses_tools"] for each in episodes)
    return f"handler {settings['eval.handler']}" if uses_tools else "prompts as they are"


def _short(name: str, category: Mapping[str, Any]) -> str:
    """The name without the benchmark, which is in the title."""
    return name.removeprefix(f"{category['benchmark']}/")


def _percent(score: Mapping[str, float]) -> tuple[str, str]:
    return f"{100 * score['mean']:.1f}", f"{100 * score['low']:.1f} to {100 * score['high']:.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def probe_grids(probed: Mapping[str, Any]) -> tuple[Grid, Grid]:
    unknown = "the reward has no such part"
    cells = {
        "rows, rollouts of each": f"{probed['rows']}, {probed['n']}",
        "reward": _interval(probed["reward"], 1, 3),
        "reward, std within groups": f"{probed['spread_within_groups']:.3f}",
        "reward, std between rows": f"{probed['spread_between_rows']:.3f}",
        "right, %": _interval(probed["success"], 100, 1),
        "rows never right, always right, %": f"{100 * probed['never_right']:.1f}, {100 * probed['always_right']:.1f}",
        "responses in a valid format, %": unknown if probed["format"] is None else f"{100 * probed['format']:.1f}",
        "responses truncated, %": f"{100 * probed['cut_off']:.1f}",
        "episodes with a parse error, %": f"{100 * probed['malformed']:.1f}",
        "tool calls per episode": f"{probed['tool_calls']:.2f}",
        "response length, tokens": f"{probed['tokens']:.0f}",
        "zero-variance groups, %": _interval(probed["zero_variance"], 100, 1),
        "prompts too long, rows missing": f"{probed['rows_too_long']}, {probed['missing']}",
    }
    sizes = []
    for size in probed["sizes"]:
        costs = [(size["tokens"], ".0f"), (size["seconds"], ".2f")]
        formatted = ["" if cost is None else f"{cost:{form}}" for cost, form in costs]
        sizes.append((str(size["n"]), f"{100 * size['zero_variance']:.1f}", size["how"], *formatted))
    title = f"probe: {probed['model']} on {probed['data']}"
    columns = ("n", "zero-variance groups, %", "method", "tokens per other group", "engine seconds per other group")
    return Grid(title, ("", "value"), list(cells.items())), Grid("by group size", columns, sizes)


def _interval(score: Mapping[str, float], scale: int, digits: int) -> str:
    mean, low, high = (f"{scale * score[name]:.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"
