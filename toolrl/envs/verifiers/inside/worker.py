"""Runs environments of verifiers 0.4 for the trainer: a file that `env.options.python` runs. Imports nothing of ours.

    python worker.py '{"id": "my_taskset", "taskset": {..}, "env": {..}}'

verifiers plays an episode with its own program (harness), which asks an OpenAI endpoint for the policy's responses.
That endpoint is in here: a request becomes a line on stdout, its answer a line on stdin. A line is a JSON object.

    stdin                                              stdout
                                                       {"ready": true}
    {"list": 10}                                       {"task": {..}} .., {"listed": 10}
    {"start": episode, "task": {..}}                   {"episode", "messages": [..], "tools": [..]}: a request
    {"answer": episode, "message": {..}}               the next request, or {"episode", "reward", "parts", "error"}
    {"stop": episode}

The end of stdin ends the process and the programs that it has started.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from typing import Any

import verifiers.v1 as vf
from aiohttp import web

MAX_LINE = 1 << 28
ENDED = "the episode has ended"


class Episode:
    """One episode, and its request that waits for the policy."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.answer: asyncio.Future[dict[str, Any]] | None = None
        self.problem = ""


class Worker:
    def __init__(self, options: dict[str, Any], out: Any) -> None:
        fields = {"taskset": {**options["taskset"], "id": options["id"]}, **options["env"]}
        kind = vf.env_config_type(options["id"], fields.get("id", ""))
        self.env = vf.load_environment(kind.model_validate(with_agents(kind, fields, options["id"])))
        check_commands(self.env.config)
        self.task_class = type(self.env.taskset).task_type()
        self.episodes: dict[Any, Episode] = {}
        self.by_trace: dict[str, Any] = {}
        self.context: Any = None
        self.out = out

    def send(self, **line: Any) -> None:
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()

    async def serve(self) -> None:
        app = web.Application(client_max_size=MAX_LINE)
        app.router.add_post("/v1/chat/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        client = vf.EvalClientConfig(base_url=url, api_key_var="TOOLRL_NO_KEY")
        self.context = vf.ModelContext(model="policy", client=client, sampling=vf.Sampling())
        async with self.env.serving():
            self.send(ready=True)
            try:
                await self.read()
            finally:
                running = [each.task for each in self.episodes.values() if each.task is not None]
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        await runner.cleanup()

    async def read(self) -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        while line := await reader.readline():
            self.handle(json.loads(line))

    def handle(self, line: dict[str, Any]) -> None:
        if "list" in line:
            self.list(line["list"])
        elif "start" in line:
            episode = self.episodes[line["start"]] = Episode()
            episode.task = asyncio.create_task(self.play(line["start"], episode, line["task"]))
        elif "answer" in line:
            asked = self.episodes.get(line["answer"])
            if asked is not None and asked.answer is not None and not asked.answer.done():
                asked.answer.set_result(line["message"])
        elif "stop" in line:
            stopped = self.episodes.pop(line["stop"], None)
            if stopped is not None and stopped.task is not None:
                stopped.task.cancel()

    def list(self, count: int) -> None:
        tasks = itertools.islice(self.env.taskset, count)
        number = 0
        for task in tasks:
            data = task.data.model_dump(mode="json", exclude_none=True)
            self.send(task=data)
            number += 1
        self.send(listed=number)

    async def play(self, name: Any, episode: Episode, data: dict[str, Any]) -> None:
        end: dict[str, Any] = {"reward": None, "parts": {}, "error": None}
        traces: list[Any] = []

        def minted(trace: Any) -> None:
            traces.append(trace)
            self.by_trace[trace.id] = name
            if len(traces) > 1:
                episode.problem = "several agents in one episode"

        try:
            task = self.task_class(self.task_class.data_type().model_validate(data), self.env.config.taskset.task)
            (slot,) = self.env.slots(task)
            played = await self.env.run_slot(slot, self.context, on_trace=minted)
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            if episode.problem or errors or not played.ok:
                problems = "; ".join(f"{each.type}: {each.message}" for each in errors)
                end["error"] = episode.problem or problems or "the episode is not ok"
            else:
                (trace,) = played.traces
                end["reward"] = trace.reward
                rewards = {key: each.score for key, each in trace.rewards.items() if each is not None}
                numbers = {**trace.metrics, **rewards}
                end["parts"] = {key: float(each) for key, each in numbers.items() if isinstance(each, int | float)}
        except Exception as error:  # noqa: BLE001  of the environment: a fault of this episode
            end["error"] = f"{type(error).__name__}: {error}"
        finally:
            for trace in traces:
                self.by_trace.pop(trace.id, None)
        if self.episodes.pop(name, None) is not None:
            self.send(episode=name, **end)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """An OpenAI chat completion by the policy."""
        body = await request.json()
        name = self.by_trace.get(request.headers.get("X-Session-ID", ""))
        episode = self.episodes.get(name)
        if episode is None:
            return refusal(ENDED)
        if episode.answer is not None and not episode.answer.done():
            episode.problem = "two requests at a time"
        if episode.problem:
            return refusal(episode.problem)
        episode.answer = asyncio.get_running_loop().create_future()
        self.send(episode=name, messages=body["messages"], tools=body.get("tools") or [])
        message = await episode.answer
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        if body.get("stream"):
            return await stream(request, message, reason)
        return web.json_response(completion("chat.completion", message=message, finish_reason=reason))


def roles(config: Any) -> dict[str, Any]:
    """The agents of a configuration class, with their defaults."""
    return {
        name: each.default for name, each in config.model_fields.items() if isinstance(each.default, vf.AgentConfig)
    }


def with_agents(kind: Any, options: dict[str, Any], id: str) -> dict[str, Any]:
    """Programs run on this machine, not at a provider; the general one is `null`, a chat loop without commands."""
    agents = {}
    for name, default in roles(kind).items():
        agents[name] = dict(options.get(name) or {})
        if "prime" in str(default.runtime.type):
            agents[name].setdefault("runtime", {"type": "subprocess"})
        if default.harness is None and vf.default_harness_id(id) == "bash":
            agents[name].setdefault("harness", {"id": "null"})
    return {**options, **agents}


def check_commands(config: Any) -> None:
    """Raises ValueError for a program that would run the policy's commands on this machine."""
    harnesses = config.agent_harnesses()
    for name in roles(type(config)):
        local = getattr(config, name).runtime.type == "subprocess"
        if local and vf.load_harness(harnesses[name]).EXECUTES_CODE:
            problem = f"the harness {harnesses[name].id} would run commands of the policy on this machine"
            raise ValueError(f"{problem}; set env.options.env.{name}.runtime, for example {{type: docker}}")


def refusal(problem: str) -> web.Response:
    return web.json_response({"error": {"message": problem, "type": "invalid_request_error"}}, status=400)


def completion(kind: str, **choice: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    choices = [{"index": 0, **choice}]
    now = int(time.time())
    return {"id": "policy", "object": kind, "created": now, "model": "policy", "choices": choices, "usage": usage}


async def stream(request: web.Request, message: dict[str, Any], reason: str) -> web.StreamResponse:
    """The completion as one chunk."""
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or [])]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    chunk = completion("chat.completion.chunk", delta=delta, finish_reason=reason)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
    return response


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints is no line of ours
    try:
        worker = Worker(json.loads(sys.argv[1]), out)
    except Exception as error:
        out.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}) + "\n")
        out.flush()
        raise SystemExit(1) from error
    asyncio.run(worker.serve())


if __name__ == "__main__":
    main()
