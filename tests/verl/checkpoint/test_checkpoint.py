"""Checkpoints: training goes on bit for bit, on other numbers of ranks too; a kill or a full disk loses nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT
from tests.support.every import every
from tests.support.programs import need
from tests.support.ranks import in_ranks
from tests.verl.batch.test_packing import random_samples, tiny_model
from tests.verl.workers.test_fsdp_engine import MAX_TOKENS, critic_loss, policy_loss, values
from verl.algorithms.names import Aggregation
from verl.batch.experience import with_loss_weights
from verl.batch.packing import assign, make_units, pack
from verl.batch.samples import batch_of
from verl.checkpoint.checkpoint import CheckpointStore, kept, read_state
from verl.checkpoint.manifest import Checkpoint, read_manifest, verify
from verl.errors import ConfigError, DataError
from verl.workers.export import start_export
from verl.workers.fsdp_engine import FSDPEngine, PackMetric
from verl.workers.model import PackedCritic, PackedPolicy, decoder_layers, hf_named_parameters
from verl.workers.optim import OptimizerSettings

TOKENIZER = str(ROOT / "dataset" / "mini" / "tokenizer")
SETTINGS = OptimizerSettings(lr=1e-3, max_grad_norm=0.5, warmup_steps=2, schedule="cosine", total_steps=9)
KINDS: dict[str, Any] = {
    "policy": (PackedPolicy, policy_loss, lambda policy, packed: policy(packed, 1.0, False).logprobs),
    "critic": (PackedCritic, critic_loss, lambda critic, packed: critic(packed)),
}


def rank_packs(rank: int, world: int) -> Any:
    samples = random_samples(5, group_sizes=(4, 1, 3, 2))
    batch = with_loss_weights(batch_of(samples), Aggregation.SEQ_MEAN_TOKEN_MEAN)
    dealt = assign(make_units(batch, True, MAX_TOKENS), MAX_TOKENS, num_ranks=world)
    return [pack(units, batch) for units in dealt[rank::world]]


def make_engine(name: str, world: int, dtype: torch.dtype = torch.float64, tied: bool = True) -> FSDPEngine:
    module = KINDS[name][0](tiny_model("qwen2", tied, dtype))
    return FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (world,)), SETTINGS, torch.float64)


def train(engine: FSDPEngine, name: str, packs: Any, num_updates: int) -> list[dict[str, float]]:
    """Updates that draw noise from every generator, so that a lost random state shows in the metrics."""

    def noisy(module: Any, packed: Any) -> Any:
        value, metrics = KINDS[name][1](module, packed)
        noise = torch.rand(()) + np.random.random() + random.random()
        return value, {**metrics, "noise": PackMetric((noise,))}

    return [values(engine.update(packs, noisy)) for _ in range(num_updates)]


def everything(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Full weights and optimizer state by name."""
    named = list(engine.module.named_parameters())
    full = {name: tensor.clone() for name, tensor in engine.export_weights(named)}
    for kind in ("exp_avg", "exp_avg_sq"):
        states = [(f"{name} {kind}", engine._optimizer.state[parameter][kind]) for name, parameter in named]
        full.update({name: tensor.clone() for name, tensor in engine.export_weights(states)})
    return full | {f"{name} step": engine._optimizer.state[each]["step"].clone() for name, each in named}


def first_half(rank: int, world: int, folder: Path) -> None:
    """Save after two updates and a pass without gradients; the two updates after it are what must come again."""
    packs = rank_packs(rank, world)
    for name in KINDS:
        engine = make_engine(name, world)
        train(engine, name, packs, 2)
        engine.score(packs, KINDS[name][2])
        engine.save(folder / name)
        keep(rank, folder / f"{name}-straight.pt", train(engine, name, packs, 2), everything(engine))


