"""Buckets: what lies where, what a digest finds, and the ways that buckets take between processes."""

from __future__ import annotations

import operator
import pickle
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from torch import Tensor, nn

from tests.conftest import ROOT, need_vllm
from tests.support.weight_sync import filled
from verl.build.transport import cpu_transport
from verl.errors import EngineError
from verl.transfer.bucket import (
    _FACTORS,
    BucketHandle,
    BucketLayout,
    BucketSender,
    Receiver,
    TensorSlice,
    all_names,
    digest,
    plan,
)
from verl.transfer.gpu import Rendezvous
from verl.transfer.shared_memory import ByValue, SharedMemory

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
    return filled(layout, sender, dict(weights()))


def received_by(receiver: Receiver, layout: BucketLayout, *handles: BucketHandle) -> Tensor:
    """A weight sync of one bucket."""
    receiver.begin([layout])
    flat = receiver.receive(layout, handles)
    receiver.end()
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
        received = received_by(Receiver(CPU), layout, sent_bucket(layout, ByValue()))
        for name, view in layout.named(received):
            torch.testing.assert_close(view, dict(weights())[name].detach().to(dtype), rtol=0, atol=0)


def sent_bucket(layout: BucketLayout, sender: BucketSender) -> BucketHandle:
    return sender.send(layout, fill(layout, sender))


def test_a_digest_finds_flipped_bits_and_misplaced_blocks() -> None:
    flat = torch.randn(1024, dtype=torch.float32)
    (layout,) = plan([("weight", flat)], torch.float32, 10**9)
    seen = {digest(layout, flat)}
    for bit in (0, 7, 8 * 513, 8 * 4095 + 7):
        altered = flat.clone()
        altered.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
        seen.add(digest(layout, altered))
    seen.add(digest(layout, flat.roll(128)))  # whole rows
    seen.add(digest(layout, flat.view(-1, 2).flip(1).flatten()))  # pairs of numbers in each row
    seen.add(digest(layout, -flat))
    seen.add(digest(replace(layout, version=1), flat))
    seen.add(digest(replace(layout, slices=(TensorSlice(("other",), (1024,), 0),)), flat))
    assert len(seen) == 10 and digest(layout, flat.clone()) in seen


def test_a_digest_is_a_hash_of_weighted_sums() -> None:
    """By numbers of any size in place of those modulo 2^64."""
    flat = torch.randn(40 * 128)
    (layout,) = plan([("weight", flat)], torch.float32, 10**9)
    rows, factors = flat.view(torch.int32).view(-1, 128).tolist(), _FACTORS.tolist()
    sums = [sum(map(operator.mul, row, factors)) % 2**64 for row in rows]
    expected = blake3(repr(layout).encode() + b"".join(each.to_bytes(8, "little") for each in sums))
    assert digest(layout, flat) == expected.hexdigest() and all(each % 2 for each in factors)


def test_an_altered_bucket_is_refused_by_its_number_and_names() -> None:
    (layout,) = plan(weights(), torch.float32, 10**9)
    sender = SharedMemory()
    handle = sender.send(layout, fill(layout, sender))
    sender.buffer(layout).view(torch.uint8)[100] ^= 1
    with pytest.raises(EngineError, match=r"checksum mismatch in weight bucket 0 \(embed .. layer\.5\) of version 0"):
        received_by(Receiver(CPU), layout, handle)


def test_a_bucket_that_is_not_due_or_missing_is_an_error() -> None:
    """One that comes twice, one of an earlier version, one that never comes."""
    layouts, sender, receiver = plan(weights(), torch.float32, 600), ByValue(), Receiver(CPU)
    receiver.begin(layouts)
    for layout in (layouts[1], replace(layouts[2], version=-1)):
        handle = sent_bucket(layout, sender)
        if layout in layouts:
            receiver.receive(layout, [handle])
        with pytest.raises(EngineError, match=f"weight bucket {layout.number} .*: it came twice, or is none of this"):
            receiver.receive(layout, [handle])
    with pytest.raises(EngineError, match=r"weight bucket 0 \(embed .. head\) of version 0 is missing, and 1 others"):
        receiver.end()
    received_by(receiver, layouts[0], sent_bucket(layouts[0], sender))  # the next weight sync is not affected


def test_opening_a_bucket_without_a_sender_is_an_error() -> None:
    (layout,) = plan(weights(), torch.float32, 10**9)
    with pytest.raises(EngineError, match="no handle for device cpu"):
        received_by(Receiver(CPU), layout)


def test_shared_memory_is_used_in_turn_and_a_new_owners_is_not_taken_for_the_old_ones() -> None:
    layouts = plan(weights(), torch.float32, 1)
    receiver = Receiver(CPU)
    for _ in range(2):  # the second sender's files have the paths of the first one's, which are gone
        sender = SharedMemory()
        for layout in layouts:
            received = received_by(receiver, layout, sender.send(layout, fill(layout, sender)))
            for name, view in layout.named(received):
                torch.testing.assert_close(view, dict(weights())[name].detach(), rtol=0, atol=0)
        assert len(receiver.kept) == 2
        del sender


READER = """
import pickle, sys, torch
from verl.transfer.bucket import Receiver
layout, handle = pickle.loads(bytes.fromhex(sys.stdin.readline()))
receiver = Receiver(torch.device("cpu"))
receiver.begin([layout])
print(float(receiver.receive(layout, [handle]).double().sum()))
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
        received_by(Receiver(CPU), layout, handle)


def test_each_node_with_engines_has_one_writer() -> None:
    transport = cpu_transport(["a", "a", "b", "b", "c"], ["b", "a", "b"])
    assert list(transport.senders) == [SharedMemory, None, SharedMemory, None, None]
    assert [list(places) for places in transport.sources] == [[2], [0], [2]]


def test_engines_on_nodes_without_a_rank_are_sent_references() -> None:
    transport = cpu_transport(["a", "b"], ["b", "c"])
    assert list(transport.senders) == [ByValue, None]
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
