"""Rows as other projects release them, in their own form; the scripts and the trainer read them as they are.

Forms and field names are those of the publishers' own code:

    Search-R1       PeterGriffinJin/Search-R1 a14dc3a, scripts/data_process/qa_search_train_merge.py (`make_map_fn`)
    ORZ-57k         Open-Reasoner-Zero 3fdd9a0, playground/zero_setting_base.py (`CustomDataset.process_dialogue`)
    DeepMath-103K   zwhe99/DeepMath 0d97187, README.md ("Rich Data Format"), and the data set's card
    ToRL            GAIR-NLP/ToRL cb78cf1, data/torl_data (`stype`, sic)
    ReTool's SFT    verl-project/verl-recipe 48ea0a7, retool/retool_sft_preprocess.py (`process`), which reads its rows
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.data import math_problems, retool_sft, search_qa
from tests.scripts.test_data_scripts import SOLUTION, violations
from tests.support.every import every
from tests.support.tiny import MINI
from tests.toolrl.papers.test_recipe_rewards import episode
from toolrl.reward_score.answers import accepted_answers
from verl.build.env import build_episode_runner, prompt_fn
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.data.tasks import TaskSet
from verl.formats.base import build_tool_call_format
from verl.formats.prompt import load_template
from verl.sft.demonstrations import read_demonstrations, sft_samples
from verl.types import Message
from verl.utils.reward_score.base import build_reward

PREFIX = (  # Search-R1's, of its template "base"
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
)
QUESTIONS = {"who got the first nobel prize in physics?": ["Wilhelm Conrad Röntgen"], "Which is it?": ["A", "B"]}


def search_r1_rows(*more: str) -> list[dict[str, Any]]:
    rows = []
    for index, (question, golden) in enumerate(QUESTIONS.items()):
        content = f"{PREFIX}Question: {question}\n"
        whole = {
            "id": f"train_{index}",
            "question": question,
            "golden_answers": golden,
            "data_source": "nq",
            "prompt": [{"role": "user", "content": content}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": golden}},
            "extra_info": {"split": "train", "index": index},
        }
        columns = ("data_source", "prompt", "ability", "reward_model", "extra_info", *more)
        rows.append({name: whole[name] for name in columns})
    return rows


@pytest.fixture
def search_r1(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(search_r1_rows()), path)
    return path


def test_search_r1s_parquet_trains_as_it_is(search_r1: Path) -> None:
    """Any of its targets is right, and the reward lab finds nothing to complain of."""
    tasks = TaskSet(str(search_r1))
    assert str(tasks.report) == "train.parquet: 2 rows, 2 used, 0 dropped"
    assert [accepted_answers(task.answer) for task in tasks] == list(QUESTIONS.values())
    for with_form in (False, True):
        assert violations("search_r1", list(tasks), with_form=with_form) == []
    reward = build_reward("search_r1")
    task = tasks[1]
    scores = [reward.score(episode(task, f"<answer> {given} </answer>"), task, 0).total for given in ("a", "B", "C")]
    assert scores == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["search_r1", "otc_search"])
def test_a_prompt_that_holds_its_instruction_gets_no_second_one(name: str, search_r1: Path) -> None:
    tool_call_format = build_tool_call_format(name)
    published = TaskSet(str(search_r1))[0].prompt
    assert tool_call_format.render_prompt(published, ()) == published
    (bare,) = tool_call_format.render_prompt((Message("user", "Which is it?"),), ())
    assert isinstance(bare, Message)
    assert bare.content == load_template(name).fill("Which is it?", "")
    assert tool_call_format.render_prompt((bare,), ()) == (bare,)
    raw = build_tool_call_format(name, {"raw": True})  # a base model without a chat template
    assert raw.render_prompt(published, ()) == published[0].content == f"{PREFIX}Question: {next(iter(QUESTIONS))}\n"


@pytest.mark.parametrize("question", ["What does <search> do in HTML?", "<answer>", "Is <search></search> a tag?"])
def test_a_question_about_tags_counts_as_a_question(question: str) -> None:
    (shown,) = build_tool_call_format("search_r1").render_prompt((Message("user", question),), ())
    assert isinstance(shown, Message) and shown.content == load_template("search_r1").fill(question, "")


@pytest.mark.parametrize("more", [(), ("id", "question", "golden_answers")])
def test_search_qa_makes_bare_questions_of_search_r1s_rows(more: tuple[str, ...], tmp_path: Path) -> None:
    source, output = tmp_path / "train.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.Table.from_pylist(search_r1_rows(*more)), source)
    assert search_qa.main(["--input", str(source), "--output", str(output)]) == 0
    tasks = TaskSet(str(output))
    assert [task.prompt for task in tasks] == [(Message("user", question),) for question in QUESTIONS]
    assert [json.loads(task.answer) for task in tasks] == list(QUESTIONS.values())
    assert {task.data_source for task in tasks} == {"nq"}


ORZ = [
    [
        {"from": "human", "value": "What is $\\frac{1}{2} + \\frac{1}{2}$?"},
        {"from": "assistant", "ground_truth": {"value": "1"}},
    ],
    [{"from": "human", "value": "Find x."}, {"from": "assistant", "ground_truth": {"value": "\\frac{3}{4}"}}],
]
DEEPMATH = {
    "question": "Evaluate the limit \\( \\lim_{x \\to \\infty} 1/x \\).",
    "final_answer": "0",
    "difficulty": 4.5,
    "topic": "Mathematics -> Precalculus -> Limits",
    **{f"r1_solution_{number}": "Okay, so .. \\boxed{0}" for number in (1, 2, 3)},
}


def test_open_reasoner_zeros_file_becomes_tasks(tmp_path: Path) -> None:
    source, output = tmp_path / "orz_math_57k_collected.json", tmp_path / "out.parquet"
    source.write_text(json.dumps(ORZ))
    assert math_problems.main(["--input", str(source), "--output", str(output), "--data-source", "orz"]) == 0
    tasks = list(TaskSet(str(output)))
    assert [(each.prompt, each.answer, each.data_source) for each in tasks] == [
        ((Message("user", asked["value"]),), known["ground_truth"]["value"], "orz")  # type: ignore[index,call-overload]
        for asked, known in ORZ
    ]
    assert violations("zerotir", tasks) == []


@pytest.mark.parametrize("spoiled", [[ORZ[0][0]], [*ORZ[0], *ORZ[0]], [ORZ[0][0], {"from": "assistant"}]])
def test_a_dialogue_of_another_form_is_a_bad_row(
    spoiled: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "orz.json"
    source.write_text(json.dumps([ORZ[0], spoiled]))
    assert math_problems.main(["--input", str(source), "--output", str(tmp_path / "out.parquet")]) == 2
    assert "orz.json, row 1: is " in capsys.readouterr().err


def test_deepmaths_parquet_becomes_tasks(tmp_path: Path) -> None:
    source, output = tmp_path / "train-00000-of-00010.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.Table.from_pylist([DEEPMATH]), source)
    assert math_problems.main(["--input", str(source), "--output", str(output)]) == 0
    (task,) = TaskSet(str(output))
    assert (task.prompt, task.answer) == ((Message("user", DEEPMATH["question"]),), "0")  # type: ignore[arg-type]
    assert violations("zerotir", [task]) == []


def test_problems_of_a_csv_file_become_tasks(tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.parquet"
    source.write_text('problem,answer\n"1, 2, ?",007\n')
    assert math_problems.main(["--input", str(source), "--output", str(output)]) == 0
    (task,) = TaskSet(str(output))
    assert (task.prompt, task.answer) == ((Message("user", "1, 2, ?"),), "007")


def test_a_problem_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}]
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": prompt, "reward_model": {"ground_truth": "2"}}))
    assert math_problems.main(["--input", str(source), "--output", str(tmp_path / "out.parquet")]) == 2
    assert "row 0, field 'content': is empty or no text" in " ".join(capsys.readouterr().err.split())


def opening(recipe: str, data: Path, chat: ChatTemplate) -> tuple[int, ...]:
    """The tokens that a recipe's first prompt begins with."""
    overrides = [f"recipe={recipe}", f"model.path={MINI / 'model'}", f"data.train_files=[{data}]"]
    config = load_config([*overrides, "sandbox.isolation=none"])  # nothing runs here
    (task,) = TaskSet(str(data))
    return tuple(prompt_fn(build_episode_runner(config, chat))(task))


