"""1,000 requests to `toolrl serve`: does any resource of the server grow?

    python bench/soak_serve.py [--requests 1000] [--model embedded:model] [-- VLLM OPTIONS]

Chat completions with tools, every second one streamed and every tenth with a body that is refused, eight at a time.
After every ten requests: memory, descriptors, threads and sockets of all processes of the server together, and its
temporary files. No regression line through the second half may rise by more than 5 %.

A table goes to standard error and JSON to standard output. The exit code is 1 if a bound is violated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
from common import ROOT, console, machine, versions
from rich.table import Table
from soak import MAX_GROWTH, Soaked, end

from tests.support.service import free_port

_AT_A_TIME, _EVERY = 8, 10
_START_S, _REQUEST_S = 600.0, 300.0
_FIGURES = ("memory, MiB", "descriptors", "threads", "sockets", "temporary files")
_TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_REQUEST = {
    "tools": [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": _TOOL}}],
    "max_tokens": 16,
}


def measured(server: psutil.Process, temporary: Path) -> dict[str, float]:
    """Sums over the server and its descendants."""
    found = dict.fromkeys(_FIGURES, 0.0)
    for each in (server, *server.children(recursive=True)):
        with suppress(psutil.Error):
            found["memory, MiB"] += each.memory_full_info().uss / 2**20
            found["descriptors"] += each.num_fds()
            found["threads"] += each.num_threads()
            found["sockets"] += len(each.net_connections("all"))
    found["temporary files"] = float(sum(len(files) for _, _, files in os.walk(temporary)))
    return found


def ask(url: str, number: int) -> bool:
    """Send a request; whether it was answered as it has to be."""
    refused = number % _EVERY == 0
    messages: Any = 7 if refused else [{"role": "user", "content": f"What is the weather in town {number}?"}]
    body = {**_REQUEST, "messages": messages, "stream": number % 2 == 1}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=_REQUEST_S)
    return answer.status_code == (400 if refused else 200)


def soaked(url: str, server: psutil.Process, temporary: Path, requests: int) -> tuple[Soaked, int]:
    """(the samples, by the number of requests; how many requests were answered otherwise)"""
    found, wrong = Soaked(), 0
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for start in range(0, requests, _EVERY):
            answers = list(pool.map(lambda number: ask(url, number), range(start, min(start + _EVERY, requests))))
            wrong += answers.count(False)
            found.add(start // _EVERY + 1, measured(server, temporary))
    return found, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--model", default="embedded:model")
    own, _, further = " ".join(sys.argv[1:]).partition("-- ")
    options = parser.parse_args(own.split())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended, too
    folder = Path(tempfile.mkdtemp(prefix="soak-serve-"))
    console.print(f"in {folder}")
    (folder / "tmp").mkdir()
    port = free_port()
    command = [sys.executable, "-m", "toolrl.cli", "serve", options.model, "--port", str(port), "--no-token"]
    command += ["--tool-call-format", "toolrl", "--", "--dtype", "float32", *further.split()]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
    with ExitStack() as stack, (folder / "output.txt").open("wb") as output:
        server = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables, cwd=ROOT)
        stack.callback(end, server)
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
        while not _answers(url):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "output.txt").read_text()[-3000:]
            time.sleep(1)
        began = time.monotonic()
        found, wrong = soaked(url, server, folder / "tmp", options.requests)
        seconds = time.monotonic() - began
    return report(found, options.requests, seconds, wrong)


def report(found: Soaked, requests: int, seconds: float, wrong: int) -> int:
    """Print table and JSON. Returns the exit code."""
    table, figures = Table("", "first", "median", "last", "growth"), {}
    for name in _FIGURES:
        values = [value for _, value in found.figures[name]]
        each = {"first": values[0], "median": statistics.median(values), "last": values[-1]}
        figures[name] = {**each, "growth": found.growth(name, of=0.5)}
        growth = figures[name]["growth"]
        table.add_row(name, *map("{:.4g}".format, each.values()), "not judged" if growth is None else f"{growth:+.2%}")
    met = not wrong and all(each["growth"] is not None and each["growth"] <= MAX_GROWTH for each in figures.values())
    console.print(table)
    console.print(f"{requests} requests in {seconds:.0f} s, {wrong} answered otherwise than they had to be")
    facts = {"requests": requests, "seconds": seconds, "wrong": wrong, "figures": figures}
    print(json.dumps({**facts, "met": met, "machine": machine(), "versions": versions()}), flush=True)
    return 0 if met else 1


def _answers(url: str) -> bool:
    with suppress(httpx2.HTTPError):
        return httpx2.get(f"{url}/health", timeout=5).status_code == 200
    return False


if __name__ == "__main__":
    sys.exit(main())
