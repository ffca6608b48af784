"""Row 18: the gateway's CPU milliseconds per request of an agent, lower is better.

    python bench/gateway.py [--sessions 40] [--requests 5] [--tokens 128] [--rounds 3]

The process clock of everything between agent and engine: HTTP, the conversation's place in the ledger, the tokens of
its new messages, the response. The agents' requests come from another process; responses of `--tokens` tokens are ready
at once, so that the engine costs nothing. The tokenizer is that of dataset/mini. There is no second side: the figure
has a limit. A session's later requests continue its first one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import chain

import httpx2
from common import Result, report
from transformers import AutoTokenizer

from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.embedded import embedded_path
from verl.episodes.episode import EpisodeLimits
from verl.episodes.program import ProgramPolicy
from verl.formats.base import build_tool_call_format
from verl.kit.agent.gateway import Gateway
from verl.kit.agent.session import Session
from verl.rollout.engine import Sampling, SingleEngine
from verl.types import Completion, FinishReason

MAX_MILLISECONDS = 5.0
_PROMPT = [
    {"role": "system", "content": "You are a helpful assistant. " * 20},
    {"role": "user", "content": "How is the weather in Oslo?"},
]
_NEXT = {"role": "user", "content": "And how will it be tomorrow?"}


class ReadyEngine(SingleEngine):
    """Has its response before it is asked."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        ids = array("i", token_ids)
        self._completion = Completion(ids, array("f", [-1.0]) * len(ids), FinishReason.STOP, 0)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        return (self._completion,)


async def agents(doors: Sequence[tuple[str, str]], num_requests: int) -> None:
    """The client's side: conversations of all sessions at once. doors: (URL, key)"""

    async def converse(url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=300.0, trust_env=False) as client:
            messages = list(_PROMPT)
            for _ in range(num_requests):
                answer = await client.post(f"{url}/v1/chat/completions", json={"model": "any", "messages": messages})
                messages += [answer.raise_for_status().json()["choices"][0]["message"], _NEXT]

    await asyncio.gather(*(converse(*door) for door in doors))


async def measure(num_sessions: int, num_requests: int, num_tokens: int) -> float:
    """CPU milliseconds per request."""
    chat = ChatTemplate(AutoTokenizer.from_pretrained(embedded_path("embedded:model")))
    text = chat.response_ids("It is cold in Oslo. " * num_tokens)[0][: num_tokens - 1]
    observations = ObservationTokenizer(chat, build_tool_call_format("hermes"), 512)
    limits = EpisodeLimits(max_turns=num_requests, max_tokens=1 << 20, max_prompt_length=1 << 20)
    engine, gateway = ReadyEngine((*text, chat.end_token_id)), Gateway()
    await gateway.start()
    async with AsyncExitStack() as stack:
        sessions = []
        for _ in range(num_sessions):
            policy = ProgramPolicy(observations, limits, Sampling(1), engine, None)
            await stack.enter_async_context(policy.timer.running())
            sessions.append(Session(policy))
            stack.enter_context(gateway.serving(sessions[-1]))
        doors = json.dumps([(gateway.url(each), each.key) for each in sessions])
        command = (sys.executable, __file__, "--requests", str(num_requests), "--agents", doors)
        before = time.process_time()
        client = await asyncio.create_subprocess_exec(*command)
        code = await client.wait()
        used_s = time.process_time() - before
    turns = list(chain.from_iterable(each.ledger.turns for each in sessions))
    assert code == 0 and len(turns) == num_sessions * num_requests, "a request has failed"
    assert all(len(each.ledger.segments) == 1 for each in sessions), "a request did not continue its session"
    await gateway.close()
    return 1000 * used_s / len(turns)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=40, help="at the same time")
    parser.add_argument("--requests", type=int, default=5, help="of each session, one after the other")
    parser.add_argument("--tokens", type=int, default=128, help="per response")
    parser.add_argument("--rounds", type=int, default=3, help="after one that does not count")
    parser.add_argument("--agents", help=argparse.SUPPRESS)  # in their own process
    options = parser.parse_args()
    if options.agents:
        asyncio.run(agents(json.loads(options.agents), options.requests))
        return
    size = (options.sessions, options.requests, options.tokens)
    times = [asyncio.run(measure(*size)) for _ in range(options.rounds + 1)][1:]
    report(
        Result(
            row=18,
            name=f"the gateway's CPU milliseconds per request, {options.sessions} sessions, {options.tokens} tokens",
            ratio=min(times),  # other work on the machine only adds
            target=MAX_MILLISECONDS,
            ours={"ms per request": min(times), "slowest round": max(times)},
            theirs={},
            lower_is_better=True,
        )
    )


if __name__ == "__main__":
    main()
