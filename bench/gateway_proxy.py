"""The other side of gateway.py: vLLM's OpenAI server, and in front of it a proxy that records what it generates.

The proxy forwards a chat completion with the options that a trainer needs (token ids and log-probs in the response),
keeps these, and passes on the rest. Products with more features, such as LiteLLM's proxy, only add to its time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import IO, Any

import httpx2
import psutil
import uvicorn
from common import answer, requests
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
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

_START_S = 300.0
_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_RECORDED = {"logprobs": True, "return_token_ids": True, "ignore_eos": True}


def proxy(upstream: str) -> Starlette:
    """POST /sessions/{session}/v1/chat/completions, and GET /clock: recorded tokens, CPU seconds of this process."""
    recorded: dict[str, list[tuple[list[int], list[int], list[float]]]] = defaultdict(list)
    clients: list[httpx2.AsyncClient] = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with httpx2.AsyncClient(base_url=upstream, timeout=300.0, trust_env=False) as client:
            clients.append(client)
            yield

    async def complete(request: Request) -> JSONResponse:
        body = {**await request.json(), **_RECORDED}
        done: dict[str, Any] = (await clients[0].post("/v1/chat/completions", json=body)).raise_for_status().json()
        choice = done["choices"][0]
        logprobs = [each["logprob"] for each in choice.pop("logprobs")["content"]]
        turn = (done.pop("prompt_token_ids"), choice.pop("token_ids"), logprobs)
        recorded[request.path_params["session"]].append(turn)
        return JSONResponse(done)

    async def clock(_: Request) -> JSONResponse:
        num_tokens = sum(len(ids) for turns in recorded.values() for _, ids, _ in turns)
        return JSONResponse([num_tokens, time.process_time()])

    path = "/sessions/{session}/v1/chat/completions"
    return Starlette(routes=[Route(path, complete, methods=["POST"]), Route("/clock", clock)], lifespan=lifespan)


@contextmanager
def started(command: list[str], url: str, log: IO[str]) -> Iterator[psutil.Process]:
    """A server's process; it answers at the URL."""
    process = subprocess.Popen(command, env={**os.environ, **_VARIABLES}, stdout=log, stderr=log)
    try:
        end = time.monotonic() + _START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > end:
                log.seek(0)
                raise SystemExit(f"{' '.join(command)} did not start:\n{log.read()[-3000:]}")
            time.sleep(0.3)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=2.0, trust_env=False).is_success
    except httpx2.HTTPError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def seconds_of(process: psutil.Process) -> float:
    """CPU seconds, all threads."""
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def proxied_vllm(arguments: argparse.Namespace) -> Iterator[Callable[[], Figures]]:
    """Rounds of the proxy."""
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        server_port, proxy_port = free_port(), free_port()
        upstream, door = f"http://127.0.0.1:{server_port}", f"http://127.0.0.1:{proxy_port}"
        server_command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--dtype", "bfloat16"),
            *("--model", arguments.model, "--served-model-name", "policy", "--generation-config", "vllm"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(arguments.sessions)),
            *("--logprobs-mode", "processed_logprobs", "--disable-log-stats", "--uvicorn-log-level", "warning"),
            *("--host", "127.0.0.1", "--port", str(server_port)),
        ]
        proxy_command = [sys.executable, __file__, "--upstream", upstream, "--port", str(proxy_port)]
        server = stack.enter_context(started(server_command, f"{upstream}/health", logs[0]))
        stack.enter_context(started(proxy_command, f"{door}/clock", logs[1]))
        doors = [(f"{door}/sessions/{number}", "none") for number in range(arguments.sessions)]

        def clocks() -> tuple[float, ...]:
            num_tokens, own = httpx2.get(f"{door}/clock", trust_env=False).json()
            engine = sum(seconds_of(each) for each in server.children(recursive=True))
            return time.perf_counter(), own, seconds_of(server), engine, num_tokens

        def one_round() -> Figures:
            before = clocks()
            asyncio.run(run_agents(doors, arguments))
            wall, own, front, engine, tokens = (after - first for first, after in zip(before, clocks(), strict=True))
            assert tokens == arguments.sessions * arguments.requests * arguments.tokens, tokens
            times = {OWN: own, FRONT: own + front, WHOLE: own + front + engine, WALL: wall}
            return per_request(times, arguments)

        yield one_round


def main() -> None:
    """One round per request of gateway.py, or the proxy."""
    parser = size_arguments(__doc__)
    parser.add_argument("--upstream", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.upstream:
        uvicorn.run(proxy(arguments.upstream), host="127.0.0.1", port=arguments.port, log_level="warning")
        return
    with proxied_vllm(arguments) as one_round:
        for _ in requests():
            answer(one_round())


if __name__ == "__main__":
    main()
