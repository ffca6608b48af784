"""Takes out of tests what they expect: the process that runs a patch sends values, and another one compares them.

    assert add(1, 2) == 3               __held__(7, (add(1, 2)))
    self.assertIn("a", find())          __held__(8, (find()))
    with pytest.raises(KeyError):       with __held__.raises(9):
    expected = 5                        expected = (None)
    assert add(1, 4) == expected        __held__(10, (add(1, 4)))

What is compared, and with what, stays in a `Check` of the judge (inside/run_tests.py). Lines stay where they are.
An expectation can be held if it is an expression of constants, builtins and names: parameters of the test whose rows
are constants, and local names of constants, if the test reads them in expectations alone. Of other assertions the truth
is sent.
"""

from __future__ import annotations

import ast
import builtins
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from toolrl.swe.rows import Rows, parametrized, replaced

NAME = "__held__"
READS_ITSELF = re.compile(r"getsource|findsource|linecache|open\(__file__|Path\(__file__\)\.(read|open)")
PURE = frozenset(
    ("abs", "bool", "bytes", "complex", "dict", "float", "frozenset", "int", "len", "list", "max", "min", "range",
     "round", "set", "slice", "sorted", "str", "sum", "tuple")
)  # fmt: skip
TYPES = frozenset(("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"))
COMPARISONS: Mapping[type[ast.cmpop], tuple[str, str]] = {  # with the expectation on the right, and on the left
    ast.Eq: ("eq", "eq"),
    ast.NotEq: ("ne", "ne"),
    ast.Lt: ("lt", "gt"),
    ast.LtE: ("le", "ge"),
    ast.Gt: ("gt", "lt"),
    ast.GtE: ("ge", "le"),
    ast.Is: ("is", "is"),
    ast.IsNot: ("is not", "is not"),
    ast.In: ("in", "has"),
    ast.NotIn: ("not in", "has not"),
}
SYMBOLS: Mapping[str, type[ast.cmpop]] = {
    "==": ast.Eq, "!=": ast.NotEq, "is": ast.Is, "is not": ast.IsNot, "in": ast.In, "not in": ast.NotIn,
    "<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE,
}  # fmt: skip
UNITTEST: Mapping[str, str] = {  # methods of two arguments
    **dict.fromkeys(
        ("assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertSetEqual", "assertDictEqual",
         "assertMultiLineEqual", "assertSequenceEqual"), "=="
    ),
    "assertNotEqual": "!=", "assertIs": "is", "assertIsNot": "is not", "assertIn": "in", "assertNotIn": "not in",
    "assertLess": "<", "assertLessEqual": "<=", "assertGreater": ">", "assertGreaterEqual": ">=",
}  # fmt: skip
PARSING = threading.Lock()  # CPython before 3.11.8 and 3.12.2 miscounts where two threads build trees: SystemError
RAISES = ("raises", "assertRaises", "assertRaisesRegex")
REFLECTS = frozenset(("locals", "vars", "eval", "exec", "globals"))
NAMED_BY_ID = re.compile("request|snapshot|regression|golden|approv")  # fixtures that may read the id of a test
SWALLOWS = re.compile(r"raises|suppress|warns|deprecated|skip|expect", re.IGNORECASE)  # names of context managers


@dataclass(frozen=True, slots=True)
class Check:
    """One assertion. predicate: what the value that is sent must do. expected: source of an expression, or empty"""

    line: int
    predicate: str
    expected: str = ""


@dataclass(slots=True)
class HeldFile:
    """A test file as the code under test may see it.

    checks: by their number in the source. needed: test ("Class::test") -> the numbers that it cannot pass without
    renamed: id of a test ("Class::test[1-2]") -> the one that it has now. rows: its new id -> sources of its parameters
    """

    source: str
    checks: dict[int, Check] = field(default_factory=dict)
    needed: dict[str, list[int]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)


