"""What both sides of gateway.py share: the agents, which run in a process of their own, and the names of the figures.

Light to import, as the agents start anew in every round: python bench/gateway_agents.py --requests 3 --tokens 128 DOORS
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence

import httpx2
from common import SMOLLM2

MAX_MODEL_LEN = 1024
KV_CACHE_GIB = 1
# Names of figures: milliseconds per request
OWN = "gateway or proxy alone"
FRONT = "all but the engine's processes"
WHOLE = "all processes"
WALL = "wall time"
Figures = dict[str, float]
Doors = Sequence[tuple[str, str]]  # (URL, key) per session
_PROMPT = [
    {"role": "system", "content": "You are a helpful assistant. " * 20},
    {"role": "user", "content": "How is the weather in Oslo?"},
]
_NEXT = {"role": "user", "content": "And how will it be tomorrow?"}


async def converse(doors: Doors, num_requests: int, num_tokens: int) -> None:
    """The agents: conversations of all sessions at once."""

    async def one(url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=300.0, trust_env=False) as client:
            messages = list(_PROMPT)
            for _ in range(num_requests):
                body = {"model": "policy", "messages": messages, "max_tokens": num_tokens}
                done = (await client.post(f"{url}/v1/chat/completions", json=body)).raise_for_status().json()
                assert done["usage"]["completion_tokens"] == num_tokens, done["usage"]
                messages += [done["choices"][0]["message"], _NEXT]

    await asyncio.gather(*(one(*door) for door in doors))


async def run_agents(doors: Doors, arguments: argparse.Namespace) -> None:
    """In their own process."""
    sizes = (f"--requests={arguments.requests}", f"--tokens={arguments.tokens}")
    client = await asyncio.create_subprocess_exec(sys.executable, __file__, *sizes, json.dumps(list(doors)))
    assert await client.wait() == 0, "a request has failed"


def per_request(seconds: Mapping[str, float], arguments: argparse.Namespace) -> Figures:
    """In milliseconds."""
    return {name: 1000 * each / (arguments.sessions * arguments.requests) for name, each in seconds.items()}


def size_arguments(description: str | None) -> argparse.ArgumentParser:
    """Of both sides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=8, help="at the same time, with vLLM")
    parser.add_argument("--requests", type=int, default=3, help="of each session, one after the other")
    parser.add_argument("--tokens", type=int, default=128, help="per response")
    parser.add_argument("--model", default=str(SMOLLM2), help="folder of SmolLM2")
    return parser


def main() -> None:
    """The agents."""
    parser = size_arguments(__doc__)
    parser.add_argument("doors", type=json.loads, help="JSON: a list of [URL, key]")
    arguments = parser.parse_args()
    asyncio.run(converse(arguments.doors, arguments.requests, arguments.tokens))


if __name__ == "__main__":
    main()
