"""`toolrl serve`: the real server, and the official client."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, need_vllm
from tests.support.service import free_port
from tests.toolrl.serve.openai_server.test_chat_template import chat, trained_ids
from toolrl.cli import main as toolrl
from toolrl.serve.openai_server.__main__ import _CPU_DEFAULTS, _ENTRY
from toolrl.servers.serving import HEADER_S
from verl.data.rows import read_rows
from verl.embedded import embedded_path
from verl.formats.base import Calls, build_tool_call_format
from verl.formats.toolrl import HISTORY_HEADING

TOOL = re.compile(r"^\d+\. Name: (.*)\nDescription: (.*)\nParameters: (.*)$", re.MULTILINE)
SETTINGS = {
    "data.train_files": ["embedded:train.parquet"],
    "data.val_files": ["embedded:test.parquet"],
    "env.name": "single_turn",
    "env.tool_call_format": None,
    "reward.name": "rlla",
}
START_S = 400


def make_run(folder: Path, settings: dict[str, Any] = SETTINGS, model: str = "embedded:model") -> Path:
    """The output folder of a run with one checkpoint."""
    checkpoint = folder / "checkpoints" / "step-000048"
    shutil.copytree(embedded_path(model), checkpoint / "hf")
    (checkpoint / "state.json").write_text(json.dumps({"command": "train", "resume_config": settings}))
    (folder / "checkpoints" / "latest.json").write_text(
        json.dumps({"step": 48, "folder": "step-000048", "score": None})
    )
    return folder


def openai_request(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the embedded data, whose tools are text, in OpenAI's form."""
    system, user = (message["content"] for message in row["prompt"])
    tools = [
        {"name": name, "description": text, "parameters": {"type": "object", "properties": json.loads(parameters)}}
        for name, text, parameters in TOOL.findall(system)
    ]
    history = user.removeprefix(f"{HISTORY_HEADING}\n<user> ").removesuffix(" </user>")
    return {
        "messages": [{"role": "user", "content": history}],
        "tools": [{"type": "function", "function": function} for function in tools],
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{tmp}/none"], "there is no folder"),
        (["{tmp}/empty"], "holds a run without a checkpoint"),
        (["{tmp}"], "neither the folder of a run"),
        (["{tmp}/run", "--checkpoint", "best"], "has no best checkpoint: best needs validation scores"),
        (["{tmp}/run", "--tool-call-format", "toolr"], "did you mean 'toolrl'?"),
        (["{tmp}/run", "--tool-call-format", "toolrl", "--option", "nosuch=1"], "has no option 'nosuch'"),
        (["{tmp}/run", "--option", "in_thought=true"], "--option needs --tool-call-format"),
        (["{tmp}/run", "--port", "{busy}"], "cannot listen on 127.0.0.1 port {busy}"),
        (["embedded:model"], "names no tool-call format"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_run_that_cannot_be_served_is_one_error(
    arguments: list[str], problem: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    need_vllm()
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").touch()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        values = {"tmp": tmp_path, "busy": busy.getsockname()[1]}
        with pytest.raises(SystemExit) as ended:
            toolrl(["serve", *(each.format(**values) for each in arguments)])
    assert ended.value.code == 2
    error = capfd.readouterr().err
    assert problem.format(**values) in error.replace("\n", " ")
    assert "Traceback" not in error


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the embedded model."""
    need_vllm()
    folder = tmp_path_factory.mktemp("serve")
    with serving(make_run(folder / "mini"), folder / "log", "--api-key", "secret") as address:
        yield address


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of `toolrl serve`, in float32; it ends with the block."""
    port = free_port()
    command = [sys.executable, "-m", "toolrl.cli", "serve", str(model), "--port", str(port), *options]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--", "--dtype", "float32"], stdout=output, stderr=output)
        try:
            wait_for(process, port, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    import httpx2

    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx2.HTTPError:
            time.sleep(1)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


@pytest.mark.slow
def test_the_official_client_gets_the_calls_of_the_trained_policy(server: str, tmp_path: Path) -> None:
    """100 requests in OpenAI's form: the tokens of training, and the calls of `toolrl generate`."""
    openai = pytest.importorskip("openai")
    rows = [*read_rows(embedded_path("embedded:test.parquet"))][:140]
    rows = [row for row in rows if "\n\n" not in row["prompt"][1]["content"]][:100]  # without a history
    expected = generated(rows, tmp_path)
    client = openai.OpenAI(base_url=server, api_key="secret")
    toolrl_format = build_tool_call_format("toolrl")

    def check(row: dict[str, Any], prompt: list[int], response: str) -> bool:
        request = {**openai_request(row), "model": "mini", "temperature": 0.0, "max_tokens": 96}
        answer = client.chat.completions.create(**request, extra_body={"return_token_ids": True})
        assert answer.prompt_token_ids == prompt
        message = answer.choices[0].message
        parsed = toolrl_format.parse(response)
        calls = [(call.name, dict(call.arguments)) for call in parsed.calls] if isinstance(parsed, Calls) else []
        assert read_calls(message.tool_calls) == calls, response
        assert not calls or answer.choices[0].finish_reason == "tool_calls"
        assert calls or message.content == response
        assert streamed(client, request) == (message.content or "", calls)
        return bool(calls)

    with ThreadPoolExecutor(16) as pool:
        with_calls = [*pool.map(check, rows, *zip(*expected, strict=True))]
    assert len(with_calls) == 100 and sum(with_calls) >= 70


def generated(rows: list[dict[str, Any]], folder: Path) -> list[tuple[list[int], str]]:
    """(prompt tokens, response) of `toolrl generate`, greedy."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl.build.run import load_chat_template
    from verl.config.schema import ModelConfig
    from verl.data.messages import read_messages

    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    settings = [
        "model.path=embedded:model",
        f"data.val_files=[{folder / 'rows.parquet'}]",
        f"eval.output={folder / 'transcripts.jsonl'}",
        *("rollout.name=hf", "model.compute_dtype=float32", "data.max_response_length=96", "trainer.device=cpu"),
    ]
    subprocess.run([sys.executable, "-m", "toolrl.cli", "generate", *settings], check=True, capture_output=True)
    chat = load_chat_template(ModelConfig(path=embedded_path("embedded:model")))
    lines = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    prompts = [list(chat.prompt_ids(read_messages(row["prompt"], "prompt"))) for row in rows]
    return [(prompt, line["responses"][0]["content"]) for prompt, line in zip(prompts, lines, strict=True)]


def read_calls(calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or ()]


def streamed(client: Any, request: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """The content and calls of a streamed answer, reassembled from its chunks."""
    content, names, arguments = "", {}, {}
    for chunk in client.chat.completions.create(**request, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            names[call.index] = names.get(call.index, "") + (call.function.name or "")
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return content, [(names[index], json.loads(arguments[index])) for index in sorted(names)]


@pytest.mark.slow
def test_connections_have_the_limits_of_our_servers(server: str) -> None:
    """Which vLLM opens itself."""
    place = ("127.0.0.1", int(server.removesuffix("/v1").rpartition(":")[2]))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    with socket.create_connection(place, timeout=60) as chunked, socket.create_connection(place, timeout=60) as half:
        half.sendall(head)
        started = time.monotonic()
        chunked.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000)
        assert b"chunks of a few bytes" in chunked.recv(1000)
        assert half.recv(1000) == b"" and time.monotonic() - started < HEADER_S + 5


@pytest.mark.slow
def test_history_reaches_the_policy_as_in_training(server: str, tmp_path: Path) -> None:
    """Through vLLM's own reading of messages: arguments as text, no content, parts of content."""
    openai = pytest.importorskip("openai")
    row = next(iter(read_rows(embedded_path("embedded:test.parquet"))))
    prompt = TOOL.sub("", row["prompt"][0]["content"]).rstrip("\n") + "\n{tools}"
    (tmp_path / "prompt.txt").write_text(prompt)
    call = {"id": "c0", "type": "function", "function": {"name": "get_rain", "arguments": '{"city":"Kala"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Rain in Kala?"}, {"type": "text", "text": "Now?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": '{"rain":  7, "note": "\\u00e9"}'},
        {"role": "assistant", "content": "<response> 7. </response>"},
        {"role": "user", "content": "And in Miri?"},
    ]
    city = {"city": {"type": "str", "description": "place"}}
    tools = [{"type": "function", "function": {"name": "get_rain", "parameters": {"properties": city}}}]
    client = openai.OpenAI(base_url=server, api_key="secret")
    answer = client.chat.completions.create(
        model="mini", messages=messages, tools=tools, max_tokens=1, extra_body={"return_token_ids": True}
    )
    toolrl_format = build_tool_call_format("toolrl", {"prompt_template": str(tmp_path / "prompt.txt")})
    assert answer.prompt_token_ids == trained_ids(chat(), toolrl_format, messages, tools)


@pytest.mark.slow
def test_a_request_decides_about_calls_in_every_api(server: str) -> None:
    """The embedded policy writes a call of the chosen tool, with arguments of its schema, streamed or not."""
    openai = pytest.importorskip("openai")
    request = openai_request(next(iter(read_rows(embedded_path("embedded:test.parquet")))))
    names = [tool["function"]["name"] for tool in request["tools"]]
    ping = {"type": "object", "properties": {"host": {"type": "string", "enum": ["a", "b"]}}, "required": ["host"]}
    request["tools"].append({"type": "function", "function": {"name": "ping", "parameters": ping}})
    request |= {"model": "mini", "temperature": 0.0, "max_tokens": 200}
    client = openai.OpenAI(base_url=server, api_key="secret", max_retries=0)
    named = {"type": "function", "function": {"name": "ping"}}
    for choice, allowed in (
        (named, ["ping"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}, ["ping"]),
        ("required", [*names, "ping"]),
    ):
        message = client.chat.completions.create(**request, tool_choice=choice).choices[0].message
        calls = read_calls(message.tool_calls)
        assert calls and all(name in allowed for name, _ in calls)
        assert all(arguments["host"] in ("a", "b") for name, arguments in calls if name == "ping")
        assert streamed(client, {**request, "tool_choice": choice}) == (message.content or "", calls)
    tools = [{"type": "function", **tool["function"]} for tool in request["tools"]]
    done = client.responses.create(
        model="mini",
        input=request["messages"],
        tools=tools,
        tool_choice={"type": "function", "name": "ping"},
        temperature=0.0,
        max_output_tokens=200,
    )
    assert [item.name for item in done.output if item.type == "function_call"] == ["ping"]


@pytest.mark.slow
def test_tools_that_the_template_cannot_list_are_refused(tmp_path: Path) -> None:
    """The embedded model's chat template has no tools, on which the format hermes relies."""
    need_vllm()
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    function = {"name": "get_rain", "parameters": {"type": "object", "properties": {}}}
    request: Any = {"model": "model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    problem = "chat template does not list tools, .* --tool-call-format toolrl"
    with serving(Path("embedded:model"), tmp_path / "log", "--name", "model", "--tool-call-format", "hermes") as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        assert client.chat.completions.create(**request).choices[0].message.content
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=problem):
                tools = [{"type": "function", "function": function}]
                client.chat.completions.create(**request, tools=tools, stream=stream)
        with pytest.raises(openai.BadRequestError, match=problem):
            client.responses.create(model="model", input="Hello", tools=[{"type": "function", **function}])
        with pytest.raises(anthropic.BadRequestError, match=problem):
            own = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
            own.messages.create(**request, tools=[{"name": "get_rain", "input_schema": function["parameters"]}])


@pytest.mark.slow
def test_vllms_own_server_answers_as_ours_on_an_exported_folder(server: str, tmp_path: Path) -> None:
    """By the command of the folder's own card: the same contents, calls and ends, streamed or whole."""
    openai = pytest.importorskip("openai")
    run, folder, port = make_run(tmp_path / "run"), tmp_path / "exported", free_port()
    command = [sys.executable, "-m", "toolrl.cli", "export", str(run), "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    documented = re.search(r"^vllm serve \. (.*?)^```", (folder / "README.md").read_text(), re.M | re.S)
    assert documented is not None
    own = ["--model", ".", "--served-model-name", "mini", "--dtype", "float32", "--enforce-eager", "--port", str(port)]
    options = [*shlex.split(documented[1].replace("\\\n", " ")), *own]  # `vllm serve` is not in the CPU distribution
    environment = {"PYTHONPATH": str(ROOT), **_CPU_DEFAULTS, **os.environ}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", _ENTRY, *options], cwd=folder, env=environment, stderr=log)
        try:
            wait_for(process, port, tmp_path / "log")
            theirs = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            compare(openai.OpenAI(base_url=server, api_key="secret"), theirs)
        finally:
            process.terminate()
            process.wait(60)


def compare(ours: Any, theirs: Any) -> None:
    rows = [*read_rows(embedded_path("embedded:test.parquet"))][:60]
    requests = [{**openai_request(row), "model": "mini", "temperature": 0.0, "max_tokens": 96} for row in rows]
    plain = {name: each for name, each in requests[0].items() if name != "tools"}
    requests += [plain, {**requests[0], "tool_choice": "none"}, {**requests[0], "tool_choice": "auto"}]
    requests += [{**requests[0], "max_tokens": 9}, {**requests[0], "stop": ["tool_call"]}]

    def check(request: dict[str, Any]) -> tuple[int, bool, str]:
        content, calls, finish = found = whole(ours, request)
        assert whole(theirs, request) == found
        for client in (ours, theirs):
            assert streamed(client, request) == (content, calls)
        return len(calls), "<think>" in content, finish

    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(check, requests)]
    numbers, thoughts, finishes = zip(*answers, strict=True)
    print(f"calls: {Counter(numbers)}, with a thought: {sum(thoughts)}, finish reasons: {Counter(finishes)}")
    assert {0, 1, 2} <= {*numbers} and any(thoughts) and {*finishes} == {"stop", "length", "tool_calls"}


def whole(client: Any, request: dict[str, Any]) -> tuple[str, list[tuple[str, Any]], str]:
    choice = client.chat.completions.create(**request).choices[0]
    return choice.message.content or "", read_calls(choice.message.tool_calls), choice.finish_reason


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tool_choice_decides_about_calls(server: str, stream: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    asked = openai_request(next(iter(read_rows(embedded_path("embedded:test.parquet")))))
    functions = [tool["function"] for tool in asked["tools"]]
    tools = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]
    ping = {"type": "object", "properties": {"host": {"type": "string", "enum": ["a", "b"]}}, "required": ["host"]}
    tools.append({"name": "ping", "input_schema": ping, "strict": True})  # which no training has seen
    client = anthropic.Anthropic(base_url=server.removesuffix("/v1"), auth_token="secret", max_retries=0)
    greedy = {"temperature": 0.0}  # which the SDK does not know
    request: Any = {"model": "mini", "messages": asked["messages"], "max_tokens": 200, "extra_body": greedy}

    def ask(choice: Any, tools: list[Any]) -> Any:
        offered = {"tools": tools} if tools else {}
        if not stream:
            return client.messages.create(**request, **offered, tool_choice=choice)
        with client.messages.stream(**request, **offered, tool_choice=choice) as events:
            return events.get_final_message()

    for choice, names in (({"type": "tool", "name": "ping"}, ["ping"]), ({"type": "any"}, [t["name"] for t in tools])):
        done = ask(choice, tools)
        calls = [block for block in done.content if block.type == "tool_use"]
        assert done.stop_reason == "tool_use" and calls and {call.name for call in calls} <= {*names}
        assert all(call.input in ({"host": "a"}, {"host": "b"}) for call in calls if call.name == "ping")
    alone = ask({"type": "any", "disable_parallel_tool_use": True}, tools)
    assert [block.type for block in alone.content if block.type != "text"] == ["tool_use"]
    written = ask({"type": "none"}, tools)
    assert written.stop_reason == "end_turn" and [block.type for block in written.content] == ["text"]
    shown = ask({"type": "auto"}, tools).usage.input_tokens
    assert written.usage.input_tokens == shown  # the tools are listed all the same
    loose = [{name: each for name, each in tool.items() if name != "strict"} for tool in tools]
    assert ask({"type": "auto"}, loose).usage.input_tokens == shown
    for choice, offered, problem in (
        ({"type": "tool", "name": "no"}, tools, "tool_choice names 'no', which is not in tools"),
        ({"type": "any"}, [], "tool_choice demands a call, but there are no tools"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=problem):
            ask(choice, offered)


@pytest.mark.slow
def test_the_server_refuses_what_it_would_drop(server: str) -> None:
    openai = pytest.importorskip("openai")
    request = openai_request(next(iter(read_rows(embedded_path("embedded:test.parquet")))))
    client = openai.OpenAI(base_url=server, api_key="secret", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="functions cannot be used here; write tools"):
        client.chat.completions.create(**request, model="mini", extra_body={"functions": [{"name": "a"}]})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server, api_key="wrong").chat.completions.create(**request, model="mini")
    answer = client.chat.completions.create(**request, model="mini", tool_choice="none", temperature=0.0, max_tokens=96)
    assert answer.choices[0].message.tool_calls in (None, [])