def second_half(rank: int, world: int, folder: Path) -> None:
    """The same from the checkpoint, in an engine that has learned something else before."""
    packs = rank_packs(rank, world)
    for name in KINDS:
        engine = make_engine(name, world)
        train(engine, name, packs, 1)
        engine.score(packs, KINDS[name][2])
        for seed in (1, 2) if name == "policy" else ():
            random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
            engine.load(folder / name)
            draws: list[Any] = [None] * world
            dist.all_gather_object(draws, (torch.rand(()).item(), random.random(), np.random.random()))
            keep(rank, folder / f"draws-{seed}.pt", draws)
        engine.load(folder / name)
        keep(rank, folder / f"{name}-again.pt", train(engine, name, packs, 2), everything(engine))


def keep(rank: int, path: Path, *outcome: Any) -> None:
    if rank == 0:
        torch.save(outcome, path)


def check_equal(folder: Path) -> None:
    for name in KINDS:
        straight, weights = torch.load(folder / f"{name}-straight.pt")
        again, restored = torch.load(folder / f"{name}-again.pt")
        assert again == straight  # losses, gradient norms, learning rates and noise, bit for bit
        assert straight[0]["lr"] != straight[1]["lr"]
        assert restored.keys() == weights.keys()
        assert every(torch.equal(restored[each], weights[each]) for each in weights)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_other_processes_go_on_bit_for_bit(num_ranks: int, tmp_path: Path) -> None:
    in_ranks(num_ranks, first_half, tmp_path)
    in_ranks(num_ranks, second_half, tmp_path)
    check_equal(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_goes_on(before: int, after: int, tmp_path: Path) -> None:
    in_ranks(before, first_half, tmp_path)
    in_ranks(after, second_half, tmp_path)
    for name in KINDS:
        straight, weights = torch.load(tmp_path / f"{name}-straight.pt")
        again, restored = torch.load(tmp_path / f"{name}-again.pt")
        for metrics, wanted in zip(again, straight, strict=True):  # each rank makes noise of its own
            assert {**metrics, "noise": 0} == pytest.approx({**wanted, "noise": 0}, rel=1e-6)
        for each, weight in weights.items():
            torch.testing.assert_close(restored[each], weight, rtol=1e-6, atol=1e-9)
    first, second = (torch.load(tmp_path / f"draws-{seed}.pt")[0] for seed in (1, 2))
    assert first == second  # what is drawn comes from the checkpoint alone
    assert all(len(set(drawn)) == after for drawn in zip(*first, strict=True))  # and differs between ranks


def one_rank(rank: int, world: int, folder: Path) -> None:
    first_half(rank, world, folder)
    second_half(rank, world, folder)
    check_untrained(folder / "untrained")
    check_errors(folder)
    for tied in (True, False):
        export(folder / f"tied-{tied}", tied)


def check_untrained(folder: Path) -> None:
    """Saving before the first update must not count as one."""
    saved, loaded, straight = (make_engine("policy", 1) for _ in range(3))
    saved.save(folder)
    loaded.load(folder)
    outcomes = []
    for engine in (straight, saved, loaded):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        outcomes.append((train(engine, "policy", rank_packs(0, 1), 1), everything(engine)))
    (metrics, wanted), *others = outcomes
    for again, weights in others:
        assert again == metrics
        assert every(torch.equal(weights[name], wanted[name]) for name in wanted)


def check_errors(folder: Path) -> None:
    module = PackedPolicy(tiny_model("qwen2", True, torch.float64))
    reference = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (1,)))
    reference.save(folder / "reference")
    reference.load(folder / "reference")
    assert not (folder / "reference").exists()
    nowhere = r"nowhere: cannot be loaded: \.metadata not found on rank 0"
    for source, problem in (("nowhere", nowhere), ("policy", "Missing key")):
        with pytest.raises(DataError, match=problem):
            make_engine("critic", 1).load(folder / source)
    (folder / "file").touch()
    with pytest.raises(DataError, match=r"below: cannot be written.*NotADirectoryError"):
        make_engine("policy", 1).save(folder / "file" / "below")