def hold(source: str, names: Collection[str], first: int, ids: Collection[str] = ()) -> HeldFile:
    """Take out what the tests of a file expect.

    names: of functions that are tests, besides those that begin with "test". first: the number of the first check
    ids: of all tests that will run ("Class::test[1-2]"); without them rows of parameters stay
    A file that cannot be parsed, or reads its own source, stays as it is.
    """
    held = HeldFile(source)
    try:
        if not READS_ITSELF.search(source):
            with PARSING:
                tree = ast.parse(source)
            _Rewriter(held, tree, frozenset(names), first, ids).rewrite()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return HeldFile(source)
    return held


@dataclass(slots=True)
class HeldTests:
    """All files of a task's tests. plan: for the judge. sources: file -> as the code under test may see it
    renamed: id of a test -> the one that it has now
    """

    plan: dict[str, dict[str, Any]] = field(default_factory=lambda: {"checks": {}, "needed": {}, "rows": {}})
    sources: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


def hold_tests(sources: Mapping[str, str], tests: Collection[str]) -> HeldTests:
    """Take out what the tests of all files expect. tests: the names of those that will run"""
    found = HeldTests()
    names = frozenset(test.partition("[")[0].rpartition("::")[2] for test in tests)
    have_files = all("::" in test for test in tests)  # short names may be in any
    for file, source in sources.items():
        module = re.compile(rf"\b{re.escape(PurePosixPath(file).stem)}\b")
        is_alone = not any(
            module.search(text) for other, text in sources.items() if other != file
        )  # none has its tests
        ids = [test.removeprefix(f"{file}::") for test in tests if test.startswith(f"{file}::")]
        held = hold(source, names, len(found.plan["checks"]), ids if is_alone and have_files else ())
        found.sources[file] = held.source
        found.plan["checks"] |= {str(number): asdict(check) for number, check in held.checks.items()}
        found.plan["needed"][file] = held.needed
        found.plan["rows"] |= {f"{file}::{test}": values for test, values in held.rows.items()}
        found.renamed |= {f"{file}::{test}": f"{file}::{now}" for test, now in held.renamed.items()}
    return found


