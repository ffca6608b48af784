"""scripts/train_tool_loop.sh: its data, and what it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from verl.data.tasks import TaskSet
from verl.sft.demonstrations import read_demonstrations
from verl.tracking.jsonl import read_jsonl

MAKE = ROOT / "scripts" / "tool_loop" / "make_data.py"


def numbers(text: str) -> tuple[str, ...]:
    """The two factors of a question."""
    return tuple(re.findall(r"\d+", text))


@pytest.mark.long
def test_the_data_is_right_apart_and_repeats(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        subprocess.run([sys.executable, MAKE, "--out", tmp_path / name, "--seed", str(seed)], check=True)
    one, again, other = (tmp_path / name / "train.jsonl" for name in ("one", "again", "other"))
    assert one.read_text() == again.read_text() != other.read_text()
    asked: list[tuple[str, ...]] = []
    for file in ("train", "test"):
        tasks = TaskSet(str(tmp_path / "one" / f"{file}.jsonl"))
        for task in tasks:
            a, b = numbers(task.prompt[0].content)
            assert task.answer == str(int(a) * int(b))
        asked += [numbers(task.prompt[0].content) for task in tasks]
    rows = [json.loads(line) for line in (tmp_path / "one" / "demonstrations.jsonl").read_text().splitlines()]
    asked += [numbers(row["messages"][0]["content"]) for row in rows]
    assert len(set(asked)) == len(asked)
    responses = [row["messages"][1]["content"] for row in rows]
    asking = sum("<code>" in response for response in responses) / len(responses)
    assert 0.25 < asking < 0.35
    assert len(read_demonstrations(str(tmp_path / "one" / "demonstrations.jsonl"))) == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_policy_learns_to_use_the_tool(seed: int, tmp_path: Path) -> None:
    need_bubblewrap()
    script = ["bash", "scripts/train_tool_loop.sh", str(seed)]
    subprocess.run(script, check=True, cwd=ROOT, env={**os.environ, "OUT": str(tmp_path)}, stdout=subprocess.DEVNULL)
    rows = read_jsonl(tmp_path / "tool_loop" / "metrics.jsonl")
    without = read_jsonl(tmp_path / "without_tool.jsonl")
    assert rows[0]["val/test/correct"] <= 0.20
    assert rows[-1]["val/test/correct"] >= 0.60
    assert sum(row["score"]["parts"]["correct"] for row in without) / len(without) <= 0.25
    assert all(not row["tool_uses"] for row in without)
