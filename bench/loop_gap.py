"""The longest gap of each server's event loop under hostile requests.

    python bench/loop_gap.py [--servers gateway sandbox ..] [--requests 200] [--seed 0] [--most-ms 100]

Every server gets as many requests in all, each kind at least once, in an order drawn by the seed. If the longest gap of
a server is above `--most-ms`, the exit code is 1.

Every server runs in a process of its own, with a task beside it that sleeps 2 ms at a time and notes how late it wakes
up: the gap, in which no other client is served, and the CPU time in it of the loop's thread and of the whole process.
On a machine with other load the gap contains the time of other processes. The CPU times do not: the thread's is what
the loop itself did, the process's also what another thread did, with Python's lock or without. Garbage collection is
counted for itself. All are printed per server and kind of request, with the gap of an idle loop and the load. A request
that is not answered within `--most-s` is given up.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import gzip
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn
from common import ROOT

TICK_S = 0.002
SETTLE_S = 0.1  # after the answer, for what the server does without one
HEAD = "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{more}"
KEY = "key-of-the-measurement"
MB = 1_000_000
Figures = tuple[float, ...]


# In the server's process


async def watch(report: Path) -> None:
    """Append `start`, the gap in ms, and the CPU time in it of this thread, the process and garbage collection."""
    with report.open("a", buffering=1) as out:
        collections = Collections()

        def clocks() -> tuple[float, ...]:
            return time.monotonic(), time.thread_time(), time.process_time(), collections.total

        before = clocks()
        while True:
            await asyncio.sleep(TICK_S)
            now = clocks()
            late, own, of_all, collected = (1000 * (b - a) for a, b in zip(before, now, strict=True))
            if late - 1000 * TICK_S > 5:
                out.write(f"{before[0]} {late - 1000 * TICK_S} {own} {of_all} {collected}\n")
            before = clocks()


class Collections:
    """CPU seconds of garbage collection so far."""

    def __init__(self) -> None:
        self.total = self._since = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._since = time.thread_time()
        else:
            self.total += time.thread_time() - self._since


def serve_watched(report: Path, name: str, port: int, folder: Path) -> int:
    """Run one of our servers with the watch beside it."""
    serve = uvicorn.Server.serve

    async def watched(self: uvicorn.Server, *given: Any, **named: Any) -> None:
        watching = asyncio.create_task(watch(report))
        try:
            await serve(self, *given, **named)
        finally:
            watching.cancel()

    uvicorn.Server.serve = watched  # type: ignore[method-assign]  # the one place that all servers share
    if name == "gateway":
        asyncio.run(serve_gateway(port))
        return 0
    if name == "serve":
        serve_model(port)
        return 0
    command, *arguments = COMMANDS[name](port, folder)
    from importlib import import_module

    return int(import_module(command).main(arguments))


def serve_model(port: int) -> None:
    """`toolrl serve` with the embedded model: vLLM's server with our options, in this process."""
    from toolrl.serve.openai_server.__main__ import arguments, serving_command
    from verl.embedded import embedded_path

    options = ["--port", str(port), "--name", "m", "--tool-call-format", "toolrl"]
    given = arguments().read([str(embedded_path("embedded:model")), *options])
    command, environment = serving_command(given, ["--dtype", "float32"])
    os.environ.update(environment)
    module = command.index("-m") + 1
    sys.argv = command[module:]
    runpy.run_module(command[module], run_name="__main__")


async def serve_gateway(port: int) -> None:
    """One session with room for 100,000 tokens, whose policy answers at once."""
    from itertools import repeat

    from tests.toolrl.envs.agent.play import ScriptedPolicy
    from toolrl.envs.agent.address import Address
    from toolrl.envs.agent.gateway import Gateway
    from toolrl.envs.agent.session import Session

    gateway = Gateway(Address("127.0.0.1", port))
    session = Session(ScriptedPolicy(repeat("One."), max_turns=1 << 30), id="s", key=KEY)
    await gateway.start()  # after the model's tokenizer is read, as in a training
    with gateway.serving(session):
        await asyncio.sleep(1 << 20)


