"""The report's data: what is read, what is explained, what is left out, and that no text of a model is HTML."""

from __future__ import annotations

import base64
import http.client
import json
import math
import re
import shlex
import socket
import sys
import threading
import warnings
import zlib
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.report_run import HOSTILE, PER_GROUP, damage, save_report_run
from toolrl.analysis.explain.explanation import explain, read_step, summary
from toolrl.analysis.report import png, rollouts, serve
from toolrl.analysis.report.__main__ import main
from toolrl.analysis.report.chunks import Chunks, spread_order
from toolrl.analysis.report.compare import compare, compare_runs, data_files, differences
from toolrl.analysis.report.curves import columns, describe, marks, validation
from toolrl.analysis.report.folder import RunFolder, read_run, read_runs
from toolrl.analysis.report.intervals import welch_half
from toolrl.analysis.report.page import render
from toolrl.analysis.report.png import smoothed
from toolrl.analysis.report.rollouts import read_rollouts
from toolrl.analysis.report.serve import ReportServer
from toolrl.analysis.report.verdict import GROUP_FREE, verdict
from toolrl.analysis.samples.sample_files import SampleFiles, read_samples, samples_path
from toolrl.commands import PROBE
from toolrl.servers.serving import ServingConfig
from verl.algorithms import ALGORITHMS
from verl.algorithms.algorithm import load_preset
from verl.config.commands import SFT
from verl.config.load import load_config
from verl.errors import ConfigError
from verl.host.services import TOKEN_VARIABLE
from verl.tracking.jsonl import append_jsonl, read_jsonl, write_jsonl
from verl.tracking.names import STDERR


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_report_run(tmp_path_factory.mktemp("runs") / "one")


