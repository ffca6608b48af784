"""The token-level door: token ids in; token ids, log-probs, weight versions and the stop reason out."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from verl.kit.agent.chat_api import read_limit, read_stops
from verl.kit.agent.requests import ChatRequest, ChatResponse, bad_request

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
_READ = ("input_ids", "max_tokens", "stop", "stream")


def read_tokens(body: Mapping[str, Any]) -> ChatRequest:
    """Raises ApiError. The ids are checked against the vocabulary when they are placed."""
    for name, value in body.items():
        if name not in (*_READ, *_SAMPLING) and value is not None:
            raise bad_request("cannot be used here", name)
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
        raise bad_request("must be a list of token ids", "input_ids")
    sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    limit, stops = read_limit(body, "max_tokens"), read_stops(body.get("stop"), "stop")
    return ChatRequest((), (), limit, stops, False, sampling, tuple(ids))


def token_response(response: ChatResponse, _: Mapping[str, Any]) -> dict[str, Any]:
    """The response as one JSON object, with as many log-probs and versions as tokens.

    A log-prob is null if the response was sampled with settings of its own.
    """
    logprobs = [None if value != value else value for piece in response.pieces for value in piece.logprobs]
    return {
        "id": response.id,
        "token_ids": list(chain.from_iterable(piece.token_ids for piece in response.pieces)),
        "logprobs": logprobs,
        "versions": list(chain.from_iterable(piece.versions for piece in response.pieces)),
        "text": response.content,
        "stop_reason": str(response.finish),
    }


def token_events(response: ChatResponse, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One event per piece that the engine returned: it yields no tokens before."""
    whole, start = token_response(response, body), 0
    for number, piece in enumerate(response.pieces, 1):
        end = start + len(piece.token_ids)
        part = {name: whole[name][start:end] for name in ("token_ids", "logprobs", "versions")}
        yield {
            "id": response.id,
            **part,
            "stop_reason": whole["stop_reason"] if number == len(response.pieces) else None,
        }
        start = end
