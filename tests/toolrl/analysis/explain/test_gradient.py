"""A sample's share of the gradient norm: the shares of an update add up, and its norm is the logged one."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.conftest import ROOT
from tests.support.local_run import OneProcess, local_fit, local_trainer
from tests.support.tiny import run_overrides
from tests.toolrl.analysis.replay.test_replay import lively
from toolrl.analysis.collapse.collapse import CollapseWatch
from toolrl.analysis.explain import gradient
from toolrl.analysis.explain.__main__ import main
from toolrl.analysis.explain.explanation import read_step
from toolrl.analysis.explain.gradient import GradientShare, gradient_share_from
from toolrl.analysis.replay.record import Recorder, made_by, read_record
from toolrl.analysis.replay.replay import plan_replay
from toolrl.analysis.report.folder import read_run
from verl.config.commands import TRAIN
from verl.config.load import flattened, load_config, restored_config
from verl.config.show import as_yaml

ROWS = 8  # 4 prompts, 2 responses each
assert lively("ab", "") == 0.2  # the reward of the runs


def recorded_run(model: Path, out: Path, *overrides: str) -> Path:
    """The folder of a run of two steps with records."""
    reward = f"reward.name={ROOT / 'tests' / 'toolrl' / 'analysis' / 'replay' / 'test_replay.py'}:lively"
    own = [*run_overrides(model, out, "hf", 2), "trainer.record=true", "trainer.num_threads=1", reward]
    config = load_config([*own, *overrides])
    recorder = Recorder(out / "run", flattened(asdict(config)), made_by(config, "cpu", 2))
    with local_trainer(config) as trained:
        asyncio.run(local_fit(trained, config, CollapseWatch(), recorder).run())
    (out / "run" / "config.yaml").write_text(as_yaml(config, TRAIN))
    return out / "run"


def shares_of(run: Path, step: int, rows: Sequence[int]) -> list[GradientShare | None]:
    """With a rank in this process."""
    plan = plan_replay(run, step)
    target = read_record(plan.records[-1])
    found = []
    for row in rows:
        config = restored_config(target.settings)
        found.append(gradient_share_from(plan, target, config, OneProcess(), row))  # type: ignore[arg-type]
        gc.collect()
        dist.destroy_process_group()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=grpo", "actor.ppo_mini_batch_size=4"],
        ["algorithm.name=ppo", "actor.ppo_mini_batch_size=4"],
        ["algorithm.name=rloo", "algorithm.correction.is_level=token", "actor.ppo_mini_batch_size=2"],
    ],
    ids=["KL in the loss", "critic", "two updates"],
)
def test_the_shares_of_an_update_add_up_to_its_norm(overrides: list[str], model: Path, tmp_path: Path) -> None:
    run = recorded_run(model, tmp_path, *overrides)
    updates = 4 // int(overrides[-1][-1])
    first = range(ROWS // updates)
    found = shares_of(run, 2, first)
    known = [each for each in found if each is not None]
    assert len(known) == known[0].samples
    assert len({each.whole for each in known}) == 1 and known[0].whole > 0
    assert sum(each.share for each in known) == pytest.approx(known[0].whole, rel=1e-4)
    assert all(abs(each.share) <= each.own * (1 + 1e-6) for each in known)
    if updates == 1:
        logged = next(row["actor/grad_norm"] for row in read_run(run).rows if row["step"] == 2)
        assert known[0].whole == pytest.approx(logged, rel=1e-5)


def test_it_is_computed_on_request_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(model, tmp_path)
    argv = [str(run), "--step", "2", "--sample", "1"]
    asked = []

    def share(folder: Path, step: int, row: int, user_code: bool) -> GradientShare | None:
        asked.append((folder, step, row))
        return GradientShare(0.5, -0.25, 2.0, 4) if len(asked) == 1 else None

    monkeypatch.setattr(gradient, "gradient_share", share)
    assert main(argv) == 0 and "--gradient repeats the update from its record" in capsys.readouterr().out
    assert main([*argv, "--gradient"]) == 0
    shown = capsys.readouterr().out
    assert "share of this sample: -0.25, -12.50% of the norm 2" in shown and "its own gradient is 0.5" in shown
    assert main([*argv, "--gradient"]) == 0 and "0: no update computed this sample" in capsys.readouterr().out
    assert asked == [(run, 2, read_step(read_run(run), 2).samples[1].row)] * 2
    monkeypatch.undo()
    (run / "records" / "step-000002.npz").unlink()
    assert main(argv) == 0 and "the step has no record (trainer.record)" in capsys.readouterr().out
    assert main([*argv, "--gradient"]) == 2 and "has no record of step 2" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_compute_it_together(model: Path, tmp_path: Path) -> None:
    run = recorded_run(model, tmp_path, "actor.ppo_mini_batch_size=4")
    one = shares_of(run, 1, [read_step(read_run(run), 1).samples[0].row])[0]
    record = read_record(run / "records" / "step-000001.npz")
    Recorder(run, {**record.settings, "trainer.n_gpus_per_node": 2}, record.made_by).write(
        1, record.batch, record.coefficients, record.metrics
    )
    code = "import sys; from toolrl.analysis.explain.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), "--step", "1", "--sample", "0", "--gradient"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert one is not None and done.returncode == 0, done.stdout + done.stderr
    assert f"share of this sample: {one.share:.4g}"[:-1] in done.stdout
