"""The caps of a page hold for any shape of run, and each that left something out is named on the page."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.report_run import save_report_run
from tests.toolrl.analysis.report.test_report import decoded, embedded, scored
from toolrl.analysis.report import chunks as chunking
from toolrl.analysis.report import compare as comparing
from toolrl.analysis.report import curves, page, rollouts
from toolrl.analysis.report.chunks import Chunks, encoded, encoded_bound, short, spread_part
from toolrl.analysis.report.compare import compare
from toolrl.analysis.report.curves import columns, fitting_columns
from toolrl.analysis.report.folder import read_run
from toolrl.analysis.report.page import render
from toolrl.analysis.report.rollouts import read_rollouts
from toolrl.analysis.samples.sample_files import SampleFiles, read_lines, read_samples, samples_path
from verl.tracking.jsonl import read_jsonl, write_jsonl

MOST = 400_000  # of a page in these tests
Shape = Callable[[Path], object]


def noise(length: int) -> str:
    """Text that compresses to about half."""
    return random.Random(length).randbytes(length // 2).hex()


def _rollouts(steps: int, per_step: int, length: int, task: int = 5) -> Shape:
    """Steps with so many rollouts of so many characters, whose tasks have names of `task` characters."""

    def shape(folder: Path) -> None:
        row = read_jsonl(folder / "transcripts" / "step-000001.jsonl")[0]
        for path in folder.glob("transcripts/*"):
            path.unlink()
        for step in range(1, steps + 1):
            rows = (
                {
                    **row,
                    "step": step,
                    "task_id": f"{step} {line // 4} {noise(task + line)}",
                    "responses": [{"role": "assistant", "content": f"{line} {noise(length + line)}"}],
                }
                for line in range(per_step)
            )
            write_jsonl(folder / "transcripts" / f"step-{step:06d}.jsonl", rows)

    return shape


def _mixed(folder: Path) -> None:
    """Of the first steps' groups one rollout is larger than the page."""
    for path in sorted(folder.glob("transcripts/*"))[:2]:
        rows = read_jsonl(path)
        large = [{"role": "assistant", "content": noise(2 * MOST)}]
        write_jsonl(path, [{**row, "responses": large} if line % 4 == 1 else row for line, row in enumerate(rows)])


def _tokens(folder: Path) -> None:
    """Samples of 4,000 tokens, of the rollouts at their lines."""
    files = SampleFiles(folder, lambda ids: f" {noise(ids[0] % 40)}")
    values = np.random.default_rng(0)
    for step in range(1, 13):
        kept = read_samples(samples_path(folder, step))
        rollouts = read_jsonl(folder / "transcripts" / f"step-{step:06d}.jsonl")
        for sample in kept.samples:
            for name in ("task_id", "index"):
                object.__setattr__(sample, name, rollouts[sample.line or 0][name])
            names = ("token_ids", "mask", "versions")
            for name in names:
                object.__setattr__(sample, name, np.resize(getattr(sample, name), 4000))
            trained = values.random((len(sample.columns), int(sample.mask.sum())))
            object.__setattr__(sample, "columns", dict(zip(sample.columns, trained, strict=True)))
        files.write(step, kept)


def _metrics(steps: int, count: int) -> Shape:
    def shape(folder: Path) -> None:
        values = random.Random(0)
        rows = ({"step": step} | {f"mine/{name}": values.random() for name in range(count)} for step in range(steps))
        validated = [{"step": steps, "val/a/total": 0.0}, {"step": steps + 1, "val/a/total": 1.0}]
        write_jsonl(folder / "metrics.jsonl", [*rows, *validated])

    return shape


def _validations(folder: Path) -> None:
    """100 flipped tasks, with transcripts of 10,000 characters."""
    for step in (0, 12):
        path = folder / "validation" / f"step-{step:06d}.jsonl"
        row = read_jsonl(path)[0]
        messages = [{"role": "assistant", "content": noise(10_000 + step)}]
        own = {"score": {"total": float(step > 0)}, "exact": float(step > 0), "responses": messages}
        write_jsonl(path, [{**row, **own, "task_id": str(task)} for task in range(100)])


def _settings(folder: Path) -> None:
    settings = {f"key{number}": noise(300 + number) for number in range(1500)}
    (folder / "config.yaml").write_text(json.dumps({"own": settings, "path": noise(10_000)}))