def decoded(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def verdict_of(run: RunFolder) -> list[str]:
    return verdict(run, validation(run))


def embedded(page: str, name: str) -> Any:
    found = re.search(rf'<script type="text/plain" id="{name}">([A-Za-z0-9+/=]*)</script>', page)
    assert found is not None
    return decoded(found[1])


def test_a_page_refers_to_nothing_and_no_text_of_the_model_is_part_of_it(folder: Path) -> None:
    page, notes = render([folder])
    assert notes == []
    assert not re.search(r"""(?:src|href)=["']?(?!data:)\w""", page.replace("document.location", ""))
    assert "taken" not in page and "onerror" not in page and "question 1" not in page
    assert page.count("</script>") == page.count("<script")
    data = embedded(page, "data")
    (run,) = data["runs"]
    meta = run["rollouts"]["meta"]
    assert run["name"] == "one" and len(meta["step"]) == 12 * 3 * PER_GROUP == run["rollouts"]["shown"]
    assert run["settings"]["trainer.seed"] == [7, 0] and "algorithm.options" not in run["settings"]
    row = next(row for row in range(12 * 3 * PER_GROUP) if (meta["step"][row], meta["line"][row]) == (5, 0))
    one = embedded(page, f"chunk-{meta['chunk'][row]}")[meta["place"][row]]
    assert one["prompt"] == [{"role": "user", "content": f"question 0 {HOSTILE}"}] and one["answer"] == HOSTILE
    assert data["metrics"]["reward/total"]["unit"] == "points" and "mine/own" not in data["metrics"]


def test_a_kept_sample_has_what_the_terminal_prints_of_it(folder: Path) -> None:
    page, _ = render([folder])
    meta, run = embedded(page, "data")["runs"][0]["rollouts"]["meta"], read_run(folder)
    chunks = [embedded(page, f"chunk-{chunk}") for tokens in meta["tokens"] for chunk in tokens]
    assert len(chunks) == 12 * 5
    for each in chunks:
        found = explain(run, each["step"], each["number"])
        assert each["explanation"]["sections"] == [[title, list(lines)] for title, lines in found.sections]
        assert each["explanation"]["failed"] == found.failed


def test_the_filters_have_what_they_need(folder: Path) -> None:
    found = read_rollouts(read_run(folder), Chunks(), 10_000_000)
    by_task = {found.meta["task_id"][row]: row for row in range(found.shown)}
    status = [found.meta["tool_status"][by_task[f"task{number}{HOSTILE}"]] for number in range(3)]
    equal = [found.meta["equal"][by_task[f"task{number}{HOSTILE}"]] for number in range(3)]
    assert status == ["s", "t", "s"] and equal == [True, False, False]
    assert set(found.meta["stop_reason"]) == {"stop", "length"} and set(found.meta["turns"]) == {2}
    assert found.quantiles["reward"][0] == [0.0, 1.0, 1.0, 2.0, 3.0]


def test_tokens_lie_with_their_rollout_a_sample_per_segment(folder: Path) -> None:
    chunks = Chunks()
    found = read_rollouts(read_run(folder), chunks, 10_000_000)
    with_tokens = {
        (found.meta["step"][row], found.meta["line"][row]) for row in range(found.shown) if found.meta["tokens"][row]
    }
    assert with_tokens == {(step, line) for step in range(1, 13) for line in range(PER_GROUP)}
    first = next(row for row in range(found.shown) if found.meta["line"][row] == 0)
    views = [decoded(chunks.texts[number]) for number in found.meta["tokens"][first]]
    assert [(view["segment"], view["num_segments"]) for view in views] == [(0, 2), (1, 2)]
    assert [view["number"] for view in views] == [0, 1]
    view = views[0]
    assert view["texts"] == ["w4 ", "w5 ", "w1 ", f"{HOSTILE}9 ", "w3 "] and view["mask"] == [0, 0, 1, 1, 1]
    assert view["columns"]["rollout_logprobs"] == [-0.5, -1.0, -1.5] and view["versions"] == [-1, -1, 0, 0, 1]
    # of the numbers before they are rounded
    assert view["columns"]["difference"] == pytest.approx([-1.2e-5] * 3, rel=0.02)
    assert view["columns"]["logprobs"] == view["columns"]["rollout_logprobs"]
    assert view["share"]["agrees"] is view["total"]["agrees"] is True
    assert view["share"]["text"].startswith("0.25 = weight * (3.75) / 1 update, with weight = token-mean: 1 / 15 ")
    assert "5 samples add up to 1.25, actor/loss is 1.25: they agree" in view["total"]["text"]


def test_a_reused_rollout_lies_where_it_was_generated(tmp_path: Path) -> None:
    """Steps 4 and 6 train again on rollout 2 of task 1, which both steps 2 and 3 have, with other rewards in step 2."""
    run = save_report_run(tmp_path / "run", steps=6)
    path = run / "transcripts" / "step-000002.jsonl"
    rows = read_jsonl(path)
    path.unlink()
    write_jsonl(path, [{**row, "reward": row["reward"] + 9} for row in rows])
    for step in (4, 6):
        kept = read_samples(samples_path(run, step))
        task = f"task1{HOSTILE}"
        again = replace(kept.samples[-1], line=None, task_id=task, index=2, reward=2.0, row=9)
        lost = replace(again, reward=77.0)
        SampleFiles(run, str).write(step, replace(kept, samples=[*kept.samples, again, lost]))
    (run / "transcripts" / "step-000005.jsonl").unlink()
    chunks = Chunks()
    found = read_rollouts(read_run(run), chunks, 10_000_000)
    line = PER_GROUP + 2
    assert found.reused == [[4, 3, line], [6, 4, line]]
    (row,) = (row for row in range(found.shown) if (found.meta["step"][row], found.meta["line"][row]) == (3, line))
    assert [decoded(chunks.texts[number])["step"] for number in found.meta["tokens"][row]] == [4]


def test_rollouts_beyond_the_size_limit_are_dropped_evenly_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = Chunks()
    found = read_rollouts(read_run(folder), chunks, 6_000)
    assert 0 < found.shown_steps < 12 and {1, 12} <= set(found.meta["step"])
    assert chunks.size <= 6_000 and len(found.meta["step"]) == found.shown < found.read == 144
    assert f"{found.shown} of 144 rollouts fit into the file, of {found.shown_steps} of 12 steps" in found.left_out[0]
    assert f"{found.samples} of 60 kept samples" in found.left_out[1]
    monkeypatch.setattr(rollouts, "MAX_READ", 12 * 2)
    few = read_rollouts(read_run(folder), Chunks(), 10_000_000)
    assert sorted(few.meta["line"][:PER_GROUP]) == [0, 1, 2, 3] and few.read == 12 * 2
    assert few.left_out == ["of every step the first 2 rollouts are read, and those with tokens"]


def test_the_verdict_by_hand(tmp_path: Path) -> None:
    """Rewards 0 and 2 in turns, then 4 and 6: means of 0.8 and 4.8, variance 1.2 in five steps each.

    Equal variances have 8 degrees of freedom, whose quantile of 97.5 % is 2.306.
    """
    first, last = [2.0, 0.0, 2.0, 0.0, 0.0], [4.0, 6.0, 4.0, 6.0, 4.0]
    rewards = enumerate([*first, *last], 1)
    rows: list[dict[str, Any]] = [{"step": number, "reward/total": reward} for number, reward in rewards]
    rows[0] |= {"val/a/total": 0.5, "val/a/total_stderr": 0.03, "val/a/Alone/total": 0.9}
    rows[-1] |= {"val/a/total": 0.6, "val/a/total_stderr": 0.04, "val/a/Alone/total": 0.1}
    rows[-1]["reward/zero_variance_groups"] = 0.9
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    run = read_run(tmp_path)
    change, half = sum(last) / 5 - sum(first) / 5, 2.306 * math.sqrt(1.2 / 5 + 1.2 / 5)
    reward, validated, advice = verdict_of(run)
    assert reward == (
        "The run learned. The mean reward rose: from 0.800 in the first 5 steps to 4.800 in the last 5, a change of "
        f"+4.000 (95 % interval {change - half:+.3f} to {change + half:+.3f})."
    )
    assert validated.startswith(
        "Validation, val/a/total: from 0.500 to 0.600, a change of +0.100 (95 % interval +0.002"
    )
    assert validation(run)[0][3] == pytest.approx(1.96 * 0.05, rel=1e-3)
    assert advice.startswith("Look first: most groups have equal returns") and "0.9 in the last 5 steps" in advice
    for name, looked in (("grpo", "Look first"), ("ppo", "Nothing stands out"), ("reinforce_pp", "Nothing stands out")):
        (tmp_path / "config.yaml").write_text(f"algorithm:\n  name: {name}\n")
        assert verdict_of(read_run(tmp_path))[2].startswith(looked)
    write_jsonl(tmp_path / "metrics.jsonl", rows[:3])
    assert verdict_of(read_run(tmp_path))[0].startswith("Too few steps for a verdict on the reward: 3")
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "mine/loss": 1.0}])
    assert verdict_of(read_run(tmp_path))[0] == "No reward is logged."
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 0, "val/a/total": 0.5}])
    assert verdict_of(read_run(tmp_path))[0] == "No step is finished yet."


