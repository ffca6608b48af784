"""The native format end to end: OpenAI rows, `toolrl sft`, `toolrl train`, `toolrl serve`, the official client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import need_vllm
from tests.toolrl.serve.openai_server.test_serve import read_calls, serving
from toolrl.serve.openai_server.serving_files import TOOL_PARSER
from verl.chat.template import ChatTemplate
from verl.data.conversations import read_conversation
from verl.embedded import embedded_path
from verl.types import Message, ToolSpec

ROOT = Path(__file__).parents[4]
FAST = ["trainer.device=cpu", "model.compute_dtype=float32"]


def command(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def openai_rows(split: str, count: int, folder: Path) -> Path:
    file = folder / f"{split}.jsonl"
    script = "scripts/data/openai_rows.py"
    command(script, "--input", f"embedded:{split}.parquet", "--output", str(file), "--limit", str(count))
    return file


@pytest.mark.slow
def test_a_native_policy_is_trained_and_served(tmp_path: Path) -> None:
    """Its checkpoints name the format, requests have the tokens of training, and answers have calls."""
    need_vllm()
    openai = pytest.importorskip("openai")
    model, out = tmp_path / "model", tmp_path / "outputs"
    shutil.copytree(embedded_path("embedded:model"), model)
    template = ROOT / "tests" / "verl" / "chat" / "templates" / "qwen2.5.jinja"
    shutil.copy(template, model / "chat_template.jinja")
    train, test = openai_rows("train", 640, tmp_path), openai_rows("test", 40, tmp_path)
    lengths = ["data.max_prompt_length=896", "data.max_response_length=96", f"trainer.default_local_dir={out}"]
    sft = [*FAST, *lengths, f"model.path={model}", f"data.train_files=[{train}]", "data.train_batch_size=16"]
    sft += ["actor.optim.lr=2e-3", "trainer.total_training_steps=30", "trainer.experiment_name=sft"]
    command("-m", "toolrl.cli", "sft", *sft)
    started = out / "sft" / "checkpoints" / "step-000030" / "hf"
    assert 'register_tool_parser("native"' in (started / TOOL_PARSER).read_text()
    rl = [*FAST, *lengths, f"data={train}", f"model={started}", "recipe=embedded", "data.prompt_template=null"]
    rl += ["env.tool_call_format=auto", "trainer.total_training_steps=3", "trainer.experiment_name=rl"]
    command("-m", "toolrl.cli", "train", *rl)
    assert "tool_call_format: native" in (out / "rl" / "config.yaml").read_text()
    chat = ChatTemplate(AutoTokenizer.from_pretrained(model))
    with serving(out / "rl", tmp_path / "log") as address:
        client = openai.OpenAI(base_url=address, api_key="none")
        num_called, num_exact = ask(client, "rl", test, partial(chat.initial_ids, column="messages"))
    sys.stdout.write(f"calls in {num_called}, exact in {num_exact} of 40 answers\n")
    assert num_called >= 5  # a third of an epoch of SFT; 20 when this was written


def ask(
    client: Any, model: str, file: Path, trained_ids: Callable[[Sequence[Message], Sequence[ToolSpec]], Sequence[int]]
) -> tuple[int, int]:
    """(answers with calls, answers with exactly the gold calls); the tokens of each prompt must be those of training"""

    def called_and_exact(row: dict[str, Any]) -> tuple[bool, bool]:
        conversation = read_conversation(row, "last")
        (turn,) = conversation.turns
        answer = client.chat.completions.create(
            model=model,
            messages=row["messages"][:turn],
            tools=row["tools"],
            temperature=0.0,
            max_tokens=96,
            extra_body={"return_token_ids": True},
        )
        assert answer.prompt_token_ids == [*trained_ids(conversation.messages[:turn], conversation.tools)]
        calls = read_calls(answer.choices[0].message.tool_calls)
        gold = [(call.name, dict(call.arguments)) for call in conversation.messages[turn].tool_calls]
        return bool(calls), calls == gold

    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(called_and_exact, map(json.loads, file.read_text().splitlines()))]
    called, exact = zip(*answers, strict=True)
    return sum(called), sum(exact)
