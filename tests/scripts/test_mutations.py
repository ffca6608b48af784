"""Injected bugs: each kind by hand, and that nothing but one place changes."""

from __future__ import annotations

import ast
import textwrap
from difflib import ndiff
from pathlib import Path

import pytest

import verl.algorithms.aggregate
import verl.text
from scripts.data.mutations import KINDS, differs, mutations

BEFORE = '''
def first(items, count, strict=True):
    """The first items."""
    if not items:
        return []
    found = []
    for item in items[:count]:
        found.append(item)
        if strict and len(found) >= 3:
            break
    else:
        found = max(found, key=len)
    if count < 2:
        count += 1
    else:
        print(count, items)
    return found
'''
EXPECTED = {
    "swapped_operator": "        if strict or len(found) >= 3:",
    "off_by_one": "    for item in items[:count - 1]:",
    "wrong_variable": "    for item in items[:found]:",
    "swapped_arguments": "        print(items, count)",
    "negated_condition": "    if items:",
    "removed_guard": "",
    "dropped_branch": "",
    "dropped_statement": "",
    "wrong_result": "",
}


def changed_lines(after: str) -> tuple[list[str], list[str]]:
    """(lines that went, lines that came)."""
    lines = list(ndiff(BEFORE.splitlines(), after.splitlines()))
    return [each[2:] for each in lines if each[0] == "-"], [each[2:] for each in lines if each[0] == "+"]


@pytest.mark.parametrize("kind", sorted(kind for kind, line in EXPECTED.items() if line))
def test_a_line_is_replaced(kind: str) -> None:
    came = [changed_lines(each.source)[1] for each in mutations(BEFORE) if each.kind == kind]
    assert [EXPECTED[kind]] in came


@pytest.mark.parametrize(
    ("kind", "gone"),
    [
        ("removed_guard", ["    if not items:", "        return []"]),
        ("dropped_branch", ["    else:", "        print(count, items)"]),
        ("dropped_statement", ["        found.append(item)"]),
    ],
)
def test_lines_are_removed(kind: str, gone: list[str]) -> None:
    assert (gone, []) in [changed_lines(each.source) for each in mutations(BEFORE) if each.kind == kind]


def test_a_truth_value_is_inverted() -> None:
    (found,) = mutations("class A:\n    def f(self):\n        return True\n")
    assert (found.kind, found.function, found.line) == ("wrong_result", "A.f", 3)
    assert found.source.endswith("return False\n")


def test_mutations_keep_the_documentation() -> None:
    found = list(mutations(BEFORE))
    assert {each.kind for each in found} == KINDS.keys() - {"wrong_result"}
    assert {each.docstring for each in found} == {"The first items."}
    assert all('"""The first items."""' in each.source for each in found)


def test_the_only_statement_of_a_block_and_one_beside_another_stay() -> None:
    source = "def f(a):\n    if a: return 1\n    a.g(); a.h()\n    for b in a:\n        b.i()\n"
    gone = [each.source for each in mutations(source) if each.kind == "dropped_statement"]
    assert gone == []
    guards = [each.source for each in mutations(source) if each.kind == "removed_guard"]
    assert guards == [source.replace("    if a: return 1\n", "")]


def test_characters_of_several_bytes_before_the_change() -> None:
    source = 'def f(a):\n    return "é→" + a, "é" + str(1)\n'
    found = [each.source for each in mutations(source) if each.kind == "off_by_one"]
    assert found == [source.replace("str(1)", "str(2)")]


@pytest.mark.parametrize("module", [verl.text, verl.algorithms.aggregate])
def test_on_real_files_one_function_changes(module: object) -> None:
    source = Path(str(module.__file__)).read_text()  # type: ignore[attr-defined]
    valid = [each for each in mutations(source) if differs(source, each.source)]
    assert len(valid) > 5
    before = functions(source)
    for each in valid:
        after = functions(each.source)
        assert after.keys() == before.keys()
        assert [name for name in before if before[name] != after[name]] == [each.function.partition(".")[0]]


def functions(source: str) -> dict[str, str]:
    """What a file defines."""
    tree = ast.parse(textwrap.dedent(source))
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