def _alarms(folder: Path) -> None:
    write_jsonl(folder / "collapses.jsonl", [{"step": step, "alarms": [noise(2000 + step)]} for step in range(500)])
    for number in range(100):
        (folder / "transcripts" / f"step-{number + 20:06d}.jsonl").write_text("junk\n")


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        (_rollouts(1, 300, 6_000), "of 300 rollouts fit into the file, of 1 of 1 step"),
        (_rollouts(2, 300, 6_000), "of 600 rollouts fit into the file, of 2 of 2 steps"),
        (_rollouts(40, 4, 200_000), "of 160 rollouts fit into the file"),
        (_rollouts(3, 400, 10, task=2_000), "of 1200 rollouts fit into the file"),
        (_rollouts(30, 60, 30), "of 1800 rollouts fit into the file"),
        (_mixed, "138 of 144 rollouts fit into the file, of 12 of 12 steps"),
        (_tokens, "of 60 kept samples fit into it with their tokens"),
        (_metrics(3_000, 20), "curves have"),
        (_metrics(3, 1_500), "1000 of 1501 metrics are shown"),
        (_validations, ""),
        (_settings, " of 1501 settings are listed"),
        (_alarms, " of 500 marks are listed"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_page_of_any_run_has_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape, rule: str, count: int
) -> None:
    monkeypatch.setattr(page, "MAX_BYTES", MOST + (count - 1) * page._RESERVE)
    folders = [save_report_run(tmp_path / str(number)) for number in range(count)]
    for folder in folders:
        shape(folder)
    text, _ = render(folders)
    assert len(text.encode()) <= page.MAX_BYTES
    data = embedded(text, "data")
    for run in data["runs"]:
        assert any(rule in each for each in run["left_out"]) or not rule
        assert run["rollouts"]["shown"] == len(run["rollouts"]["meta"]["step"]) <= rollouts.MAX_ROLLOUTS
        assert all(f'id="chunk-{chunk}"' in text for chunk in run["rollouts"]["meta"]["chunk"])
    if shape is _validations:
        for each in data["comparisons"][:count]:
            assert 0 < len(each["flipped"]) < 100 and len(each["flipped"]) + each["left_out"] == 100
    if shape is _alarms:
        assert len(data["runs"][0]["notes"]) == 51 and data["runs"][0]["notes"][-1] == "51 other notes"


def test_large_runs_use_most_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimates are no excuse for a page that is half empty."""
    monkeypatch.setattr(page, "MAX_BYTES", 2_000_000)
    folder = save_report_run(tmp_path / "run")
    _rollouts(20, 100, 3_000)(folder)
    _tokens(folder)
    text, _ = render([folder])
    assert 0.9 * 2_000_000 < len(text.encode()) <= 2_000_000


def test_shown_rollouts_are_limited_and_those_with_tokens_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_report_run(tmp_path / "run", steps=2)
    for step in (1, 2):
        kept = read_samples(samples_path(folder, step))
        for sample in kept.samples:
            object.__setattr__(sample, "line", 11 - sample.index)
        SampleFiles(folder, str).write(step, kept)
    assert read_lines(samples_path(folder, 1)) == ([11, 11, 10, 9, 8], 0)
    for most, shown in ((12, list(range(12))), (6, [0, 1, 8, 9, 10, 11]), (4, [8, 9, 10, 11])):
        monkeypatch.setattr(rollouts, "MAX_ROLLOUTS", most)
        found = read_rollouts(read_run(folder), Chunks(), 10_000_000)
        first = [line for step, line in zip(found.meta["step"], found.meta["line"], strict=True) if step == 1]
        assert sorted(first) == shown and len(found.meta["step"]) == found.shown <= most
        assert found.left_out[0].startswith(f"{found.shown} of 24 rollouts fit into the file")


def test_a_large_step_leaves_room_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of places for 100 rollouts the first step has 50, the last 32, a chunk, and the others what is left."""
    folder = save_report_run(tmp_path / "run")
    _rollouts(5, 80, 10)(folder)
    monkeypatch.setattr(rollouts, "MAX_ROLLOUTS", 100)
    found = read_rollouts(read_run(folder), Chunks(), 10_000_000)
    assert Counter(found.meta["step"]) == {1: 50, 5: 32, 3: 18}
    found = read_rollouts(read_run(folder), chunks := Chunks(), 40_000)
    assert chunks.size <= 40_000 and {1, 3, 5} <= set(found.meta["step"])


