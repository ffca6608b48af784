"""The collapse watch: alarms on constructed collapses, none on healthy runs, and what a run does about them."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.support.every import every
from tests.support.local_run import local_fit, local_trainer
from tests.support.tiny import run_overrides
from toolrl.analysis.collapse.collapse import (
    COLLAPSE_RULES,
    WARM_UP,
    Alarm,
    CollapseRule,
    CollapseWatch,
    rules_for,
)
from verl.config.load import known_keys, load_config
from verl.errors import ConfigError
from verl.tracking.jsonl import read_jsonl, write_jsonl
from verl.trainer.collapse_policy import CollapseError
from verl.trainer.hooks import MAX_ROLLBACKS
from verl.types import TrajectoryGroup

HEALTHY = {  # of a run that uses tools, in its first steps
    "reward/total": 0.0,
    "reward/format": 0.9,
    "reward/zero_variance_groups": 0.2,
    "response_length/mean": 100.0,
    "response_length/clip_ratio": 0.05,
    "tools/usage_rate": 0.5,
    "tools/parse_errors_mean": 0.05,
    "actor/entropy": 0.5,
    "actor/grad_norm": 0.3,
    "engine/kl": 0.001,
    "correction/ess": 0.95,
}


def run(steps: int, course: Callable[[int], dict[str, float]], watch: CollapseWatch | None = None) -> list[Alarm]:
    """All alarms of a run whose metrics are HEALTHY but for what `course` gives for a step."""
    watch = watch or CollapseWatch()
    return [alarm for step in range(1, steps + 1) for alarm in watch.observe(step, {**HEALTHY, **course(step)})]


def drift(metric: str, end: float, steps: int = 30) -> Callable[[int], dict[str, float]]:
    """Steady for ten steps, then in a straight line to `end`, where it stays."""
    begin = HEALTHY[metric]
    return lambda step: {metric: begin + (end - begin) * min(1.0, max(0, step - 10) / (steps - 10))}


@pytest.mark.parametrize(
    ("rule", "metric", "end"),
    [
        ("mismatch", "engine/kl", 0.4),
        ("mismatch", "engine/kl", -0.4),
        ("few effective samples", "correction/ess", 0.05),
        ("lost reward", "reward/total", -2.0),
        ("entropy collapse", "actor/entropy", 0.001),
        ("entropy explosion", "actor/entropy", 8.0),
        ("tools abandoned", "tools/usage_rate", 0.0),
        ("parse errors", "tools/parse_errors_mean", 2.0),
        ("format lost", "reward/format", 0.0),
        ("truncated responses", "response_length/clip_ratio", 1.0),
        ("zero-variance groups", "reward/zero_variance_groups", 1.0),
        ("short responses", "response_length/mean", 5.0),
        ("long responses", "response_length/mean", 1000.0),
    ],
)
def test_a_collapse_raises_its_own_alarm_once(rule: str, metric: str, end: float) -> None:
    alarms = run(60, drift(metric, end))
    assert [alarm.rule.name for alarm in alarms] == [rule]
    (alarm,) = alarms
    assert 10 < alarm.first <= alarm.step - alarm.rule.patience + 1
    message = str(alarm)
    assert metric in message and alarm.rule.cause in message and alarm.rule.hint in message


def test_every_rule_has_been_constructed() -> None:
    assert len({rule.name for rule in COLLAPSE_RULES}) == len(COLLAPSE_RULES) == 13


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_update_raises_an_alarm_from_the_first_step(value: float) -> None:
    (alarm,) = CollapseWatch().observe(1, {"actor/grad_norm": value})
    assert alarm.rule.name == "broken update" and str(alarm).startswith("broken update, step 1: actor/grad_norm is")


def test_the_correction_s_own_mismatch_is_looked_at_where_it_is_known() -> None:
    """With stale samples the raw gap is expected."""
    stale = {"engine/kl": 0.5, "correction/engine_kl": 0.01}
    assert run(20, lambda step: stale) == []


def test_learning_is_no_collapse() -> None:
    """Surer, shorter, longer responses and groups that are solved, all with a rising reward."""

    def learning(step: int) -> dict[str, float]:
        done = min(1.0, step / 40)
        return {
            "reward/total": done,
            "actor/entropy": 0.5 * (1 - done) + 0.001,
            "response_length/mean": 100 + 700 * done,
            "reward/zero_variance_groups": 0.2 + 0.8 * done,
            "response_length/clip_ratio": 0.05 + 0.4 * done,
            "tools/usage_rate": 0.5 - 0.35 * done,
        }

    assert run(80, learning) == []
    assert run(80, lambda step: {"reward/total": step / 40, "response_length/mean": max(10.0, 100 - 3 * step)}) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_collapse(seed: int) -> None:
    """Small batches: every metric jumps by a third of its value from step to step, the reward by its whole spread."""
    dice = random.Random(seed)

    def noisy(step: int) -> dict[str, float]:
        values = {name: value * dice.uniform(0.67, 1.33) for name, value in HEALTHY.items()}
        return {**values, "reward/total": dice.gauss(0.0, 0.5), "correction/ess": min(1.0, values["correction/ess"])}

    assert run(300, noisy) == []


def test_a_bad_start_is_no_collapse() -> None:
    """A base model that rambles to the limit, calls no tools and keeps no format is to be trained, not stopped."""
    begin = {
        "response_length/clip_ratio": 0.97,
        "tools/usage_rate": 0.0,
        "reward/format": 0.0,
        "tools/parse_errors_mean": 1.5,
    }
    assert run(60, lambda step: begin) == []


def test_a_rule_must_be_triggered_in_consecutive_steps_and_may_raise_again() -> None:
    mismatch = next(rule for rule in COLLAPSE_RULES if rule.name == "mismatch")

    def course(step: int) -> dict[str, float]:
        return {"engine/kl": 0.5 if step in (3, 4, 6, 7, 8, 9, 12, 13, 14) else 0.0}

    alarms = run(20, course, CollapseWatch([mismatch]))
    assert [(alarm.first, alarm.step) for alarm in alarms] == [(6, 8), (12, 14)]


def test_groups_of_one_response_are_never_dead() -> None:
    watch = CollapseWatch(rules_for(needs_group=False))
    assert run(60, drift("reward/zero_variance_groups", 1.0), watch) == []


def test_a_metric_that_comes_late_has_a_start_of_its_own() -> None:
    """As after the warm-up of a critic."""
    watch, metrics = CollapseWatch(), {"reward/total": 0.0}
    for step in range(1, 21):
        watch.observe(step, metrics)
    for step in range(21, 41):
        watch.observe(step, {**metrics, "actor/entropy": 0.5})
    assert watch.starts["actor/entropy"] == [0.5] * WARM_UP
    alarms = [each for step in range(41, 60) for each in watch.observe(step, {**metrics, "actor/entropy": 0.001})]
    assert [(each.rule.name, each.first) for each in alarms] == [("entropy collapse", 41)]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, math.nan]), min_size=1, max_size=25), st.integers(min_value=0, max_value=24))
def test_a_resumed_watch_raises_the_same_alarms_as_an_unbroken_one(kls: list[float], cut: int) -> None:
    def observed(watch: CollapseWatch, steps: Iterable[int]) -> list[str]:
        return [str(alarm) for step in steps for alarm in watch.observe(step, {**HEALTHY, "engine/kl": kls[step]})]

    cut = min(cut, len(kls))
    whole, first, second = CollapseWatch(), CollapseWatch(), CollapseWatch()
    alarms = observed(first, range(cut))
    second.restore(json.loads(json.dumps(first.state())))
    assert alarms + observed(second, range(cut, len(kls))) == observed(whole, range(len(kls)))
    assert second.state() == whole.state()


def test_the_page_lists_the_rules_and_names_settings_that_there_are() -> None:
    page = " ".join((ROOT / "docs" / "collapse.md").read_text(encoding="utf-8").split())
    assert f"the median of its first {WARM_UP} values" in page and f"At most {MAX_ROLLBACKS} rollbacks" in page
    keys = {*known_keys(), "rollout.max_staleness"}
    for rule in COLLAPSE_RULES:
        named = re.findall(r"\b(?:actor|algorithm|data|env|model|reward|rollout)\.[a-z_.]+", rule.hint)
        assert named and set(named) <= keys, rule.name


def alarming(steps: Sequence[int]) -> CollapseWatch:
    """Raises an alarm after the given train steps, regardless of rollbacks; the rule is triggered one step before."""
    seen = iter(range(1, 100))

    def triggered(now: float, start: Sequence[float]) -> bool:
        number = next(seen)
        return number in steps or number + 1 in steps

    rule = CollapseRule(
        "made up", ("actor/grad_norm",), triggered, "always", "of this test", "end it", 2, relative=False
    )
    return CollapseWatch([rule])


@pytest.mark.long
def test_a_run_goes_back_to_its_last_checkpoint_with_other_prompts(model: Path, tmp_path: Path) -> None:
    """Alarm in step 4: the checkpoint due in step 3 waits, so the run goes back to 2; then steps 3 to 5 are new."""
    overrides = [*run_overrides(model, tmp_path, "hf", 5), "trainer.save_freq=1", "trainer.on_collapse=rollback"]
    config = load_config([*overrides, "trainer.num_threads=1"])
    asked: list[list[str]] = []
    with local_trainer(config) as trained:
        fit = local_fit(trained, config, alarming([4]))
        write = fit.checkpointing.transcripts.write

        def watched(step: int, groups: Sequence[TrajectoryGroup]) -> Path:
            asked.append([group.task.id for group in groups])
            return write(step, groups)

        fit.checkpointing.transcripts.write = watched  # type: ignore[method-assign]
        last = asyncio.run(fit.run())
    folder = tmp_path / "run"
    assert last.name == "step-000005" and fit.collapse.rollbacks == 1
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert len(asked) == 7 and len({name for names in asked for name in names}) == 7 * 4
    (collapse,) = read_jsonl(folder / "collapses.jsonl")
    assert (
        collapse["step"] == 4
        and collapse["back_to"] == "step-000002"
        and "made up, steps 3 to 4" in collapse["alarms"][0]
    )
    assert "actor/loss" in collapse["metrics"]


@pytest.mark.long
def test_prompts_not_started_by_a_resumed_run_survive_a_rollback(model: Path, tmp_path: Path) -> None:
    """An earlier run was three steps ahead with twelve prompts; two at a time are started again."""
    overrides = [*run_overrides(model, tmp_path, "hf", 4), "trainer.save_freq=1", "trainer.on_collapse=rollback"]
    config = load_config([*overrides, "trainer.num_threads=1", "data.train_batch_size=2", "rollout.max_staleness=3"])
    with local_trainer(config) as trained:
        rollouts = trained.rollouts
        pending = [rollouts._next_draw(1) for _ in range(12)]
        before = {**rollouts.state(), "pending": [{"drawn": list(each.drawn)} for each in pending]}
        rollouts.restore(before)
        fit = local_fit(trained, config, alarming([3]))
        trained_on: list[str] = []
        write = fit.checkpointing.transcripts.write

        def watched(step: int, groups: Sequence[TrajectoryGroup]) -> Path:
            trained_on.extend(group.task.id for group in groups)
            return write(step, groups)

        fit.checkpointing.transcripts.write = watched  # type: ignore[method-assign]
        asyncio.run(fit.run())
    left = [rollouts.tasks.at(draw["drawn"]).id for draw in rollouts.state()["pending"]]
    assert fit.collapse.rollbacks == 1 and len({*trained_on}) == len(trained_on)
    assert {rollouts.tasks.at(each.drawn).id for each in pending} <= {*trained_on, *left}


@pytest.mark.long
def test_a_rollback_cancels_a_pending_checkpoint(model: Path, tmp_path: Path) -> None:
    """Due in step 4, where a rule was triggered; the step after the rollback is not due, and is not saved."""
    overrides = [*run_overrides(model, tmp_path, "hf", 5), "trainer.save_freq=2", "trainer.on_collapse=rollback"]
    config = load_config([*overrides, "trainer.num_threads=1", "trainer.keep_last=9"])
    with local_trainer(config) as trained:
        fit = local_fit(trained, config, alarming([5]))
        asyncio.run(fit.run())
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert fit.collapse.rollbacks == 1 and saved == ["step-000002", "step-000004", "step-000005"]


@pytest.mark.long
def test_a_run_that_collapses_again_and_again_is_stopped(model: Path, tmp_path: Path) -> None:
    overrides = [*run_overrides(model, tmp_path, "hf", 9), "trainer.save_freq=1", "trainer.on_collapse=rollback"]
    config = load_config([*overrides, "trainer.num_threads=1"])
    with local_trainer(config) as trained:
        fit = local_fit(trained, config, alarming([3, 5, 7]))
        with pytest.raises(CollapseError, match=r"collapsed after 2 rollbacks. made up, steps 2 to 3.*\n.*step-000001"):
            asyncio.run(fit.run())
    assert fit.collapse.rollbacks == MAX_ROLLBACKS == 2
    kept = read_jsonl(tmp_path / "run" / "collapses.jsonl")
    assert [(row["action"], row["back_to"]) for row in kept] == [("rollback", "step-000001")] * 2 + [("stop", None)]


@pytest.mark.long
def test_a_stopping_run_saves_no_bad_weights_and_resumes_from_good_ones(model: Path, tmp_path: Path) -> None:
    overrides = [*run_overrides(model, tmp_path, "hf", 9), "trainer.save_freq=1", "trainer.on_collapse=stop"]
    config = load_config([*overrides, "trainer.num_threads=1"])
    with local_trainer(config) as trained:
        fit = local_fit(trained, config, alarming([3]))
        with pytest.raises(CollapseError, match=r"Stopped after step 3; the last good checkpoint is .*step-000001"):
            asyncio.run(fit.run())
    folder = tmp_path / "run"
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000001"]
    assert [row["collapse/triggered_rules"] for row in read_jsonl(folder / "metrics.jsonl")] == [0.0, 1.0, 1.0]


@pytest.mark.long
def test_without_a_checkpoint_there_is_no_way_back(model: Path, tmp_path: Path) -> None:
    overrides = [*run_overrides(model, tmp_path, "hf", 9), "trainer.save_freq=5", "trainer.on_collapse=rollback"]
    config = load_config([*overrides, "trainer.num_threads=1"])
    with local_trainer(config) as trained:
        fit = local_fit(trained, config, alarming([2]))
        with pytest.raises(CollapseError, match="there is no checkpoint yet"):
            asyncio.run(fit.run())


@pytest.mark.long
def test_a_warning_changes_nothing(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends = []
    earlier = [{"step": 7, "action": "warn", "alarms": ["one"]}, {"step": 7, "action": "stop", "alarms": ["two"]}]
    write_jsonl(tmp_path / "calm" / "run" / "collapses.jsonl", earlier)  # of a run that starts anew
    for name, steps in (("calm", []), ("warned", [2])):
        config = load_config([*run_overrides(model, tmp_path / name, "hf", 2), "trainer.num_threads=1"])
        with local_trainer(config) as trained:
            last = asyncio.run(local_fit(trained, config, alarming(steps)).run())
        ends.append(load_file(last / "hf" / "model.safetensors"))
    assert "made up, steps 1 to 2" in caplog.text
    assert read_jsonl(tmp_path / "calm" / "run" / "collapses.jsonl") == earlier[1:]
    (kept,) = read_jsonl(tmp_path / "warned" / "run" / "collapses.jsonl")
    assert (kept["step"], kept["action"], kept["back_to"]) == (2, "warn", None) and "made up" in kept["alarms"][0]
    assert every(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.on_collapse must be warn or stop or rollback, got 'panic'"):
        load_config(["trainer.on_collapse=panic"])
    with pytest.raises(ConfigError, match=r"trainer.on_collapse=rollback needs trainer.save_freq above 0"):
        load_config(["trainer.on_collapse=rollback", "trainer.save_freq=0"])