def test_a_run_without_rewards_is_judged_by_its_loss(tmp_path: Path) -> None:
    """As `toolrl sft` leaves it: no rollouts, no responses of validations, defaults of its own."""
    rows = [{"step": n, "actor/loss": 4.0 - n / 10, "val/demonstrations/loss": 2.0} for n in range(1, 11)]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    (tmp_path / "config.yaml").write_text("trainer:\n  save_freq: 0\n  total_epochs: 9\n")
    loss, validated, advice = verdict_of(run := read_run(tmp_path))
    assert loss.startswith(
        "The run learned. The mean loss fell: from 3.700 in the first 5 steps to 3.200 in the last 5, a change of -0.5"
    )
    assert (
        validated.startswith("Validation, val/demonstrations/loss") and advice == "Nothing stands out in the metrics."
    )
    assert not any("validation" in note for note in run.notes)
    described = embedded(render([tmp_path])[0], "data")["runs"][0]
    assert described["settings"] == {"trainer.total_epochs": [9, 3]}  # toolrl train has 30


def test_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    save_report_run(tmp_path / "one", steps=1)
    with pytest.raises(ConfigError, match=r"neither metrics.jsonl nor config.yaml; runs in it: .*/one$"):
        read_run(tmp_path)


def test_a_task_that_is_drawn_twice_in_a_step_has_two_groups(tmp_path: Path) -> None:
    """Their returns are equal in each of the two, and differ between them."""
    folder = save_report_run(tmp_path / "run", steps=1)
    path = folder / "transcripts" / "step-000001.jsonl"
    rows = [{**row, "task_id": "a", "reward": float(row["group"])} for row in read_jsonl(path)]
    write_jsonl(path, rows)
    meta = read_rollouts(read_run(folder), Chunks(), 10_000_000).meta
    by_line = dict(zip(meta["line"], meta["group"], strict=True))
    assert [by_line[line] for line in range(12)] == [0] * 4 + [1] * 4 + [2] * 4 and meta["equal"] == [True] * 12
    write_jsonl(path, [{name: value for name, value in row.items() if name != "group"} for row in rows])
    meta = read_rollouts(read_run(folder), Chunks(), 10_000_000).meta  # of an earlier version: one group per task
    assert set(meta["group"]) == {"a"} and meta["equal"] == [False] * 12


def test_samples_without_room_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_report_run(tmp_path / "run", steps=2)
    for step, count in ((1, 0), (2, 13)):
        kept = read_samples(samples_path(folder, step))
        SampleFiles(folder, str).write(step, replace(kept, samples=kept.samples[:3], left_out=count))
    found = read_rollouts(read_run(folder), Chunks(), 10_000_000)
    assert found.left_out == ["13 of 19 chosen samples had no room in the files of their steps (1 MB each)"]
    assert summary(read_step(read_run(folder), 2))[3:] == ["13 longer samples had no room in the file (1 MB)"]
    assert len(summary(read_step(read_run(folder), 1))) == 3


def test_tokens_are_never_those_of_another_rollout(tmp_path: Path) -> None:
    folder = save_report_run(tmp_path / "run", steps=1)
    path = folder / "transcripts" / "step-000001.jsonl"
    write_jsonl(path, reversed(read_jsonl(path)))
    run = read_run(folder)
    found = read_rollouts(run, Chunks(), 10_000_000)
    assert found.samples == 0 and not any(found.meta["tokens"])
    assert run.notes == ["transcripts of step 1: the rollouts of 5 kept samples are not at their lines"]
    run.notes.clear()
    shown = explain(run, 1, 0)
    assert dict(shown.sections)["Texts"][1] == "the transcript of this rollout is not in the step's file"
    lost = "transcripts of step 1: line 1, the rollout of this sample, is missing or damaged"
    assert lost in run.notes


def test_presets_without_groups_are_known() -> None:
    assert {name for name in ALGORITHMS if not load_preset(name).needs_group} == set(GROUP_FREE)


def test_the_verdict_names_a_score_and_no_count(tmp_path: Path) -> None:
    """Counts of tasks that could not be judged come before scores in the alphabet."""
    rows = [{"eval/bfcl/missing": 3.0 * step, "eval/bfcl/score": step / 10, "eval/bfcl/exact": 0.0} for step in (1, 2)]
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": step, **row} for step, row in enumerate(rows)])
    run = read_run(tmp_path)
    assert verdict_of(run)[1] == "Validation, eval/bfcl/score: from 0.100 to 0.200, a change of +0.100."
    assert [each[0].rpartition("/")[2] for each in validation(run)] == ["score", "exact", "missing"]
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": step, "eval/bfcl/missing": 1.0} for step in (1, 2)])
    assert verdict_of(read_run(tmp_path))[1] == "There was no validation before and after the training."


def test_an_interval_of_unequal_variances_by_hand() -> None:
    """Variances of the means 0 and 1 / 5: 4 degrees of freedom, whose quantile is 2.776, not the normal one's 1.96."""
    assert welch_half([1.0] * 5, [0.0, 2.0, 1.0, 2.0, 0.0]) == pytest.approx(2.776 * math.sqrt(0.2), rel=1e-3)
    # variances 0.2 and 0.5: 0.7 ** 2 / (0.2 ** 2 / 4 + 0.5 ** 2 / 4) = 6.759 degrees, between 2.447 (6) and 2.365 (7)
    half = welch_half([0.0, 2.0, 1.0, 2.0, 0.0], [math.sqrt(2.5) * each for each in (0.0, 2.0, 1.0, 2.0, 0.0)])
    assert 2.365 < half / math.sqrt(0.7) < 2.447
    assert welch_half([1.0] * 5, [2.0] * 5) == 0.0
    even = [float(number % 2) for number in range(400)]  # many values: the normal quantile
    assert welch_half(even, even) == pytest.approx(1.96 * math.sqrt(2 * 0.25 / 400), rel=5e-3)


