"""Chat in the terminal, with tools that run."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.toolrl.serve.openai_server.test_serve import make_run
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from toolrl.commands import CHAT
from toolrl.serve import chat as terminal
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.embedded import embedded_path
from verl.errors import ConfigError
from verl.pretrained import read_tokenizer
from verl.rollout.engine import Sampling

TOOL = '''
def get_rain(city: str) -> str:
    """Rain in a city.

    Args:
        city: place
    """
    return f"7 in {city}"
'''
CALL = '<think> a </think>\n<tool_call>\n{"name": "get_rain", "parameters": {"city": "Kala"}}\n</tool_call>'


def talk(
    argv: Sequence[str], lines: str, responses: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[str]]:
    """(what the terminal shows, the prompts of the engine). lines: the piped input"""
    tokenizer = read_tokenizer(embedded_path("embedded:model"))
    prompts: list[str] = []

    def script(prompt_ids: Sequence[int], number: int) -> list[int]:
        prompts.append(tokenizer.decode(prompt_ids))
        return [*tokenizer(responses[len(prompts) - 1])["input_ids"], tokenizer.eos_token_id]

    @asynccontextmanager
    async def scripted(config: Any, chat: ChatTemplate) -> AsyncIterator[Any]:
        yield ScriptedEngine(script), Sampling(400, 0.0, stop_token_ids=chat.stop_token_ids)

    monkeypatch.setattr(terminal, "standalone_engine", scripted)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    shown = io.StringIO()
    monkeypatch.setattr(terminal, "run_cli", lambda given, text, command, run: run_with(run, given, shown))
    assert terminal.main([*argv, "rollout.name=hf"]) == 0
    return shown.getvalue(), prompts


def run_with(run: Any, argv: Sequence[str], shown: io.StringIO) -> int:
    from verl.trainer.cli import CliArgs

    return int(run(CliArgs(load_config(argv, CHAT), []), Console(file=shown, width=200, highlight=False)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["{run}", "model={run}", "model.path={run}/checkpoints/{latest}/hf"])
def test_the_tools_run_and_all_turns_are_in_the_format_of_the_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(TOOL)
    run = make_run(tmp_path / "run")
    latest = json.loads((run / "checkpoints" / "latest.json").read_text())["folder"]
    shown, (first, second, third) = talk(
        [model.format(run=run, latest=latest), "--tools", f"{tmp_path / 'mine.py'}:get_rain,calculator"],
        "Be short.\nRain in Kala?\nAnd now?\n\n",
        [CALL, "<response> 7. </response>", "<response> Bye. </response>"],
        monkeypatch,
    )
    assert "get_rain> 7 in Kala" in shown and "model> <response> Bye. </response>" in shown
    assert first.startswith("<|im_start|>system\nBe short.\n\nCall tools or respond.")  # the prompt of the rows
    assert "1. Name: get_rain\nDescription: Rain in a city." in first and "2. Name: calculator" in first
    assert first.endswith("<user> Rain in Kala? </user><|im_end|>\n<|im_start|>assistant\n")
    assert second.startswith(first + CALL)
    assert second.endswith(
        '<obs> [{"name": "get_rain", "results": "7 in Kala"}] </obs><|im_end|>\n<|im_start|>assistant\n'
    )
    assert third.endswith("<user> And now? </user><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.filterwarnings("ignore")
def test_without_tools_it_is_a_plain_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, prompts = talk(["model.path=embedded:model"], "\nHello\n", ["Hi."], monkeypatch)
    assert "model> Hi." in shown
    assert prompts == ["<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (
            ["model.path=embedded:model", "--tools=calculator"],
            "tools need the folder of a run, or env.tool_call_format",
        ),
        (["embedded:model", "model.path=embedded:model"], "one model at a time"),
        (["{tmp}"], "neither the folder of a run"),
    ],
)
def test_unusable_arguments_are_refused(
    argv: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=problem):
        talk([each.format(tmp=tmp_path) for each in argv], "", [], monkeypatch)


def test_tools_are_names_or_mcp_servers() -> None:
    argv, tools = terminal._options(["RUN", "--tools=a.py:f,stdio:python s.py", "--tools", "http://h/mcp", "model.x=1"])
    assert argv == ["RUN", "model.x=1"]
    assert tools == ["a.py:f", {"name": "mcp", "command": "python s.py"}, {"name": "mcp", "url": "http://h/mcp"}]