def export(folder: Path, tied: bool) -> None:
    """Float32 masters that are computed with in bfloat16, so that a weight gathered for computing would show."""
    module = PackedPolicy(tiny_model("qwen2", tied, torch.float32))
    mesh = init_device_mesh("cpu", (1,))
    engine = FSDPEngine(module, decoder_layers(module), mesh, SETTINGS, compute_dtype=torch.bfloat16)
    packs = rank_packs(0, 1)
    train(engine, "policy", packs, 2)
    torch.save({name: each.full_tensor().clone() for name, each in module.model.named_parameters()}, f"{folder}.pt")
    engine.score(packs, KINDS["policy"][2])
    assert {full.dtype for _, full in engine.export_weights(hf_named_parameters(module))} == {torch.float32}
    before = torch.get_rng_state()
    start_export(engine, folder / "default", TOKENIZER).write()
    start_export(engine, folder / "float32", str(folder), TOKENIZER, dtype=torch.float32).write()
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(DataError, match="contains no tokenizer"):
        start_export(engine, folder / "without", str(folder)).write()


@pytest.fixture(scope="module")
def one_rank_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process left that went through all that one rank can show; starting processes is what takes time."""
    folder = tmp_path_factory.mktemp("one_rank")
    in_ranks(1, one_rank, folder)
    return folder


@pytest.mark.long
def test_a_fresh_engine_goes_on_bit_for_bit(one_rank_folder: Path) -> None:
    check_equal(one_rank_folder)


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("name", "dtype"), [("default", torch.bfloat16), ("float32", torch.float32)])
def test_an_export_is_the_model(tied: bool, name: str, dtype: torch.dtype, one_rank_folder: Path) -> None:
    folder = one_rank_folder / f"tied-{tied}" / name
    wanted = tiny_model("qwen2", tied, torch.float32)
    wanted.set_attn_implementation("sdpa")
    wanted.load_state_dict(torch.load(f"{folder.parent}.pt"), strict=not tied)
    for parameter in wanted.parameters():  # `to` would round the rotary frequencies as well
        parameter.data = parameter.data.to(dtype)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == dtype
    ids = torch.arange(20)[None]
    assert torch.equal(model(input_ids=ids).logits, wanted(input_ids=ids).logits)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert ("lm_head.weight" in tensors.keys()) != tied  # noqa: SIM118
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert (folder / "generation_config.json").exists()
    assert AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(TOKENIZER).chat_template


def write(store: CheckpointStore, step: int, score: float | None = None, text: str = "weights") -> None:
    with store.writing(step, score) as unfinished:
        (unfinished.folder / "policy").mkdir()
        (unfinished.folder / "policy" / ".metadata").write_text(text)
        unfinished.write_state({"step": step, "cursor": {"a.parquet": 7}, "kl": 0.1})


def pointer(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def test_a_checkpoint_by_hand(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", keep_last=2, keep_best=1)
    assert store.latest() is None and not (tmp_path / "run").exists()
    write(store, 20, score=0.5, text="abc")
    path = store.latest(hashes=True)
    assert path == tmp_path / "run" / "step-000020"
    assert read_state(path) == {"step": 20, "cursor": {"a.parquet": 7}, "kl": 0.1}
    assert pointer(store.folder, "latest") == {"step": 20, "folder": "step-000020", "score": 0.5}
    assert pointer(store.folder, "best") == pointer(store.folder, "latest")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["step"] == 20
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", in FIPS 180-2
    assert manifest["files"]["policy/.metadata"] == {"size": 3, "sha256": digest}
    assert sorted(each.name for each in store.folder.iterdir()) == ["best.json", "latest.json", "step-000020"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=0)
    write(store, 10)
    before = sorted(tmp_path.rglob("*"))
    for problem, raised in ((RuntimeError("ours"), RuntimeError), (OSError(28, "No space left"), DataError)):
        with pytest.raises(raised, match=r"ours|No space left.*Free some space"), store.writing(20) as unfinished:
            (unfinished.folder / "half").write_text("half")
            raise problem
        assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(AssertionError, match="not plain JSON"), store.writing(20) as unfinished:
        unfinished.write_state({"rng": (1, 2)})
    assert store.latest() == tmp_path / "step-000010"


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=1)
    write(store, 20, score=0.9, text="old")
    write(store, 20, score=0.1, text="new")
    assert (store.latest() / "policy" / ".metadata").read_text() == "new"
    assert pointer(tmp_path, "best")["score"] == 0.1
    (tmp_path / "step-000020").rename(tmp_path / ".step-000020.replaced-1")  # killed between the two renames
    assert CheckpointStore(tmp_path, 1, 1).latest(hashes=True) == tmp_path / "step-000020"


def test_a_run_that_was_taken_back_counts_by_writing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=0)
    for step in (20, 100, 30, 40):
        write(store, step)
    assert store.latest() == tmp_path / "step-000040"
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-000030", "step-000040"}


ENTRY = {"size": 1, "sha256": "0" * 64}


def altered(path: Path, **fields: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | fields))


def flipped(file: Path) -> None:
    found = bytearray(file.read_bytes())
    found[len(found) // 2] ^= 1
    file.write_bytes(found)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: (path / "policy" / ".metadata").unlink(), "is missing"),
        (lambda path: (path / "policy" / ".metadata").write_text("weight"), "has 6 bytes; expected 7 bytes"),
        (lambda path: (path / "policy" / ".metadata").write_text("Weights"), "its hash differs"),
        (lambda path: (path / "manifest.json").write_text('{"format"'), "manifest.json: is damaged"),
        (lambda path: (path / "manifest.json").write_text("[]"), "a JSON object"),
        (lambda path: (path / "manifest.json").write_text('{"format": 1}'), "is damaged"),
        (lambda path: (path / "manifest.json").write_text('{"format": 2}'), "unknown format"),
        (lambda path: (path / "manifest.json").unlink(), "cannot be read"),
        (lambda path: shutil.copy(path.with_name("step-000010") / "manifest.json", path), "step-000020"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest.json: is damaged"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json: is damaged"),
        (lambda path: altered(path, step="20"), "manifest.json: is damaged"),
        (lambda path: altered(path, number="2"), "manifest.json: is damaged"),
        (lambda path: altered(path, score=[1.0]), "manifest.json: is damaged"),
        (lambda path: altered(path, files={}), "manifest.json: is damaged"),
        (lambda path: altered(path, files=["state.json"]), "manifest.json: is damaged"),
        (lambda path: altered(path, files={"state.json": 7}), "manifest.json: is damaged"),
        (lambda path: altered(path, files={"/etc/hostname": ENTRY}), "manifest.json: is damaged"),
        (lambda path: altered(path, files={"../step-000010/state.json": ENTRY}), "manifest.json: is damaged"),
        (lambda path: altered(path, files={"a/../../../x": ENTRY}), "manifest.json: is damaged"),
        (lambda path: altered(path, files={"x" * 5000: ENTRY}), "File name too long"),
        (lambda path: altered(path, files={"a\0b": ENTRY}), "null byte"),
        (lambda path: flipped(path / "state.json"), "its hash differs"),
        (lambda path: (path / "state.json").unlink(), "state.json: is missing"),
        (lambda path: (path / "state.json").write_bytes(b""), "has 0 bytes"),
    ],
)
def test_damage_is_seen(damage: Any, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, keep_last=5, keep_best=0)
    write(store, 10), write(store, 20)
    damage(tmp_path / "step-000020")
    assert store.latest(hashes=True) == tmp_path / "step-000010"
    assert problem in caplog.text
    if "hash" in problem:
        assert store.latest() == tmp_path / "step-000020"  # sizes alone do not show it
    (tmp_path / "step-000010" / "policy" / ".metadata").unlink()
    with pytest.raises(DataError, match="all are damaged"):
        store.latest(hashes=True)
    write(store, 30)
    assert store.latest() == tmp_path / "step-000030"


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a fifo": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("put", list(NO_FILES.values()), ids=list(NO_FILES))
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "policy/.metadata"])
def test_a_folder_link_loop_or_fifo_in_the_place_of_a_file_is_damage(
    name: str, put: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=5, keep_best=1)
    write(store, 10, 0.5), write(store, 20, 0.9)
    (tmp_path / "step-000020" / name).unlink()
    put(tmp_path / "step-000020" / name)
    for hashes in (False, True):
        assert CheckpointStore(tmp_path, 5, 1).latest(hashes) == tmp_path / "step-000010"
    assert f"step-000020/{name}: " in caplog.text
    write(store, 30)
    assert store.latest(hashes=True) == tmp_path / "step-000030"


def test_junk_beside_the_checkpoints_is_passed_over_and_left(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=0)
    write(store, 10)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "old").mkdir()
    (tmp_path / ".step-1").write_bytes(b"\xff")
    (tmp_path / "STEP-000099").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    junk = {path.name for path in tmp_path.iterdir()} - {"step-000010", "latest.json"}
    assert CheckpointStore(tmp_path, 1, 0).latest(hashes=True) == tmp_path / "step-000010"
    write(store, 20)
    assert store.latest(hashes=True) == tmp_path / "step-000020"
    assert {path.name for path in tmp_path.iterdir()} == junk | {"step-000020", "latest.json"}


@pytest.mark.parametrize("name", ["step-", "step-000099", "step-x.txt"])
@pytest.mark.parametrize("put", [Path.touch, Path.mkdir, os.mkfifo, NO_FILES["a link to itself"]])
def test_junk_with_the_name_of_a_checkpoint_is_skipped_with_a_line(
    name: str, put: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=0)
    write(store, 10)
    put(tmp_path / name)
    assert CheckpointStore(tmp_path, 1, 0).latest(hashes=True) == tmp_path / "step-000010"
    assert f"checkpoint skipped: {tmp_path}/{name}" in caplog.text
    write(store, 20)
    assert store.latest(hashes=True) == tmp_path / "step-000020"


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"folder": "../elsewhere"}', b"[" * 100_000])
def test_without_latest_json_or_with_a_damaged_one_the_newest_whole_checkpoint_is_taken(
    content: bytes | None, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, keep_last=5, keep_best=1)
    write(store, 10, 0.9), write(store, 20, 0.1)
    for name in ("latest.json", "best.json"):
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_bytes(content)
    again = CheckpointStore(tmp_path, 5, 1)
    assert again.latest(hashes=True) == tmp_path / "step-000020"
    write(again, 30)
    assert pointer(tmp_path, "latest")["step"] == 30 and pointer(tmp_path, "best")["step"] == 10


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.none() | st.floats(-1, 1), max_size=12),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_the_last_and_the_best_are_kept(scores: list[float | None], keep_last: int, keep_best: int) -> None:
    left: list[Checkpoint] = []
    seen: list[Checkpoint] = []
    for step, score in enumerate(scores):
        seen.append(Checkpoint(step, step, score, {}))
        left = kept([*left, seen[-1]], keep_last, keep_best)
        assert left[-keep_last:] == seen[-keep_last:]
        assert len(left) <= keep_last + keep_best
        best = sorted((each.score for each in seen if each.score is not None), reverse=True)[:keep_best]
        assert sorted((each.score for each in left if each.score is not None), reverse=True)[: len(best)] == best


def test_kept_on_the_disk(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    for step, score in ((1, 0.1), (2, 0.9), (3, None), (4, float("nan")), (5, 0.2)):
        write(store, step, score)
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-000002", "step-000004", "step-000005"}
    assert pointer(tmp_path, "best")["folder"] == "step-000002"
    with pytest.raises(ConfigError, match="keep_last must be at least 1"):
        CheckpointStore(tmp_path, keep_last=0, keep_best=1)


SAVES_FOREVER = """
import sys, time
from pathlib import Path
from verl.checkpoint.checkpoint import CheckpointStore
store, step = CheckpointStore(Path(sys.argv[1]), keep_last=2, keep_best=1), 0
while True:
    step += 1
    with store.writing(step, score=-step) as unfinished:
        for number in range(8):
            (unfinished.folder / str(number)).write_bytes(bytes(100_000))
            if step == int(sys.argv[2]) and number == 4:
                print("halfway", flush=True)
                time.sleep(600)
        unfinished.write_state({"step": step})
    print(step, flush=True)
