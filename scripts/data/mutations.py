"""One-line bugs in the functions of a Python file, in the manner of SWE-smith's procedural changes (arXiv 2504.21798).

A mutation replaces or removes the text of one node, so that a diff shows that alone.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
MAX_CONSTANT = 16  # larger ones are seldom bounds
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class InjectedBug:
    """A file with one bug.

    kind:      name in KINDS
    function:  qualified name
    docstring: of the function
    line:      counted from 1
    lines:     first and last one of the function, with its decorators
    """

    kind: str
    function: str
    docstring: str
    line: int
    lines: tuple[int, int]
    source: str


@dataclass(frozen=True, slots=True)
class _Edit:
    """The node whose text changes, and what replaces it; without replacement its lines are removed."""

    node: ast.AST
    replacement: ast.expr | None
    after: ast.AST | None = None  # only the text after the end of this node is removed


def mutations(source: str) -> Iterator[InjectedBug]:
    """Every mutation, in the order of the functions, whether or not it `differs`. Raises SyntaxError."""
    data = source.encode()
    starts = _line_starts(data)
    for name, function in _functions(ast.parse(source), ""):
        first = min(node.lineno for node in (function, *function.decorator_list))
        lines = first, function.end_lineno or first
        for kind, edits in KINDS.items():
            for edit in edits(function):
                changed = _applied(edit, data, starts)
                if changed is not None:
                    line = getattr(edit.node, "lineno", function.lineno)
                    yield InjectedBug(kind, name, ast.get_docstring(function) or "", line, lines, changed)


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """(qualified name, function); what is defined in a function belongs to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _inside(function: Function) -> Iterator[ast.AST]:
    """The nodes of its body, without docstring and annotations."""
    for statement in function.body[ast.get_docstring(function) is not None :]:
        yield from ast.walk(statement)


def _swapped_operator(function: Function) -> Iterator[_Edit]:
    for node in _inside(function):
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
            changed = copy(node)
            changed.op = SWAPPED[type(node.op)]()  # type: ignore[assignment]
            yield _Edit(node, changed)
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            compare = copy(node)
            compare.ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]  # type: ignore[list-item]
            yield _Edit(node, compare)


def _off_by_one(function: Function) -> Iterator[_Edit]:
    for node in _inside(function):
        if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MAX_CONSTANT:
            yield _Edit(node, ast.Constant(node.value + 1))
        elif isinstance(node, ast.Slice):
            for bound, operator in ((node.lower, ast.Add()), (node.upper, ast.Sub())):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield _Edit(bound, ast.BinOp(bound, operator, ast.Constant(1)))


def _wrong_variable(function: Function) -> Iterator[_Edit]:
    """Another one of its arguments or local variables: the next by name."""
    nodes = list(_inside(function))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    arguments = function.args
    named = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    names = sorted((stored | named) - {"self", "cls", "_"})
    following = {name: names[(number + 1) % len(names)] for number, name in enumerate(names)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and following.get(node.id, node.id) != node.id:
            yield _Edit(node, ast.Name(following[node.id], ast.Load()))


def _swapped_arguments(function: Function) -> Iterator[_Edit]:
    for node in _inside(function):
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            first, second, *rest = node.args
            if not any(isinstance(each, ast.Starred) for each in (first, second)):
                yield _Edit(node, ast.Call(node.func, [second, first, *rest], node.keywords))


def _negated_condition(function: Function) -> Iterator[_Edit]:
    for node in _inside(function):
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
            inverse = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
            yield _Edit(node.test, node.test.operand if inverse else ast.UnaryOp(ast.Not(), node.test))  # type: ignore[attr-defined]


def _removed_guard(function: Function) -> Iterator[_Edit]:
    for statement in _removable(function):
        if isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[0], LEAVES):
            yield _Edit(statement, None)


def _dropped_branch(function: Function) -> Iterator[_Edit]:
    for node in _inside(function):
        if isinstance(node, ast.If) and node.orelse:
            yield _Edit(node, None, after=node.body[-1])


def _dropped_statement(function: Function) -> Iterator[_Edit]:
    for statement in _removable(function):
        is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if is_call or isinstance(statement, ast.AugAssign):
            yield _Edit(statement, None)


def _wrong_result(function: Function) -> Iterator[_Edit]:
    for node in _inside(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield _Edit(node, ast.Constant(not node.value))


KINDS: dict[str, Callable[[Function], Iterator[_Edit]]] = {
    "swapped_operator": _swapped_operator,
    "off_by_one": _off_by_one,
    "wrong_variable": _wrong_variable,
    "swapped_arguments": _swapped_arguments,
    "negated_condition": _negated_condition,
    "removed_guard": _removed_guard,
    "dropped_branch": _dropped_branch,
    "dropped_statement": _dropped_statement,
    "wrong_result": _wrong_result,
}


def _removable(function: Function) -> Iterator[ast.stmt]:
    """Statements on lines of their own, in blocks that have others."""
    for node in (function, *_inside(function)):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, [])
            if isinstance(block, list) and len(block) > 1:
                lines = Counter(line for each in block for line in {each.lineno, each.end_lineno})
                yield from (each for each in block if lines[each.lineno] == lines[each.end_lineno] == 1)


def _line_starts(data: bytes) -> list[int]:
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _applied(edit: _Edit, data: bytes, starts: list[int]) -> str | None:
    """The file after an edit; None if it cannot be made on the text, as inside of an f-string."""
    node: ast.expr = edit.node  # type: ignore[assignment]
    assert node.end_lineno is not None and node.end_col_offset is not None
    low, high = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    new = b""
    if edit.replacement is not None:
        new = ast.unparse(ast.fix_missing_locations(edit.replacement)).encode()
    elif edit.after is not None:
        body: ast.stmt = edit.after  # type: ignore[assignment]
        assert body.end_lineno is not None and body.end_col_offset is not None
        low = starts[body.end_lineno - 1] + body.end_col_offset
    else:
        low, high = starts[node.lineno - 1], starts[node.end_lineno]
    try:
        return (data[:low] + new + data[high:]).decode()
    except UnicodeDecodeError:
        return None


def differs(source: str, changed: str) -> bool:
    """Whether the change is a program, and another one."""
    try:
        return _dumped(changed) != _dumped(source)
    except SyntaxError:
        return False


@lru_cache(maxsize=64)
def _dumped(source: str) -> bytes:
    """Equal for programs that differ in nothing but their layout."""
    return hashlib.sha256(ast.dump(ast.parse(source)).encode()).digest()
