"""The embedded model trains in environments of three libraries: its rewards are those that these reported."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.foreign import foreign_folder
from toolrl.envs.class_env.class_env import as_task_row
from verl.data.tasks import to_task
from verl.envs.registry import build_env_factory
from verl.tracking.jsonl import read_jsonl

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SEEDS = (1, 2)
ANSWERS = {  # what a game's policy writes at first
    "Taxi": [str(number) for number in range(6)],
    "GuessTheNumber": [f"[{number}]" for number in range(1, 21)],
    "Gsm8k": ["#### 2", "#### 3", "two"],
}
SIZES = ["data.max_prompt_length=400", "data.max_response_length=420", "env.tool_call_format=hermes"]
FAST = ["trainer.device=cpu", "model.compute_dtype=float32"]


def row(seed: int) -> dict[str, Any]:
    return {"prompt": "Play.", "seed": seed, "max_turns": 2, "reward_spec": {"ground_truth": "2"}}


def opening(game: str, seed: int) -> str:
    env = build_env_factory(f"{HERE / 'recorded.py'}:{game}")(to_task(as_task_row(row(seed)), "rows.jsonl#0"))
    return asyncio.run(env.reset()).messages[-1].content


def command(folder: Path, *overrides: str) -> None:
    path = os.pathsep.join((str(ROOT), str(foreign_folder(HERE / "libraries.txt"))))
    environment = {**os.environ, "PYTHONPATH": path, "REPORTED": str(folder / "reported.jsonl")}
    place = [f"trainer.default_local_dir={folder}", *FAST, *SIZES]
    done = subprocess.run(
        [sys.executable, "-m", "toolrl.cli", *overrides, *place],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model after a short cold start: it makes moves of all kinds."""
    folder = tmp_path_factory.mktemp("policy")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(foreign_folder(HERE / "libraries.txt")))
        openings = [(opening(game, seed), answers) for (game, answers), seed in product(ANSWERS.items(), SEEDS)]
    draw = random.Random(0)
    rows = [(text, draw.choice(answers)) for _ in range(64) for text, answers in openings]
    messages = [[{"role": "user", "content": text}, {"role": "assistant", "content": answer}] for text, answer in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    learn = ["data.train_batch_size=16", "actor.optim.lr=2e-3", "trainer.total_training_steps=48"]
    overrides = ["sft", "model=embedded", f"data={folder / 'rows.jsonl'}", "trainer.experiment_name=sft", *learn]
    command(folder, *overrides)
    return folder / "sft"


@pytest.mark.parametrize("game", ANSWERS)
def test_the_rewards_of_a_run_are_those_that_the_environment_reported(game: str, policy: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row(seed)) + "\n" for seed in SEEDS))
    overrides = [f"env.name={HERE / 'recorded.py'}:{game}", "env.max_turns=3", "reward.name=env", f"model={policy}"]
    overrides += [f"data={tmp_path / 'rows.jsonl'}", "data.map=toolrl.envs.class_env.class_env:as_task_row"]
    overrides += ["algorithm.name=grpo", "rollout.name=hf", "rollout.n=8", "data.train_batch_size=2"]
    overrides += ["actor.ppo_mini_batch_size=2", "actor.optim.lr=1e-4", "trainer.total_training_steps=2"]
    overrides += ["trainer.save_freq=0", "trainer.test_freq=0", "trainer.experiment_name=run"]
    command(tmp_path, "train", *overrides)

    reported = Counter(tuple(each.values()) for each in read_jsonl(tmp_path / "reported.jsonl"))
    rollouts = [each for file in sorted(tmp_path.glob("run/transcripts/*.jsonl")) for each in read_jsonl(file)]
    trained = Counter(
        (SEEDS[int(each["task_id"][-1])], each["score"]["parts"]["steps"], each["score"]["total"]) for each in rollouts
    )
    assert trained == reported and reported.total() == 2 * 2 * 8
    groups: dict[tuple[int, str], set[float]] = {}
    for each in rollouts:
        groups.setdefault((each["step"], each["task_id"]), set()).add(each["score"]["total"])
    assert len(groups) == 4 and sum(len(rewards) > 1 for rewards in groups.values()) >= 2, groups
    assert any(each["actor/grad_norm"] > 0 for each in read_jsonl(tmp_path / "run" / "metrics.jsonl"))