def test_an_interval_of_few_tasks_takes_their_number(tmp_path: Path) -> None:
    """Standard errors of 0.03 over 8 tasks each: 14 degrees of freedom, whose quantile is 2.145."""
    run = save_report_run(tmp_path / "run")
    (found,) = validation(read_run(run))
    assert found[0] == "val/test/total" and found[3] == pytest.approx(2.145 * 0.03 * math.sqrt(2), rel=1e-3)
    (run / "validation" / "step-000000.jsonl").unlink()  # infinitely many in one: 4 * 7 degrees, with 2.048
    assert validation(read_run(run))[0][3] == pytest.approx(2.048 * 0.03 * math.sqrt(2), rel=1e-3)
    rows = [{"step": step, "val/a/exact": float(step), f"val/a/exact{STDERR}": 0.0} for step in (0, 1)]
    write_jsonl(tmp_path / "equal" / "metrics.jsonl", rows)
    assert validation(read_run(tmp_path / "equal")) == [("val/a/exact", 0.0, 1.0, None)]


def test_the_interval_of_a_data_source_counts_its_own_tasks(tmp_path: Path) -> None:
    """Three of eight tasks in each validation: 4 degrees of freedom, whose quantile is 2.776."""
    name = "val/test/few/exact"
    metrics = [{"step": step, name: float(step), f"{name}{STDERR}": 0.1} for step in (0, 1)]
    write_jsonl(tmp_path / "metrics.jsonl", metrics)
    (tmp_path / "validation").mkdir()
    scored = {"set": "test", "score": {"total": 0.0, "parts": {}}, "exact": 0.0}
    rows = [{**scored, "task_id": f"{task}", "data_source": "few" if task < 3 else "many"} for task in range(8)]
    for step in (0, 1):
        write_jsonl(tmp_path / "validation" / f"step-{step:06d}.jsonl", rows)
    halves = {metric: half for metric, *_, half in validation(read_run(tmp_path))}
    assert halves[name] == pytest.approx(2.776 * 0.1 * math.sqrt(2), rel=1e-3)