@pytest.mark.parametrize("recipe", ["retool", "artist_math"])
def test_math_rows_carry_the_recipes_prompt_and_no_other(recipe: str, tmp_path: Path, chat: ChatTemplate) -> None:
    """Neither paper has a system message."""
    torl = {
        "data_source": "aime24",
        "prompt": [{"role": "system", "content": "Use \\boxed{}."}, {"role": "user", "content": "How many?"}],
        "reward_model": {"ground_truth": "204", "stype": "rule"},
    }
    source, output = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text(json.dumps(torl))
    assert math_problems.main(["--input", str(source), "--output", str(output)]) == 0
    shown = load_template(recipe).fill("How many?", "")
    assert opening(recipe, output, chat) == chat.prompt_ids((Message("user", shown),))


def test_retools_own_demonstrations_are_read_and_their_outputs_are_not_trained(
    tmp_path: Path, chat: ChatTemplate
) -> None:
    """Two messages: the prompt, and a response with code, outputs and an answer in tags."""
    response = (
        "I compute.\n<code>\n```python\nprint(6 * 7)\n```\n</code>\n<interpreter>\n42\n</interpreter>\n\nSo it is 42.\n"
        "<answer>\n\\boxed{42}\n</answer>"
    )
    asked = "Solve it.\n\n*user question:*\nAnswer the following Math Problem\n\nWhat is 6 times 7?\n"
    row = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": response}]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "sft.parquet")
    (sample,) = sft_samples(read_demonstrations(str(tmp_path / "sft.parquet")), chat, 4096)
    trained = [token for token, own in zip(sample.token_ids, sample.action_mask, strict=True) if own]
    text = chat.tokenizer.decode(trained)
    assert text.startswith("I compute.") and "print(6 * 7)" in text and "\\boxed{42}" in text
    assert "<interpreter>" not in text and "\n42\n" not in text


def test_a_cold_start_shows_the_prompt_of_reinforcement_learning(tmp_path: Path, chat: ChatTemplate) -> None:
    source, sft, rl = tmp_path / "in.jsonl", tmp_path / "sft.parquet", tmp_path / "rl.parquet"
    source.write_text(json.dumps({"problem": "How many?", "solution": SOLUTION, "answer": "25"}))
    assert retool_sft.main(["--input", str(source), "--output", str(sft)]) == 0
    assert math_problems.main(["--input", str(source), "--output", str(rl)]) == 0
    (sample,) = sft_samples(read_demonstrations(str(sft)), chat, 4096)
    prompt = opening("retool", rl, chat)
    assert tuple(sample.token_ids[: len(prompt)]) == prompt
    assert every(not trained for trained in sample.action_mask[: len(prompt)]) and sample.action_mask[len(prompt)]
