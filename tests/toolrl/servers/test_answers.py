"""Large answers of servers: the same JSON as whole, in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolrl.servers.answers import PIECE, json_answer, json_pieces

VALUES: list[Any] = [
    *(None, True, 3, -0.5, "", 'a\n"\\', [], {}, [[]], {"a": {}}, ("x", 1)),
    {"text": "\u00e4\U0001f600\n" * PIECE, "list": [{"\U0001f600" * 3: [None, "\ud800"]}] * 3},
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_pieces_are_the_whole(value: Any) -> None:
    pieces = list(json_pieces(value))
    assert b"".join(pieces).decode() == json.dumps(value)
    assert max(map(len, pieces)) <= 12 * PIECE  # an escaped character has up to twelve


async def test_an_answer_is_sent_in_parts() -> None:
    answer = await json_answer({"text": "x" * 10 * PIECE, "numbers": [1, 2]})
    parts = [bytes(part) async for part in answer.body_iterator]  # type: ignore[arg-type]
    assert json.loads(b"".join(parts)) == {"text": "x" * 10 * PIECE, "numbers": [1, 2]} and len(parts) > 5