"""


def saving(folder: Path, stop: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SAVES_FOREVER, str(folder), str(stop)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def killed(process: subprocess.Popen[str]) -> list[str]:
    process.send_signal(signal.SIGKILL)
    return process.communicate()[0].split()


def test_a_kill_in_the_middle_of_a_save(tmp_path: Path) -> None:
    process = saving(tmp_path, stop=3)
    lines = [process.stdout.readline().strip() for _ in range(3)]
    (leftover,) = tmp_path.glob(".step-000003.unfinished-*")
    assert lines == ["1", "2", "halfway"] and len(list(leftover.iterdir())) == 5
    killed(process)
    store = CheckpointStore(tmp_path, 2, 1)
    assert not leftover.exists()
    assert store.latest(hashes=True) == tmp_path / "step-000002"
    assert read_state(store.latest()) == {"step": 2}
    mine = leftover.with_name(f".step-000003.unfinished-{os.getpid()}")
    mine.mkdir()
    CheckpointStore(tmp_path, 2, 1)
    assert not mine.exists()  # one process at a time has a store: an earlier one with our number left it


@pytest.mark.slow
def test_a_kill_at_any_moment(tmp_path: Path) -> None:
    source = random.Random(0)
    for attempt in range(30):
        folder = tmp_path / str(attempt)
        process = saving(folder, stop=-1)
        process.stdout.readline()
        time.sleep(source.uniform(0, 0.05))
        step = int((["1", *killed(process)])[-1])
        store = CheckpointStore(folder, 2, 1)
        path = store.latest(hashes=True)
        assert read_manifest(path).step in (step, step + 1)
        assert every(verify(each, hashes=True) for each in folder.glob("step-*"))
        assert verify(folder / pointer(folder, "best")["folder"], hashes=True).step == 1
        assert verify(folder / pointer(folder, "latest")["folder"], hashes=True).step in (step, step + 1)
        assert not [each for each in folder.iterdir() if each.name.startswith(".")]


WRITES_ONE = """
import sys
from pathlib import Path
from verl.checkpoint.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep_last=2, keep_best=0)
with store.writing(int(sys.argv[2])) as unfinished:
    unfinished.write_state({})