def test_quantiles_are_of_the_first_rollouts_and_not_of_the_kept_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept rollouts are a choice: the highest rewards among others. Rewards here are the numbers of the lines."""
    folder = save_report_run(tmp_path / "run", steps=2)
    for path in folder.glob("transcripts/*"):
        write_jsonl(path, [{**row, "reward": float(line)} for line, row in enumerate(read_jsonl(path))])
    kept = read_samples(samples_path(folder, 1))
    for sample in kept.samples:
        object.__setattr__(sample, "line", 11)
    SampleFiles(folder, str).write(1, kept)
    monkeypatch.setattr(rollouts, "MAX_READ", 2 * 5)
    found = read_rollouts(read_run(folder), Chunks(), 10_000_000)
    assert found.quantiles["reward"][0] == [0.0, 1.0, 2.0, 3.0, 4.0] and found.read == 10 and found.shown == 11


def test_a_group_that_is_cut_is_not_called_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second group two of four rollouts are read, whose rewards are equal; the third one's sums are."""
    folder = save_report_run(tmp_path / "run", steps=1)
    path = folder / "transcripts" / "step-000001.jsonl"
    rows = read_jsonl(path)
    for line, (reward, turns) in enumerate([(1, 0)] * 4 + [(1, 0)] * 3 + [(2, 0)] + [(2, 1), (3, 0), (1, 2), (0, 3)]):
        rows[line] |= {"reward": float(reward), "turn_rewards": [None, float(turns)]}
    write_jsonl(path, rows)

    def equal(read: int) -> list[int]:
        monkeypatch.setattr(rollouts, "MAX_READ", read)
        meta = read_rollouts(read_run(folder), Chunks(), 10_000_000).meta
        return sorted(line for line, each in zip(meta["line"], meta["equal"], strict=True) if each)

    assert equal(12) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert equal(6) == equal(7) == equal(8) == equal(4) == [0, 1, 2, 3] and equal(3) == equal(2) == []


def test_steps_beyond_the_limit_are_left_out_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_report_run(tmp_path / "run")
    monkeypatch.setattr(rollouts, "MAX_STEPS", 4)
    found = read_rollouts(read_run(folder), Chunks(), 10_000_000)
    assert found.steps == [1, 3, 6, 12] and set(found.meta["step"]) == {1, 3, 6, 12}
    assert found.left_out == ["of 12 steps 4 are read, spread over the run"]


def test_curves_keep_validations_and_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(
        tmp_path / "metrics.jsonl",
        [{"step": step, "a": step / 7} | ({"val/x/total": 0.5} if step in (33, 77) else {}) for step in range(101)],
    )
    run = read_run(tmp_path)
    assert fitting_columns(run, 10_000) == (columns(run), [])
    part, rules = fitting_columns(run, 400)
    assert {0, 33, 77, 100} <= set(part["step"]) and len(encoded(part)) <= 400 and len(part["step"]) == len(part["a"])
    assert rules == [f"curves have {len(part['step'])} of 101 steps"] and len(part["step"]) >= 12
    monkeypatch.setattr(curves, "MAX_STEPS", 50)
    assert fitting_columns(run, 10_000)[1] == ["curves have 50 of 101 steps"]


def test_flips_of_both_kinds_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "MAX_FLIPPED", 2)
    found = compare("A", scored(1, 1, 1, 1, 0, 0), "B", scored(0, 0, 0, 0, 1, 1), Chunks())
    assert [each["solved"] for each in found.flipped] == [False, True] and found.left_out == 4
    few = compare("A", scored(1), "B", scored(0), chunks := Chunks(), limit=100)
    assert few.flipped == [] and few.left_out == 1 and chunks.texts == []


def test_many_differences_are_cut() -> None:
    sides = [dict.fromkeys("abcd", side) for side in ("1", "2" * 900)]
    rows = comparing._differing(sides, len(encoded([["a", "1", short("2" * 900)]] * 2)) + 20)
    assert [row[0] for row in rows] == ["a", "b", "2 more"] and rows[0][2] == f"{'2' * 500} [400 more characters]"
    assert len(comparing._differing(sides, 10**6)) == 4


@pytest.mark.parametrize("value", [0, -1.5, "", "x" * 200, "\u2028\ud800", [], [1, [2, "\n"]], {"a": None}], ids=ascii)
def test_a_bound_of_what_is_encoded_with_other_data(value: Any) -> None:
    others = [noise(500), list(range(50))]
    for count in (1, 3, 50):
        grown = len(encoded([*others, *[value] * count])) - len(encoded(others))
        assert grown <= count * encoded_bound(value) + 16


def test_values_are_cut_only_if_they_are_long_or_have_no_form_in_json() -> None:
    kept = (1, "x" * 400, [1, 2], {"a": [True, None]})
    assert [short(each) for each in kept] == list(kept)
    assert short(float("inf")) == "inf" and short({1: {(1, 2): 3}}) == "{1: {(1, 2): 3}}"
    assert short("y" * 501) == f"{'y' * 500} [1 more characters]" and len(short(list(range(10**5)))) < 600


def test_parts_are_spread_and_in_order() -> None:
    assert spread_part(list(range(9)), 3) == [0, 4, 8] and spread_part([5, 6], 9) == [5, 6] and spread_part([], 3) == []


def test_a_chunk_beyond_the_limit_is_not_added() -> None:
    chunks = Chunks()
    size = 10 + chunking._TAG + 3
    assert chunks.add("x" * 10, size - 1, 3) is None and chunks.size == 0 and chunks.texts == []
    assert chunks.add("x" * 10, size, 3) == 0 and chunks.size == size
    assert decoded(encoded({"a": [float("nan"), 1]})) == {"a": [None, 1]}
