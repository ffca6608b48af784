"""Would training learn? The prediction for other group sizes, the statistics, the advice, and the command itself."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.tiny import MINI, save_tiny_model
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from toolrl.check.probe.advice import advice
from toolrl.check.probe.run import Shaped, criteria_of
from toolrl.check.probe.statistics import Cost, Criteria, row_of, summary
from toolrl.check.probe.zero_variance import fit_beta, predict
from toolrl.commands import PROBE
from verl.build.env import single_turn_runner
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.scoring.rewards import Rewards, build_rewards
from verl.tracking.jsonl import read_jsonl
from verl.trainer import main_eval
from verl.types import Message, Task, TrajectoryGroup
from verl.utils.reward_score.base import GroupReward, build_reward

TASK = Task("train.parquet#3", (Message("user", "What is 6 x 7?"),), "42", "math")


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=7), st.data())
def test_smaller_groups_are_counted_over_all_subsets(rewards: list[float], data: st.DataObject) -> None:
    n = data.draw(st.integers(2, len(rewards)))
    subsets = [set(each) for each in combinations(rewards, n)]
    found = predict([rewards], n)
    assert found.how == "subsets"
    assert found.share == pytest.approx(sum(len(each) == 1 for each in subsets) / len(subsets))


def test_a_prediction_for_the_observed_size_is_the_observation() -> None:
    assert predict([[1, 1, 1], [0, 1, 1], [0, 0, 0], [2, 1, 0]], 3).share == 0.5


def test_two_of_four_right_by_hand() -> None:
    assert predict([[0, 0, 1, 1]], 2).share == pytest.approx(2 / 6)  # of six pairs, two are alike


def drawn(weights: Sequence[float], prompts: int, n: int) -> tuple[list[list[float]], Any]:
    """Groups [P][n] of prompts with probabilities [P, V] of each reward."""
    random = np.random.default_rng(0)
    chances = random.dirichlet(weights, prompts)
    return [[float(each) for each in random.choice(len(weights), n, p=row)] for row in chances], chances


@pytest.mark.parametrize("weights", [(0.5, 0.5), (2.0, 0.3), (4.0, 4.0), (0.2, 0.2, 0.2), (0.5, 0.5, 0.1, 3.0)])
@pytest.mark.parametrize("n", [16, 32])
def test_larger_groups_are_foretold_from_groups_of_eight(weights: tuple[float, ...], n: int) -> None:
    groups, chances = drawn(weights, 1000, 8)
    found = predict(groups, n)
    assert found.how == "beta"
    assert found.share == pytest.approx(float((chances**n).sum(axis=1).mean()), abs=0.035)


def test_the_fitted_distribution_is_the_one_that_was_drawn_from() -> None:
    groups, _ = drawn((6.0, 2.0), 4000, 8)  # of the rewards 0 and 1
    a, b = fit_beta(Counter(int(sum(each)) for each in groups), 8)
    assert a / (a + b) == pytest.approx(0.25, abs=0.03)
    assert a + b == pytest.approx(8.0, rel=0.3)


def test_prompts_that_are_all_hopeless_stay_so() -> None:
    assert predict([[0.0] * 8] * 64, 32).share > 0.9


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=6))
def test_a_larger_group_has_zero_variance_no_more_often(groups: list[list[int]]) -> None:
    shares = [predict(groups, n).share for n in (2, 3, 4, 8, 32)]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(shares))
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)


def rollout(reward: float, tokens: int = 10, stop: str = "stop", **parts: float) -> dict[str, Any]:
    return {
        "reward": reward,
        "score": {"total": reward, "parts": parts},
        "num_tokens": tokens,
        "stop_reason": stop,
        "tool_uses": [],
        "malformed_calls": 0,
    }


RIGHT_IF_CORRECT = Criteria(lambda task, found: found["score"]["parts"]["correct"] > 0, best_format=1.0)


def test_statistics_by_hand() -> None:
    mixed = [rollout(1.0, correct=1, format=1), rollout(0.0, 30, "length", correct=0, format=0)]
    lost = [rollout(0.0, correct=0, format=1), rollout(0.0, correct=0, format=0)]
    groups = [mixed, lost]
    rows = [row_of(TASK, group, RIGHT_IF_CORRECT) for group in groups]
    assert [row["success_rate"] for row in rows] == [0.5, 0.0]
    assert [row["spread"] for row in rows] == [0.5, 0.0]
    found = summary(rows, groups, RIGHT_IF_CORRECT, Cost(tasks=2, seconds=8.0), 100)
    assert found["reward"]["mean"] == 0.25
    assert found["format"] == 0.5
    assert found["cut_off"] == 0.25
    assert found["tokens"] == 15.0
    assert (found["never_right"], found["always_right"], found["useless_never_right"]) == (0.5, 0.0, 0.5)
    (pair, *_) = found["sizes"]
    assert pair == {"n": 2, "zero_variance": 0.5, "how": "subsets", "tokens": 60.0, "seconds": 8.0}


def test_without_any_advantage_there_is_no_cost() -> None:
    group = [rollout(0.0, correct=0), rollout(0.0, correct=0)]
    found = summary([row_of(TASK, group, RIGHT_IF_CORRECT)], [group], RIGHT_IF_CORRECT, Cost(0, 0.0), 10)
    assert found["sizes"][0]["tokens"] is None
    assert found["seconds"] is None
    assert found["format"] is None


GOLD = '<think> t </think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "answer", "parts", "total", "right", "formed"),
    [
        ("rlla", GOLD, {"format": 1.0, "correctness": 3.0}, 4.0, True, True),
        ("rlla", GOLD, {"format": 0.0, "correctness": 2.0}, 2.0, False, False),
        ("torl", "4", {"correct": 1.0, "executability": -0.5}, 0.5, True, None),
        ("zerotir", "4", {"correct": 0.0, "format": -2.0}, -2.0, False, False),
        ("env", "4", {"db": 1.0}, 1.0, True, None),
        ("env", "4", {"db": 0.9}, 0.9, False, None),
        ("artist_math", "4", {"answer": 0.0, "format": 0.5}, 0.5, False, True),
    ],
)
def test_the_criteria_of_a_right_answer_follow_the_reward(
    name: str, answer: str, parts: dict[str, float], total: float, right: bool, formed: bool | None
) -> None:
    task = Task("x#0", TASK.prompt, answer, "any")
    criteria = criteria_of(build_rewards(name), [task])
    found = rollout(total, **parts)
    assert criteria.right(task, found) is right
    assert criteria.well_formed(found) is formed


def test_a_format_part_that_is_always_zero_is_ignored() -> None:
    criteria = criteria_of(build_rewards("zerotir"), [TASK])
    group = [rollout(0.0, correct=0.0, format=0.0), rollout(1.0, correct=1.0, format=0.0)]
    assert summary([row_of(TASK, group, criteria)], [group], criteria, Cost(1, 1.0), 10)["format"] is None


def statistics(**changed: Any) -> dict[str, Any]:
    sizes = [{"n": 8, "zero_variance": 0.1}, {"n": 16, "zero_variance": 0.05}, {"n": 32, "zero_variance": 0.02}]
    return {
        "n": 8,
        "rows": 64,
        "rows_too_long": 0,
        "format": 0.9,
        "malformed": 0.0,
        "tools_used": 0.8,
        "cut_off": 0.02,
        "success": {"mean": 0.4},
        "zero_variance": {"mean": 0.1},
        "useless_never_right": 0.05,
        "useless_always_right": 0.05,
        "sizes": sizes,
    } | changed


def dead(at_8: float, at_16: float, at_32: float) -> dict[str, Any]:
    shares = zip((8, 16, 32), (at_8, at_16, at_32), strict=True)
    sizes = [{"n": n, "zero_variance": share} for n, share in shares]
    return {"zero_variance": {"mean": at_8}, "sizes": sizes}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ["no objection to training"]),
        ({"format": 0.08}, ["SFT first: 92 % of the responses have no valid format"]),
        ({"success": {"mean": 0.0}} | dead(0.6, 0.55, 0.52), ["no response was right", "larger groups would not help"]),
        (dead(0.6, 0.35, 0.2), ["raise n to 16: 60 % of the groups have zero variance at n=8, predicted 35 % at n=16"]),
        ({"success": {"mean": 0.0}, "useless_never_right": 1.0, "useless_always_right": 0.0}, ["no objection"]),
        (dead(0.9, 0.8, 0.7), ["raise n to 32: 90 % of the groups have zero variance at n=8, predicted 70 % at n=32"]),
        (
            {"useless_never_right": 0.15, "useless_always_right": 0.25},
            ["drop rows without a learning signal: 15 % were never right, 25 % always"],
        ),
        ({"cut_off": 0.4}, ["raise data.max_response_length: 40 % of the responses are truncated"]),
        ({"rows_too_long": 16}, ["raise data.max_prompt_length, or drop rows: 20 % of the prompts"]),
        ({"malformed": 0.5}, ["50 % of the episodes have a parse error"]),
        ({"tools_used": 0.05}, ["5 % of the episodes call one"]),
        ({"rows": 8}, ["no objection", "probe more rows: 8"]),
    ],
)
def test_every_advice_has_its_reason(changed: dict[str, Any], expected: Sequence[str]) -> None:
    lines = advice(statistics(**changed), with_tools=True)
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert part in line


def test_without_tools_the_advice_does_not_mention_them() -> None:
    (line,) = advice(statistics(tools_used=0.0), with_tools=False)
    assert line.startswith("no objection")


def test_a_probe_uses_only_the_episode_settings_of_a_recipe() -> None:
    config = load_config(["recipe=torl", "data.train_files=[x.parquet]", "data.max_response_length=100"], PROBE)
    assert (config.rollout.n, config.rollout.temperature) == (16, 1.0)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (400, 100)
    assert config.model.enable_gradient_checkpointing == Config().model.enable_gradient_checkpointing
    assert (config.reward.name, config.env.tool_call_format, config.env.tools) == ("torl", "fence", ["python"])
    assert load_config(["recipe=mini_grpo"], PROBE).model.compute_dtype == "float32"
    assert load_config([], PROBE).rollout.n == load_config(["recipe=torl", "rollout.n=8"], PROBE).rollout.n == 8
    assert load_config(["recipe=toolrl_ppo"], PROBE).rollout.n == 8  # a recipe with a critic has one response
    assert load_config(["recipe=toolrl_ppo"], PROBE).rollout.gpu_memory_utilization is None  # no trainer on the GPU
    assert load_config(["eval.limit=null"], PROBE).eval.limit is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe=torrl"], "did you mean 'torl'"),
        (["rollout.n=1"], "n must be from 2"),
        (["rollout.temperature=0"], "temperature must be positive"),
        (["eval.limit=0"], "limit must be at least 1"),
        (["data.max_respons_length=5"], "did you mean 'data.max_response_length'"),
        (["env.max_turns=3"], "env.max_turns=3 has no effect: env.tool_call_format is not set"),
        (["rollout.name=hf", "rollout.kv_cache_gib=3"], "rollout.kv_cache_gib=3 has no effect"),
    ],
)
def test_unusable_probe_settings_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, PROBE)
    assert message in str(caught.value)


def test_rewards_are_those_after_shaping() -> None:
    chat = ChatTemplate(AutoTokenizer.from_pretrained(MINI / "tokenizer"))
    texts = ["\\boxed{42}", "\\boxed{41}"]
    engine = ScriptedEngine(lambda prompt_ids, number: chat.response_ids(texts[number])[0])
    reward = build_reward("otc_grpo", {"scale": 3.0, "answers": "math"})
    assert isinstance(reward, GroupReward)
    judged = DirectScorer(reward)
    plain = Shaped(engine, judged, Sampling(64), single_turn_runner(chat, 256))
    group = asyncio.run(plain.run(TASK, 2, 0))
    assert group.rewards == (3.0, 0.0)

    class Flat:
        """Shapes all differences away."""

        score = reward.score

        def shape(self, group: TrajectoryGroup, state: Any) -> tuple[tuple[float, ...], dict[str, Any]]:
            assert state == {}
            return (7.0,) * len(group.rewards), {}

    shaped = asyncio.run(replace(plain, rewards=Rewards(Flat())).run(TASK, 2, 0))
    assert shaped.rewards == (7.0, 7.0)
    assert shaped.scores == group.scores


def test_the_command_probes_goes_on_and_keeps_what_was_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model(tmp_path / "model")
    overrides = [
        "--probe",
        f"model.path={model}",
        f"data.train_files=[{MINI / 'test.parquet'}]",
        "rollout.n=2",
        "rollout.name=hf",
        "model.compute_dtype=float32",
    ]
    overrides += [
        "trainer.device=cpu",
        "data.max_response_length=4",
        "data.max_prompt_length=256",
        f"eval.output={tmp_path / 'out'}",
    ]
    assert main_eval.main([*overrides, "eval.limit=2"]) == 0
    printed = capfd.readouterr().out
    assert "test.parquet: 200 rows, 200 used, 0 dropped" in printed
    assert "SFT first: 100 % of the responses have no valid format" in printed
    assert "raise data.max_response_length" in printed
    (folder,) = (tmp_path / "out").iterdir()
    rows = read_jsonl(folder / "probe.jsonl")
    answers = read_jsonl(folder / "answers.jsonl")
    assert len(rows) == 2
    assert len(answers) == 4
    assert {row["success_rate"] for row in rows} == {0.0}
    assert main_eval.main([*overrides, "eval.limit=3"]) == 0
    more = read_jsonl(folder / "answers.jsonl")
    assert more[:4] == answers
    assert len(more) == 6
    assert {row["task_id"] for row in rows} < {row["task_id"] for row in read_jsonl(folder / "probe.jsonl")}
    found = json.loads((folder / "probe.json").read_text())
    assert found["rows"] == 3
    assert found["settings"]["env.tool_call_format"] is None
    assert "zero-variance groups" in (folder / "probe.md").read_text()
    namesake = tmp_path / "test.parquet"
    shutil.copy(MINI / "test.parquet", namesake)
    assert main_eval.main([*overrides, f"data.train_files=[{namesake}]", "eval.limit=2"]) == 0
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_probe_without_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_eval.main(["--probe", f"model.path={tmp_path}"]) == 2
    assert "data.train_files is not set" in capsys.readouterr().out
    assert main_eval.main(["--probe", "--help"]) == 0
    assert "Would training learn" in capsys.readouterr().out