def _report_command(port: int, folder: Path) -> list[str]:
    from tests.support.report_run import save_report_run

    run = folder / "run"
    if not run.exists():
        save_report_run(run)
    return ["toolrl.analysis.report.__main__", str(run), "--serve", "--port", str(port)]


def _retrieval_command(port: int, folder: Path) -> list[str]:
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": n, "contents": f"city {n} of land"}) + "\n" for n in range(1000)))
    return ["toolrl.tools.retrieval.server", "--corpus", str(corpus), "--port", str(port)]


COMMANDS: Mapping[str, Callable[[int, Path], list[str]]] = {
    "sandbox": lambda port, _: ["toolrl.sandbox.server", "--isolation", "none", "--port", str(port)],
    "env": lambda port, _: ["toolrl.envs.openenv.server", "--env", "shop", "--port", str(port)],
    "runtime": lambda port, _: ["toolrl.swe.server", "--port", str(port)],
    "retrieval": _retrieval_command,
    "report": _report_command,
}


# The requests


@dataclass(frozen=True)
class Target:
    """A server's path for JSON. body: of a text, of a list, or of other fields"""

    path: str
    text: Callable[[str], Any]
    entries: Callable[[list[Any]], Any]
    headers: str = ""


def _chat(content: str) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": content}]}


