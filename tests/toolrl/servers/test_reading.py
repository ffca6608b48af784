"""Large JSON is read as json.loads reads it, in steps of milliseconds: a step in C holds up every other thread."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from toolrl.servers import bounds
from toolrl.servers.bounds import ANY, TooMuchError

MARKS = [
    '"',
    "\\",
    "\\u",
    "d83d",
    "de00",
    r"\ud83d\ude00",
    r"\ud83d",
    r"\ude00",
    r"\u00e9",
    r"\n",
    r"\"",
    "a",
    "é",
    "😀",
]
SIGNS = [*'[]{},: \n\t-.e"01', "12", "true", "null", "NaN", "-Infinity", '"a":', '"b"', "\ud800"]


def outcome(read: Callable[[], Any]) -> str:
    """The value, or that there is none."""
    try:
        return repr(read())
    except ValueError:
        return "not JSON"


@pytest.mark.parametrize("piece", [13, 16, 21, 64])
def test_it_reads_what_json_loads_reads(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a piece ends in an escape, or in a pair of surrogates."""
    monkeypatch.setattr(bounds, "_PIECE", piece)
    monkeypatch.setattr(bounds, "LARGE", 0)
    draw, found = random.Random(piece), set()
    for number in range(6000):
        text = "".join(draw.choices(MARKS + SIGNS, k=draw.randint(1, 25)))
        if number % 2:
            text = f'["{"".join(draw.choices(MARKS[3:], k=draw.randint(1, 40)))}", {{"a": 1.5e3}}]'
        given = text.encode(draw.choice(["utf-8", "utf-16", "utf-32-be"]), "surrogatepass")
        known = outcome(lambda given=given: json.loads(given))  # type: ignore[misc]
        assert outcome(lambda given=given: ANY.read(given)) == known, text  # type: ignore[misc]
        found.add(known)
    assert len(found) > 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["' + "a" * 40 + r"\x" + '"]', "Invalid \\escape: line 1 column 43 (char 42)"),
        ('["' + "a" * 40 + "\n" + '"]', "Invalid control character at: line 1 column 43 (char 42)"),
        ('["' + "a" * 40, "Unterminated string starting at: line 1 column 2 (char 1)"),
        ('{"a" 1}', "Expecting ':' delimiter: line 1 column 6 (char 5)"),
        ("[1 2]", "Expecting ',' delimiter: line 1 column 4 (char 3)"),
        ("[1] 2", "Extra data: line 1 column 5 (char 4)"),
    ],
)
def test_an_error_has_its_place(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_PIECE", 16)
    monkeypatch.setattr(bounds, "LARGE", 0)
    with pytest.raises(json.JSONDecodeError) as found:
        ANY.read(text)
    assert str(found.value) == message


STEPS = """
import gc, json, sys, time
from toolrl.servers.bounds import CONVERSATION, TooMuchError

gc.disable()
longest, started = 0.0, 0.0

def note(_, event, __):
    global longest, started
    if event == "c_call":
        started = time.thread_time()
    elif event in ("c_return", "c_exception"):
        longest = max(longest, time.thread_time() - started)

MB = 1_000_000
for raw in (
    b'{"a":"' + rb"\\ud800" * 5 * MB + b'"}',
    b'{"a":"' + b"\\xed\\xa0\\x80" * 2 * MB + b'"}',
    json.dumps({"a": "\\U0001f600" * 2 * MB}, ensure_ascii=False).encode("utf-16"),
    b'{"a":' + b" " * 20 * MB + b"1}",
    b'{"a":1e' + b"7" * 20 * MB + b"}",
    b'{"' + rb"\\u1234" * 3 * MB + b'":1}',
):
    longest, problem = 0.0, ""
    sys.setprofile(note)
    try:
        CONVERSATION.read(raw)
    except TooMuchError as error:
        problem = str(error).partition(":")[0]
    sys.setprofile(None)
    print(longest < 0.15, problem)
"""


def test_no_step_in_c_holds_up_other_threads() -> None:
    """CPU time of the longest call of a function in C, in a process whose profile hook is no one else's."""
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout.splitlines() == [
        *["True "] * 4,
        "True a number has more than 4000 digits",
        "True a key has more than 20000 characters",
    ], done.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a":{' + '"a":1,' * 100_000 + '"a":1}}', "more than 100000 lists, objects and keys"),
        (json.dumps({"a": dict.fromkeys(map(str, range(20_001)))}), "an object has more than 20000 keys"),
        (json.dumps({"input_ids": ["a"] * 250_000}), "more than 250000 values"),
    ],
)
def test_counts_are_bounded(text: str, problem: str) -> None:
    with pytest.raises(TooMuchError, match=problem):
        ANY.read(text)
