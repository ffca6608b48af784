"""Row 18: the gateway's CPU milliseconds per request of an agent, beside a proxy in front of vLLM's server.

    python bench/gateway.py [--sessions 8] [--requests 3] [--tokens 128] [--rounds 3] [--model DIR]

Ours: the gateway with our vLLM engine. Theirs: `python -m vllm.entrypoints.openai.api_server`, and in front of it a
proxy that records token ids and log-probs (gateway_proxy.py). Both sides have the same model and arguments, and the
same agents in another process: chat completions of exactly `--tokens` tokens, continued by the next request. The sides
alternate.

The row's figure is the gateway's own CPU time: the process clock of everything between agent and engine, that is HTTP,
the place of the conversation in the ledger, the tokens of its new messages, the response. It is measured in the same
rounds with responses that are ready at once, so that the process clock has no part of the engine's. Limit: its share of
the CPU time of all processes of our side with vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import chain
from pathlib import Path

from common import (
    Result,
    Side,
    alternate,
    answer,
    cpu_seconds,
    median_ratio,
    medians,
    need_smollm2,
    report,
    requests,
)
from gateway_agents import (
    FRONT,
    KV_CACHE_GIB,
    MAX_MODEL_LEN,
    OWN,
    WALL,
    WHOLE,
    Figures,
    per_request,
    run_agents,
    size_arguments,
)
from transformers import AutoTokenizer

from toolrl.envs.agent.gateway import Gateway
from toolrl.envs.agent.session import Session
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.episodes.episode import EpisodeLimits
from verl.episodes.program import ProgramPolicy
from verl.formats.base import build_tool_call_format
from verl.rollout.engine import Generator, Sampling, SingleEngine
from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings
from verl.types import Completion, FinishReason

HERE = Path(__file__).parent
MAX_MILLISECONDS = 5.0
MAX_SHARE = 0.05
READY_SESSIONS = 40  # of the measurement without vLLM


class ReadyEngine(SingleEngine):
    """Has its response before it is asked."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        ids = array("i", token_ids)
        self._completion = Completion(ids, array("f", [-1.0]) * len(ids), FinishReason.STOP, 0)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        return (self._completion,)


async def serve_agents(engine: Generator, chat: ChatTemplate, num_sessions: int, arguments: argparse.Namespace) -> None:
    """One round of the gateway."""
    observations = ObservationTokenizer(chat, build_tool_call_format("hermes"), 512)
    limits = EpisodeLimits(max_turns=arguments.requests, max_tokens=MAX_MODEL_LEN, max_prompt_length=MAX_MODEL_LEN)
    gateway = Gateway()
    await gateway.start()
    async with AsyncExitStack() as stack:
        sessions = []
        for _ in range(num_sessions):
            policy = ProgramPolicy(observations, limits, Sampling(1), engine, None)
            await stack.enter_async_context(policy.timer.running())
            sessions.append(Session(policy))
            stack.enter_context(gateway.serving(sessions[-1]))
        await run_agents([(gateway.url(each), each.key) for each in sessions], arguments)
    turns = list(chain.from_iterable(each.ledger.turns for each in sessions))
    assert len(turns) == num_sessions * arguments.requests
    assert all(len(each.ledger.segments) == 1 for each in sessions), "a request did not continue its session"
    await gateway.close()


@contextmanager
def our_side(arguments: argparse.Namespace) -> Iterator[Callable[[], Figures]]:
    """Rounds of the gateway, with a ready engine and with vLLM."""
    chat = ChatTemplate(AutoTokenizer.from_pretrained(arguments.model))
    text = chat.response_ids("It is cold in Oslo. " * arguments.tokens)[0][: arguments.tokens - 1]
    ready = ReadyEngine((*text, chat.end_token_id))
    settings = VLLMSettings(arguments.model, MAX_MODEL_LEN, kv_cache_gib=KV_CACHE_GIB, max_num_seqs=arguments.sessions)
    with asyncio.Runner() as runner:
        engine = runner.run(VLLMEngine.start(settings))

        def one_round() -> Figures:
            started = time.process_time()
            runner.run(serve_agents(ready, chat, READY_SESSIONS, arguments))
            own_s = time.process_time() - started
            wall, process, whole = time.perf_counter(), time.process_time(), cpu_seconds()
            runner.run(serve_agents(engine, chat, arguments.sessions, arguments))
            wall, process, whole = time.perf_counter() - wall, time.process_time() - process, cpu_seconds() - whole
            own = {OWN: 1000 * own_s / (READY_SESSIONS * arguments.requests)}
            return own | per_request({FRONT: process, WHOLE: whole, WALL: wall}, arguments)

        yield one_round
        runner.run(engine.close())


def run_our_side(arguments: argparse.Namespace) -> None:
    """One round per request."""
    with our_side(arguments) as one_round:
        for _ in requests():
            answer(one_round())


def compare(arguments: argparse.Namespace) -> Result:
    """Alternating rounds of both sides."""
    options = [f"--{name}={getattr(arguments, name)}" for name in ("sessions", "requests", "tokens", "model")]
    our_command = [sys.executable, str(HERE / "gateway.py"), *options, "--side"]
    their_command = [sys.executable, str(HERE / "gateway_proxy.py"), *options]
    with Side(our_command) as ours, Side(their_command) as theirs:
        figures = alternate({"ours": ours.ask, "theirs": theirs.ask}, arguments.rounds, lambda ask: ask())
    own, whole = ([each[name] for each in figures["ours"]] for name in (OWN, WHOLE))
    return Result(
        row=18,
        name=f"the gateway's CPU milliseconds per request, {arguments.sessions} sessions, {arguments.tokens} tokens",
        ratio=medians(figures["ours"])[OWN],
        target=MAX_MILLISECONDS,
        ours=medians(figures["ours"]),
        theirs=medians(figures["theirs"]),
        lower_is_better=True,
        limits={"share of the CPU time of all processes": (median_ratio(own, whole), MAX_SHARE)},
    )


def main() -> None:
    """Measure and report."""
    parser = size_arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="after one that does not count")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run_our_side(arguments)
    else:
        need_smollm2(Path(arguments.model))
        report(compare(arguments))


if __name__ == "__main__":
    main()
