"""The programs of examples/agents against the server of the trained model: they see what they saw in training."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import need_vllm
from tests.examples.test_agents import EXAMPLES, PRODUCT, in_ledger, node_path, played, program, thoughtful
from tests.support.tiny import save_long_model
from tests.toolrl.benchmarks.runner.eval_play import chat
from tests.toolrl.serve.openai_server.test_serve import free_port, wait_for
from toolrl.envs.agent.agent import task_json
from toolrl.serve.openai_server.__main__ import serving_command

pytestmark = pytest.mark.slow
OPTIONS = {"prompt_template": "artist_tools"}  # lists the tools, and renders calls, whatever the chat template
SERVED = (
    *("openai_loop", "anthropic_loop", "langgraph_agent", "node_loop"),
    *("agents_sdk", "pydantic_ai_agent", "pydantic_ai_agent:run_with_output_type", "litellm_loop", "smolagents_agent"),
)
SCRIPTED = Path(__file__).with_name("scripted_server.py")
START = """
import asyncio, importlib, inspect, json, os, sys
file, function, task = sys.argv[1:]
sys.path.insert(0, os.path.dirname(file))
run = getattr(importlib.import_module(os.path.basename(file)[:-3]), function)
reward = run(os.environ["OPENAI_BASE_URL"], json.load(open(task)))
json.dump(asyncio.run(reward) if inspect.isawaitable(reward) else reward, open(os.environ["REWARD_FILE"], "w"))
"""
__all__ = ["node_path"]


@dataclass(frozen=True)
class Scripted:
    """A running server, with the files of its responses and of the prompts that they follow."""

    port: int
    texts: Path
    prompts: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """All of `toolrl serve` but the engine."""
    need_vllm()
    folder = tmp_path_factory.mktemp("programs")
    found = Scripted(free_port(), folder / "texts.json", folder / "prompts.jsonl")
    options = argparse.Namespace(
        model=str(save_long_model(folder / "model")),  # smolagents' prompt alone has over 2,000 tokens
        checkpoint="latest",
        name="policy",
        tool_call_format="hermes",
        option=[*OPTIONS.items()],
        prompt_template=None,
        host="127.0.0.1",
        port=found.port,
        api_key=None,
        token_file=None,
        no_token=True,
    )
    command, environment = serving_command(options, ["--dtype", "float32"])
    own = command[command.index("--model") :]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTED), str(found.texts), str(found.prompts), *own],
            env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=output,
            stderr=output,
        )
        try:
            wait_for(process, found.port, log)
            yield found
        finally:
            process.terminate()
            process.wait(60)


def play(name: str, server: Scripted, folder: Path) -> tuple[float, list[list[int]]]:
    """(the program's reward, what the policy saw)"""
    server.texts.write_text(json.dumps(thoughtful(name)))
    server.prompts.unlink(missing_ok=True)
    task, reward = folder / "task.json", folder / "reward.json"
    task.write_text(json.dumps(task_json(PRODUCT)))
    settings = program(name)
    if "command" in settings:
        command = [part.format(task_json=task) for part in settings["command"].split()]
    else:
        file, _, function = settings["agent"].rpartition(":")
        command = [settings["python"], "-c", START, file, function, str(task)]
    url = f"http://127.0.0.1:{server.port}"
    given = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url, "REWARD_FILE": str(reward)}
    keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    kept = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, env={**kept, **given, **keys}, check=True, cwd=EXAMPLES, timeout=120)
    return json.loads(reward.read_text()), [json.loads(line) for line in server.prompts.read_text().splitlines()]


@pytest.mark.parametrize("name", SERVED)
def test_a_program_sees_from_the_server_what_it_saw_in_training(name: str, server: Scripted, tmp_path: Path) -> None:
    """The same reward; the prompts have the same text, but for the white space that SDKs change around thoughts."""
    ((trained, _),) = played(name, thoughtful(name), **OPTIONS)
    reward, prompts = play(name, server, tmp_path)
    assert trained.score is not None and reward == trained.score.total
    shown = [plain(ids) for ids, _ in in_ledger(trained)]
    assert [plain(ids) for ids in prompts] == shown


def test_fields_that_vllm_would_drop_are_errors_in_its_shape(server: Scripted) -> None:
    import httpx2

    body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "functions": [{"name": "a"}]}
    answer = httpx2.post(f"http://127.0.0.1:{server.port}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "functions cannot be used here; write tools"


def plain(ids: object) -> str:
    return "".join(str(chat().tokenizer.decode(ids)).split())
