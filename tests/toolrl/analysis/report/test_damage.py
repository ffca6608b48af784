"""Files that are damaged, missing or of another shape: one note each, and the rest is shown."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import damage as forms
from tests.support.report_run import PER_GROUP, save_report_run
from tests.toolrl.analysis.report.test_report import embedded
from toolrl.analysis.report import folder as folders
from toolrl.analysis.report.folder import read_run
from toolrl.analysis.report.page import render
from toolrl.analysis.samples.sample_files import kept_steps, read_samples
from verl.errors import ConfigError, DataError
from verl.host.files import step_files
from verl.tracking.jsonl import read_jsonl, write_jsonl
from verl.tracking.transcripts import Transcripts

EVERY = 12 * 3 * PER_GROUP
TRANSCRIPT, VALIDATION = "transcripts/step-000003.jsonl", "validation/step-000012.jsonl"
SAMPLES = "samples/step-000003.npz"
LINE = "transcripts of step 3: 1 line left out"
VALIDATED = r"step-000012.jsonl of validation: \d+ of \d+ lines left out .*"
METRICS = r"metrics.jsonl: \d+ of \d+ lines left out .*"
LACKS = "config.yaml lacks algorithm.name: token losses are not computed again"
PIPE = r"cannot be read \(is a pipe\)"
SCORED = '{"set": "test", "task_id": "x", "score": {"total": %s, "parts": {}}, "exact": 0.0}'


def doubled(form: str) -> bytes:
    """Settings of 40 short lines, each with twice the values of the one before."""
    lines = [f"a{number}: &a{number} {form.format(f'*a{number - 1}')}" for number in range(1, 40)]
    return "\n".join(["a0: &a0 1", *lines]).encode()


@pytest.mark.parametrize(
    ("damage", "note", "shown"),
    [
        (forms.replaced(TRANSCRIPT, b""), None, EVERY - 12),
        (forms.replaced(TRANSCRIPT, forms.JUNK), r"transcripts of step 3: \d+ lines left out \(damaged", EVERY - 12),
        (forms.cut(TRANSCRIPT), LINE, None),
        (forms.directory(TRANSCRIPT), "step-000003.jsonl of transcripts cannot be read", EVERY - 12),
        (forms.added(TRANSCRIPT, "[" * 100_000), LINE, EVERY),
        (
            forms.copied(TRANSCRIPT, "transcripts/step-000003 (1).jsonl"),
            r"transcripts/ has files that are not named step-<6 digits>.jsonl, not read: step-000003 \(1\).jsonl",
            EVERY,
        ),
        (forms.copied(SAMPLES, "samples/step-3.npz"), "samples/ has files that are not named .*: step-3.npz", EVERY),
        (forms.copied(VALIDATION, "validation/step-last.jsonl"), "validation/ has files that are not named", EVERY),
        *(
            (forms.added(VALIDATION, SCORED % score), f"{VALIDATED}.*finite", EVERY)
            for score in ("NaN", "-Infinity", "1e400", '"1"', "null")
        ),
        (forms.replaced(VALIDATION, forms.JUNK), f"{VALIDATED}damaged", EVERY),
        (forms.directory(VALIDATION), "step-000012.jsonl of validation cannot be read", EVERY),
        (forms.linked("validation", "validation"), "validation/ lacks the files of 3 validations: step 0, 6", EVERY),
        (forms.linked(TRANSCRIPT, "/dev/zero"), r"step-000003.jsonl of transcripts .*\(is a link", EVERY - 12),
        (forms.pipe(TRANSCRIPT), f"step-000003.jsonl of transcripts {PIPE}", EVERY - 12),
        (forms.pipe("config.yaml"), f"config.yaml {PIPE}", EVERY),
        (forms.pipe("metrics.jsonl"), f"metrics.jsonl {PIPE}", EVERY),
        (forms.pipe(SAMPLES), r".*step-000003.npz: is a pipe", EVERY),
        (forms.bomb(SAMPLES), r".*step-000003.npz: is damaged \(it decompresses to over", EVERY),
        (forms.linked("config.yaml", "config.yaml"), r"config.yaml cannot be read \(Too many levels of symb", EVERY),
        *(
            (forms.replaced("config.yaml", text), r"config.yaml cannot be read \(it holds over", EVERY)
            for text in (doubled("{{p: {0}, q: {0}}}"), doubled("[{0}, {0}]"), b"a: &x [*x]", b"a: &x [{b: *x}]")
        ),
        (forms.replaced("config.yaml", b"a: " + b"x" * 2**22), r"config.yaml cannot be read \(it has over", EVERY),
        (forms.replaced(SAMPLES, b""), ".*step-000003.npz: is damaged", EVERY),
        (forms.replaced(SAMPLES, forms.JUNK), ".*step-000003.npz: is damaged", EVERY),
        (forms.directory(SAMPLES), ".*step-000003.npz: is a folder", EVERY),
        (forms.added("metrics.jsonl", '{"reward/total": 1.0}'), f"{METRICS}without step", EVERY),
        (forms.added("metrics.jsonl", '{"step": 1.5}'), f"{METRICS}without step", EVERY),
        (forms.replaced("metrics.jsonl", forms.JUNK), f"{METRICS}damaged", EVERY),
        (forms.cut("metrics.jsonl"), f"{METRICS}damaged", EVERY),
        (forms.directory("metrics.jsonl"), r"metrics.jsonl cannot be read \(is a folder\)", EVERY),
        (forms.replaced("config.yaml", b""), r"config.yaml cannot be read \(it holds no settings\)", EVERY),
        (forms.replaced("config.yaml", b"- 1\n"), r"config.yaml cannot be read \(it holds no settings\)", EVERY),
        (forms.replaced("config.yaml", forms.JUNK), "config.yaml cannot be read", EVERY),
        (forms.replaced("config.yaml", b"a: &x {b: *x}"), "config.yaml cannot be read", EVERY),
        (forms.directory("config.yaml"), "config.yaml cannot be read", EVERY),
        (forms.replaced("config.yaml", b"a: .inf\nb: 2026-01-01\nc: [.nan, !!binary aaaa]\n"), LACKS, EVERY),
        (forms.replaced("config.yaml", b"algorithm: 3"), LACKS, EVERY),
        (forms.replaced("code_version.json", b'{"toolrl": [1,2'), "code_version.json: 1 of 1 line left out", EVERY),
        (forms.replaced("collapses.jsonl", forms.JUNK), r"collapses.jsonl: \d+ of \d+ lines left out", EVERY),
        (forms.replaced("collapses.jsonl", b'{"step": 3, "alarms": 5}\n{"step": "3"}\n'), None, EVERY),
        (forms.replaced("data_versions.jsonl", b"[]\n"), "data_versions.jsonl: 1 of 1 line left out", EVERY),
        (forms.directory("code_version.json"), r"code_version.json cannot be read \(is a folder\)", EVERY),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_note(tmp_path: Path, damage: Any, note: str | None, shown: int | None) -> None:
    folder = save_report_run(tmp_path / "run")
    damage(folder)
    page, notes = render([folder])
    assert len(notes) == (note is not None) and (note is None or re.match(note, notes[0])), notes
    (run,) = embedded(page, "data")["runs"]
    assert run["notes"] == notes
    assert run["rollouts"]["shown"] == shown or (shown is None and EVERY - 12 < run["rollouts"]["shown"] < EVERY)


def test_a_file_without_permission_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_report_run(tmp_path / "run")
    real = os.open

    def refused(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).endswith("step-000003.jsonl"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    assert render([folder])[1] == ["step-000003.jsonl of transcripts cannot be read (Permission denied)"]
    monkeypatch.setattr(Path, "is_dir", lambda path: refused("step-000003.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read \\(Permission denied\\)"):
        read_run(folder)


def test_a_line_that_is_too_long_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_report_run(tmp_path / "run")
    path = folder / TRANSCRIPT
    first, *others = path.read_bytes().splitlines(keepends=True)
    long = len(first) + 50
    monkeypatch.setattr(folders, "_LONGEST", long)
    for length in (long - 1, long, long + 1, 3 * long):
        filled = json.dumps({"a": "x" * (length - 10)}).encode() + b"\n"
        path.write_bytes(filled + b"".join([first, *others]))
        lines = list(read_run(folder).transcript(3))
        assert len(lines) == 13 and lines[1:] == [first, *others] and max(map(len, lines)) <= long
        assert lines[0] == (filled if len(filled) <= long else b"\n")
        assert render([folder])[1] == [
            "transcripts of step 3: 1 line left out (damaged, or with values of other types)"
        ]


def test_a_step_that_is_logged_again_is_shown_once_with_its_last_values(tmp_path: Path) -> None:
    folder = save_report_run(tmp_path / "run", steps=3)
    rows = [{"step": 3, "b": 1.0}, {"step": 1, "a": 1.0, "b": 5.0}, {"step": 3, "a": 2.0}, {"step": 3, "a": 4.0}]
    write_jsonl(folder / "metrics.jsonl", rows)
    page, notes = render([folder])
    shown = embedded(page, "data")["runs"][0]["metrics"]
    assert (shown["step"], shown["a"], shown["b"]) == ([1, 3], [1.0, 4.0], [5.0, 1.0])
    assert notes == ["metrics.jsonl: steps repeat or go back; each is shown once, with its last values"]


def test_damaged_steps_are_named_in_their_order(tmp_path: Path) -> None:
    folder = save_report_run(tmp_path / "run")
    for step in (12, 2, 7):
        forms.added(f"transcripts/step-{step:06d}.jsonl", "no json")(folder)
    assert [note.split(":")[0] for note in render([folder])[1]] == [f"transcripts of step {n}" for n in (2, 7, 12)]


@pytest.mark.parametrize("name", [TRANSCRIPT, VALIDATION, "metrics.jsonl", "data_versions.jsonl", "code_version.json"])
def test_values_of_other_types_end_no_report(tmp_path: Path, name: str) -> None:
    folder = save_report_run(tmp_path / "run")
    forms.add_wrong_rows(folder / name)
    page, notes = render([folder, folder])
    run = embedded(page, "data")["runs"][0]
    assert run["rollouts"]["shown"] >= EVERY and len(run["metrics"]["step"]) >= 13
    assert len(notes) <= 2 * 2 and (name not in (TRANSCRIPT, VALIDATION) or "left out" in notes[0])


def test_settings_of_other_types_end_no_report(tmp_path: Path) -> None:
    folder = save_report_run(tmp_path / "run")
    for value in forms.VALUES:
        if value == value and value not in (10**400, math.inf):
            text = json.dumps({"reward": value, "env": value, "algorithm": {"name": value}, "trainer": {"seed": value}})
            (folder / "config.yaml").write_text(text)
            assert embedded(render([folder])[0], "data")["runs"][0]["rollouts"]["shown"] == EVERY


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def damage(arrays: dict[str, Any]) -> None:
        header = json.loads(arrays["header"].tobytes())
        change(header)
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)

    return damage


def _first(**values: Any) -> Callable[[dict[str, Any]], None]:
    return _header(lambda header: header["samples"][0].update(values))


@pytest.mark.parametrize(
    "damage",
    [
        _first(reward="x"), _first(line=[]), _first(group_returns=None), _first(length=10**6), _first(columns=["x"]),
        _header(lambda header: header.update(samples=[3])), _header(lambda header: header.update(texts=[])),
        lambda arrays: arrays.update(advantages=arrays["advantages"][:3]), lambda arrays: arrays.pop("mask"),
        lambda arrays: arrays.update(num_trained=arrays["num_trained"][:2]),
    ],
)  # fmt: skip
def test_samples_of_another_shape_are_one_note(tmp_path: Path, damage: Any) -> None:
    folder = save_report_run(tmp_path / "run")
    with np.load(folder / SAMPLES) as file:
        arrays = dict(file)
    damage(arrays)
    np.savez_compressed(folder / SAMPLES, **arrays)
    with pytest.raises(DataError, match="is damaged"):
        read_samples(folder / SAMPLES)
    assert len(render([folder])[1]) == 1


def test_files_of_steps_by_name(tmp_path: Path) -> None:
    names = ("step-000002.jsonl", "step-000001.jsonl", "step-1234567.jsonl")
    for name in (
        *names,
        "step-000001 (1).jsonl",
        "step-1.jsonl",
        "step-0000003.jsonl",
        "step-.jsonl",
        "step-\u0661.jsonl",
    ):
        (tmp_path / "transcripts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "transcripts" / name).write_text("")
    assert list(step_files(tmp_path / "transcripts", ".jsonl")) == [1, 2, 1234567]
    Transcripts(tmp_path).truncate_after(1)
    assert len(list((tmp_path / "transcripts").iterdir())) == 6  # a copy is the user's
    assert step_files(tmp_path / "none", ".npz") == {} and kept_steps(tmp_path) == []
    assert read_jsonl(tmp_path / "transcripts" / names[1]) == []
