"""What only a GPU can show; run with -m gpu."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import ROOT
from tests.support.tiny import run_overrides, save_tiny_model
from tests.verl.workers.test_attention import HEADS, PACK, SIZE, random_inputs
from verl.tracking.jsonl import read_jsonl
from verl.transfer.bucket import Receiver, digest, plan
from verl.transfer.gpu import CudaIpc
from verl.workers.attention import by_segments, packed_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


OFFLOAD = ["actor.offload=all", "ref.offload_params=true"]
WITH_REFERENCE = ["algorithm.kl_placement=loss", "algorithm.kl_coefficient=0.001"]


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_grpo_with_engines_beside_the_trainer(dtype: str, num_gpus: int, tmp_path: Path) -> None:
    """Sleep, wake, weight sync by CUDA IPC and canary on the trainer's own devices; nccl where there are two."""
    train(dtype, num_gpus, [f"trainer.n_gpus_per_node={num_gpus}"], tmp_path)


def test_grpo_with_engines_on_devices_of_their_own(tmp_path: Path) -> None:
    """Weight sync by NCCL broadcast."""
    train("bfloat16", 2, ["rollout.placement=separate"], tmp_path)


def test_grpo_with_everything_in_host_memory_between_its_uses(tmp_path: Path) -> None:
    train("bfloat16", 1, [*OFFLOAD, *WITH_REFERENCE], tmp_path)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_gives_what_the_cpu_gives(dtype: torch.dtype, window: int | None) -> None:
    """Outputs and gradients of the device's own kernel against a call per segment in float64, windows included."""
    inputs = [each.detach().to("cuda", dtype).requires_grad_() for each in random_inputs(torch.float64)]
    exact = [each.detach().cpu().double().requires_grad_() for each in inputs]
    weight = torch.randn(1, PACK[-1].end, HEADS, SIZE, dtype=torch.float64)
    ours, _ = packed_attention(nn.Module(), *inputs, None, 0.3, sliding_window=window, segments=PACK)
    theirs = by_segments(*exact, PACK, 0.3, window)
    found = [ours, *torch.autograd.grad((ours * weight.to("cuda", dtype)).sum(), inputs)]
    expected = [theirs, *torch.autograd.grad((theirs * weight).sum(), exact)]
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), other, rtol=bound, atol=bound)


READER = """
import pickle, sys, torch
from verl.transfer.bucket import Receiver
layout, handle = pickle.loads(bytes.fromhex(sys.stdin.readline()))
receiver = Receiver(torch.device("cuda:0"))
receiver.begin([layout])
print(float(receiver.receive(layout, [handle]).double().sum()))
"""


def test_another_process_takes_a_bucket_from_the_same_device() -> None:
    (layout,) = plan([("weight", torch.empty(1000, 1000))], torch.bfloat16, 10**9)
    sender = CudaIpc()
    flat = sender.buffer(layout).normal_()
    assert digest(layout, flat) == digest(layout, flat.cpu())
    handle = sender.send(layout, flat)
    sent = pickle.dumps((layout, handle)).hex()
    command = [sys.executable, "-c", READER]
    read = subprocess.run(command, input=sent, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(read.stdout) == float(flat.double().sum())
    sender.release()


def test_a_bucket_on_another_device_is_not_taken() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    (layout,) = plan([("weight", torch.empty(100))], torch.bfloat16, 10**9)
    sender = CudaIpc()
    handle = sender.send(layout, sender.buffer(layout).normal_())
    assert handle.take(layout, Receiver(torch.device("cuda:1"))) is None


def train(dtype: str, num_gpus: int, more: list[str], tmp_path: Path) -> None:
    """Three steps with vLLM; the canary holds on each."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    overrides = [
        word for word in run_overrides(save_tiny_model(tmp_path / "model"), tmp_path, "vllm", 3) if "device" not in word
    ]
    overrides += [
        f"model.compute_dtype={dtype}",
        "rollout.gpu_memory_utilization=0.3",
        *more,
    ]
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *overrides], check=True, cwd=ROOT)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["engine/canary_logprob_diff"] < (0.25 if dtype == "bfloat16" else 1e-2) for row in rows)
    assert all(row["memory/trainer_gib"] > 0 and row["perf/mfu"] >= 0 for row in rows)