"""


@pytest.mark.long
def test_a_clock_that_jumps_does_not_change_the_order(tmp_path: Path) -> None:
    """A year ahead, then back by two: the newest is what was written last."""
    need("faketime")
    for step, clock in ((10, "+0d"), (20, "+365d"), (30, "-365d"), (25, "-730d")):
        command = ["faketime", "-f", clock, sys.executable, "-c", WRITES_ONE, str(tmp_path), str(step)]
        subprocess.run(command, cwd=ROOT, check=True)
    store = CheckpointStore(tmp_path, 2, 0)
    assert store.latest(hashes=True) == tmp_path / "step-000025"
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-000025", "step-000030"}


FILLS_A_DISK = """
import sys
from pathlib import Path
from verl.errors import DataError
from verl.checkpoint.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]) / "run", keep_last=3, keep_best=0)
for step in (10, 20):
    try:
        with store.writing(step) as unfinished:
            unfinished.write_state({"step": step})
            (unfinished.folder / "weights").write_bytes(bytes(1_200_000))
    except DataError as error:
        print(error)
print(store.latest(hashes=True).name, sorted(path.name for path in store.folder.iterdir()))
"""

FILLS_A_DISK_BY_ENGINE = """
import shutil, sys
from pathlib import Path
import torch, torch.distributed as dist
from tests.verl.checkpoint.test_checkpoint import TOKENIZER, make_engine, rank_packs, train
from verl.errors import DataError
from verl.checkpoint.checkpoint import CheckpointStore
from verl.workers.export import start_export

