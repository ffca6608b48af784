"""The token-level door: token ids in; token ids, log-probs, weight versions and the stop reason out."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any

from pydantic import Field

from toolrl.envs.agent.api.conversation import given_sampling
from toolrl.envs.agent.api.fields import Count, Fields, First, Stops, read_fields
from toolrl.envs.agent.requests import ChatRequest, ChatResponse

_SAMPLING = dict.fromkeys(("temperature", "top_p", "top_k", "repetition_penalty", "seed"))


class TokenFields(Fields):
    """A request."""

    input_ids: Annotated[list[Annotated[int, Field(ge=0)]], First, Field(min_length=1)]
    max_tokens: Count | None = None
    stop: Stops | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None


def read_tokens(body: Mapping[str, Any]) -> ChatRequest:
    """Raises ApiError. The ids are checked against the vocabulary when they are placed."""
    given = read_fields(TokenFields, body)
    ids, stops, sampling = tuple(given.input_ids), tuple(given.stop or ()), given_sampling(body, _SAMPLING)
    return ChatRequest((), (), given.max_tokens, stops, False, sampling, ids, conversation="input_ids")


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