def test_a_steady_reward_is_not_called_a_rise(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": n, "reward/total": float(n % 2)} for n in range(1, 21)])
    reward, validated, advice = verdict_of(read_run(tmp_path))
    assert (
        reward.startswith("The run did not learn. The mean reward did not change measurably: ")
        and "no validation" in validated
        and "Nothing stands out" in advice
    )


@pytest.mark.parametrize(
    ("rewards", "after", "outcome"),
    [
        ([0.0, 1.0] * 5, 0.9, "The run learned, by its validation. The mean reward did not change measurably"),
        ([0.0, 1.0] * 5, 0.1, "The run got worse, by its validation. The mean reward did not change measurably"),
        ([0.0, 1.0] * 5, 0.55, "The run did not learn. The mean reward did not change measurably"),
        ([0.0] * 5 + [1.0] * 5, 0.1, "The run got worse, by its validation. The mean reward rose"),
        ([1.0] * 5 + [0.0] * 5, 0.9, "The run learned, by its validation. The mean reward fell"),
        ([1.0] * 5 + [0.0] * 5, 0.55, "The run got worse. The mean reward fell"),
        ([0.0] * 5 + [1.0] * 5, 0.9, "The run learned. The mean reward rose"),
    ],
)
def test_a_measured_change_of_the_validation_decides(
    rewards: list[float], after: float, outcome: str, tmp_path: Path
) -> None:
    """Standard errors of 0.05: the change of 0.5 -> 0.55 is within the interval, the others are not."""
    rows: list[dict[str, Any]] = [{"step": n, "reward/total": reward} for n, reward in enumerate(rewards, 1)]
    rows[0] |= {"val/a/total": 0.5, "val/a/total_stderr": 0.05}
    rows[-1] |= {"val/a/total": after, "val/a/total_stderr": 0.05}
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    assert verdict_of(read_run(tmp_path))[0].startswith(outcome)


CONFIG = """algorithm: {name: grpo}
actor: {optim: {lr: 0.0004}}
data: {max_response_length: 96, train_files: [/rows/my calls.jsonl]}
model: {path: /models/m}
reward: {name: auto}
"""
DATA = "model.path=/models/m 'data.train_files=[/rows/my calls.jsonl]'"


@pytest.mark.parametrize(
    ("metrics", "start", "end"),
    [
        (
            {"reward/correctness": -3.0, "reward/zero_variance_groups": 1.0},
            "No response had a right call",
            f"sft {DATA}",
        ),
        ({"reward/correctness": -2.99, "reward/zero_variance_groups": 1.0}, "Look first: most groups", f"probe {DATA}"),
        ({"reward/format": 0.1}, "Look first: few responses have the format", f"sft {DATA}"),
        ({"response_length/clip_ratio": 0.9}, "Look first: many responses reach", "Try data.max_response_length=192"),
        ({"actor/clip_fraction": 0.5}, "Look first: the ratio of new to old", "Try actor.optim.lr=0.00012"),
        ({"tools/parse_errors_mean": 2.0}, "Look first: many tool calls cannot be parsed", f"sft {DATA}"),
    ],
)
def test_a_run_that_did_not_learn_has_a_reason_and_a_command(
    metrics: dict[str, float], start: str, end: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    rows = [{"step": n, "reward/total": float(n % 2), **metrics} for n in range(1, 11)]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    advice = verdict_of(read_run(tmp_path))[2]
    assert advice.startswith(start) and advice.endswith(end)
    write_jsonl(tmp_path / "metrics.jsonl", [{**row, "reward/total": row["step"]} for row in rows])
    reward, _, advice = verdict_of(read_run(tmp_path))
    assert reward.startswith("The run learned.") and "Try " not in advice and "demonstrations" not in advice


def test_a_command_of_a_verdict_is_one_that_the_command_line_takes() -> None:
    overrides = shlex.split(DATA)
    assert load_config(overrides, PROBE).data.train_files == load_config(overrides, SFT).data.train_files


def test_the_lowest_correctness_is_that_of_the_rewards_options(tmp_path: Path) -> None:
    rows = [{"step": n, "reward/total": -1.0, "reward/correctness": -1.0} for n in range(1, 4)]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    for options, never in (("{}", False), ("{correct_max_1: true}", True)):
        (tmp_path / "config.yaml").write_text(f"reward: {{name: rlla, options: {options}}}\n")
        assert ("No response had a right call" in verdict_of(read_run(tmp_path))[2]) is never


def test_marks_stand_where_something_begins(tmp_path: Path) -> None:
    """A gap around the limit begins once, and so does a rule that stays triggered."""
    gaps, depths, rules = [0.01, 0.2, 0.06, 0.3, 0.04, 0.2], [1, 1, 2, 2, 2, 2], [0, 0, 0, 1, 1, 2]
    rows = [
        {"step": step, "engine/logprob_diff_mean": gap, "staleness/depth": depth, "collapse/triggered_rules": count}
        for step, (gap, depth, count) in enumerate(zip(gaps, depths, rules, strict=True), 1)
    ]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    alarms = [{"step": 5, "action": "stop", "alarms": ["one", "two"]}] * 2  # resumed, and stopped again
    write_jsonl(tmp_path / "collapses.jsonl", [*alarms, {"alarms": ["of no step"]}])
    alarm, *others = marks(read_run(tmp_path))
    assert (alarm["step"], alarm["text"]) == (5, "one; two")
    found = [(mark["step"], mark["kind"]) for mark in others]
    assert found == [(2, "gap"), (3, "staleness"), (4, "collapse"), (6, "collapse"), (6, "gap")]


def test_runs_of_one_name_are_named_with_their_parents(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "x" / "run", tmp_path / "b" / "x" / "run"]
    for folder in folders:
        write_jsonl(folder / "metrics.jsonl", [{"step": 1}])
    assert [run.name for run in read_runs(folders)] == ["a/x/run", "b/x/run"]
    assert [run.name for run in read_runs(folders[:1])] == ["run"]
    assert [run.name for run in read_runs([folders[0], folders[0]])] == ["run", "run"]


def test_axes_and_descriptions(folder: Path) -> None:
    table = columns(read_run(folder))
    assert table["time"][:3] == pytest.approx([0, 60 / 3600, 120 / 3600])
    assert table["tokens"][:3] == pytest.approx([0, 0.0045, 0.009])
    assert table["reward/total"][0] is None and len(set(map(len, table.values()))) == 1
    exact, part, free = (describe(name) for name in ("reward/turns", "reward/own_part", "val/a/b/total"))
    assert (
        exact
        and part
        and free
        and (exact.name, part.name, free.name) == ("reward/turns", "reward/<part>", "val/<set>/total")
    )
    assert describe("mine/own") is None
    for name, entry, unit in (
        ("time/update_s", "time/<phase>_s", "s"),
        ("time/update_cpu_s", "time/<phase>_cpu_s", "s"),
        ("reward/swe/running_s", "reward/swe/<stage>_s", "s"),
        ("reward/swe/starting_wait_s", "reward/swe/<stage>_wait_s", "s"),
        ("val/a/b/swe/engine_s", "reward/swe/engine_s", "s"),
        ("reward/source/swe/engine_share", "reward/swe/engine_share", "share"),
        ("reward/source/format", "reward/<data_source>/<part>", "points"),
        ("val/a/format", "val/<set>/<part>", "points"),
    ):
        found = describe(name)
        assert found is not None and (found.name, found.unit) == (entry, unit)
    assert "CPU time" in describe("time/update_cpu_s").meaning  # type: ignore[union-attr]


def test_damaged_files_are_notes_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = save_report_run(tmp_path / "run")
    damage(folder)
    page, notes = render([folder])
    expected = [
        "config.yaml cannot be read",
        "metrics.jsonl: 1 of 14 lines left out (damaged)",
        "transcripts of step 1: 3 lines left out",
        "step-000002.npz",
    ]
    assert all(any(each in note for note in notes) for each in expected) and len(notes) == len(expected)
    (run,) = embedded(page, "data")["runs"]
    assert run["rollouts"]["shown"] == 11 * 3 * PER_GROUP and len(run["metrics"]["step"]) == 13


def _without(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()


def _emptied(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("")


def _crashed(folder: Path) -> None:
    for time, first in (("20260101-000000", "LookupError: old"), ("20260102-000000", "WorkerError: rank 0 died")):
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / f"crash-{time}.txt").write_text(f"{first}\n\ncommand: toolrl train\n")


@pytest.mark.parametrize(
    ("damaged", "note"),
    [
        (
            _crashed,
            "the run has crashed 2 times, the last time: WorkerError: rank 0 died; crash report: .*-20260102-000000",
        ),
        (_emptied, "metrics.jsonl has no line: no step has been logged"),
        (partial(_without, pattern="metrics.jsonl"), r"metrics\.jsonl cannot be read \(No such file or directory\)"),
        (
            partial(_without, pattern="transcripts/*"),
            "transcripts/ lacks the files of all finished steps: 1, 2, 3, 4, 5, ..",
        ),
        (partial(_without, pattern="samples/*2.npz"), "samples/ lacks the files of 2 of 12 finished steps: 2, 12"),
    ],
    ids=["crash", "no metrics yet", "no metrics.jsonl", "no transcripts", "few samples"],
)
def test_each_missing_file_of_a_run_is_one_note(tmp_path: Path, damaged: Any, note: str) -> None:
    folder = save_report_run(tmp_path / "run")
    damaged(folder)
    page, notes = render([folder])
    assert len(notes) == 1 and re.match(note, notes[0])
    (run,) = embedded(page, "data")["runs"]
    assert run["notes"] == notes
    assert bool(run["metrics"]["step"]) is ("metrics" not in note) and run["rollouts"]["shown"] == (
        0 if "transcripts" in note else 12 * 3 * PER_GROUP
    )


def test_samples_are_not_missed_where_none_are_kept(tmp_path: Path) -> None:
    folder = save_report_run(tmp_path / "run")
    _without(folder, "samples/*")
    assert render([folder])[1] == ["samples/ lacks the files of all finished steps: 1, 2, 3, 4, 5, .."]
    (folder / "config.yaml").write_text("trainer:\n  samples_kept: 0\n")
    assert render([folder])[1] == []


@pytest.mark.parametrize(
    "damaged",
    [
        {"reward": math.nan},
        {"reward": math.inf},
        {"reward": "1"},
        {"score": {"total": 1.0, "parts": {"format": math.nan}}},
        {"score": {"total": 1.0, "parts": None}},
        {"score": []},
        {"responses": [{"role": "assistant", "content": None}]},
        {"responses": ["text"]},
        {"prompt": None},
        {"num_tokens": "12"},
        {"tool_uses": "search"},
        {"tool_uses": [None]},
        {"task_id": ["a"]},
    ],
    ids=str,
)
def test_a_rollout_of_another_shape_is_left_out(tmp_path: Path, damaged: dict[str, Any]) -> None:
    folder = save_report_run(tmp_path / "run")
    path = folder / "transcripts" / "step-000001.jsonl"
    rows, total = read_jsonl(path), sum(len(read_jsonl(each)) for each in path.parent.glob("*.jsonl"))
    path.write_text("".join(json.dumps(row) + "\n" for row in [{**rows[0], **damaged}, *rows[1:]]))
    page, notes = render([folder])
    assert notes == ["transcripts of step 1: 1 line left out (damaged, or with values of other types)"]
    (run,) = embedded(page, "data")["runs"]
    assert run["rollouts"]["read"] == total - 1


def test_curves_as_pictures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("matplotlib.image")
    other = tmp_path / "run $x^"  # no formula
    write_jsonl(other / "metrics.jsonl", [{"step": step, "reward/$_part": float(step)} for step in (1, 2, 3)])
    (other / "config.yaml").write_text("{}")
    assert main([str(folder), str(other), "--png", str(tmp_path / "png")]) == 0
    written = {path.name for path in (tmp_path / "png").iterdir()}
    assert written == {f"{name}.png" for name in ("actor", "mine", "perf", "reward", "time", "val")}
    assert str(tmp_path / "png" / "reward.png") in capsys.readouterr().out
    height, width, _ = image.imread(tmp_path / "png" / "reward.png").shape
    assert width == 1260 and height == 270  # three curves beside each other
    assert smoothed("reward/total", [1.0, 2.0, 0.0]) == pytest.approx([1.0, 1.3, 0.91])
    assert smoothed("val/a/total", [1.0, 2.0]) == [1.0, 2.0]
    assert main([str(folder), "--png", str(tmp_path / "png" / "reward.png")]) == 2
    assert "cannot be written (" in capsys.readouterr().err
    (tmp_path / "taken" / "actor.png").mkdir(parents=True)
    assert main([str(folder), "--png", str(tmp_path / "taken")]) == 2
    assert "actor.png: cannot be written (Is a directory)" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(folder), "--png", str(tmp_path / "none")]) == 2
    assert "--png needs the package matplotlib: pip install 'toolrl[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_picture_has_its_unit_and_whole_steps(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": step, "time/update_cpu_s": step / 7} for step in (1, 2, 3, 4)])
    axes, run = figure.add_subplot(), read_run(tmp_path)
    png._draw(axes, "time/update_cpu_s", [run], [columns(run)])
    figure.canvas.draw()
    assert axes.get_ylabel() == "s" and all(float(tick).is_integer() for tick in axes.get_xticks())


