"""Supervised runs on one rank in this process: the loss falls, and a run that is broken off goes on bit for bit."""

from __future__ import annotations

import gc
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from transformers import Gemma2Config

from tests.support.every import every
from tests.support.service import free_port
from tests.support.tiny import MINI
from toolrl.check.preflight.local_group import LocalGroup
from verl.batch.samples import Sample
from verl.batch.token_batch import TokenBatch
from verl.build.run import load_chat_template
from verl.chat.template import ChatTemplate
from verl.checkpoint.checkpoint import CheckpointStore
from verl.checkpoint.state import find_saved
from verl.config.schema import ModelConfig
from verl.data.overlap import Trace, TrainTasks
from verl.errors import ConfigError
from verl.host.signals import Ended
from verl.lora import Lora
from verl.sft.demonstrations import read_demonstrations, sft_samples
from verl.sft.run import SFTRun, SFTSettings
from verl.single_controller.group import WorkerContext, WorkerView
from verl.tracking.jsonl import read_jsonl
from verl.tracking.metric import Metric
from verl.tracking.timers import PhaseTimer
from verl.tracking.tracker import RunInfo, build_trackers
from verl.trainer.main_sft import main
from verl.trainer.policy import PackSettings, Policy
from verl.workers.optim import OptimizerSettings
from verl.workers.rank import RankSpec, build_rank

TRAINED = TrainTasks((Trace("single_turn", "sft.parquet#0", "0" * 16),))


@pytest.fixture(scope="module")
def samples(model: Path) -> list[Sample]:
    chat: ChatTemplate = load_chat_template(ModelConfig(path=str(model)))
    return sft_samples(read_demonstrations(str(MINI / "sft.parquet"))[:60], chat, 512)


@pytest.fixture(autouse=True)
def group_ends() -> Iterator[None]:
    yield
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def run(
    model: Path, samples: list[Sample], out: Path, steps: int, signal_in: int = 0, lora: Lora | None = None
) -> SFTRun:
    """signal_in: the step in whose update a SIGTERM comes"""
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
    port = free_port()
    optimizer = OptimizerSettings(lr=1e-2, weight_decay=0.0, schedule="cosine", total_steps=8, min_lr_ratio=0.1)
    rank = build_rank(RankSpec(str(model), torch.float32, 1.0, optimizer, lora), WorkerContext(0, 1, port=port))
    workers = LocalGroup(rank)
    store = CheckpointStore(out / "checkpoints", keep_last=2, keep_best=0)
    made = SFTRun(
        settings=SFTSettings(total_steps=steps, batch_size=16, test_freq=4, save_freq=4),
        train=samples[:50],
        val=samples[50:],
        policy=Policy(WorkerView(workers, "policy"), PackSettings(2048)),
        workers=workers,
        store=store,
        trackers=build_trackers([], RunInfo(out)),
        timer=PhaseTimer(),
        resume_config={"optim.lr": 1e-2},
        contents={},
        saved=find_saved(store, "main_sft", {"optim.lr": 1e-2}),
        train_tasks=TRAINED,
    )
    policy = made.policy

    def sft_step(batch: TokenBatch) -> dict[str, Metric]:
        if made.step + 1 == signal_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return policy.sft_step(batch)

    made.policy = SimpleNamespace(sft_step=sft_step, score=policy.score, shard_for_scoring=policy.shard_for_scoring)  # type: ignore[assignment]
    try:
        with made.listening(True, Console(file=io.StringIO())):
            made.run()
    finally:
        made.trackers.close()
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("lora", "last"),
    [(None, "hf/model.safetensors"), (Lora(4, 32.0, ("all-linear",)), "adapter/adapter_model.safetensors")],
    ids=["whole", "adapter"],
)
def test_a_signal_saves_after_the_step_and_the_run_goes_on_bit_for_bit(
    model: Path, samples: list[Sample], tmp_path: Path, lora: Lora | None, last: str
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    run(model, samples, straight, steps=4, lora=lora)
    with pytest.raises(Ended, match=r"saved .*step-000003"):
        run(model, samples, broken, steps=4, signal_in=3, lora=lora)
    run(model, samples, broken, steps=4, lora=lora)
    last = f"checkpoints/step-000004/{last}"
    weights = load_file(broken / last)
    assert every(torch.equal(weight, weights[name]) for name, weight in load_file(straight / last).items())
    first, fourth = (read_jsonl(broken / "metrics.jsonl")[step] for step in (0, 4))
    assert fourth["val/demonstrations/loss"] < first["val/demonstrations/loss"]


@pytest.mark.long
def test_the_loss_falls_and_a_broken_run_goes_on_bit_for_bit(
    model: Path, samples: list[Sample], tmp_path: Path
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    run(model, samples, straight, steps=8)
    run(model, samples, broken, steps=4)
    resumed = run(model, samples, broken, steps=8)
    one, two = (read_jsonl(folder / "metrics.jsonl") for folder in (straight, broken))
    assert [row["step"] for row in two] == list(range(9)) and resumed.step == 8
    assert [row["actor/loss"] for row in one[1:]] == [row["actor/loss"] for row in two[1:]]
    assert one[8]["val/demonstrations/loss"] < 0.8 * one[0]["val/demonstrations/loss"]
    store = CheckpointStore(broken / "checkpoints", keep_last=2, keep_best=0)
    with pytest.raises(ConfigError, match=r"different inputs: optim\.lr=0\.5 \(originally 0\.01\)"):
        find_saved(store, "main_sft", {"optim.lr": 0.5})
    with pytest.raises(ConfigError, match="contains a run of main_sft, not of main_ppo"):
        find_saved(store, "main_ppo", {})
    last = "checkpoints/step-000008/hf/model.safetensors"
    weights = load_file(broken / last)
    assert every(torch.equal(weight, weights[name]) for name, weight in load_file(straight / last).items())
    assert TrainTasks.read(str((broken / last).parent)) == TRAINED


def test_every_epoch_sees_every_sample_once_in_another_order(samples: list[Sample]) -> None:
    made = object.__new__(SFTRun)
    made.settings, made.train, made.step = SFTSettings(total_steps=6, batch_size=4, seed=3), samples[:8], 0
    drawn = []
    for batch in made._batches():
        drawn += [made.train.index(sample) for sample in batch]
        made.step += 1
    epochs = [drawn[start : start + 8] for start in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs) and epochs[0] != epochs[1]


@pytest.mark.long
def test_a_model_that_packs_do_not_compute_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copytree(model, tmp_path / "model")
    Gemma2Config().save_pretrained(folder)
    overrides = [f"model.path={folder}", f"data.train_files=[{MINI / 'sft.parquet'}]", "trainer.device=cpu"]
    assert main([*overrides, "data.train_batch_size=4", f"trainer.default_local_dir={tmp_path}"]) == 2
    output = " ".join(capsys.readouterr().out.split())
    assert "model.path: Gemma2" in output and "needs softcap=50.0" in output
