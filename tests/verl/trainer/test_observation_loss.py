"""algorithm.observation_coefficient: a run learns to predict what its tool returns, and so does a replay of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.metric_names import known
from tests.support.tiny import run_overrides
from tests.toolrl.analysis.replay.test_replay import STEPS, recorded_run, replay_step
from toolrl.analysis.replay.record import read_record, record_path
from toolrl.analysis.report.loss import LOSSES, computed_loss, sum_check
from toolrl.analysis.samples.sample_files import read_samples, samples_path
from verl.build.algorithm import algorithm_of, check_algorithm
from verl.checkpoint.state import resume_config
from verl.config.commands import TRAIN
from verl.config.load import load_config
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.tracking.jsonl import read_jsonl

KEY = "algorithm.observation_coefficient"


def weather(text: str) -> str:
    """What it is like, wherever one asks."""
    return "sunny and warm"


TOOL = [
    "env.name=tool",
    f"env.tools=[{Path(__file__)}:weather]",
    "env.tool_call_format=tests.chaos.parts:AlwaysCalls",
    "env.max_tool_calls=2",
    "data.max_response_length=64",
    "env.max_turn_tokens=6",
]


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose rewards are all equal: there is nothing else to learn."""
    out = tmp_path_factory.mktemp("run")
    prompts = [[{"role": "user", "content": word}] for word in ("One", "Two", "Six", "Ten")]
    rows = [{"data_source": "s", "prompt": each, "reward_model": {"ground_truth": "x"}} for each in prompts]
    (out / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = [f"data.train_files=[{out / 'rows.jsonl'}]", f"reward.name={Path(__file__)}:same"]
    return recorded_run(model, out, *TOOL, *overrides, "algorithm.name=dr_grpo", f"{KEY}=0.5")[1]


def same(response: str, answer: str) -> float:
    return 1.0


def test_the_policy_learns_what_the_tool_returns(run: Path) -> None:
    steps = [row for row in read_jsonl(run / "metrics.jsonl") if row["step"]]
    losses = [row["actor/observation_loss"] for row in steps]
    assert len(losses) == STEPS and losses == sorted(losses, reverse=True) and losses[-1] < 0.7 * losses[0]
    for step in steps:
        assert step["actor/observation_tokens"] > 0 and step["actor/grad_norm"] > 0
        assert step["reward/zero_variance_groups"] == step["actor/computed_share"] == 1.0
        assert step["actor/loss"] == pytest.approx(0.5 * step["actor/observation_loss"], rel=1e-5)
        assert [name for name in step if name not in ("step", "time") and not known(name)] == []


def test_the_report_adds_observations_to_the_shares_of_samples(run: Path) -> None:
    for step in read_jsonl(run / "metrics.jsonl"):
        if step["step"]:
            kept = read_samples(samples_path(run, step["step"]))
            assert kept.scale is not None and kept.scale.observation_coefficient == 0.5
            check = sum_check(kept, computed_loss(kept), *(step[name] for name in LOSSES))
            assert check.agrees and "0.5 * actor/observation_loss is" in check.text, check.text
            assert sum_check(kept, computed_loss(kept), step["actor/loss"], 0.0).agrees is False


def test_a_step_comes_out_the_same_again(run: Path) -> None:
    record = read_record(record_path(run, STEPS))
    assert record.settings[KEY] == 0.5 and record.batch.nll_weights is None  # follows from the mask and the setting
    replayed = replay_step(run, STEPS)
    assert replayed.differing() == []
    assert replayed.replayed["actor/observation_loss"] == replayed.recorded["actor/observation_loss"]


def configured(*overrides: str) -> Config:
    return load_config([*run_overrides(Path("model"), Path("out"), "hf", 1), *overrides])


def test_the_setting_reaches_any_algorithm() -> None:
    assert algorithm_of(configured()).observation_coefficient == 0.0
    for name in ("grpo", "vapo", "dppo_tv"):
        algorithm = algorithm_of(configured(*TOOL, f"algorithm.name={name}", f"{KEY}=0.05"))
        assert algorithm.observation_coefficient == 0.05
        check_algorithm(algorithm, configured(*TOOL))
    assert resume_config(configured(*TOOL, f"{KEY}=0.05"), TRAIN)[KEY] == 0.05  # compared when a run is resumed


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{KEY}=-0.1"], f"{KEY} must be 0 or more, got -0.1"),
        ([f"{KEY}=inf"], f"{KEY} must be a finite number, got inf"),
        ([f"{KEY}=nan"], f"{KEY} must be a finite number, got nan"),
        ([f"{KEY}=much"], "much"),
        ([f"{KEY}=0.1"], f"{KEY}=0.1 has no effect: without env.tool_call_format an episode has no observations"),
        (
            [*TOOL, f"{KEY}=0.1", "env.train_on_observations=20"],
            f"{KEY}=0.1 and env.train_on_observations would train observations twice; set one of them",
        ),
    ],
)
def test_wrong_values_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config = configured(*overrides)
        check_algorithm(algorithm_of(config), config)
    assert message in str(refused.value)
