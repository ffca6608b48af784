"""What every setting means: the comments beside the fields of schema.py, the only source for --help and the docs."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from verl.config import schema


@cache
def meanings() -> dict[str, str]:
    """{key: its comment}; keys without one are missing."""
    return dict(_of_group(schema.Config(), "", _comments()))


def _of_group(group: Any, prefix: str, comments: dict[tuple[str, str], str]) -> Iterator[tuple[str, str]]:
    for item in fields(group):
        value, key = getattr(group, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from _of_group(value, f"{key}.", comments)
        else:
            found = (comments.get((kind.__name__, item.name)) for kind in type(group).__mro__)
            if (text := next(filter(None, found), None)) is not None:
                yield key, text


def _comments() -> dict[tuple[str, str], str]:
    """{(class, field): the comment lines right above it, and behind it}"""
    source = inspect.getsource(schema)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {each.start[0]: each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT}
    code = {number for number, line in enumerate(source.splitlines(), 1) if not line.lstrip().startswith("#")}
    found = {}
    for group in (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)):
        for node in group.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first = node.lineno
                while first - 1 in by_line and first - 1 not in code:
                    first -= 1
                lines = [*range(first, node.lineno), node.end_lineno or node.lineno]
                found[group.name, node.target.id] = " ".join(by_line[each] for each in lines if each in by_line)
    return found
