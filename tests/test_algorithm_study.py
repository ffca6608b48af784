"""The study of the algorithms: its runs, how it resumes, and what its tables conclude."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest

from bench.algorithms import child, shop, study
from bench.algorithms.design import (
    BASE,
    CALLS,
    RULES,
    SHOP,
    SORT_SEEDS,
    SORT_TASKS,
    SWEEP_SEED,
    TASKS,
    TOOL_LOOP,
    StudyRun,
    confirm,
    rate_of,
    sort,
    sweep,
)
from bench.algorithms.tables import best_rates, chosen_rules, differences, scores_of, tables, verdict
from tests.support.tiny import MINI
from toolrl.analysis.compare.paired import Difference
from verl.algorithms import ALGORITHMS
from verl.algorithms.algorithm import KLPlacement
from verl.algorithms.losses.policy_loss import policy_gradient
from verl.build.algorithm import algorithm_of
from verl.config.load import load_config

DATA = ("model.path=embedded:model", "data.train_files=[train.jsonl]", "data.val_files=[test.jsonl]")
RATE = 3e-4
RATES = TASKS[CALLS].rates


def result(*scores: float) -> dict[str, Any]:
    return {"scores": {"test": list(scores)}, "rewards": [0.0], "cpu_s": 60.0}


def run_of(rule: str, seed: int, stage: str = "sort", rate: float = RATE) -> StudyRun:
    return StudyRun(stage, CALLS, rule, rate, seed, 6)


def sorted_runs(levels: Mapping[str, float]) -> dict[StudyRun, dict[str, Any]]:
    """Four rows a run, whose scores are the rule's level, a little more in the next row and seed."""
    return {
        run_of(rule, seed): result(*(level + 0.01 * (seed + row) for row in range(4)))
        for rule, level in levels.items()
        for seed in SORT_SEEDS
    }


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("rule", RULES)
def test_every_run_is_a_configuration_of_its_rule(rule: str, task: str) -> None:
    settings = StudyRun("sort", task, rule, RATE, 2, 6).settings()
    config = load_config([*settings, *DATA, *([study.SHOP_ENVIRONMENT] if task == SHOP else [])])
    algorithm = algorithm_of(config)
    assert config.algorithm.name == rule and config.actor.optim.lr == RATE and config.trainer.seed == 2
    assert (config.trainer.total_training_steps, config.trainer.test_freq) == (6, 6)
    assert config.data.train_batch_size * config.rollout.n == 128
    updates = config.data.train_batch_size // config.actor.ppo_mini_batch_size
    assert updates == (1 if algorithm.policy_loss is policy_gradient else 2)
    assert algorithm.kl.placement is KLPlacement.NONE
    assert algorithm.entropy_coefficient == 0 and (algorithm.entropy_target is not None) == (rule == "skywork")


def test_the_sweep_and_the_first_stage_have_every_rule() -> None:
    assert {*RULES} == {*ALGORITHMS} - {"opd"}
    swept = {(run.task, run.rule, run.rate) for run in sweep()}
    assert swept == {(task, rule, rate) for task in SORT_TASKS for rule in RULES for rate in TASKS[task].rates}
    runs = [*sort({task: dict.fromkeys(RULES, RATE) for task in SORT_TASKS})]
    assert len(runs) == len({run.name for run in runs}) == len(RULES) * len(SORT_TASKS) * 3
    assert SWEEP_SEED not in {run.seed for run in runs}
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)  # whole comparisons first


def swept(**scores: Sequence[float]) -> dict[StudyRun, dict[str, Any]]:
    """By rule, a score for each rate."""
    return {
        run_of(rule, SWEEP_SEED, "sweep", rate): result(score, score)
        for rule, each in scores.items()
        for rate, score in zip(RATES, each, strict=True)
    }


def test_a_rule_has_the_common_rate_unless_its_own_best_is_better_by_more_than_chance() -> None:
    scores = {"rloo": (0.0, 1.0, 2.0, 1.5), "opo": (0.0, 1.0, 2.0, 1.9), "gpg": (0.0, 2.0, 2.1, 1.0)}
    sweep = swept(**scores, grpo=(0.0, 2.1, 2.0, 1.0), gspo=(0.0, 2.0, 1.8, 1.0))
    common = dict.fromkeys((*scores, "grpo"), RATES[2])
    assert best_rates({**sweep, run_of("grpo", 0, rate=9.0): result(4.0, 4.0)}) == {CALLS: {**common, "gspo": RATES[1]}}


