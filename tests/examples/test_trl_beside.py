"""TRL's own trainer beside ours, whole: two steps on the same rows, with the same model and the same reward function.

A tiny model knows its responses by heart, and samples at a temperature near 0, so that both trainers draw the same
responses. The reward writes down everything that it is given and what it returns; the lines are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import get_json_schema

from tests.conftest import ROOT
from tests.support.tiny import MINI
from tests.verl.utils.reward_score.peers.tools import Counter, weather
from verl.envs.tools.function import FunctionTool
from verl.formats.prompt import function_schema

pytestmark = [
    pytest.mark.slow,  # two trainers and a model that is taught: minutes
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
]

TEMPLATE = json.loads((ROOT / "tests/verl/utils/reward_score/peers/cases.json").read_text())["template"]
GROUP, STEPS = 2, 2
TOOLS = "tests/verl/utils/reward_score/peers/tools.py"
MINE = """
import json

OUT = {out!r}


def plain(value):
    return vars(value) if type(value).__name__ == "Counter" else value


def right(completions, answer, prompts, completion_ids, trainer_state, **columns):
    scores = [float(text in str(made)) + len(ids) / 100 for text, made, ids in zip(answer, completions, completion_ids)]
    columns = {{name: values for name, values in columns.items() if not callable(values)}}
    columns |= dict(answer=answer, prompts=prompts, completions=completions, completion_ids=completion_ids)
    with open(OUT, "a") as file:
        for row, score in enumerate(scores):
            given = {{name: plain(values[row]) for name, values in sorted(columns.items())}}
            file.write(json.dumps(dict(step=trainer_state.global_step, given=given, score=score)) + "\\n")
    return scores
"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# {case: (rows, [what the policy writes and the tool answers, in turns], the tool's functions)}
CASES: dict[str, tuple[list[dict[str, Any]], list[list[str]]]] = {
    "a conversation": (
        [
            {"prompt": user("1 + 1?"), "answer": "2", "level": 3, "tags": ["sum", "short"]},
            {
                "prompt": [{"role": "system", "content": "Be brief."}, *user("2 * 3?")],
                "answer": "7",
                "level": 4,
                "tags": [],
            },
        ],
        [["It is 2."], ["6"]],
    ),
    "a tool": (
        [{"prompt": user("Rain in Oslo?"), "answer": "Yes"}, {"prompt": user("Rain in Rome?"), "answer": "Yes"}],
        [[call("weather", city="Oslo"), "rain", "Yes."], [call("weather", city="Rome"), "sun", "No."]],
    ),
    "an environment": (
        [{"prompt": user("Count to 3."), "answer": "Done"}, {"prompt": user("Count to 5."), "answer": "Done"}],
        [[call("add", number=3), "3", "Done."], [call("add", number=4), "4", "Lost."]],
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows every case by heart: its prompt as both trainers render it, and its response."""
    folder = tmp_path_factory.mktemp("by_heart")
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer", padding_side="left")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    policy = Qwen2ForCausalLM(config)
    teach(policy, [ids for name in CASES for ids in written(name, tokenizer)])
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def functions(name: str) -> list[Any]:
    return [weather] if name == "a tool" else [Counter().add] if name == "an environment" else []


def written(name: str, tokenizer: Any) -> list[tuple[list[int], list[bool]]]:
    """(tokens, whether the policy writes them) of every episode of a case.

    Of each with tools there are two: TRL's schemas have `return`, which is no argument, and ours do not.
    """
    rows, episodes = CASES[name]
    theirs = [get_json_schema(each) for each in functions(name)]
    ours = [function_schema(FunctionTool(each).spec) for each in functions(name)]
    made = []
    for tools in (theirs, ours) if theirs else (None,):
        for row, texts in zip(rows, episodes, strict=True):
            messages = [dict(each) for each in row["prompt"]]
            if name == "an environment":
                messages[-1]["content"] += " It is at 0."
            ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
            own = [False] * len(ids)
            for number, text in enumerate(texts):
                if number % 2:
                    new = tokenizer(f"\n<|im_start|>tool\n{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
                else:
                    new = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
                ids, own = [*ids, *new], [*own, *[number % 2 == 0] * len(new)]
            made.append((ids, own))
    return made


def teach(policy: Any, episodes: list[tuple[list[int], list[bool]]]) -> None:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    longest = max(len(ids) for ids, _ in episodes)
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in episodes])
    labels = torch.full_like(ids, -100)
    for row, (tokens, own) in enumerate(episodes):
        for place, (token, is_own) in enumerate(zip(tokens, own, strict=True)):
            labels[row, place] = token if is_own else -100
    for _ in range(400):
        loss = policy(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 0.01:
            return
    raise AssertionError(f"not learned: {loss.item()}")


TRL = """
import json, sys
sys.path.insert(0, {root!r})
sys.path.insert(0, {folder!r})
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen3_template
from mine import right
from tests.verl.utils.reward_score.peers.tools import Counter, weather
from verl.envs.tools.function import FunctionTool
from verl.formats.prompt import function_schema

tokenizer = AutoTokenizer.from_pretrained({model!r}, padding_side="left")
name = {name!r}
if name in ("a tool", "an environment"):
    tokenizer.response_template = qwen3_template
args = trl.GRPOConfig(
    {folder!r} + "/trl", per_device_train_batch_size=4, num_generations=2, max_steps=2, max_completion_length=256,
    temperature=0.01, use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1,
)
trainer = trl.GRPOTrainer(
    AutoModelForCausalLM.from_pretrained({model!r}), right, args, Dataset.from_list(json.loads({rows!r})),
    processing_class=tokenizer, tools=[weather] if name == "a tool" else None,
    environment_factory=Counter if name == "an environment" else None,
)
trainer.train()
print([each["reward"] for each in trainer.state.log_history if "reward" in each])
"""


def recorded(folder: Path, name: str, command: list[str]) -> list[dict[str, Any]]:
    """What the reward wrote down: the same lines in an order of their own."""
    (folder / "mine.py").write_text(MINE.format(out=str(folder / f"{name}.jsonl")))
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return sorted(lines, key=json.dumps)


@pytest.mark.parametrize("name", CASES)
def test_both_trainers_give_a_reward_the_same_and_get_the_same(name: str, model: Path, tmp_path: Path) -> None:
    rows = CASES[name][0]
    program = tmp_path / "program.py"
    program.write_text(
        TRL.format(root=str(ROOT), folder=str(tmp_path), model=str(model), name=name, rows=json.dumps(rows))
    )
    theirs = recorded(tmp_path, "trl", [sys.executable, str(program)])
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = {
        "a tool": ["env.name=tool", f"env.tools=[{TOOLS}:weather]"],
        "an environment": [f"env.name={TOOLS}:Counter"],
    }
    overrides = [
        f"data={data}",
        "data.map=toolrl.envs.class_env.class_env:as_task_row",
        f"model={model}",
        f"reward.name={tmp_path / 'mine.py'}:right",
        *([*tools[name], "env.tool_call_format=hermes"] if name in tools else []),
        *("rollout.name=hf", "rollout.temperature=0.01", f"rollout.n={GROUP}", "model.compute_dtype=float32"),
        *("data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "data.max_response_length=256"),
        "data.max_prompt_length=256",
        *(f"trainer.total_training_steps={STEPS}", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}"),
    ]
    ours = recorded(tmp_path, "ours", [sys.executable, "-m", "toolrl", "train", *overrides])
    assert len(theirs) == len(ours) == STEPS * GROUP * len(rows)
    for line in ours:
        assert line["given"].pop("data_source")  # the one column that all of our rows have
    assert ours == theirs
