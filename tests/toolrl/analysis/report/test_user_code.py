"""Code that the settings of a run name is run only for a user who asks: the folder may be a colleague's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import VALUES
from tests.support.report_run import PER_GROUP, save_report_run
from tests.toolrl.analysis.report.test_report import embedded
from toolrl.analysis.explain.__main__ import main as explain
from toolrl.analysis.explain.explanation import Explainer
from toolrl.analysis.report.__main__ import main
from toolrl.analysis.report.folder import read_run
from toolrl.analysis.report.page import render
from toolrl.analysis.report.reasons import call_reader, reasons_of
from toolrl.analysis.report.serve import ReportServer
from verl.config.load import known_keys

CODE = """
from pathlib import Path
from verl.algorithms.algorithm import load_preset
from toolrl.formats.hermes import HermesFormat as Format
with Path({ran!r}).open("a") as file:
    file.write("ran ")
preset = load_preset("grpo")
"""
NOTES = {
    "algorithm.name": "token losses are not computed again",
    "env.tool_call_format": "calls in responses are not parsed",
}


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """The file that the user's code writes."""
    (tmp_path / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    return tmp_path / "ran"


def run_with(folder: Path, **settings: Any) -> Path:
    save_report_run(folder, steps=2)
    (folder / "config.yaml").write_text(
        json.dumps({"reward": {"name": "rlla"}, "algorithm": {"name": "grpo"}, **settings})
    )
    return folder


def notes_of(run: Path, name: str, value: str) -> list[str]:
    return [f"{name}={value} names code, which is not run without --user-code: {NOTES[name]}"]


@pytest.mark.parametrize(
    ("name", "attribute"), [("algorithm.name", "preset"), ("env.tool_call_format", "Format")], ids=str
)
def test_code_of_the_settings_is_run_by_a_flag_alone(
    name: str, attribute: str, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value, (group, key) = f"{ran.parent}/own.py:{attribute}", name.split(".")
    run = run_with(ran.parent / "run", **{group: {key: value}})
    page, notes = render([run])
    shown = embedded(page, "data")["runs"][0]
    assert not ran.exists() and notes == shown["notes"] == notes_of(run, name, value)
    assert shown["rollouts"]["shown"] == 2 * 3 * PER_GROUP and shown["rollouts"]["samples"]
    sample = ["--step", "1", "--sample", "0"]
    explain([str(run), *sample])
    printed = " ".join(capsys.readouterr().out.split())
    assert not ran.exists() and f"note: {notes[0]}" in printed
    assert (f"not computed: {name}={value} names code" in printed) is (name == "algorithm.name")
    assert main([str(run)]) == 0 and not ran.exists()
    assert ReportServer([run]).page() and not ran.exists()
    for times, asked in enumerate(
        (
            lambda: main([str(run), "--user-code"]),
            lambda: ReportServer([run], user_code=True).page(),
            lambda: explain([str(run), *sample, "--user-code"]),
        )
    ):
        capsys.readouterr()
        asked()
        assert len(ran.read_text().split()) > times and "names code" not in capsys.readouterr().out


@pytest.mark.long
def test_no_setting_names_code_that_is_run(ran: Path) -> None:
    """Whatever a setting names: neither the page nor an explanation imports it."""
    run, value = read_run(save_report_run(ran.parent / "run", steps=2)), f"{ran.parent}/own.py:preset"
    for key in known_keys():
        if key.startswith(("algorithm.", "env.", "reward.", "rollout.", "data.")):
            for form in (value, [{"name": value}]):
                one = replace(run, settings={"reward.name": "rlla", key.rstrip("."): form})
                Explainer.of(one), call_reader(one), reasons_of(one)
    assert not ran.exists()


def test_filters_of_the_user_are_not_needed(ran: Path) -> None:
    own = {"filters": [f"{ran.parent}/own.py:preset"], "max_resample_rounds": 3, "name": "grpo"}
    run = run_with(ran.parent / "run", algorithm=own)
    explainer = Explainer.of(read_run(run))
    assert explainer.algorithm is not None and not explainer.algorithm.filters and not ran.exists()


@pytest.mark.parametrize("settings", [{"trainer.of_another_version": 3}, {"sandbox.urls": [[]]}, {"data.new": {}}])
def test_keys_of_another_version_matter_only_where_they_are_needed(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = read_run(run_with(tmp_path / "run", algorithm={"name": "gspo"}))
    explainer = Explainer.of(replace(run, settings={**run.settings, **settings}))
    assert explainer.algorithm is not None and explainer.algorithm.name == "gspo"
    assert explainer.reasons is not None
    explainer = Explainer.of(replace(run, settings={**run.settings, "algorithm.new": 3, "reward.options.new": 3}))
    assert explainer.algorithm is None and "unknown key 'algorithm.new'" in explainer.unknown


@pytest.mark.long
def test_values_of_every_form_end_no_explanation(tmp_path: Path) -> None:
    run = read_run(run_with(tmp_path / "run"))
    for key in known_keys():
        if key.startswith(("algorithm.", "env.tool_call", "reward.")):
            for value in VALUES:
                one = replace(run, settings={"reward.name": "rlla", key.rstrip("."): value})
                Explainer.of(one), call_reader(one), reasons_of(one)
