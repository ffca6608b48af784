"""The gateway under the load of many agents in processes of their own: no request is lost, every ledger is exact."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.toolrl.envs.agent.play import ScriptedPolicy, check_exact
from toolrl.envs.agent.gateway import Gateway
from toolrl.envs.agent.session import Session

AGENTS = Path(__file__).with_name("load_of_tests.py")
REQUESTS = 4
TEXTS = ("one", "two terms", "and three terms", "four")


async def load(num_sessions: int, num_processes: int, pause: Callable[[], float]) -> list[float | str]:
    """The seconds of each request, or its error. pause: before a request, in seconds"""

    async def think() -> None:
        await asyncio.sleep(random.uniform(0, 0.5))

    gateway = Gateway()
    await gateway.start()
    try:
        with ExitStack() as stack:
            played = [
                (Session(policy), policy)
                for policy in (ScriptedPolicy(iter(TEXTS), think) for _ in range(num_sessions))
            ]
            for session, _ in played:
                stack.enter_context(gateway.serving(session))
            given = [(gateway.url(session), session.key, [pause() for _ in TEXTS]) for session, _ in played]
            parts = [given[place::num_processes] for place in range(num_processes)]
            found = [each for part in await asyncio.gather(*map(_agents, parts)) for each in part]
            for session, policy in played:
                check_exact(session, policy)
                lost = REQUESTS - len(policy.completions)
                assert lost or [len(segment.turns) for segment in session.ledger.segments] == [REQUESTS]
                await session.close()
        return found
    finally:
        await gateway.close()


async def _agents(given: list[tuple[str, str, list[float]]]) -> list[float | str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(AGENTS), stdin=pipe, stdout=pipe, limit=1 << 24)
    output, _ = await process.communicate(json.dumps(given).encode())
    found: list[float | str] = json.loads(output)
    return found


def check(found: list[float | str], expected: int) -> None:
    errors = Counter(each for each in found if isinstance(each, str))
    seconds = sorted(each for each in found if not isinstance(each, str))
    half, most = (seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.99))
    print(f"{len(found)} requests, {sum(errors.values())} lost {dict(errors)}; p50 {half:.2f} s, p99 {most:.2f} s")
    assert not errors and len(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_500_sessions_lose_no_request(number: int) -> None:
    """In every other round the pauses are those after which httpx gives a connection up, as many servers do."""
    pauses = random.Random(number)
    lengths = (0.0, 0.1, 0.2) if number % 2 else (0.1, 4.9, 4.99, 5.0, 5.01)
    check(asyncio.run(load(500, 4, lambda: pauses.choice(lengths))), 2000)
