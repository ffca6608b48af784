"""Buckets: what lies where, what a digest finds, and the ways that buckets take between processes."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import ROOT, need_vllm
from verl.build.transport import cpu_transport
from verl.errors import EngineError
from verl.transfer.bucket import BucketHandle, BucketLayout, BucketSender, Receiver, all_names, digest, plan
from verl.transfer.gpu import Rendezvous
from verl.transfer.shared_memory import ByReference, SharedMemory

CPU = torch.device("cpu")


def weights() -> list[tuple[str, Tensor]]:
    """An embedding whose head is tied to it, and others; 40 to 400 elements each."""
    torch.manual_seed(0)
    embedding = nn.Parameter(torch.randn(20, 20))
    return [
        ("embed", embedding),
        *((f"layer.{number}", nn.Parameter(torch.randn(number, 20))) for number in range(2, 6)),
        ("head", embedding),
    ]


def fill(layout: BucketLayout, sender: BucketSender) -> Tensor:
    flat = sender.buffer(layout)
    tensors = dict(weights())
    for piece, view in layout.unpack(flat):
        view.copy_(tensors[piece.names[0]].detach())
    return flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 600, 10**9])
def test_every_weight_is_in_one_bucket_and_a_tied_one_travels_once(dtype: torch.dtype, bucket_bytes: int) -> None:
    layouts = plan(weights(), dtype, bucket_bytes)
    assert sorted(all_names(layouts)) == sorted(name for name, _ in weights())
    assert layouts[0].slices[0].names == ("embed", "head")
    assert len(layouts) == {1: 5, 600: 2 if dtype is torch.bfloat16 else 4, 10**9: 1}[bucket_bytes]
    for layout in layouts:
        assert len(layout.slices) == 1 or layout.num_bytes <= bucket_bytes + 512
        received = Receiver(CPU).receive(layout, [sent_bucket(layout, ByReference())])
        for name, view in layout.named(received):
            torch.testing.assert_close(view, dict(weights())[name].detach().to(dtype), rtol=0, atol=0)


def sent_bucket(layout: BucketLayout, sender: BucketSender) -> BucketHandle:
    return sender.send(layout, fill(layout, sender))


def test_a_digest_finds_flipped_bits_and_misplaced_blocks() -> None:
    flat = torch.randn(1024, dtype=torch.float32)
    seen = {digest(flat)}
    for bit in (0, 7, 8 * 513, 8 * 4095 + 7):
        altered = flat.clone()
        altered.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
        seen.add(digest(altered))
    seen.add(digest(flat.roll(128)))  # whole rows
    assert len(seen) == 6 and digest(flat.clone()) in seen


def test_an_altered_bucket_is_refused_by_its_number_and_names() -> None:
    (layout,) = plan(weights(), torch.float32, 10**9)
    sender = SharedMemory()
    handle = sender.send(layout, fill(layout, sender))
    sender.buffer(layout).view(torch.uint8)[100] ^= 1
    with pytest.raises(EngineError, match=r"checksum mismatch in weight bucket 0 \(embed .. layer\.5\)"):
        Receiver(CPU).receive(layout, [handle])


def test_opening_a_bucket_without_a_sender_is_an_error() -> None:
    (layout,) = plan(weights(), torch.float32, 10**9)
    with pytest.raises(EngineError, match="no handle for device cpu"):
        Receiver(CPU).receive(layout, [])


def test_shared_memory_is_used_in_turn_and_a_new_owners_is_not_taken_for_the_old_ones() -> None:
    layouts = plan(weights(), torch.float32, 1)
    receiver = Receiver(CPU)
    for _ in range(2):  # the second sender's files have the paths of the first one's, which are gone
        sender = SharedMemory()
        for layout in layouts:
            received = receiver.receive(layout, [sender.send(layout, fill(layout, sender))])
            for name, view in layout.named(received):
                torch.testing.assert_close(view, dict(weights())[name].detach(), rtol=0, atol=0)
        assert len(receiver.kept) == 2
        del sender


READER = """
import pickle, sys, torch
from verl.transfer.bucket import Receiver
layout, handle = pickle.loads(bytes.fromhex(sys.stdin.readline()))
print(float(Receiver(torch.device("cpu")).receive(layout, [handle]).double().sum()))
"""


def test_another_process_takes_a_bucket_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (layout,) = plan(weights(), torch.float32, 10**9)
    sender = SharedMemory()
    flat = fill(layout, sender)
    sent = pickle.dumps((layout, sender.send(layout, flat)))
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-c", READER]
    read = subprocess.run(command, input=sent.hex(), cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(read.stdout) == float(flat.double().sum())
    assert not {path for path in set(Path("/dev/shm").iterdir()) - before if "verl" in path.name}


def test_shared_memory_of_a_dead_process_is_an_error() -> None:
    (layout,) = plan(weights(), torch.float32, 10**9)
    sender = SharedMemory()
    handle = sender.send(layout, fill(layout, sender))
    del sender
    with pytest.raises(EngineError, match="one machine, in one container"):
        Receiver(CPU).receive(layout, [handle])


def test_each_node_with_engines_has_one_writer() -> None:
    transport = cpu_transport(["a", "a", "b", "b", "c"], ["b", "a", "b"])
    assert list(transport.senders) == [SharedMemory, None, SharedMemory, None, None]
    assert [list(places) for places in transport.sources] == [[2], [0], [2]]


def test_engines_on_nodes_without_a_rank_are_sent_references() -> None:
    transport = cpu_transport(["a", "b"], ["b", "c"])
    assert list(transport.senders) == [ByReference, None]
    assert [list(places) for places in transport.sources] == [[0], [0]]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_without_nccl_do_not_take_a_broadcast_that_does_nothing_for_one(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_vllm()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "/nowhere/libnccl.so")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    rendezvous = Rendezvous(host, port, 2)
    with ThreadPoolExecutor(2) as ranks:
        both = [ranks.submit(rendezvous.join, rank) for rank in range(2)]
        for rank, each in enumerate(both):
            with pytest.raises(EngineError, match=f"rank {rank} of 2 cannot load NCCL"):
                each.result(60)