def test_a_failed_run_leaves_its_rule_the_other_rates() -> None:
    sweep = swept(rloo=(0.0, 1.0, 2.0, 1.5), opo=(0.0, 1.0, 2.0, 1.9), gspo=(0.0, 1.0, 2.0, 0.5))
    failed = run_of("gspo", SWEEP_SEED, "sweep", RATES[2])
    assert best_rates({**sweep, failed: {"failed": "x"}})[CALLS]["gspo"] == RATES[1]


def test_the_shop_takes_the_rates_of_the_tool_loop() -> None:
    rates = {CALLS: {"grpo": 1.0}, TOOL_LOOP: {"grpo": 2.0}}
    assert {run.task: run.rate for run in confirm(["grpo"], rates)} == {CALLS: 1.0, TOOL_LOOP: 2.0, SHOP: 2.0}
    assert rate_of(SHOP, "gspo", rates) == TASKS[TOOL_LOOP].rates[0]  # its sweep has failed


def test_differences_are_to_grpo_over_rows_and_seeds() -> None:
    results = sorted_runs({"grpo": 1.0, "gspo": 0.5, "rloo": 1.0})
    del results[run_of("rloo", 1)], results[run_of("rloo", 2)]
    found = differences(scores_of(results, "sort")[CALLS, "test"])
    assert list(found) == ["gspo"]  # one seed makes no difference
    assert found["gspo"].mean == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("mean", "error", "p", "expected"),
    [
        (-0.3, 0.01, 0.001, "differs"),
        (0.02, 0.01, 0.6, "equivalent"),
        (0.02, 0.1, 0.9, ""),  # too few runs
        (0.14, 0.01, 0.06, ""),  # the interval ends beyond the margin
    ],
)
def test_a_verdict_needs_a_p_value_or_an_interval_within_the_margin(
    mean: float, error: float, p: float, expected: str
) -> None:
    assert verdict(Difference(mean, error, freedom=50), p, margin=0.15) == expected


def test_the_second_stage_has_the_nearest_and_the_farthest_rules() -> None:
    levels = dict(zip(("grpo", *"abcdefghij"), (1.0, 1.01, 0.98, 1.03, 1.2, 0.7, 1.5, 0.4, 1.7, 0.0, 2.5), strict=True))
    aside = {"kpop": 1.0, "raft_pp": -3.0}  # a copy of GRPO on this task, and a rule that its reward does not suit
    assert chosen_rules(sorted_runs({**levels, **aside})) == ["grpo", "a", "b", "c", "g", "h", "i", "j"]


def test_a_copy_is_in_the_table_and_is_not_tested() -> None:
    text = tables(sorted_runs({"grpo": 1.0, "gspo": 0.99, "kpop": 1.0}))
    assert "| kpop | +0.000 (+0.000 to +0.000) copy |" in text


def test_a_failed_run_is_an_outcome() -> None:
    results = {run_of("grpo", SWEEP_SEED, "sweep", rate): result(1.0, 2.0) for rate in RATES[:2]}
    failed = run_of("grpo", SWEEP_SEED, "sweep", RATES[2])
    text = tables({**results, failed: {"failed": "no group has an advantage"}})
    assert "| grpo | **1.500** | 1.500 |  |" in text
    assert text.endswith(f"3 runs, 0.0 CPU hours.\n\n- failed: {failed.name}: no group has an advantage")


def test_the_table_of_a_stage() -> None:
    results = sorted_runs({"grpo": 1.0, "gspo": 0.5, "rloo": 1.1, "opo": 1.0})
    del results[run_of("opo", 1)], results[run_of("opo", 2)]
    text = tables(results)
    assert (
        text
        == """sort

| rule | calls, test |
| --- | --- |
| grpo | 1.025 |
| rloo | **+0.100 (+0.100 to +0.100), p 0** |
| gspo | **-0.500 (-0.500 to -0.500), p 0** |

Detectable: calls, test 0.00.

10 runs, 0.2 CPU hours."""
    )


def test_a_rule_with_one_seed_in_one_of_the_tasks() -> None:
    results = sorted_runs({"grpo": 1.0, "gspo": 0.5})
    other = {replace(run, task=TOOL_LOOP): each for run, each in results.items() if run.rule == BASE or run.seed == 0}
    assert "| gspo | **-0.500 (-0.500 to -0.500), p 0** | seeds: 1 |" in tables({**results, **other})


