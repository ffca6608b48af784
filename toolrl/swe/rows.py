"""Rows of `@pytest.mark.parametrize`, and which of them an id of a test names.

    @pytest.mark.parametrize("a, expected", [(1, 2), (3, 4)])     test_add[1-2]    test_add[3-4]

What a test expects is then in its id, too. With a text such as "held0" in place of the 2 its id is test_add[1-held0].
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

PART = "(?:^|(?<=-)){}(?=-|$)"  # of an id that has parts of other decorators or fixtures, too


@dataclass(frozen=True)
class Rows:
    """Of one decorator. names: of its columns. cells: of each row"""

    names: tuple[str, ...]
    cells: tuple[tuple[ast.expr, ...], ...]

    def column(self, name: str) -> list[ast.expr]:
        place = self.names.index(name)
        return [row[place] for row in self.cells]

    def find(self, inside: str) -> tuple[int, Mapping[str, tuple[int, int]]] | None:
        """(row, where each column is) of what is in the brackets of an id; None unless exactly one row fits."""
        for patterns in self._patterns:
            found = [(number, match) for number, each in enumerate(patterns) for match in each.finditer(inside)]
            if len(found) == 1:
                number, match = found[0]
                return number, {name: match.span(place + 1) for place, name in enumerate(self.names)}
        return None

    @cached_property
    def _patterns(self) -> list[list[re.Pattern[str]]]:
        """Of each row, from the most exact ones on: the whole id, a part of it, and with any id for other objects."""
        exact, other = (
            [self._pattern(number, any_id) for number in range(len(self.cells))] for any_id in (False, True)
        )
        kinds = (("^{}$", exact), (PART, exact), ("^{}$", other), (PART, other))
        return [[re.compile(kind.format(each)) for each in patterns] for kind, patterns in kinds]

    def _pattern(self, number: int, any_id: bool) -> str:
        cells = zip(self.names, self.cells[number], strict=True)
        ids = [_ids(cell, f"{name}{number}") if is_literal(cell) or not any_id else None for name, cell in cells]
        return "-".join(f"({'|'.join(map(re.escape, each)) if each is not None else '.+'})" for each in ids)


def parametrized(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Rows]:
    """The decorators whose rows are written out, and whose ids are pytest's own."""
    found = [_rows(each) for each in function.decorator_list if isinstance(each, ast.Call)]
    return [each for each in found if each is not None]


def replaced(rows: Iterable[Rows], inside: str, texts: Mapping[ast.expr, str]) -> tuple[str, dict[str, ast.expr]]:
    """(what is in the brackets of an id, if some cells have these texts; the cells of its row that have one)"""
    values, spans = {}, []
    for each in rows:
        number, places = each.find(inside) or (0, {})
        for name, cell in zip(each.names, each.cells[number], strict=True):
            if cell in texts:
                values[name] = cell
                spans.append((*places[name], texts[cell]))
    for start, end, text in sorted(spans, reverse=True):
        inside = inside[:start] + text + inside[end:]
    return inside, values


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _rows(call: ast.Call) -> Rows | None:
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "parametrize"):
        return None
    if call.keywords or len(call.args) != 2 or not isinstance(call.args[1], ast.List | ast.Tuple):
        return None
    try:
        given = ast.literal_eval(call.args[0])
    except ValueError:
        return None
    names = [each.strip() for each in given.split(",") if each.strip()] if isinstance(given, str) else [*given]
    rows = [_cells(each, len(names)) for each in call.args[1].elts]
    if not all(isinstance(each, str) for each in names) or not rows or any(each is None for each in rows):
        return None
    if len({tuple(map(ast.dump, row or ())) for row in rows}) < len(rows):
        return None  # pytest counts equal ids
    return Rows(tuple(names), tuple(tuple(row or ()) for row in rows))


def _cells(row: ast.expr, columns: int) -> Sequence[ast.expr] | None:
    if isinstance(row, ast.Call) and isinstance(row.func, ast.Attribute) and row.func.attr == "param":
        cells: Sequence[ast.expr] = row.args
        if any(each.arg != "marks" for each in row.keywords):
            return None  # an id of its own
    elif columns == 1:
        return None if isinstance(row, ast.Starred) else [row]
    elif isinstance(row, ast.Tuple | ast.List):
        cells = row.elts
    else:
        return None
    return cells if len(cells) == columns and not any(isinstance(each, ast.Starred) for each in cells) else None


def _ids(cell: ast.expr, default: str) -> Iterable[str]:
    """What pytest may call a value. default: of what has no name"""
    if not is_literal(cell):
        last = cell.id if isinstance(cell, ast.Name) else cell.attr if isinstance(cell, ast.Attribute) else default
        return dict.fromkeys((default, last))
    value = ast.literal_eval(cell)
    if isinstance(value, str):
        return dict.fromkeys((value.encode("unicode_escape").decode(), value))
    if isinstance(value, bytes):
        return (value.decode("ascii", "backslashreplace"),)
    return (str(value),) if value is None or isinstance(value, bool | int | float | complex) else (default,)
