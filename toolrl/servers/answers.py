"""Large answers of servers as JSON: made in a thread and in pieces, so that no step holds up other requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi.responses import StreamingResponse

PIECE = 1 << 16  # characters that are written in one step; bytes of a part of an answer


async def json_answer(value: Any) -> StreamingResponse:
    """value: mappings, lists, texts and what `json` writes"""
    return streamed(await asyncio.to_thread(lambda: list(_joined(json_pieces(value)))))


def streamed(pieces: Iterable[bytes]) -> StreamingResponse:
    async def each() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return StreamingResponse(each(), media_type="application/json")


def json_pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, str):
        yield b'"'
        for start in range(0, len(value), PIECE):
            yield json.dumps(value[start : start + PIECE])[1:-1].encode()
        yield b'"'
    elif isinstance(value, Mapping):
        for number, (name, each) in enumerate(value.items()):
            yield b", " if number else b"{"
            yield from json_pieces(name)
            yield b": "
            yield from json_pieces(each)
        yield b"}" if value else b"{}"
    elif isinstance(value, Sequence):
        for number, each in enumerate(value):
            yield b", " if number else b"["
            yield from json_pieces(each)
        yield b"]" if value else b"[]"
    else:
        yield json.dumps(value).encode()


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= PIECE:
            yield bytes(part)
            part.clear()
    yield bytes(part)
