"""Calls in Python's syntax."""

from typing import Any

import pytest

from toolrl.layouts.python_calls import parse_calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f()]", [("f", {})]),
        (
            '[f(a="x]y)", b=[1, (2)], c={"k": -1.5}, d=True, e=null)]',
            [("f", {"a": "x]y)", "b": [1, 2], "c": {"k": -1.5}, "d": True, "e": None})],
        ),
        ('[a.b-c d(x=true), g(y="\\"q\\"")]', [("a.b-c d", {"x": True}), ("g", {"y": '"q"'})]),
        ('[f(from="NYC", class=1, page-size=3)]', [("f", {"from": "NYC", "class": 1, "page-size": 3})]),
        ('[f(a={"k": true}, b=[null, false])]', [("f", {"a": {"k": True}, "b": [None, False]})]),
        ('[Get Weather (v2)(city="x")]', [("Get Weather (v2)", {"city": "x"})]),
        ("[User Feed (Video Posts) V2(), g(a=1)]", [("User Feed (Video Posts) V2", {}), ("g", {"a": 1})]),
        ('[f(a="one\ntwo", b=[1,\n2])]', [("f", {"a": "one\ntwo", "b": [1, 2]})]),
        ("[f(a=1)", None),
        ("[f(1)]", None),
        ("[f(**k)]", None),
        ("[f(a=g(1))]", None),
        ("[f(a=1) g(b=2)]", None),
        ("[f(a=1), , g()]", None),
        ("[f(a=1e999)]", None),
        ("[f(a={1})]", None),
        ("[f(a=1, a=2)]", None),
        ('[f(a={"k": 1, "k": 2})]', None),
        ("[f(a='it's')]", None),
        ("[f(a=1]))]", None),
        ("[not a call]", None),
        ("[]", None),
    ],
)
def test_calls_in_pythons_syntax(text: str, calls: list[tuple[str, dict[str, Any]]] | None) -> None:
    assert parse_calls(text) == calls