class _Rewriter:
    def __init__(
        self, held: HeldFile, tree: ast.Module, names: frozenset[str], first: int, ids: Collection[str]
    ) -> None:
        self._held, self._tree, self._names, self._first, self._ids = held, tree, names, first, ids
        self._data = held.source.encode()
        ends = [match.end() for match in re.finditer(rb"\r\n|\r|\n", self._data)]
        self._lines = [0, *ends]
        self._edits: list[tuple[int, int, bytes]] = []
        self._of_fixtures = frozenset(_arguments_of_fixtures(tree))
        # Of the function that is rewritten:
        self._values: dict[str, list[ast.expr]] = {}  # what a name can be in the present statement
        self._stay: Collection[str] = ()  # names whose values stay where they are
        self._assigned: list[tuple[str, ast.expr]] = []
        self._taken: set[ast.Name] = set()  # names in expectations
        self._bound = frozenset(_bound_names(tree))
        self._approx = {"pytest"} & _imported(tree) | ({"approx"} & _imported(tree, "pytest"))

    def rewrite(self) -> None:
        functions = list(_functions(self._tree.body))
        again = {name for name, count in Counter(name for name, _ in functions).items() if count > 1}
        for name, function in functions:
            last = name.rpartition("::")[2]
            if last.startswith("test") or last in self._names:
                rows = [] if name in again else self._rows(name, function)
                needed, hidden = self._function(function, rows)
                self._hide(name, rows, hidden)
                self._held.needed[name] = [] if name in again else needed
        self._inherit()
        parts, place = [], 0
        for start, end, text in sorted(self._edits):
            parts += [self._data[place:start], text]
            place = end
        self._held.source = b"".join([*parts, self._data[place:]]).decode()

    def _inherit(self) -> None:
        """Tests of a class are those of its bases in the same file, too."""
        classes = {each.name: each for each in self._tree.body if isinstance(each, ast.ClassDef)}
        for name in classes:
            for base in _ancestors(name, classes):
                for test, needed in list(self._held.needed.items()):
                    owner, _, rest = test.partition("::")
                    if owner == base and rest:
                        self._held.needed.setdefault(f"{name}::{rest}", needed)

    def _rows(self, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Rows]:
        """Of its parameters, if the row of each test that will run is known."""
        classes = {each.name: each for each in self._tree.body if isinstance(each, ast.ClassDef)}
        if any(name.partition("::")[0] in _ancestors(each, classes) for each in classes):
            return []  # they are those of other tests, too
        if any(NAMED_BY_ID.search(each.arg) for each in ast.walk(function.args) if isinstance(each, ast.arg)):
            return []  # ids are a part of what they test
        rows, tests = parametrized(function), self._tests_of(name)
        known = all(test.endswith("]") and each.find(_inside(test)) for each in rows for test in tests)
        return rows if tests and known else []

    def _tests_of(self, name: str) -> list[str]:
        return [each for each in self._ids if each.startswith(f"{name}[")]

    def _function(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, rows: Sequence[Rows]
    ) -> tuple[list[int], set[str]]:
        """The numbers of the checks that a run of it cannot do without; names that it reads in expectations alone."""
        stay, edits, checks = {*self._of_fixtures}, [*self._edits], {**self._held.checks}
        while True:
            needed = self._body(function, rows, stay)
            taken = {each.id for each in self._taken}
            read = {*_read_or_changed(function.body, self._taken)} if taken else set()
            if not taken & read:
                break
            stay |= read  # again, as if they were unknown
            self._edits, self._held.checks = [*edits], {**checks}
        for name, value in self._assigned:
            if name in taken:
                self._edit(value, "(None", ")")
        return needed, taken

    def _hide(self, name: str, rows: Sequence[Rows], hidden: Collection[str]) -> None:
        """Other values and ids in place of what a test expects of its parameters."""
        columns = [(each, column) for each in rows for column in each.names if column in hidden]
        cells = [cell for each, column in columns for cell in each.column(column)]
        texts = {cell: f"held{len(self._held.rows)}x{number}" for number, cell in enumerate(cells)}
        for cell, text in texts.items():
            self._edit(cell, f'("{text}"', ")")
        for test in self._tests_of(name) if texts else ():
            inside, values = replaced(rows, _inside(test), texts)
            self._held.renamed[test] = f"{name}[{inside}]"
            self._held.rows[f"{name}[{inside}]"] = {each: self._text(value) for each, value in values.items()}

    def _body(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, rows: Sequence[Rows], stay: Collection[str]
    ) -> list[int]:
        """stay: names whose values stay where they are"""
        needed: list[int] = []
        self._taken, self._assigned, self._stay, self._values = set(), [], stay, {}
        columns = {name: each.column(name) for each in rows for name in each.names if name not in stay}
        self._values = {name: cells for name, cells in columns.items() if all(map(self._is_constant, cells))}
        self._block(function.body, needed)
        if not needed and (place := _last_simple(function.body)):
            number = self._number(Check(place.lineno, "reached"))
            end = self._offset(place.end_lineno, place.end_col_offset)
            self._edits.append((end, end, f"; {NAME}({number})".encode()))
            needed.append(number)
        return needed

    def _block(self, statements: Sequence[ast.stmt], needed: list[int] | None) -> None:
        """needed: to add to; None where statements may be skipped"""
        before = self._values
        for statement in statements:
            bound = {*_bound_names(statement)} if self._values else set()
            self._values = {name: cells for name, cells in self._values.items() if name not in bound}
            self._statement(statement, needed)
            self._assign(statement)
            if _may_leave(statement):
                needed = None
        self._values = before

    def _assign(self, statement: ast.stmt) -> None:
        """Note a name that becomes a constant."""
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        if isinstance(target, ast.Name) and isinstance(statement, ast.Assign) and target.id not in self._stay:
            known, self._values = self._values, {}
            if self._is_constant(statement.value):
                known = {**known, target.id: [statement.value]}
                self._assigned.append((target.id, statement.value))
            self._values = known

    def _statement(self, statement: ast.stmt, needed: list[int] | None) -> None:
        if isinstance(statement, ast.Assert):
            self._take(statement.msg)
            self._replace(statement, *self._predicate(statement.test), needed)
        elif isinstance(statement, ast.Expr) and (found := self._of_unittest(statement.value)):
            self._replace(statement, *found, needed)
        elif isinstance(statement, ast.With | ast.AsyncWith):
            for item in statement.items:
                call = item.context_expr
                if isinstance(call, ast.Call) and _name(call) in RAISES:
                    expected = self._raised(call)
                    number = self._number(Check(call.lineno, "raises" if expected else "reached", expected), needed)
                    own = "" if _name(call) == "raises" else ", self"
                    self._edit(
                        call,
                        f"{NAME}.{'raises' if expected else 'within'}({number}",
                        *([f"{own})"] if expected else [f", {self._text(call)})"]),
                    )
            if not _may_swallow(statement):
                self._block(statement.body, needed)
        elif isinstance(statement, ast.For | ast.AsyncFor):
            runs = _is_not_empty(statement.iter) and not _has(statement.body, ast.Break | ast.Continue)
            self._block(statement.body, needed if runs else None)
            self._block(statement.orelse, None)
        elif isinstance(statement, ast.Try):
            if not statement.handlers:
                self._block(statement.body, needed)
            elif all(isinstance(each.type, ast.Name) and "Error" in each.type.id and each.type.id != "AssertionError"
                     for each in statement.handlers):  # fmt: skip
                self._block(statement.body, None)
            for block in (*(each.body for each in statement.handlers), statement.orelse, statement.finalbody):
                self._block(block, None)
        elif isinstance(statement, ast.If | ast.While):
            self._block(statement.body, None)
            self._block(statement.orelse, None)

    def _replace(self, statement: ast.stmt, predicate: str, sent: str, expected: str, needed: list[int] | None) -> None:
        number = self._number(Check(statement.lineno, predicate, expected), needed)
        self._edit(statement, f"{NAME}({number}, ", f"{sent})")

    def _number(self, check: Check, needed: list[int] | None = None) -> int:
        number = self._first + len(self._held.checks)
        self._held.checks[number] = check
        if needed is not None:
            needed.append(number)
        return number

    def _edit(self, node: ast.stmt | ast.expr, begin: str, rest: str) -> None:
        """Write another text in its place, with as many lines: those that are missing stand before its last bracket."""
        start, end = self._range(node)
        missing = self._data[start:end].count(b"\n") - rest.count("\n")
        self._edits.append((start, end, f"{begin}{rest[:-1]}{chr(10) * missing}{rest[-1]}".encode()))

    def _range(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return self._lines[line - 1] + column

    def _take(self, node: ast.expr | None) -> list[ast.Name]:
        """The names of known values that a part has which will not be in the file."""
        names = [each for each in (ast.walk(node) if node else ()) if isinstance(each, ast.Name)]
        known = [each for each in names if each.id in self._values]
        self._taken.update(known)
        return known

    def _expected(self, node: ast.expr) -> str:
        """Source of an expectation: local names are what they are, and parameters remain."""
        text, (start, end) = b"", self._range(node)
        for each in sorted(self._take(node), key=lambda name: (name.lineno, name.col_offset)):
            values, (begin, after) = self._values[each.id], self._range(each)
            if (each.id, values[-1]) in self._assigned:
                text += self._data[start:begin] + self._text(values[-1]).encode()
                start = after
        return f"({(text + self._data[start:end]).decode()})"

    def _text(self, node: ast.expr) -> str:
        start, end = self._range(node)
        return f"({self._data[start:end].decode()})"

    def _predicate(self, test: ast.expr) -> tuple[str, str, str]:
        """(what it must do, source of the part that is sent, source of what is expected)"""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            predicate, sent, expected = self._predicate(test.operand)
            return f"not {predicate}", sent, expected
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compared(test.left, type(test.ops[0]), test.comparators[0]) or ("true", self._text(test), "")
        if isinstance(test, ast.Call) and _name(test) == "isinstance" and len(test.args) == 2:
            named = test.args[1].elts if isinstance(test.args[1], ast.Tuple) else [test.args[1]]
            if all(isinstance(each, ast.Name) and each.id in TYPES - self._bound for each in named):
                return "isinstance", self._text(test.args[0]), self._text(test.args[1])
        return "true", self._text(test), ""

    def _compared(self, left: ast.expr, operator: type[ast.cmpop], right: ast.expr) -> tuple[str, str, str] | None:
        with_right, with_left = COMPARISONS[operator]
        values = self._values.get(right.id, []) if isinstance(right, ast.Name) else [right]
        alone = [isinstance(each, ast.Constant) and isinstance(each.value, bool | None) for each in values]
        if with_right in ("is", "is not") and not (alone and all(alone)):
            return None  # of another value the identity is not sent
        if self._is_constant(right):
            return with_right, self._text(left), self._expected(right)
        return (with_left, self._text(right), self._expected(left)) if self._is_constant(left) else None

    def _of_unittest(self, call: ast.expr) -> tuple[str, str, str] | None:
        """Of a method of unittest's that compares with a constant, or checks the truth."""
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and not call.keywords):
            return None
        if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "self"):
            return None
        name, arguments = call.func.attr, call.args
        if name in self._bound or not arguments or any(isinstance(each, ast.Starred) for each in arguments):
            return None  # a method of the file's own
        if name in ("assertTrue", "assertFalse"):
            predicate, sent, expected = self._predicate(arguments[0])
            return predicate if name == "assertTrue" else f"not {predicate}", sent, expected
        if name in ("assertIsNone", "assertIsNotNone"):
            return "is" if name == "assertIsNone" else "is not", self._text(arguments[0]), "None"
        if name in ("assertAlmostEqual", "assertAlmostEquals") and len(arguments) == 2:
            for place, each in enumerate(arguments):
                if self._is_constant(each):
                    return "almost", self._text(arguments[1 - place]), self._expected(each)
        if name in UNITTEST and len(arguments) in (2, 3):
            left, right = arguments[:2]
            whole = f"({self._text(left)} {UNITTEST[name]} {self._text(right)})"
            return self._compared(left, SYMBOLS[UNITTEST[name]], right) or ("true", whole, "")
        return None

    def _raised(self, call: ast.Call) -> str:
        """Source of (exceptions, pattern) that a context manager expects, if all are builtins; else empty."""
        func, patterns = call.func, [each.value for each in call.keywords if each.arg == "match"]
        owner = func.value.id if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) else ""
        if _name(call) == "raises" and not (owner == "pytest" or "raises" in _imported(self._tree, "pytest")):
            return ""
        if _name(call) != "raises" and (owner != "self" or _name(call) in self._bound or call.keywords):
            return ""
        if len(call.args) != 1 + (_name(call) == "assertRaisesRegex") or len(call.keywords) != len(patterns):
            return ""
        patterns += call.args[1:]
        named = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else [call.args[0]]
        if not all(
            isinstance(each, ast.Name) and _is_exception(each.id) and each.id not in self._bound for each in named
        ):
            return ""
        for each in patterns:
            values = self._values.get(each.id, []) if isinstance(each, ast.Name) else [each]
            if not values or not all(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in values):
                return ""
        return f"({self._text(call.args[0])}, {self._expected(patterns[0]) if patterns else None})"

    def _is_constant(self, node: ast.expr) -> bool:
        """Whether its value does not depend on the code under test."""
        inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        if isinstance(node, ast.Call):
            name = _name(node)
            pure = isinstance(node.func, ast.Name) and name in PURE - self._bound
            approx = name == "approx" and bool(self._approx) and _root(node.func) in self._approx
            arguments = [*node.args, *(each.value for each in node.keywords)]
            return (pure or approx) and all(self._is_constant(each) for each in arguments)
        if isinstance(node, ast.Name):
            return node.id in self._values
        allowed = ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp | ast.Starred
        return isinstance(node, allowed) and all(self._is_constant(each) for each in inner)


