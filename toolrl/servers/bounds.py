"""What the JSON of a request may hold, and a thread for large work, so that no request holds up the others.

Python's threads take turns, but only between steps of Python: a C function that reads 30 MB of JSON, or garbage
collection that visits a million lists, stops all of them. So large JSON is read here value by value, and texts in
pieces. Whatever the JSON is, no step takes more than milliseconds; at the first value beyond a bound it is refused.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from math import inf, nan
from typing import Any, TypeVar

from verl.text import utf8

LARGE = 20_000  # bytes or characters; less is read, rendered and tokenized in the event loop, in milliseconds
MAX_PARTS = 100_000  # lists, objects and keys, of which some steps in C take a microsecond each
MAX_DIGITS = 4000  # of a number, as Python's own limit for integers
MAX_KEYS = 20_000  # of an object
MAX_KEY = LARGE  # characters of one
_PIECE = 1 << 16  # bytes or characters that are read in one step
_SPACE = re.compile(r"[ \t\n\r]*+")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*+))(\.[0-9]++)?([eE][-+]?[0-9]++)?")
_LITERALS = {"null": None, "true": True, "false": False, "NaN": nan, "Infinity": inf, "-Infinity": -inf}
# Of a text, up to its end, or to an escape or a pair of surrogates that is not whole in the piece.
_TEXT = re.compile(
    r"""(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])....|"""
    r"""\\u[dD][89abAB]..(?:\\u[dD][c-fC-F]..|(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])))*+""",
    re.DOTALL,
)
NESTED_JSON = ("arguments", "tool_calls")  # fields whose texts are read as JSON again
_T = TypeVar("_T")


class TooMuchError(ValueError):
    """A request beyond a bound: what, the limit, and the way out."""


@dataclass(frozen=True)
class Bounds:
    """Limits on the JSON of a request body.

    max_mib: size of the text
    values: all together
    entries: of a list or object of the top level, by its name
    others: entries of any other
    """

    max_mib: int = 32
    values: int = 250_000
    entries: Mapping[str, int] = field(default_factory=dict)
    others: int = 10_000

    def read(self, text: bytes | str) -> Any:
        """The value. Raises TooMuchError; ValueError or RecursionError for what is not JSON."""
        if len(text) > self.max_mib << 20:
            raise TooMuchError(f"the JSON has more than {self.max_mib} MiB: send less at a time")
        if len(text) <= LARGE:
            value = json.loads(text)
        else:
            value = _Reader(_decoded(text) if isinstance(text, bytes) else text, self.values).whole()
            for each in _nested(value):
                _count(each, self.values)
        self._check_entries(value)
        return value

    def _check_entries(self, body: Any) -> None:
        for name, value in body.items() if isinstance(body, dict) else ():
            most = self.entries.get(name, self.others)
            if isinstance(value, list | dict) and len(value) > most:
                raise TooMuchError(f"{name[:80]} has {len(value)} entries; at most {most} are read: send fewer")


ANY = Bounds()
# Limits on requests to language models. OpenAI accepts 128 tools and four stop strings.
CONVERSATION = Bounds(
    values=1_100_000,  # a million token ids
    entries={
        **dict.fromkeys(("input_ids", "prompt"), 1 << 20),
        **dict.fromkeys(("tools", "functions"), 1024),
        **dict.fromkeys(("stop", "stop_sequences"), 64),
    },
)


def _decoded(raw: bytes) -> str:
    reader = io.TextIOWrapper(io.BytesIO(raw), json.detect_encoding(raw), "surrogatepass", newline="")
    return "".join(iter(lambda: reader.read(_PIECE), ""))


def _count(text: str, most: int) -> None:
    """Raises TooMuchError; what is not JSON is an error of the field that has the text."""
    try:
        _Reader(text, most).whole()
    except TooMuchError:
        raise
    except (ValueError, RecursionError):
        return


class _Reader:
    """The value of one JSON text, as json.loads reads it, in steps that other threads interrupt."""

    def __init__(self, text: str, most: int) -> None:
        self._text, self._most = text, most
        self._values = self._parts = 0

    def whole(self) -> Any:
        """Raises TooMuchError, JSONDecodeError, RecursionError."""
        value, end = self._value(self._skip(0))
        if (end := self._skip(end)) != len(self._text):
            raise JSONDecodeError("Extra data", self._text, end)
        return value

    def _value(self, at: int) -> tuple[Any, int]:
        """(the value that begins here, its end)"""
        self._values += 1
        if self._values > self._most:
            raise TooMuchError(f"the JSON has more than {self._most} values: send less at a time")
        match self._text[at : at + 1]:
            case '"':
                return self._string(at + 1)
            case "[":
                return self._array(self._skip(at + 1))
            case "{":
                return self._object(self._skip(at + 1))
        return self._number(at) or self._literal(at)

    def _array(self, at: int) -> tuple[list[Any], int]:
        self._count_part()
        values: list[Any] = []
        if self._text[at : at + 1] == "]":
            return values, at + 1
        while True:
            value, at = self._value(at)
            values.append(value)
            sign, at = self._sign(at, ",]")
            if sign == "]":
                return values, at
            at = self._skip(at)

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        self._count_part()
        values: dict[str, Any] = {}
        if self._text[at : at + 1] == "}":
            return values, at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            self._count_part()
            key, at = self._string(at + 1)
            if len(key) > MAX_KEY:
                raise TooMuchError(f"a key has more than {MAX_KEY} characters: send it as a value")
            _, at = self._sign(at, ":")
            values[key], at = self._value(self._skip(at))
            sign, at = self._sign(at, ",}")
            if len(values) > MAX_KEYS:
                raise TooMuchError(f"an object has more than {MAX_KEYS} keys: send fewer")
            if sign == "}":
                return values, at
            at = self._skip(at)

    def _string(self, start: int) -> tuple[str, int]:
        """start: after its quote"""
        pieces, at = [], start
        while True:
            end = _TEXT.match(self._text, at, at + _PIECE).end()  # type: ignore[union-attr]  # also of nothing
            if closed := self._text[end : end + 1] == '"':
                if at == start:
                    text: str = scanstring(self._text, at)[0]
                    return text, end + 1
            elif end == at:  # not one escape or pair, but the end of the text
                raise JSONDecodeError("Unterminated string starting at", self._text, start - 1)
            try:
                pieces.append(scanstring(f'{self._text[at:end]}"', 0)[0])
            except JSONDecodeError as error:
                raise JSONDecodeError(error.msg, self._text, at + error.pos) from None
            if closed:
                return "".join(pieces), end + 1
            at = end

    def _number(self, at: int) -> tuple[Any, int] | None:
        found = _NUMBER.match(self._text, at, at + MAX_DIGITS + 3)  # an exponent that is cut off has two
        if found is None:
            return None
        if found.end() > at + MAX_DIGITS:
            raise TooMuchError(f"a number has more than {MAX_DIGITS} digits: write it with fewer")
        return (float if found[2] or found[3] else int)(found[0]), found.end()

    def _literal(self, at: int) -> tuple[Any, int]:
        for literal, value in _LITERALS.items():
            if self._text.startswith(literal, at):
                return value, at + len(literal)
        raise JSONDecodeError("Expecting value", self._text, at)

    def _sign(self, at: int, expected: str) -> tuple[str, int]:
        """(the sign, its end). expected: the first is named in the error"""
        at = self._skip(at)
        sign = self._text[at : at + 1]
        if not sign or sign not in expected:
            raise JSONDecodeError(f"Expecting '{expected[0]}' delimiter", self._text, at)
        return sign, at + 1

    def _skip(self, at: int) -> int:
        """The end of the white space here."""
        while (end := _SPACE.match(self._text, at, at + _PIECE).end()) == at + _PIECE:  # type: ignore[union-attr]
            at = end
        return end

    def _count_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise TooMuchError(f"the JSON has more than {MAX_PARTS} lists, objects and keys: send less at a time")


def _nested(value: Any, name: str = "") -> Iterator[str]:
    """Strings of the value that are long JSON texts themselves."""
    if isinstance(value, str):
        if name in NESTED_JSON and len(value) > LARGE:
            yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _nested(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from _nested(each)


def num_chars(value: Any) -> int:
    """Total length of all strings of a JSON value, keys included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(len, value)) + sum(map(num_chars, value.values()))
    return sum(map(num_chars, value)) if isinstance(value, list) else 0


def without_surrogates(value: Any) -> Any:
    """The JSON value with lone surrogates replaced, which no tokenizer takes."""
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, dict):
        return {utf8(key): without_surrogates(each) for key, each in value.items()}
    return [without_surrogates(each) for each in value] if isinstance(value, list) else value


class LargeWork:
    """A thread for work on large requests, one at a time: several threads would hold the event loop up together."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large-requests")

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """The result of the work, in the event loop if it is small. size: bytes or characters"""
        if size <= LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