def _tool(properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


CHAT_KEY = f"authorization: Bearer {KEY}\r\n"
TARGETS: Mapping[str, Target] = {
    "gateway": Target("/sessions/s/v1/chat/completions", _chat, lambda given: {"messages": given}, CHAT_KEY),
    "serve": Target("/v1/chat/completions", _chat, lambda given: {"model": "m", "messages": given}),
    "sandbox": Target(
        "/run_code",
        lambda text: {"code": "pass", "language": "python", "stdin": text},
        lambda given: {"code": "pass", "language": "python", "fetch_files": given},
    ),
    "env": Target(
        "/mcp",
        lambda text: {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": text}},
        lambda given: {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"arguments": {"a": given}}},
    ),
    "runtime": Target("/execute", lambda text: {"command": ["true", text]}, lambda given: {"command": given}),
    "retrieval": Target("/retrieve", lambda text: {"query": text}, lambda given: {"queries": given}),
    "report": Target("/", lambda text: text, lambda given: given),
}


def whole(target: Target, body: bytes, path: str = "", more: str = "") -> bytes:
    head = HEAD.format(path=path or target.path, more=f"{target.headers}{more}content-length: {len(body)}\r\n\r\n")
    return head.encode() + body


@cache
def requests(name: str) -> Mapping[str, bytes]:
    """What is sent, by kind."""
    target = TARGETS[name]

    def text(given: str) -> bytes:
        return whole(target, json.dumps(target.text(given)).encode())

    def entries(given: list[Any]) -> bytes:
        return whole(target, json.dumps(target.entries(given)).encode())

    def raw(given: str) -> bytes:
        """In place of the text."""
        return whole(target, json.dumps(target.text("@@")).replace('"@@"', given).encode())

    message: Any = {"role": "user", "content": "a"} if name in ("gateway", "serve") else "a"
    chunked = HEAD.format(path=target.path, more=target.headers + "transfer-encoding: chunked\r\n\r\n").encode()
    surrogate = json.dumps(target.text("@@")).encode().partition(b"@@")
    wide = json.dumps(target.text("@@")).replace("@@", "\U0001f600" * 5_000_000).encode("utf-16")
    zipped = gzip.compress(json.dumps(target.text("a b " * 7_500_000)).encode())
    found = {
        "30 MB of 'a b '": text("a b " * 7_500_000),
        "900 kB of 'a b '": text("a b " * 225_000),
        "30 MB of spaces": text(" " * (30 * MB)),
        "30 MB of lone surrogates": raw('"' + r"\ud800" * 5_000_000 + '"'),
        "100,000 entries": entries([message] * 100_000),
        "10,000 entries": entries([message] * 9_999),
        "100,000 lists deep": raw("[" * 100_000 + "]" * 100_000),
        "1.9 million empty lists": raw("[" + "[]," * 1_900_000 + "[]]"),
        "an object of a million keys": raw("{" + ",".join(f'"k{n}":1' for n in range(MB)) + "}"),
        "a number of 30 MB": raw("7" * (30 * MB)),
        "an exponent of 30 MB": raw("1e" + "7" * (30 * MB)),
        "30 MB between two values": raw("[1," + " " * (30 * MB) + "2]"),
        "a key of 30 MB": raw('{"' + r"\u1234" * 5_000_000 + '": 1}'),
        "a key a million times": raw("{" + '"k": 1, ' * MB + '"k": 1}'),
        "200,000 numbers": raw("[" + "1," * 200_000 + "1]"),
        "a million short strings": raw("[" + ",".join(f'"s{n}"' for n in range(MB)) + "]"),
        "30 MB of escapes, not closed": raw('"' + r"\n" * (15 * MB)),
        "surrogates in UTF-8": whole(
            target, b'"'.join((surrogate[0][:-1], b"\xed\xa0\x80" * (10 * MB), surrogate[2][1:]))
        ),
        "20 MB in UTF-16": whole(target, wide),
        "a million long floats": raw("[" + "1.2345678901234567e-300," * MB + "1]"),
        "half a head, 50 times": b"",
        "a slow body": chunked + b"400\r\n" + b" " * 100,
        "30 kB of headers": HEAD.format(path=target.path, more="a: b\r\n" * 5000 + "\r\n").encode(),
        "gzip": whole(target, zipped, more="content-encoding: gzip\r\n"),
        "a million chunks of a byte": chunked + b"1\r\nx\r\n" * MB + b"0\r\n\r\n",
        "10,000 requests in one": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10_000,
    }
    if name in ("gateway", "serve"):
        base = target.path.removesuffix("/v1/chat/completions")
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" + "[]," * 900_000 + "[]]"}}
        tools = [{"type": "function", "function": {"name": f"tool{number}"}} for number in range(10_000)]
        properties = {f"p{number}": {"type": "string"} for number in range(20_000)}
        parts = [{"type": "text", "text": "a"}] * 30_000
        chat = _chat("a")
        changed: Mapping[str, Mapping[str, Any]] = {
            "10,000 tools": {"tools": tools},
            "1,000 tools": {"tools": tools[:1000]},
            "a tool of 20,000 properties": {"tools": [_tool(properties)]},
            "100,000 stop strings": {"stop": [f"stop{number}" for number in range(100_000)]},
            "a bias of a million tokens": {"logit_bias": {str(number): 1 for number in range(MB)}},
            "30,000 parts of a message": {"messages": [{"role": "user", "content": parts}]},
            "JSON of 900,000 lists in arguments": {
                "messages": [
                    *chat["messages"],
                    {"role": "assistant", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c", "content": "a"},
                ]
            },
        }
        found |= {kind: whole(target, json.dumps({**chat, **each}).encode()) for kind, each in changed.items()}
        many = {f"x{number}": 1 for number in range(19_000)}
        found["19,000 unknown fields"] = whole(target, json.dumps({**chat, **many}).encode())
        crowded = {"role": "user", "content": "a", **many}
        found["a message of 19,000 fields"] = whole(target, json.dumps(target.entries([crowded])).encode())
        count = f"{base}/v1/messages/count_tokens"
        for kind, given in (("100,000 messages", [message] * 99_999), ("30 MB", _chat("a b " * 7_500_000)["messages"])):
            body = {"model": "m", "max_tokens": 8, "messages": given}
            found[f"count_tokens of {kind}"] = whole(target, json.dumps(body).encode(), count)
        found["7 MB of 'a b '"] = text("a b " * 1_750_000)
        found["5,000 messages"] = entries([message] * 5_000)
        few = {name: {"type": "string"} for name in map(str, range(9_000))}
        for kind, given in (("900 tools", tools[:900]), ("a tool of 9,000 properties", [_tool(few)])):
            body = {**chat, "tools": given, "tool_choice": "required"}
            found[f"{kind}, a call required"] = whole(target, json.dumps(body).encode())
        for kind, items in {
            "500 empty items": [{}] * 500,
            "500 items": [message] * 500,
            "an item of 9,000 empty parts": [{"role": "user", "content": [{}] * 9_000}],
            "9,000 numbers as parts": [{"role": "user", "content": [1] * 9_000}],
        }.items():
            body = {"model": "m", "input": items}
            found[f"responses: {kind}"] = whole(target, json.dumps(body).encode(), f"{base}/v1/responses")
            body = {"model": "m", "max_tokens": 8, "messages": items}
            found[f"messages: {kind}"] = whole(target, json.dumps(body).encode(), f"{base}/v1/messages")
            found[f"chat: {kind}"] = whole(target, json.dumps(body).encode())
    if name == "serve":
        for kind, given in (("a million", MB), ("500,000", 500_000), ("900", 900)):
            body = {"model": "m", "max_tokens": 8, "prompt": [7] * given}
            found[f"{kind} token ids"] = whole(target, json.dumps(body).encode(), "/v1/completions")
    if name == "gateway":
        for kind, given in {
            "a million token ids": list(range(1000)) * 1000,
            "90,000 token ids": list(range(900)) * 100,
            "a million ids that are texts": [f"s{number}" for number in range(MB)],
        }.items():
            found[kind] = whole(target, json.dumps({"input_ids": given}).encode(), "/sessions/s/generate")
        found["100,000 parts of a reward"] = whole(
            target,
            json.dumps({"reward": 1, "parts": {f"p{n}": 1 for n in range(100_000)}}).encode(),
            "/sessions/s/reward",
        )
    if name == "runtime":
        line = "--x\r\ncontent-disposition: form-data; name=a\r\n\r\n1\r\n"
        form = (line * 100_000 + "--x--\r\n").encode()
        head = whole(target, form, "/upload").replace(b"application/json", b"multipart/form-data; boundary=x")
        found["100,000 fields of a form"] = head
        head = (
            whole(target, b"", f"/image/{'a' * 40}")
            .replace(b"POST", b"PUT")
            .replace(b"length: 0", b"length: 500000000")
        )
        found["an image of 500 MB"] = head.replace(b"application/json", b"application/x-tar") + bytes(500 * MB)
    return found


def send(port: int, kind: str, data: bytes, most_s: float) -> str:
    """The status of the answer, or what else came."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=most_s)) as connection:
        if kind.startswith("half"):
            halves = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
            for each in halves:
                each.sendall(b"POST /x HTTP/1.1\r\nhost: loc")
            time.sleep(0.2)
            for each in halves:
                each.close()
            return "closed"
        try:
            connection.sendall(data)
            if kind.startswith("a slow"):
                return "closed"
            answer = connection.recv(65536)
        except TimeoutError:
            return "none"
        except ConnectionError as error:
            answer = b""
            with suppress(OSError):
                answer = connection.recv(65536)
            if not answer:
                return type(error).__name__
    return answer.partition(b" ")[2].partition(b" ")[0].decode() or "closed"


# The measurement


@contextmanager
def running(name: str, folder: Path) -> Iterator[tuple[int, Path]]:
    """(port, report) of a server that has started"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    report = folder / f"{name}.gaps"
    report.touch()
    command = [sys.executable, __file__, "--serve", name, str(port), str(report), str(folder)]
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": paths})
        try:
            for _ in range(3000):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert process.poll() is None, (folder / f"{name}.log").read_text()[-3000:]
                time.sleep(0.1)
            time.sleep(2 * SETTLE_S)
            yield port, report
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def worst(report: Path, since: float) -> Figures:
    """Of the gaps after a time, in ms: the longest; the most CPU time of the loop's thread, of the process, of garbage
    collection, which is no part of the second."""
    lines = [tuple(map(float, line.split())) for line in report.read_text().splitlines() if line.count(" ") == 4]
    late = [
        (gap, own, of_all - collected, collected)
        for start, gap, own, of_all, collected in lines
        if start + gap / 1000 >= since
    ]
    return tuple(max(each, default=0.0) for each in zip(*late, strict=True)) or (0.0, 0.0, 0.0, 0.0)


@dataclass
class Kind:
    """What the requests of a kind led to. statuses: in the order of the requests"""

    statuses: list[str] = field(default_factory=list)
    most: Figures = (0.0, 0.0, 0.0, 0.0)

    def add(self, status: str, figures: Figures) -> None:
        self.statuses.append(status)
        self.most = tuple(map(max, zip(self.most, figures, strict=True)))


def drawn(kinds: Sequence[str], count: int, seed: int) -> list[str]:
    """That many, each kind at least once."""
    draw = random.Random(seed)
    found = [*kinds, *draw.choices(kinds, k=max(0, count - len(kinds)))]
    draw.shuffle(found)
    return found


def measure(name: str, count: int, seed: int, most_s: float, folder: Path) -> dict[str, Kind]:
    """By kind; `(idle)` is a loop without requests."""
    kinds: defaultdict[str, Kind] = defaultdict(Kind)
    with running(name, folder) as (port, report):
        since = time.monotonic()
        time.sleep(5)
        kinds["(idle)"].add("", worst(report, since))
        for kind in drawn([*requests(name)], count, seed):
            since = time.monotonic()
            status = send(port, kind, requests(name)[kind], most_s)
            time.sleep(SETTLE_S)
            deadline = time.monotonic() + most_s
            while _is_blocked(port) and time.monotonic() < deadline:  # a loop that is blocked has not reported it
                time.sleep(SETTLE_S)
            kinds[kind].add(status, worst(report, since))
    return kinds


def _is_blocked(port: int) -> bool:
    with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), timeout=1)) as connection:
        connection.sendall(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return not connection.recv(100)
    return True


def _shown(figures: Figures) -> str:
    return "gap {:6.0f} ms, CPU of the loop {:5.0f}, of the process {:5.0f}, collection {:4.0f}".format(*figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", nargs="+", default=["gateway", "serve", *COMMANDS])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-ms", type=float, default=100.0)
    parser.add_argument("--most-s", type=float, default=60.0)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        name, port, report, folder = options.serve
        sys.exit(serve_watched(Path(report), name, int(port), Path(folder)))
    longest = {}
    for name in options.servers:
        print(f"\n{name}, load {os.getloadavg()[0]:.1f}", flush=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            kinds = measure(name, options.requests, options.seed, options.most_s, Path(folder))
        idle = kinds.pop("(idle)")
        print(f"  {'(idle)':36s} {'':14s} {_shown(idle.most)}")
        for kind, found in sorted(kinds.items(), key=lambda each: -each[1].most[0]):
            statuses = " ".join(sorted(set(found.statuses)))
            print(f"  {kind:36s} {len(found.statuses):3d} {statuses:>10s} {_shown(found.most)}")
        most = tuple(map(max, zip(*(each.most for each in kinds.values()), strict=True)))
        count, took = sum(len(each.statuses) for each in kinds.values()), time.monotonic() - started
        title = f"longest of {count} requests in {took:.0f} s"
        print(f"  {title:51s} {_shown(most)}; load {os.getloadavg()[0]:.1f}", flush=True)
        longest[name] = most[0]
    late = [name for name, gap in longest.items() if gap > options.most_ms]
    if late:
        sys.exit(f"longer than {options.most_ms:g} ms: {', '.join(late)}")


if __name__ == "__main__":
    main()
