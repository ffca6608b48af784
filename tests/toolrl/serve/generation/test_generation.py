"""`toolrl generate` over rows with a gold and without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny import MINI
from toolrl.serve.generation import command

GOLD = "<think> a </think>\n<response> red </response>"


def test_prompts_without_a_gold_are_answered_and_not_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": "Name a color.", "ground_truth": GOLD},
        {"prompt": "Name a color."},
        {"messages": [{"role": "user", "content": "Name a color."}]},
    ]
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model.path={MINI / 'model'}", f"data.val_files=[{file}]", f"eval.output={output}"]
    settings += ["rollout.name=hf", "data.max_response_length=4", "reward.num_workers=1", "trainer.device=cpu"]
    assert command.main(settings) == 0
    printed = capsys.readouterr().out
    assert "3 responses to 3 prompts, mean reward" in printed and "without a gold and not scored: 2" in printed
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert set(written[0]["score"]["parts"]) == {"format", "correctness", "length"}
    assert [(each["score"], each["reward"]) for each in written[1:]] == [(None, None)] * 2
    assert all(each["responses"] for each in written)
    assert command.main([*settings, "reward.name=rlla"]) == 2  # which was asked for
    assert "prompts.jsonl: 2 of 3 rows cannot be used" in capsys.readouterr().out