folder = Path(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
store, engine, packs = CheckpointStore(folder / "run", 3, 0), make_engine("policy", 1, torch.float32), rank_packs(0, 1)
for step in (10, 20, 30):
    train(engine, "policy", packs, 1)
    try:
        with store.writing(step) as unfinished:
            if step == 30:
                (unfinished.folder / "ballast").write_bytes(bytes(shutil.disk_usage(folder).free - 100_000))
                start_export(engine, unfinished.folder / "hf", TOKENIZER, dtype=torch.float64).write()
            engine.save(unfinished.folder / "policy")
            (unfinished.folder / "ballast").write_bytes(bytes(100_000))
    except DataError as error:
        print(error)
print(store.latest(hashes=True).name, sorted(path.name for path in store.folder.iterdir()))
make_engine("policy", 1, torch.float32).load(store.latest() / "policy")
"""


def on_a_small_disk(size: str, script: str, folder: Path) -> list[str]:
    """The lines a script prints that gets a file system of its own as its argument; no other process sees that one."""
    need("unshare", "mount")
    mounted = f'mount -t tmpfs -o size={size} tmpfs {folder} && exec "$0" "$@"'
    for isolation in (["unshare", "-rm"], ["unshare", "-m"]):
        if subprocess.run([*isolation, "sh", "-c", mounted, "true"], capture_output=True).returncode == 0:
            command = [*isolation, "sh", "-c", mounted, sys.executable, "-c", script, str(folder)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout.splitlines()
    pytest.skip("mounting a small file system is not permitted here")


@pytest.mark.long
def test_a_full_disk(tmp_path: Path) -> None:
    message, outcome = on_a_small_disk("2m", FILLS_A_DISK, tmp_path)
    assert message == f"no space left on {tmp_path}/run/step-000020 (No space left on device). Free some space"
    assert outcome == "step-000010 ['latest.json', 'step-000010']"


@pytest.mark.slow
def test_a_full_disk_under_the_engine(tmp_path: Path) -> None:
    by_engine, by_export, outcome = on_a_small_disk("2m", FILLS_A_DISK_BY_ENGINE, tmp_path)
    for message, step in ((by_engine, 20), (by_export, 30)):
        assert message == f"no space left on {tmp_path}/run/step-0000{step} (No space left on device). Free some space"
    assert outcome == "step-000010 ['latest.json', 'step-000010']"


@pytest.mark.long
def test_a_checkpoint_of_an_optimizer_that_is_not_fused_goes_on_fused(tmp_path: Path) -> None:
    in_ranks(1, other_optimizer, tmp_path)


def other_optimizer(rank: int, world: int, folder: Path) -> None:
    packs = rank_packs(rank, world)
    unfused = make_engine("policy", world)
    for group in unfused._optimizer.param_groups:
        group["fused"] = None
    train(unfused, "policy", packs, 2)
    unfused.save(folder / "policy")
    loaded = make_engine("policy", world)
    loaded.load(folder / "policy")
    assert [group["fused"] for group in loaded._optimizer.param_groups] == [True]
    expected, found = (train(engine, "policy", packs, 2) for engine in (unfused, loaded))
    for one, other in zip(expected, found, strict=True):
        assert {**one, "noise": 0} == pytest.approx({**other, "noise": 0}, rel=1e-9)
    for name, tensor in everything(unfused).items():
        torch.testing.assert_close(everything(loaded)[name], tensor, rtol=1e-9, atol=1e-12)
