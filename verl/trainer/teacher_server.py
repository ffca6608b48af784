"""A teacher behind an OpenAI server: log-probs of the policy's tokens by `prompt_logprobs` (vLLM, `toolrl serve`).

Every sample is one request with its tokens as the prompt, so the teacher reads exactly what was sampled, and no text is
tokenized twice. vLLM gives log-probs at temperature 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from verl.batch.packing import Sharding
from verl.batch.token_batch import Floats, TokenBatch, top_type
from verl.errors import ConfigError, ServiceDownError
from verl.host.daemon import run_async
from verl.host.services import service_headers

if TYPE_CHECKING:
    import httpx2

_REQUESTS = 64  # at the same time
_TIMEOUT_S = 600.0  # of a request: a long sample may wait behind many
_WAITS_S = (1.0, 4.0, 16.0)  # before further attempts
_TOKENS = 1024  # token ids compared in one request
_T = TypeVar("_T")
_ById = Mapping[str, Any]  # {token id: {"logprob": .., "rank": ..}}


@dataclass(frozen=True, slots=True)
class TeacherServer:
    """Scores samples like a `Policy`. url: with /v1; model: its name there; num_ids: token ids that the policy has"""

    url: str
    model: str
    num_ids: int

    def score(self, sharding: Sharding) -> Floats:
        """[A] the teacher's log-probs of the trained tokens. Raises ServiceDownError."""
        return np.array(run_async(self._read(sharding.batch, 0, _logprob)), dtype=np.float32)

    def top(self, sharding: Sharding, k: int) -> npt.NDArray[np.void]:
        """[A] its k likeliest tokens in place of the trained ones, and their log-probs (`top_type`).

        Raises ServiceDownError.
        """
        found = run_async(self._read(sharding.batch, k, lambda by_id, _: self._top(by_id, k)))
        return np.array(found, dtype=top_type(k))

    async def _read(self, batch: TokenBatch, k: int, read: Callable[[_ById, int], _T]) -> list[_T]:
        """[A] what `read` makes of the log-probs in place of each trained token, and of that token."""
        bounds = [slice(*ends) for ends in pairwise(batch.bounds.tokens)]
        samples = [(batch.token_ids[part], batch.action_mask[part]) for part in bounds]

        async def score(client: httpx2.AsyncClient, ids: Any, mask: Any) -> list[_T]:
            places = np.flatnonzero(mask).tolist()
            return await self._sample(client, ids[: places[-1] + 1].tolist(), places, k, read) if places else []

        found = await _with_client(lambda client: asyncio.gather(*(score(client, *sample) for sample in samples)))
        return [value for values in found for value in values]

    async def _sample(
        self,
        client: httpx2.AsyncClient,
        ids: list[int],
        places: Sequence[int],
        k: int,
        read: Callable[[_ById, int], _T],
    ) -> list[_T]:
        request = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
        answer = await _ask(client, "POST", f"{self.url}/completions", request)
        try:
            by_place = answer["choices"][0]["prompt_logprobs"]
            if len(by_place) != len(ids):
                raise ValueError(f"{len(by_place)} log-probs for {len(ids)} tokens")
            return [read(by_place[place], ids[place]) for place in places]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            problem = f"its answer has no prompt_logprobs of the tokens ({type(error).__name__}: {error})"
            raise ServiceDownError(_name(self.url), f"{problem}; vLLM and `toolrl serve` have them") from error

    def _top(self, by_id: _ById, k: int) -> tuple[list[int], list[float]]:
        """The server lists the token of the prompt, too, which may not be among the likeliest ones."""
        likeliest = sorted(by_id, key=lambda token: int(by_id[token]["rank"]))[:k]
        if len(likeliest) < k or int(by_id[likeliest[-1]]["rank"]) > k:
            raise ValueError(f"{len(likeliest)} tokens of rank 1 to {k}")
        if unknown := [token for token in likeliest if int(token) >= self.num_ids]:
            raise ValueError(f"the token id {unknown[0]} of {self.num_ids}")
        return list(map(int, likeliest)), [float(by_id[token]["logprob"]) for token in likeliest]


def _logprob(by_id: _ById, token: int) -> float:
    return float(by_id[str(token)]["logprob"])


async def teacher_server(
    url: str, num_tokens: int, ids: Sequence[int], decode: Callable[[Sequence[int]], str], num_ids: int
) -> TeacherServer:
    """The teacher at this address, once its context and its tokens are known to fit.

    num_tokens: of the longest sample; ids: the policy's vocabulary; num_ids: token ids that its model has
    Raises ConfigError for a teacher that cannot score the policy's tokens, ServiceDownError.
    """
    url = url.rstrip("/")

    async def check(client: httpx2.AsyncClient) -> TeacherServer:
        cards = (await _ask(client, "GET", f"{url}/models"))["data"]
        if len(cards) != 1:
            names = ", ".join(card["id"] for card in cards) or "none"
            raise ConfigError(
                f"teacher.path: the server at {url} has several models ({names}); serve the teacher alone"
            )
        name, limit = cards[0]["id"], cards[0].get("max_model_len")
        if limit is not None and num_tokens >= limit:
            lengths = "data.max_prompt_length + data.max_response_length"
            raise ConfigError(f"{lengths} is {num_tokens} tokens, but the teacher at {url} supports {limit}, one more")
        parts = [ids[at : at + _TOKENS] for at in range(0, len(ids), _TOKENS)]

        async def text(part: Sequence[int]) -> object:
            request = {"model": name, "tokens": list(part)}
            return (await _ask(client, "POST", f"{url.removesuffix('/v1')}/detokenize", request)).get("prompt")

        for part, found in zip(parts, await asyncio.gather(*map(text, parts)), strict=True):
            if found != decode(part):
                raise ConfigError(
                    f"teacher.path: the tokenizer of the server at {url} has other texts for the ids {part[0]} to "
                    f"{part[-1]} than the policy's. Distillation compares probabilities of the same tokens; serve a "
                    "teacher of the policy's family"
                )
        return TeacherServer(url, name, num_ids)

    return await _with_client(check)


async def _with_client(work: Callable[[httpx2.AsyncClient], Awaitable[_T]]) -> _T:
    import httpx2

    limits = httpx2.Limits(max_connections=_REQUESTS)
    timeout = httpx2.Timeout(_TIMEOUT_S, pool=None)  # the others wait for a connection
    async with httpx2.AsyncClient(limits=limits, timeout=timeout, headers=service_headers()) as client:
        return await work(client)


async def _ask(client: httpx2.AsyncClient, method: str, url: str, request: Any = None) -> Any:
    """The JSON object of the answer. Raises ServiceDownError, after further attempts where these may help."""
    import httpx2

    for wait_s in (*_WAITS_S, None):
        try:
            answer = await client.request(method, url, json=request)
            if answer.status_code < 500:
                break
            problem = f"returned status {answer.status_code}"
        except httpx2.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        if wait_s is None:
            raise ServiceDownError(_name(url), problem)
        await asyncio.sleep(wait_s)
    if answer.status_code != 200:
        raise ServiceDownError(_name(url), f"returned status {answer.status_code}: {answer.text[:500]}")
    try:
        found = answer.json()
        if isinstance(found, dict):
            return found
        raise ValueError("no object")
    except ValueError as error:
        raise ServiceDownError(_name(url), f"its answer is no JSON ({error})") from error


def _name(url: str) -> str:
    return f"the teacher at {url}"
