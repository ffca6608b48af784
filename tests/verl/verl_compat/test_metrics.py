"""trainer.logger=[verl_names]: a step logs veRL's metrics, too, with the values of veRL's definitions."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from statistics import fmean

import pytest

from tests.support.local_run import local_trainer
from tests.support.metric_names import known
from tests.support.tiny import run_overrides
from tests.verl.trainer.test_recipes import one_step
from verl.algorithms.filters import num_written
from verl.config.load import load_config
from verl.errors import ConfigError
from verl.types import Score, Task, TrajectoryGroup
from verl.verl_compat.metric_names import ABSENT, COMPUTED, EQUAL, RENAMED, renamed
from verl.verl_compat.metrics import verl_validation_metrics

# What compute_data_metrics, compute_throughout_metrics and the losses of veRL 0.9.1 log for a run of one turn.
OF_VERL = {
    *(f"critic/{what}/{stat}" for what in ("score", "rewards", "advantages") for stat in ("mean", "max", "min")),
    *("response_length/mean", "response_length/max", "response_length/min", "response_length/clip_ratio"),
    *("prompt_length/mean", "prompt_length/max", "prompt_length/min", "prompt_length/clip_ratio"),
    *("perf/total_num_tokens", "perf/time_per_step", "perf/throughput", "training/global_step"),
    *("timing_s/step", "timing_s/gen", "timing_s/adv", "timing_s/update_actor", "timing_s/update_weights"),
    *("actor/entropy", "actor/grad_norm", "actor/lr", "actor/ppo_kl", "actor/pg_clipfrac"),
}
OF_CRITIC = {
    *(f"critic/{what}/{stat}" for what in ("values", "returns") for stat in ("mean", "max", "min")),
    *("critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var", "critic/grad_norm", "critic/lr"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("toolrl_grpo", {"actor/reward_kl_penalty", "critic/kl", "critic/kl_coeff", "critic/format_score/mean"}),
        ("ppo", OF_CRITIC),
        ("grpo", {"actor/pg_loss"}),
    ],
)
def test_a_step_logs_verls_metrics_by_its_definitions(
    algorithm: str, expected: set[str], model: Path, tmp_path: Path
) -> None:
    overrides = [*run_overrides(model, tmp_path, "hf", 1), f"algorithm.name={algorithm}", "trainer.num_threads=1"]
    if algorithm == "grpo":  # without a penalty, samples without advantage are not computed: a reward that differs
        reward = tmp_path / "mine.py"
        reward.write_text("def length(response, answer):\n    return float(sum(map(ord, response)) % 97)\n")
        overrides += [
            "algorithm.kl_placement=none",
            "algorithm.entropy_coefficient=0.0",
            f"reward.name={reward}:length",
        ]
    config = load_config([*overrides, "trainer.logger=[console,verl_names]"])
    with local_trainer(config) as trainer:
        result = asyncio.run(one_step(trainer))
    metrics, groups = result.metrics, result.groups
    assert OF_VERL | expected <= metrics.keys()
    pattern = "|".join(re.sub(r"\\?<\w+\\?>", ".+", re.escape(each.name)) for each in (*RENAMED, *COMPUTED))
    assert {name for name in metrics if not known(name)} == {
        name for name in metrics if re.fullmatch(pattern, name) and not known(name)
    }

    totals = [score.total for group in groups for score in group.scores]
    mean, most, least = (metrics[f"critic/score/{stat}"] for stat in ("mean", "max", "min"))
    assert (mean, most, least) == pytest.approx((fmean(totals), max(totals), min(totals)))
    responses = [num_written(each) for group in groups for each in group.trajectories]
    prompts = [len(each.turns[0].context_ids) for group in groups for each in group.trajectories]
    assert metrics["response_length/min"] == min(responses)
    assert [metrics[f"prompt_length/{stat}"] for stat in ("mean", "max", "min")] == pytest.approx(
        [fmean(prompts), max(prompts), min(prompts)]
    )
    tokens = sum(responses) + sum(prompts)
    assert metrics["perf/total_num_tokens"] == tokens
    assert metrics["perf/throughput"] == pytest.approx(tokens / metrics["time/step_s"])
    assert metrics["training/global_step"] == 1
    if "kl/reference" in metrics:  # the penalty is summed over the tokens of a response
        penalty = metrics["kl/coefficient"] * metrics["kl/reference"] * sum(responses) / len(responses)
        assert metrics["critic/rewards/mean"] == pytest.approx(mean - penalty, abs=1e-5)
    else:
        assert metrics["critic/rewards/mean"] == pytest.approx(mean)
    assert metrics["critic/advantages/min"] <= metrics["critic/advantages/mean"] <= metrics["critic/advantages/max"]
    for each in RENAMED:
        assert each.ours not in metrics or metrics[each.name] == metrics[each.ours]


@pytest.mark.long
def test_without_the_option_the_names_are_ours_alone(model: Path, tmp_path: Path) -> None:
    with local_trainer(load_config([*run_overrides(model, tmp_path, "hf", 1), "trainer.num_threads=1"])) as trainer:
        assert all(map(known, asyncio.run(one_step(trainer)).metrics))


def test_validation_is_logged_by_data_source_over_all_files() -> None:
    def group(source: str, *totals: float) -> TrajectoryGroup:
        scores = tuple(Score(each, {}) for each in totals)
        return TrajectoryGroup(Task("t", (), "", source), (), scores, totals)

    found = verl_validation_metrics([group("rlla", 4.0, 2.0), group("nq", 1.0), group("rlla", 0.0, 0.0)], n=2)
    assert found == {
        "val-core/rlla/reward/mean@2": 1.5,
        "val-core/nq/reward/mean@2": 1.0,
        "val/test_score/rlla": 1.5,
        "val/test_score/nq": 1.0,
    }


def test_each_of_our_names_in_the_table_is_a_metric_and_none_of_verls_is_listed_twice() -> None:
    listed = [each.name for each in (*RENAMED, *COMPUTED, *EQUAL, *ABSENT)]
    assert len(listed) == len(set(listed))
    for each in (*RENAMED, *EQUAL):
        assert known(each.ours), each
    assert renamed({"kl/reference": 0.5, "actor/lr": 1.0}) == {"actor/reward_kl_penalty": 0.5, "critic/kl": 0.5}


@pytest.mark.parametrize(
    ("overrides", "loggers"),
    [
        ("tracking.names=verl", ["console", "verl_names"]),
        ("tracking.names=verl trainer.logger=[jsonl]", ["jsonl", "verl_names"]),
        ("trainer.logger=[verl_names] tracking.names=verl", ["verl_names"]),
        ("tracking.names=own", ["console"]),
        ("tracking.names=null", ["console"]),
    ],
)
def test_the_names_may_be_chosen_by_a_key_of_their_own(overrides: str, loggers: list[str]) -> None:
    assert load_config(["recipe=mini_grpo", *overrides.split()]).trainer.logger == loggers


def test_other_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tracking.names must be own or verl, got 'trl'"):
        load_config(["recipe=mini_grpo", "tracking.names=trl"])
    with pytest.raises(ConfigError, match=r"trainer.logger must be some of console, rollouts, verl_names"):
        load_config(["trainer.logger=[trl_names]"])
