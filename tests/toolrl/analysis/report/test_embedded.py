"""The embedded default, as it is but for short validations: what a run leaves for its report."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import need_vllm
from tests.support.commands import printed
from tests.support.tiny import MINI, first_rows
from toolrl.analysis.explain.explanation import explain
from toolrl.analysis.report.folder import read_run
from toolrl.analysis.report.page import MAX_BYTES as PAGE_BYTES
from toolrl.analysis.report.page import write_report
from toolrl.analysis.samples.sample_files import MAX_BYTES, read_samples, samples_path
from toolrl.cli import main


@pytest.mark.long
def test_every_step_keeps_what_the_report_shows_without_a_setting_for_it(tmp_path: Path) -> None:
    need_vllm()
    overrides = ["recipe=mini_grpo", "trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path}"]
    few = [str(first_rows(MINI / f"{name}.parquet", 8, tmp_path)) for name in ("test", "test_new_tools")]
    output = printed(main, ["train", *overrides, f"data.val_files=[{','.join(few)}]"], CORRECTMAX1="1")
    folder = tmp_path / "mini_grpo"
    assert f"look at it: toolrl report {folder}\n" in output
    run = read_run(folder)
    assert run.settings["trainer.samples_kept"] == 16 and run.switches == {"CORRECTMAX1": "1"}
    computed = 0
    for step in (1, 2):
        path = samples_path(folder, step)
        kept = read_samples(path)
        assert path.stat().st_size < MAX_BYTES and len(kept.samples) == 16 and kept.left_out == 0
        for number, sample in enumerate(kept.samples):
            assert len(sample.token_ids) == len(sample.mask) == len(sample.versions) and sample.mask.any()
            trained = int(sample.mask.sum())
            assert {len(sample.columns[name]) for name in ("rollout_logprobs", "advantages")} == {trained}
            assert set(sample.versions[sample.mask]) == {step - 1}
            if sample.row in kept.loss:
                computed += 1
                assert np.abs(sample.columns["logprobs"] - sample.columns["rollout_logprobs"]).max() < 1e-3
            shown = explain(run, step, number)
            texts = {title: "\n".join(lines) for title, lines in shown.sections}
            assert shown.failed == [] and "they agree within 1e-05" in texts["Share of the loss"]
            assert re.search(r"correctness:? -?[01]\b", texts["Reward"])  # the switch: from -1 to 1, not 3
    assert computed > 4
    assert write_report([folder], tmp_path / "report.html") == []
    assert (tmp_path / "report.html").stat().st_size < PAGE_BYTES