def test_pictures_of_strange_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long names, characters without a glyph, values near the largest, and more curves than a picture has room for."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(png, "_MOST", 2)
    names = {"m" * 400 + "/x": 1.0, "ctrl/a\x07\u202eb": 1.0, **{f"many/{number}": 1.0 for number in range(5)}}
    rows = [{"step": step, "big/x": (-1) ** step * 1.7e308, **names} for step in range(3)]
    (tmp_path / "run").mkdir()
    write_jsonl(tmp_path / "run" / "metrics.jsonl", rows)
    with warnings.catch_warnings(action="error"):
        paths = png.write_pngs(read_runs([tmp_path / "run"]), tmp_path / "out")
    assert [path.stem for path in paths] == ["big", "ctrl", "many", "many-2", "many-3", "m" * 100]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "report.html"
    assert main([str(folder), "--out", str(out)]) == 0
    assert out.stat().st_size < 1_000_000 and str(out) in capsys.readouterr().out
    (tmp_path / "link").symlink_to(out)
    out.write_text("")
    assert main([str(folder), "--out", str(tmp_path / "link")]) == 0 and out.stat().st_size > 100_000
    for taken in (tmp_path, Path("/dev/null")):
        assert main([str(folder), "--out", str(taken)]) == 2
        assert f"--out: {taken} is no regular file" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        read_run(tmp_path)
    assert len(read_jsonl(folder / "transcripts" / "step-000001.jsonl")) == 12


