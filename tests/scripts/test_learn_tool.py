"""scripts/learn_tool.sh: its questions, its report, and what it does before it trains."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from scripts.learn_tool.make_data import ARITHMETIC, CALLS_IN_TEN, COPIES, COUNTS, OPERANDS, PLAIN, datasets
from scripts.learn_tool.one_operation import one_operation
from scripts.learn_tool.report import main
from tests.conftest import ROOT, smollm2
from tests.support.tiny import MINI
from tests.verl.episodes.test_episode import Speaker
from toolrl.tools.calculator import value_of
from verl.build.env import build_episode_runner
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.data.tasks import TaskSet
from verl.envs.tools.base import ToolError
from verl.plugins import TOOLS
from verl.registry import resolve
from verl.rollout.engine import Sampling
from verl.sft.demonstrations import read_demonstrations, sft_samples
from verl.tracking.jsonl import read_jsonl, write_jsonl
from verl.types import Message, Task, Trajectory
from verl.utils.reward_score.base import build_reward


def numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"-?\d+", text)]


def question(row: dict[str, Any]) -> str:
    text: str = row.get("messages", row.get("prompt"))[0]["content"]
    return text


def by_hand(text: str) -> int:
    """The answer, by the text of the question alone."""
    a, b, *more = numbers(text)
    if more:
        return first_result(text) + later_change(text, *more)
    if "minus" in text:
        return a - b
    return a + b if "plus" in text or "Add" in text else a * b


def first_result(text: str) -> int:
    a, b, *_ = numbers(text)
    return a + b if "buys" in text else a * b


def later_change(text: str, c: int, d: int = 0) -> int:
    """What changes the first result."""
    return c - d if "plus" in text else d - c


@pytest.mark.parametrize(("plain", "steps"), [(0.0, 1), (0.3, 1), (0.0, 3), (0.3, 2)])
def test_questions_repeat_by_seed_and_share_no_operand_between_files(plain: float, steps: int) -> None:
    found = datasets(0, plain, steps)
    assert found == datasets(0, plain, steps) != datasets(1, plain, steps)
    for name, rows in found.items():
        assert len(rows) == len({question(row) for row in rows}) == COUNTS[name]
        assert all(number in OPERANDS[name] for row in rows for number in numbers(question(row)))
    assert len({number for operands in OPERANDS.values() for number in operands}) == sum(map(len, OPERANDS.values()))


def test_answers_of_arithmetic_are_right() -> None:
    rows = datasets(3)["train"] + datasets(3)["test"]
    assert {row["data_source"] for row in rows} == {ARITHMETIC}
    assert all(int(row["reward_model"]["ground_truth"]) == by_hand(question(row)) for row in rows)


@pytest.mark.parametrize(("steps", "kinds"), [(2, {"two_steps"}), (3, {"two_steps", "three_steps"})])
def test_questions_of_several_steps(steps: int, kinds: set[str]) -> None:
    rows = datasets(3, steps=steps)["train"]
    assert {row["data_source"] for row in rows} == kinds
    for row in rows:
        answer = int(row["reward_model"]["ground_truth"])
        assert answer == by_hand(question(row)) >= 0
        assert len(numbers(question(row))) == (3 if row["data_source"] == "two_steps" else 4)


def test_demonstrations_of_several_steps_call_once_for_each() -> None:
    rows = datasets(0, steps=3)["demonstrations"]
    calling = [row for row in rows if len(row["messages"]) > 2]
    assert len(calling) == len(rows) * CALLS_IN_TEN / 10
    for row in calling:
        (_, *turns, last), before = row["messages"], ""
        for call, result in zip(turns[::2], turns[1::2], strict=True):
            expression = json.loads(call["tool_calls"][0]["function"]["arguments"])["expression"]
            assert expression.startswith(f"{before} ".lstrip())
            before = result["content"]
            assert asyncio.run(one_operation.call({"expression": expression})) == before
        assert len(turns) / 2 == len(numbers(question(row))) - 1
        assert int(before) == by_hand(question(row)) == numbers(last["content"])[0]


@pytest.mark.parametrize("expression", ["1 + 2 + 3", "2 * (3 + 4)", "7", "2 ** 3", "1.5 + 2", "9 / 3", ""])
def test_the_calculator_of_several_steps_works_out_one_operation(expression: str) -> None:
    with pytest.raises(ToolError, match="is not one operation of two whole numbers, such as 12"):
        asyncio.run(one_operation.call({"expression": expression}))


def test_a_share_of_questions_has_its_answer_in_it() -> None:
    rows = datasets(0, plain=1 / 3)["train"]
    plain = [row for row in rows if row["data_source"] == PLAIN]
    assert 0.28 < len(plain) / len(rows) < 0.39
    assert all(int(row["reward_model"]["ground_truth"]) in numbers(question(row)) for row in plain)
    asked = {re.sub(r"\d+", "#", question(row)) for row in plain}
    assert asked == {re.sub(r"\{.\}", "#", form) for form in COPIES}
    texts = {question(row): int(row["reward_model"]["ground_truth"]) for row in plain}
    assert all(answer == numbers(text)[0] for text, answer in texts.items() if "stamps" in text)
    assert all(answer == numbers(text)[1] for text, answer in texts.items() if "train" in text or "parcel" in text)


@pytest.mark.parametrize("plain", [0.0, 0.3])
def test_demonstrations_call_rightly_or_guess_wrongly(plain: float, tmp_path: Path) -> None:
    rows = datasets(0, plain)["demonstrations"]
    computed = [row for row in rows if not re.search("Write|parcel|stamps|train", question(row))]
    calling = [row for row in computed if len(row["messages"]) == 4]
    assert abs(len(calling) - len(computed) * CALLS_IN_TEN / 10) < 3
    for row in rows:
        (stated,) = numbers(row["messages"][-1]["content"])
        if row not in computed:
            assert len(row["messages"]) == 2 and stated in numbers(question(row))
        else:
            assert (stated == by_hand(question(row))) is (row in calling)
    for row in calling:
        (call,) = row["messages"][1]["tool_calls"]
        expression = json.loads(call["function"]["arguments"])["expression"]
        assert value_of(expression) == int(row["messages"][2]["content"]) == by_hand(question(row))
    write_jsonl(tmp_path / "demonstrations.jsonl", rows)
    shown = read_demonstrations(str(tmp_path / "demonstrations.jsonl"))
    offered = [resolve("tool", name, TOOLS).spec for name in load_config(["recipe=learn_tool"]).env.tools]
    described = [(tool.name, tool.description, tool.parameters) for tool in offered]
    for each in shown:  # the tools that the training offers
        assert [(tool.name, tool.description, tool.parameters) for tool in each.tools] == described
    write_jsonl(tmp_path / "train.jsonl", datasets(0, plain)["train"])
    assert len(list(TaskSet(str(tmp_path / "train.jsonl")))) == COUNTS["train"]


@pytest.mark.parametrize("model", ["mini", "smollm2"])
def test_an_episode_has_the_tokens_that_demonstrations_train(model: str, tmp_path: Path) -> None:
    """Also with a model whose chat template lists no tools."""
    chat = ChatTemplate(AutoTokenizer.from_pretrained(MINI / "tokenizer" if model == "mini" else smollm2()))
    config = load_config(["recipe=learn_tool", "data.max_prompt_length=2000", "data.max_response_length=2000"])
    runner = build_episode_runner(config, chat)
    row = datasets(0)["demonstrations"][0]
    write_jsonl(tmp_path / "demonstrations.jsonl", [row])
    demonstrations = read_demonstrations(str(tmp_path / "demonstrations.jsonl"))
    samples = sft_samples(demonstrations, chat, 4000, observations=runner.observations)
    call, answer = (chat.tokenizer.decode(sample.token_ids[sample.action_mask][:-1]) for sample in samples)
    result = row["messages"][2]["content"]
    question = Task("t", (Message("user", row["messages"][0]["content"]),), result, ARITHMETIC)
    policy = Speaker(chat, call, answer)
    played = asyncio.run(runner.run(policy, Sampling(60), question, 0, None))
    assert isinstance(played, Trajectory) and played.num_tool_calls == 1
    assert played.turns[0].responses[0].content == result
    assert build_reward("number").score(played, question, 0).total == 1.0
    turns = zip(policy.asked, played.turns, strict=True)
    assert [(*prompt, *turn.completion.token_ids) for (prompt, _), turn in turns] == [
        tuple(sample.token_ids.tolist()) for sample in samples
    ]


def validation(rights: Sequence[bool], calls: Sequence[bool]) -> list[dict[str, Any]]:
    """Rows of a validation, as far as the report reads them."""
    return [
        {
            "task_id": f"test.jsonl#{number}",
            "data_source": ARITHMETIC,
            "prompt": [{"role": "user", "content": f"What is {number} times 2?"}],
            "responses": [{"role": "assistant", "content": f"It is\n{number}."}],
            "answer": str(2 * number),
            "score": {"total": float(right)},
            "tool_uses": [{"tool": "calculator"}] if called else [],
        }
        for number, (right, called) in enumerate(zip(rights, calls, strict=True))
    ]


def test_the_report_counts_pairs_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "learn_tool"
    assert main([str(tmp_path)]) == 2
    assert "has 0 validations, expected one before the training" in capsys.readouterr().err
    before = validation([False, True, False, False], [False, True, True, False])
    after = validation([True, True, True, False], [True, True, True, False])
    for step, rows in ((0, before), (10, before), (20, after)):
        write_jsonl(run / "validation" / f"step-{step:06d}.jsonl", rows)
    write_jsonl(run / "metrics.jsonl", [{"step": 0}, {"step": 1, "reward/total": 0.5, "tools/usage_rate": 0.25}])
    assert main([str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == [0, 20]
    assert result["questions"][ARITHMETIC] == {
        "before": {"questions": 4, "right": 1, "called": 2, "right_with_call": 1},
        "after": {"questions": 4, "right": 3, "called": 3, "right_with_call": 3},
    }
    assert result["gain"][ARITHMETIC]["mean"] == 0.5
    assert [(each["step"], each["reward"], each["calls"], each["entropy"]) for each in result["curve"]] == [
        (1, 0.5, 0.25, None)
    ]
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "result.md").read_text()
    # Wilson's interval of 1 of 4, by hand: (0.25 + z2/8 +- z sqrt(0.1875/4 + z2/64)) / (1 + z2/4), z2 = 3.8416
    assert "| arithmetic | 0 | 1 of 4 (4.6% to 69.9%) | 2 of 4" in shown
    assert (
        "Question: What is 0 times 2? (answer: 0)\n  before, wrong:\n    assistant: It is 0.\n  after, right:" in shown
    )
    answers = read_jsonl(tmp_path / "answers.jsonl")
    assert [row["after"]["called"] for row in answers] == [True, True, True, False]


def test_the_script_refuses_what_is_no_seed_and_shows_a_finished_run_again(tmp_path: Path) -> None:
    def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "scripts/learn_tool.sh", *arguments]
        environment = {**os.environ, "OUT": str(tmp_path), **variables}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    wrong = script("zero")
    assert wrong.returncode == 2 and "expected a seed (a whole number) or key=value, got 'zero'" in wrong.stderr
    for variables in ({"STEPS": "4"}, {"STEPS": "two"}, {"CALLS": "some"}):
        refused = script("7", **variables)
        assert refused.returncode == 2 and "expected STEPS of 1 to 3 and a whole number of CALLS" in refused.stderr
    assert "expected the DTYPE bfloat16 or float32, got 'half'" in script("7", DTYPE="half").stderr
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "result.md").write_text("the table\n")
    again = script("7")
    assert again.returncode == 0
    assert re.fullmatch(
        rf"learn_tool \[0 min\] seed 7 is done; to repeat it, remove {tmp_path}\nthe table\n", again.stdout
    )