def test_finished_runs_are_not_run_again_and_a_stage_waits_for_the_one_before(tmp_path: Path) -> None:
    first, *others = sweep()
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / f"{first.name}.json").write_text(study.record_of(first, result(1.0)))
    other = json.loads(study.record_of(others[1], result(2.0)))
    other["settings"][0] = "recipe=tool_loop"  # of an earlier design
    (folder / f"{others[1].name}.json").write_text(json.dumps(other))
    (folder / f"{others[0].name}.tmp").write_text('{"run"')  # left by an interruption
    finished = study.finished(tmp_path)
    assert finished == {first: result(1.0)}
    assert [run for run in study.planned("sweep", finished) if run not in finished] == others
    with pytest.raises(SystemExit, match="sort needs all runs of sweep: 209 are missing"):
        list(study.planned("sort", finished))


def test_exported_runs_are_known_to_a_later_call(tmp_path: Path) -> None:
    results = sorted_runs({"grpo": 1.0})
    for name in ("one.jsonl.gz", "two.jsonl.gz"):
        study.export(results, tmp_path / name)
    assert study.finished(tmp_path / "empty", tmp_path / "one.jsonl.gz") == results
    assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes()
    assert not [*tmp_path.glob("*.tmp")]


def test_an_unknown_stage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        study.main([str(tmp_path), "--jobs", "2", "sorting"])
    assert "unknown stage: sorting; known: sweep, sort, confirm" in capsys.readouterr().err


def test_a_missing_file_of_known_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        study.main([str(tmp_path), "--known", str(tmp_path / "nowhere.jsonl.gz")])
    assert "--known: there is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("calls", "reward"),
    [
        ([("put", "A1", 2), ("put", "B2", 1), ("pay",)], 1.0),
        ([("put", "B2", 1), ("put", "A1", 1), ("put", "A1", 1), ("pay",)], 1.0),
        ([("put", "A1", 2), ("put", "B2", 1)], 0.0),
        ([("pay",), ("put", "A1", 2), ("put", "B2", 1)], 0.0),
        ([("put", "A1", 2), ("put", "B2", 1), ("put", "C3", 1), ("pay",)], 0.0),
    ],
)
def test_the_shop_rewards_the_order_alone(calls: list[tuple[Any, ...]], reward: float) -> None:
    assert played({"A1": 2, "B2": 1}, calls) == reward


def test_a_cart_is_paid_once_and_nothing_is_not_put() -> None:
    with pytest.raises(ValueError, match="paid already"):
        played({"A1": 1}, [("pay",), ("pay",)])
    with pytest.raises(ValueError, match="nothing to put"):
        played({"A1": 1}, [("put", "A1", 0)])


def test_a_fifth_of_the_demonstrations_ends_an_order_well() -> None:
    draw = random.Random(5)
    rewards = []
    for _ in range(2000):
        order = shop.new_order(draw)
        messages = shop.demonstration(order, draw)["messages"]
        functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        calls = [(each["name"], *json.loads(each["arguments"]).values()) for each in functions]
        rewards.append(played(order, calls))
    expected = 0.3 * (1 / 3 + 2 / 3 * 0.5)  # orders of one product have nothing to leave out
    assert fmean(rewards) == pytest.approx(expected, abs=0.03)


def test_no_order_of_the_test_is_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shop.py", "--out", str(tmp_path)])
    shop.main()
    orders = {}
    for file in tmp_path.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        texts = [row.get("prompt", row.get("messages"))[0]["content"] for row in rows]
        orders[file.stem] = [frozenset(text.removeprefix("Buy ").removesuffix(".").split(", ")) for text in texts]
    assert {name: len(each) for name, each in orders.items()} == shop.COUNTS
    assert not {*orders["test"]} & {*orders["train"], *orders["demonstrations"]}


def played(order: dict[str, int], calls: Iterable[tuple[Any, ...]]) -> float:
    episode = shop.Shop()
    episode.reset(order)
    for name, *arguments in calls:
        getattr(episode, name)(*arguments)
    return episode.get_reward()


@pytest.mark.long
def test_a_run_trains_and_is_the_same_again(tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet"
    pq.write_table(pq.read_table(MINI / "composed/test.parquet").slice(0, 16), rows)
    run = StudyRun("sort", CALLS, "grpo", 1e-3, 0, 2)
    overrides = [*run.settings(), *(f"data.{each}_files=[{rows}]" for each in ("train", "val"))]
    first, second = child.train(overrides), child.train(overrides)
    assert len(first["scores"]["rows"]) == 16 and len(first["rewards"]) == 2 and first["cpu_s"] > 0
    assert {**first, "cpu_s": 0} == {**second, "cpu_s": 0}
    assert first["rewards"] != child.train([*overrides, "trainer.seed=1"])["rewards"]