@given(st.integers(0, 300))
def test_every_part_of_the_order_is_spread(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    for part in (8, 40):
        if count > 2 * part:
            chosen = sorted(order[:part])
            assert max(b - a for a, b in pairwise(chosen)) <= 4 * count / part


def test_the_server_answers_this_machine_alone(folder: Path) -> None:
    with ReportServer([folder]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            asked = [
                ("/", "127.0.0.1"),
                ("/", f"localhost:{server.port}"),
                ("/", "LOCALHOST"),
                ("/", "attacker.example"),
                ("/../config.yaml", "localhost"),
            ]
            answers = [_answer(server.port, path, host) for path, host in asked]
            with pytest.raises(ConfigError, match="cannot listen on"):
                ReportServer([folder], ServingConfig("127.0.0.1", server.port))
        finally:
            server.shutdown()
            thread.join()
        assert [status for status, _ in answers] == [200, 200, 200, 400, 404]
        assert embedded(answers[0][1], "data")["live"] == server.version()
        assert server.page() is server.page()
        with pytest.raises(ConfigError, match="port must be 0-65535"):
            ReportServer([folder], ServingConfig("127.0.0.1", 99999))


def test_a_server_for_other_machines_answers_by_its_own_name(folder: Path) -> None:
    with ReportServer([folder], ServingConfig("0.0.0.0", 0, no_token=True)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            found = [_answer(server.port, "/", host)[0] for host in (socket.gethostname(), "attacker.example")]
        finally:
            server.shutdown()
            thread.join()
    assert found == [200, 400]


def test_beyond_loopback_the_report_needs_the_token(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(TOKEN_VARIABLE, raising=False)
        server = ReportServer([folder], ServingConfig("0.0.0.0", 0))
    token = capsys.readouterr().err.strip().partition("=")[2]
    basic = base64.b64encode(f"any:{token}".encode()).decode()
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            wrong, right = (
                _answer(server.port, "/", "localhost", authorization=each) for each in ("", f"Basic {basic}")
            )
        finally:
            server.shutdown()
            thread.join()
    assert server.has_token and (wrong[0], right[0]) == (401, 200)


def test_half_requests_and_event_streams_take_no_threads(folder: Path) -> None:
    with ReportServer([folder]) as server, ExitStack() as stack:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for number in range(100):
                half = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                half.sendall((b"GET / HT", b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")[number % 2])
            assert _answer(server.port, "/", "localhost")[0] == 200
            assert threading.active_count() < 50
        finally:
            server.shutdown()
            thread.join()


def test_a_step_between_the_page_and_its_stream_is_an_event(tmp_path: Path) -> None:
    """Also one that ends while the page is rendered: the page has the version from before."""
    folder = save_report_run(tmp_path / "run")

    def step(number: int) -> None:
        append_jsonl(folder / "metrics.jsonl", {"step": number, "time": 2000.0})

    with ReportServer([folder]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            seen = embedded(_answer(server.port, "/", "localhost")[1], "data")["live"]
            assert _first_event(server.port, seen) == ":"
            step(13)
            assert _first_event(server.port, seen) == f"event: changed\nid: {server.version()}"
            assert _first_event(server.port, seen, last=server.version()) == ":"
            real = render

            def slow(*args: Any, **options: Any) -> Any:
                step(14)
                return real(*args, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(serve, "render", slow)
                seen = embedded(_answer(server.port, "/", "localhost")[1], "data")["live"]
            assert _first_event(server.port, seen) == f"event: changed\nid: {server.version()}"
            before = server.version()
            append_jsonl(folder / "collapses.jsonl", {"step": 14, "alarms": ["one"]})
            assert _first_event(server.port, before) == f"event: changed\nid: {server.version()}"
            before = server.version()
            (folder / "logs").mkdir()
            (folder / "logs" / "crash-20260101-120000.txt").write_text("RuntimeError: no memory left\n")
            assert _first_event(server.port, before) == f"event: changed\nid: {server.version()}"
            data = embedded(_answer(server.port, "/", "localhost")[1], "data")
            assert any("no memory left" in note for note in data["runs"][0]["notes"])
        finally:
            server.shutdown()
            thread.join()


def _first_event(port: int, seen: str, last: str | None = None) -> str:
    """What the stream begins with, without its data. last: the event's id that a browser connects again with"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", f"/events?seen={seen}", headers={} if last is None else {"Last-Event-ID": last})
    answer = connection.getresponse()
    first = answer.readline().decode()
    text = first if first.startswith(":") else first + answer.readline().decode()
    connection.close()
    return text.strip()


def _answer(port: int, path: str, host: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Host": host, **headers})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def scored(*scores: float, exact: bool = False, tasks: str = "abcdefgh") -> dict[tuple[str, str], list[Any]]:
    """A response per task of the set `v`; two of a task that is named twice."""
    found: dict[tuple[str, str], list[Any]] = {}
    for task, score in zip(tasks, scores, strict=False):
        row = {"score": {"total": score}, "answer": f"gold of {task}", **({"exact": score} if exact else {})}
        found.setdefault(("v", task), []).append(row)
    return found


def test_paired_differences_by_hand() -> None:
    """Differences 0, 0, 1, 1, -1, 0, 1, 0: mean 1/4, variance (4 - 8 / 16) / 7 = 0.5, t of 7 degrees 2.365."""
    chunks = Chunks()
    found = compare("A", scored(1, 1, 0, 0, 1, 0, 0, 1), "B", scored(1, 1, 1, 1, 0, 0, 1, 1), chunks)
    (paired,) = found.sets
    assert (paired.tasks, paired.before, paired.after, paired.solved) == (8, 0.5, 0.75, [4, 6])
    half = 2.3646 * math.sqrt(0.5 / 8)
    assert (paired.gained, paired.lost) == (3, 1)
    assert (paired.low, paired.high) == pytest.approx((0.25 - half, 0.25 + half), abs=1e-4)
    assert [(each["task"], each["solved"]) for each in found.flipped] == [
        ("e", False), ("c", True), ("d", True), ("g", True)
    ]  # fmt: skip
    assert decoded(chunks.texts[found.flipped[0]["chunk"]])[0]["score"] == {"total": 1}


def test_a_pair_is_narrower_than_two_means() -> None:
    """Tasks differ by far more than the runs: they gain 0.1 or 0.2. Of many, the bootstrap is close to the normal."""
    for count, quantile in ((4, 3.182), (200, 1.96)):
        hard, tasks = [5.0 * task for task in range(count)], "".join(map(chr, range(1000, 1000 + count)))
        old, new = (
            scored(*(each + gain * (1 + task % 2) for task, each in enumerate(hard)), tasks=tasks) for gain in (0, 0.1)
        )
        (paired,) = compare("A", old, "B", new, Chunks()).sets
        half = quantile * 0.05 / math.sqrt(count - 1)
        assert (paired.low, paired.high) == pytest.approx((0.15 - half, 0.15 + half), abs=0.1 * half)


@pytest.mark.parametrize("gain", [0.0, 0.1])
@pytest.mark.parametrize("count", [1, 2, 8, 200])
def test_equal_differences_have_no_interval(count: int, gain: float) -> None:
    """Rounding is no variance: 5.1 - 5 is not 0.1."""
    hard, tasks = [5.0 * task for task in range(count)], "".join(map(chr, range(1000, 1000 + count)))
    old, new = (scored(*(each + more for each in hard), tasks=tasks) for more in (0, gain))
    (paired,) = compare("A", old, "B", new, Chunks()).sets
    assert (paired.tasks, paired.low, paired.high) == (count, None, None)


def test_tasks_without_a_counterpart_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    other = scored(0, 1, 1, tasks="abx")
    other["v", "b"][0]["answer"] = "another question"
    found = compare("A", scored(1, 1, 1), "B", other, Chunks())
    assert [paired.tasks for paired in found.sets] == [1] and found.unpaired == 4
    monkeypatch.setattr("toolrl.analysis.report.compare.MAX_FLIPPED", 0)
    assert compare("A", scored(1), "B", scored(0), Chunks()).left_out == 1


def test_other_data_pair_only_tasks_with_the_same_prompt() -> None:
    old, new = (scored(1, 0, tasks="ab") for _ in range(2))
    for side, question in ((old, "2 + 2"), (new, "3 + 3")):
        side["v", "a"][0]["prompt"] = [{"role": "user", "content": question}]
    found = compare("A", old, "B", new, Chunks())
    assert [paired.tasks for paired in found.sets] == [1] and found.unpaired == 2
    assert [paired.tasks for paired in compare("A", old, "B", new, Chunks(), same_data=True).sets] == [2]


def test_a_task_is_solved_by_half_of_its_maximum_rewards() -> None:
    """Rewards of 0.6 are positive, but not the maximum."""
    few, half = scored(0.6, 0.6, exact=True, tasks="aa"), scored(1, 0, exact=True, tasks="aa")
    few["v", "a"][0]["exact"] = few["v", "a"][1]["exact"] = 0.0
    assert compare("A", few, "B", half, Chunks()).sets[0].solved == [0, 1]


def test_the_transcript_of_a_flipped_task_has_the_outcome_that_flipped() -> None:
    """One of three rewards is 1, so the task is not solved; then two are, of which the second response is the first."""
    chunks = Chunks()
    found = compare("A", scored(1, 0, 0, tasks="aaa"), "B", scored(0, 1, 1, tasks="aaa"), chunks)
    assert [each["solved"] for each in found.flipped] == [True]
    sides = decoded(chunks.texts[found.flipped[0]["chunk"]])
    assert [(side["score"]["total"], side["response"], side["num_responses"]) for side in sides] == [
        (0, 2, 3),
        (1, 2, 3),
    ]


def _with_data(folder: Path, **sources: str) -> Path:
    write_jsonl(folder / "metrics.jsonl", [{"step": 1}])
    rows = [{"source": source.replace("_", "/"), "sha256": digest} for source, digest in sources.items()]
    write_jsonl(folder / "data_versions.jsonl", rows)
    return folder


def test_data_files_of_one_name_in_different_folders_are_distinguished(tmp_path: Path) -> None:
    one = _with_data(tmp_path / "one", _a_x_train="1", _a_y_train="2", _a_val="3")
    same = _with_data(tmp_path / "same", _b_x_train="1", _b_y_train="2", _b_val="3")
    other = _with_data(tmp_path / "other", _b_x_train="2", _b_y_train="2", _b_val="3")
    runs = [read_run(each) for each in (one, same, other)]
    assert data_files(runs[:2]) == [{"x/train": "1", "y/train": "2", "val": "3"}] * 2
    assert differences(runs[:2])["data"] == [] and differences(runs)["data"] == [["x/train", "1", "1", "2"]]
    assert data_files([read_run(_with_data(tmp_path / "none"))]) == [{}]


def test_a_run_is_compared_with_its_start_and_with_others(tmp_path: Path) -> None:
    runs = [read_run(save_report_run(tmp_path / name, gain=gain)) for name, gain in (("one", 0.1), ("two", 0.2))]
    found = compare_runs(runs, Chunks())
    assert [(each.before, each.after) for each in found] == [
        ("one, step 0", "one, step 12"), ("two, step 0", "two, step 12"), ("one, step 12", "two, step 12")
    ]  # fmt: skip
    assert [each.sets[0].solved for each in found] == [[2, 3], [2, 6], [3, 6]]
    differing = differences(runs)
    assert differing == {"settings": [], "data": [], "code": [["source", "source of 0.1", "source of 0.2"]]}
    (runs[1].folder / "validation" / "step-000012.jsonl").write_text('no json\n{"score": {"total": "1"}}\n')
    assert compare_runs(runs, Chunks())[-1].sets == []
    assert runs[1].notes == [
        "step-000012.jsonl of validation: 1 of 2 lines left out (damaged)",
        "step-000012.jsonl of validation: 1 of 2 lines left out (without finite score, or with values of other types)",
    ]