def _functions(
    body: Sequence[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(Class::function, node), also those under a condition."""
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{each.name}", each
        elif isinstance(each, ast.ClassDef):
            yield from _functions(each.body, f"{prefix}{each.name}::")
        elif isinstance(each, ast.If | ast.Try | ast.With):
            handlers = [inner for handler in getattr(each, "handlers", ()) for inner in handler.body]
            yield from _functions([*each.body, *getattr(each, "orelse", ()), *handlers], prefix)


def _inside(test: str) -> str:
    """What an id has in brackets."""
    return test.partition("[")[2][:-1]


def _read_or_changed(body: Sequence[ast.stmt], taken: Collection[ast.AST]) -> Iterator[str]:
    """Names that are read elsewhere, or change without an assignment of their own; all if names are looked up."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    reflects = any(isinstance(each, ast.Name) and each.id in REFLECTS for each in nodes)
    for node in nodes:
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield from node.names
        elif isinstance(node, ast.AugAssign):
            yield from _bound_names(node.target)
        elif isinstance(node, ast.Name) and (reflects or not (isinstance(node.ctx, ast.Store) or node in taken)):
            yield node.id


def _arguments_of_fixtures(tree: ast.Module) -> Iterator[str]:
    """They may be parameters of the tests."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("fixture" in ast.dump(each) for each in node.decorator_list):
            yield from _bound_names(node.args)


def _ancestors(name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    seen, waiting = {name}, [name]
    while waiting:
        for base in classes[waiting.pop(0)].bases:
            if isinstance(base, ast.Name) and base.id in classes and base.id not in seen:
                seen.add(base.id)
                waiting.append(base.id)
                yield base.id


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """All names that a file binds, wherever."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
            if node.name == "*":
                yield from PURE


def _imported(tree: ast.Module, package: str = "") -> frozenset[str]:
    """Names of modules that are imported as they are; of a package, what is imported from it."""
    kinds = ast.ImportFrom if package else ast.Import
    imports = [each for each in ast.walk(tree) if isinstance(each, kinds)]
    names = [name for each in imports if getattr(each, "module", "") == package for name in each.names]
    return frozenset(name.name for name in names if name.asname is None)


def _name(node: ast.AST) -> str:
    """The last name of a call, or of what is called."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _root(node: ast.AST) -> str:
    return _root(node.value) if isinstance(node, ast.Attribute) else _name(node)


def _is_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def _walk(statement: ast.AST) -> Iterator[ast.AST]:
    """What runs with a statement: not the functions and classes that it defines."""
    yield statement
    for each in ast.iter_child_nodes(statement):
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _walk(each)


def _has(statements: Sequence[ast.stmt], kinds: object) -> bool:
    return any(isinstance(node, kinds) for each in statements for node in _walk(each))  # type: ignore[arg-type]


def _may_leave(statement: ast.stmt) -> bool:
    defines = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return not defines and _has([statement], ast.Return)


def _may_swallow(statement: ast.With | ast.AsyncWith) -> bool:
    """Also what is only named, or chosen by a condition."""
    given = [item.context_expr for item in statement.items]
    return any(not isinstance(each, ast.Call) or SWALLOWS.search(_name(each)) for each in given)


def _is_not_empty(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return any(not isinstance(each, ast.Starred) for each in node.elts)
    is_range = isinstance(node, ast.Call) and _name(node) == "range" and len(node.args) == 1
    first = node.args[0] if isinstance(node, ast.Call) and node.args else None
    return is_range and isinstance(first, ast.Constant) and isinstance(first.value, int) and first.value > 0


def _last_simple(body: Sequence[ast.stmt]) -> ast.stmt | None:
    """The last statement that another one can follow on its line, and that every regular run reaches."""
    kinds = ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Pass | ast.Delete | ast.Assert
    found: ast.stmt | None = None
    for each in body:
        if isinstance(each, kinds):
            found = each
        elif isinstance(each, ast.With | ast.AsyncWith) and not _may_swallow(each):
            found = _last_simple(each.body) or found
        if _may_leave(each):
            break
    return found
