"""A tool-calling log in, a better model behind OpenAI's protocol out: SmolLM2-135M-Instruct on Seal-Tools' rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import need_vllm, real_data, smollm2
from tests.toolrl.serve.openai_server.test_native_run import ask, command
from tests.toolrl.serve.openai_server.test_serve import serving
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.data.layouts import as_openai_row
from verl.envs.base import Observation
from verl.formats.base import build_tool_call_format
from verl.types import Message, ToolSpec

NUM_ROWS = 40  # for training, and as many held out
# Describes the calls, so that the untrained model could write them, too; shorter than ToolRL's.
PROMPT = """Answer with calls of these tools, one JSON object per line:
<tool_call>
{"name": "tool", "parameters": {"parameter": "value"}}
</tool_call>

{tools}"""
SFT = {"data.train_batch_size": 4, "actor.optim.lr": 2e-4, "trainer.total_epochs": 1}
TRAIN = {
    "data.train_batch_size": 4,
    "actor.ppo_mini_batch_size": 4,
    "actor.optim.lr": 1e-5,
    "rollout.n": 4,
    "trainer.total_training_steps": 3,
}


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Seal-Tools' 80 rows with the shortest tool lists, every other one held out. A list has two tools: the one of the
    gold call, and the first other one."""
    published = json.loads(real_data("toolcalls", "sealtools_test.json").read_text())
    rows = [with_two_tools(as_openai_row(row)) for row in published]
    rows = sorted(rows, key=lambda row: len(json.dumps(row["tools"])))[: 2 * NUM_ROWS]
    files = folder / "calls.jsonl", folder / "held_out.jsonl"
    for number, file in enumerate(files):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[number::2]))
    return files


def with_two_tools(row: dict[str, Any]) -> dict[str, Any]:
    (call,) = row["messages"][-1]["tool_calls"]
    others = [tool for tool in row["tools"] if tool["function"]["name"] != call["function"]["name"]]
    return {**row, "tools": [tool for tool in row["tools"] if tool not in others[1:]]}


def settings(folder: Path, name: str, model: Path, rows: Path, own: dict[str, Any]) -> list[str]:
    return [
        *("trainer.device=cpu", "model.compute_dtype=float32", "data.max_prompt_length=512"),
        *("data.max_response_length=96", "trainer.save_freq=0", "trainer.test_freq=0"),
        *("env.tool_call_format=toolrl", f"data.prompt_template={folder / 'prompt.txt'}"),
        *(f"trainer.default_local_dir={folder}", f"trainer.experiment_name={name}", f"model={model}", f"data={rows}"),
        *(f"{key}={value}" for key, value in own.items()),
    ]


def exact_calls(folder: Path, model: Path, *options: str) -> tuple[int, int]:
    """(answers with calls, answers with exactly the gold calls) of a server, on the held-out rows"""
    import openai

    tool_call_format = build_tool_call_format("toolrl", {"prompt_template": str(folder / "prompt.txt")})
    observations = ObservationTokenizer(ChatTemplate(AutoTokenizer.from_pretrained(smollm2())), tool_call_format, 512)

    def trained_ids(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[int]:
        return observations.prompt_ids(Observation(tuple(messages), tools=tuple(tools)))

    with serving(model, folder / "log", "--name", "served", *options) as address:
        client = openai.OpenAI(base_url=address, api_key="none", timeout=600)
        found = ask(client, "served", folder / "held_out.jsonl", trained_ids)
    sys.stdout.write(f"{model.name}: calls in {found[0]}, exact in {found[1]} of {NUM_ROWS} answers\n")
    return found


@pytest.mark.slow
def test_a_log_of_calls_makes_a_model_that_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_vllm()
    pytest.importorskip("openai")
    rows, _ = write_rows(tmp_path)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    monkeypatch.setenv("RAY_worker_niceness", "0")
    as_trained = ("--tool-call-format", "toolrl", "--prompt-template", str(tmp_path / "prompt.txt"))
    before = exact_calls(tmp_path, smollm2(), *as_trained)
    command("-m", "toolrl.cli", "sft", *settings(tmp_path, "sft", smollm2(), rows, SFT))
    started = exact_calls(tmp_path, tmp_path / "sft")
    command("-m", "toolrl.cli", "train", *settings(tmp_path, "rl", tmp_path / "sft", rows, TRAIN))
    after = exact_calls(tmp_path, tmp_path / "rl")
    assert before[1] <= 4 and min(started[1], after[1]) >= before[1] + 10
    assert min(started[0], after[0]) >= 25
