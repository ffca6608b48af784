"""Record and replay: a step run again from its record gives the same numbers, bit for bit."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.conftest import ROOT
from tests.support.local_run import OneProcess, local_fit, local_trainer
from tests.support.tiny import run_overrides
from toolrl.analysis.collapse.collapse import CollapseWatch
from toolrl.analysis.replay.__main__ import main, show
from toolrl.analysis.replay.record import (
    Record,
    Recorder,
    made_by,
    read_record,
    record_path,
    recorded_steps,
)
from toolrl.analysis.replay.replay import Replay, plan_replay, replay_from
from verl.batch.samples import Sample, batch_of
from verl.config.load import flattened, load_config, restored_config
from verl.config.schema import Config
from verl.errors import DataError
from verl.host.files import replacing
from verl.tracking.jsonl import read_jsonl

STEPS = 3


def lively(response: str, answer: str) -> float:
    """A reward under which hardly two responses are alike."""
    return len(set(response)) / 10


def recorded_run(model: Path, out: Path, *overrides: str) -> tuple[Config, Path]:
    """A run of STEPS steps with records and a checkpoint after two; its configuration and folder."""
    own = [
        *run_overrides(model, out, "hf", STEPS),
        "trainer.save_freq=2",
        "trainer.record=true",
        "trainer.num_threads=1",
    ]
    config = load_config([*own, f"reward.name={Path(__file__)}:lively", *overrides])
    folder = out / "run"
    recorder = Recorder(folder, flattened(asdict(config)), made_by(config, "cpu", STEPS))
    with local_trainer(config) as trained:
        asyncio.run(local_fit(trained, config, CollapseWatch(), recorder).run())
    return config, folder


def replay_step(folder: Path, step: int) -> Replay:
    """`toolrl.analysis.replay.replay.replay` with a rank in this process."""
    way = plan_replay(folder, step)
    asked = read_record(way.records[-1])
    try:
        return replay_from(way, asked, restored_config(asked.settings), OneProcess())  # type: ignore[arg-type]
    finally:
        gc.collect()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def plain_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_run(model, tmp_path_factory.mktemp("plain"))[1]


@pytest.mark.long
@pytest.mark.parametrize(("step", "start"), [(1, None), (2, None), (3, "step-000002")])
def test_every_step_comes_out_the_same_again(step: int, start: str | None, plain_run: Path) -> None:
    way = plan_replay(plain_run, step)
    assert (way.start.name if way.start else None) == start
    replayed = replay_step(plain_run, step)
    logged = next(row for row in read_jsonl(plain_run / "metrics.jsonl") if row["step"] == step)
    assert replayed.differing() == []
    for name in ("actor/loss", "actor/grad_norm", "engine/logprob_diff_mean", "actor/entropy"):
        assert replayed.replayed[name] == replayed.recorded[name] == logged[name]
    assert replayed.replayed["actor/grad_norm"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=ppo", "algorithm.kl_placement=reward", "algorithm.kl_target=0.01"],
        ["algorithm.name=skywork", "algorithm.filters=[]", "algorithm.entropy_target=100"],
        ["algorithm.name=opd", "teacher.path=self", "teacher.top_k=5"],
        ["algorithm.name=remax"],
        ["algorithm.name=kl_cov", "algorithm.options.share=0.3"],
        ["rollout.max_staleness=2", "rollout.max_reuse=2"],
    ],
    ids=[
        "critic and adaptive KL in the reward",
        "adaptive entropy",
        "prompts of the teacher",
        "greedy baselines",
        "tokens chosen by seed",
        "rollouts that go on",
    ],
)
def test_records_hold_all_inputs_of_the_arithmetic(overrides: list[str], model: Path, tmp_path: Path) -> None:
    _, folder = recorded_run(model, tmp_path, *overrides)
    replayed = replay_step(folder, STEPS)
    assert replayed.differing() == [] and replayed.replayed["actor/grad_norm"] > 0
    if "algorithm.name=ppo" in overrides:
        first, last = (read_record(record_path(folder, step)).metrics["kl/coefficient"] for step in (1, STEPS))
        assert first != last == replayed.replayed["kl/coefficient"]
        assert {"critic/loss", "critic/grad_norm", "kl/reference"} <= replayed.replayed.keys()
    if "algorithm.name=skywork" in overrides:
        bonus = replayed.replayed["actor/entropy_coefficient"]
        assert bonus == read_record(record_path(folder, STEPS)).metrics["actor/entropy_coefficient"] > 0


@pytest.mark.long
def test_the_record_alone_counts(plain_run: Path, tmp_path: Path) -> None:
    """Another reward in the record is another step, and what differs is named."""
    record = read_record(record_path(plain_run, 1))
    rewards = record.batch.rewards
    assert rewards is not None
    rewards[record.batch.num_trained[0] - 1] = 9.0
    Recorder(tmp_path, record.settings, record.made_by).write(1, record.batch, {}, record.metrics)
    assert {"actor/loss", "actor/grad_norm"} <= set(replay_step(tmp_path, 1).differing())


@pytest.mark.parametrize(
    ("device", "replayed", "message"),
    [
        ("cuda", 0.1000001, "1 of 1 metrics of the update differ On a GPU no update repeats bit for bit"),
        ("cpu", 0.1000001, "1 of 1 metrics of the update differ"),
        ("cuda", 0.1, "all 1 metrics of the update are the same, bit for bit"),
    ],
)
def test_the_exactness_of_a_replay_depends_on_the_device(device: str, replayed: float, message: str) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        code = show(Replay({"actor/loss": 0.1}, {"actor/loss": replayed}, device), 3, console)
    output = " ".join(capture.get().split())
    assert message in output and code == (0 if replayed == 0.1 else 1)
    assert ("attention's backward" in output) == (device == "cuda" and code == 1)


def test_changed_code_or_settings_are_logged(plain_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        record = read_record(record_path(plain_run, step))
        settings = {**record.settings, "actor.optim.lr": 0.5} if step == 1 else record.settings
        older = Recorder(tmp_path, settings, {**record.made_by, "code": "older"})
        older.write(step, record.batch, record.coefficients, record.metrics)
    replay_step(tmp_path, 2)
    assert "but older in the record: the result may differ" in caplog.text
    assert "actor.optim.lr is 0.5 in step 1, but 0.01 in the record" in caplog.text


def copied(plain_run: Path, folder: Path, steps: Sequence[int]) -> Path:
    """The folder with records of these steps, and nothing else."""
    content = record_path(plain_run, 1).read_bytes()
    for step in steps:
        with replacing(record_path(folder, step)) as unfinished:
            unfinished.write_bytes(content)
    return folder


def test_a_run_that_is_taken_back_forgets_its_later_records(plain_run: Path, tmp_path: Path) -> None:
    Recorder(copied(plain_run, tmp_path, [1, 2, 3]), {}, {}).truncate_after(1)
    assert recorded_steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("steps", "step", "message"),
    [
        ([], 1, "has no record of step 1; expected one of the recorded steps: none; trainer.record=true writes them"),
        ([1, 2, 4], 9, "has no record of step 9; expected one of the recorded steps: 1-2, 4"),
        ([1, 4], 4, "the nearest start is the initial model, and there is no record of step 2-3"),
    ],
)
def test_a_step_without_a_checkpoint_before_it_is_refused(
    steps: list[int], step: int, message: str, plain_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        plan_replay(copied(plain_run, tmp_path, steps), step)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_damaged_checkpoint_is_gone_around(plain_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copied(plain_run, tmp_path, [1, 2, 3])
    (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    way = plan_replay(folder, 3)
    assert way.start is None and len(way.records) == 3 and "checkpoint skipped" in caplog.text


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_damaged_record_is_one_clear_error(content: bytes | None, plain_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-000001.npz"
    whole = record_path(plain_run, 1).read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(DataError, match="is damaged"):
        read_record(path)


def test_every_lost_byte_of_a_record_is_detected(plain_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-000001.npz"
    whole = record_path(plain_run, 1).read_bytes()
    for place in range(100, len(whole) // 2, len(whole) // 20):  # in the arrays, not in the directory at the end
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            read = read_record(path)
        except DataError:
            continue
        assert content(read) == content(read_record(record_path(plain_run, 1)))


def test_a_record_of_another_format_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "step-000001.npz", header=np.array(json.dumps({"format": 0})))
    with pytest.raises(DataError, match="is of an unknown format; expected format 4"):
        read_record(tmp_path / "step-000001.npz")


def content(record: Record) -> str:
    """Every value, bit for bit."""
    batch = {field.name: getattr(record.batch, field.name) for field in fields(record.batch)}
    shown = {name: (each.dtype, each.tobytes()) for name, each in batch.items() if isinstance(each, np.ndarray)}
    return repr((shown, replace(record, batch=None)))  # type: ignore[arg-type]


numbers = st.floats(allow_nan=False, width=32)
tokens = st.tuples(st.integers(0, 200_000), st.booleans(), numbers | st.just(math.nan))
rows = st.lists(st.tuples(st.lists(tokens, min_size=1), numbers), min_size=1, max_size=5)


@settings(deadline=None)
@given(rows, st.booleans(), st.booleans(), st.dictionaries(st.text(), numbers))
def test_a_batch_comes_back_bit_for_bit(
    rows: list[tuple[list[Any], float]], with_baselines: bool, with_segments: bool, coefficients: dict[str, float]
) -> None:
    samples = [
        Sample(
            token_ids=np.array(ids),
            action_mask=np.array(mask),
            rollout_logprobs=np.array(logprobs)[list(mask)],
            group=number,
            reward=reward,
        )
        for number, (each, reward) in enumerate(rows)
        for ids, mask, logprobs in [zip(*each, strict=True)]
    ]
    batch = batch_of(samples, np.arange(len(samples), dtype=np.float32) if with_baselines else None)
    parts = np.array([(each,) for each in range(len(samples))], dtype=[("format", np.float32)])
    parts_or_none = parts if with_baselines else None
    batch = replace(batch, episodes=np.arange(len(samples)) // 2 if with_segments else None, parts=parts_or_none)
    metrics, recorder = {"actor/loss": 0.1, "actor/lr": math.inf}, {"settings": {"a.b": [1]}, "made_by": {"code": "x"}}
    record = Record(step=7, batch=batch, coefficients=coefficients, metrics=metrics, **recorder)
    with TemporaryDirectory() as folder:
        Recorder(Path(folder), **recorder).write(7, batch, coefficients, metrics)
        assert content(read_record(record_path(Path(folder), 7))) == content(record)


def test_a_configuration_comes_back_from_its_settings(model: Path, tmp_path: Path) -> None:
    overrides = [
        "env.tools=[calculator,{name: python}]",
        "env.name=tool",
        "env.tool_call_format=hermes",
        "algorithm.name=kl_cov",
    ]
    config = load_config([*run_overrides(model, tmp_path, "hf", 1), *overrides, "algorithm.options.share=0.3"])
    assert restored_config(json.loads(json.dumps(flattened(asdict(config))))) == config


@pytest.mark.parametrize("argv", [[], ["run"], ["run", "--step"], ["run", "--step", "x"], ["run", "step=0"]])
def test_arguments_that_name_no_step_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and "--step" in capsys.readouterr().err


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from toolrl.analysis.replay.__main__ import main; "
        "code = main(['nowhere', 'step=1']); "
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no folder 'nowhere'" in done.stdout, done.stdout + done.stderr
