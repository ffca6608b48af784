"""A sample from its prompt to its share of the loss: the arithmetic by hand, and the checks on real steps."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.local_run import local_fit, local_trainer
from tests.support.report_run import save_report_run
from tests.support.tiny import MINI, run_overrides
from tests.verl.trainer.test_recipes import HalfScripted
from toolrl.analysis.collapse.collapse import CollapseWatch
from toolrl.analysis.explain.__main__ import main
from toolrl.analysis.explain.explanation import Explainer, Explanation, clean, explain, read_step
from toolrl.analysis.report.folder import read_run
from toolrl.analysis.report.loss import computed_loss
from toolrl.analysis.samples.sample_files import COLUMNS, LossScale, SampleFiles, StepSamples
from verl.batch import experience
from verl.batch.experience import with_loss_weights
from verl.batch.token_batch import TokenBatch
from verl.build.algorithm import build_algorithm
from verl.checkpoint.crash import CRASH_FILES
from verl.config.commands import TRAIN
from verl.config.load import load_config
from verl.config.show import as_yaml
from verl.envs.base import Observation, StepResult
from verl.errors import ConfigError, DataError
from verl.rollout.engine import RolloutEngine, Sampling
from verl.tracking.jsonl import append_jsonl
from verl.types import Completion, Message, Score, Task


def lively(response: str, answer: str) -> float:
    """A reward under which hardly two responses are alike."""
    return len(set(response)) / 10


class TwoTurns:
    """Asks a second time, whatever the policy wrote."""

    def __init__(self, task: Task) -> None:
        self.prompt, self.texts = task.prompt, []  # type: ignore[var-annotated]

    async def reset(self) -> Observation:
        return Observation(self.prompt)

    async def step(self, message: Message) -> StepResult:
        self.texts.append(message.content)
        return StepResult((Message("user", "again"),), done=len(self.texts) == 2)

    async def judge(self) -> Score:
        total = len(set("".join(self.texts))) / 10
        return Score(total, {"letters": total})

    async def close(self) -> None:
        """Nothing to close."""


KL = "algorithm.kl_coefficient=0.5"


class OtherLogprobs:
    """An engine that reports other log-probs than the trainer computes, as one of lower precision does."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        own = await self._engine.generate(prompt_ids, sampling)
        return tuple(replace(each, logprobs=[p - 0.4 * (n % 3) for n, p in enumerate(each.logprobs)]) for each in own)


TEACHER = f"teacher.path={MINI / 'model'}"
TWO_TURNS = (f"env.name={__file__}:TwoTurns", "env.tool_call_format=hermes", "data.max_response_length=64")


def trained_folder(model: Path, out: Path, *overrides: str) -> Path:
    """The folder of a run of two steps, each of two updates."""
    own = [*run_overrides(model, out, "hf", 2), "trainer.num_threads=1", f"reward.name={Path(__file__)}:lively"]
    config = load_config([*own, *overrides])
    with local_trainer(config) as trained:
        rollout = trained.rollouts.rollout
        engine: Any = OtherLogprobs(rollout.engine) if config.algorithm.correction.is_level else rollout.engine
        if config.reward.name == "env":  # an untrained policy ends no turn
            engine = HalfScripted(engine, rollout.episode_runner.chat, ["one", "two, three"])
        object.__setattr__(rollout, "engine", engine)
        asyncio.run(local_fit(trained, config, CollapseWatch()).run())
    (out / "run" / "config.yaml").write_text(as_yaml(config, TRAIN))
    return out / "run"


@pytest.mark.long
def test_a_teacher_is_learned_from_in_every_turn_and_in_no_observation(model: Path, tmp_path: Path) -> None:
    """Beside the reward: GRPO's advantage of the episode, and half of the difference on each token of the policy's."""
    overrides = ["algorithm.name=grpo", "algorithm.kl_placement=none", TEACHER, "teacher.weight=0.5"]
    run = read_run(trained_folder(model, tmp_path, *overrides, "reward.name=env", *TWO_TURNS))
    assert all(line["kl/teacher"] > 0 for line in run.rows)
    turns: list[int] = []
    for step in (1, 2):
        for number, sample in enumerate(read_step(run, step).samples):
            turns.append(int((np.diff(sample.mask, prepend=False) & sample.mask).sum()))
            taught = 0.5 * (sample.columns["teacher_logprobs"] - sample.columns["old_logprobs"])
            of_reward = sample.columns["advantages"] - taught
            assert np.ptp(of_reward) < 1e-5 < np.ptp(taught)
            shown = section(explain(run, step, number), "Group and advantage")
            assert "plus 0.5 * (log p_teacher - log p): the difference is from " in shown
    assert max(turns) == 2


def section(explanation: Explanation, title: str) -> str:
    return "\n".join(dict(explanation.sections)[title])


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=grpo", KL],
        ["algorithm.name=toolrl_grpo"],
        ["algorithm.name=ppo"],
        ["algorithm.name=gspo", "actor.ppo_epochs=2"],
        ["algorithm.name=grpo", KL, "algorithm.entropy_coefficient=0.01", "algorithm.correction.is_level=token"],
        ["algorithm.name=grpo", KL, "algorithm.aggregation=token-mean", "algorithm.correction.is_level=sequence"],
        ["algorithm.name=dr_grpo", "reward.name=env", *TWO_TURNS],
        ["algorithm.name=opd", TEACHER, "teacher.weight=0.05", "reward.name=env", *TWO_TURNS],
        ["algorithm.name=dr_grpo", TEACHER, "teacher.weight=0.05", "teacher.top_k=3"],
        ["algorithm.name=dr_grpo", "algorithm.entropy_target=100", "algorithm.entropy_coefficient=0.05"],
    ],
    ids=[
        "KL in the loss",
        "KL in the reward",
        "critic",
        "sequences",
        "token IS",
        "sequence IS",
        "several turns",
        "teacher",
        "the teacher's likeliest tokens",
        "adaptive entropy",
    ],
)
def test_the_record_of_a_step_agrees_with_the_arithmetic(overrides: list[str], model: Path, tmp_path: Path) -> None:
    run = read_run(trained_folder(model, tmp_path, *overrides))
    turns: list[int] = []
    weighted: list[Any] = []
    for step in (1, 2):
        kept = read_step(run, step)
        assert len(kept.samples) == 8
        for number, sample in enumerate(kept.samples):
            explanation = explain(run, step, number)
            assert explanation.failed == []
            assert "they agree within 1e-05" in section(explanation, "Share of the loss")
            if sample.row in kept.loss:
                shown = section(explanation, "Tokens")
                assert "computed again" in shown and ("k3(p, p_ref)" in shown) is (KL in overrides)
                assert ("importance weight * " in shown) is ("is_level" in overrides[-1])
                assert ("importance weight = min(exp(" in shown) is ("is_level" in overrides[-1])
                weighted.append(sample.columns.get("importance", np.ones(1)))
            if (np.diff(sample.mask.astype(int)) == 1).sum() == 2:
                assert section(explanation, "Texts").count("assistant:") == 2
                turns.append(number)
    assert bool(turns) is ("reward.name=env" in overrides)
    assert bool((np.concatenate(weighted) != 1).any()) is ("is_level" in overrides[-1])
    # the checks can fail: a token's loss, a sum and a share are changed
    sample = next(each for each in kept.samples if each.row in kept.loss and each.columns["advantages"].any())
    number, files = kept.samples.index(sample), SampleFiles(run.folder, lambda ids: "w")
    changed = replace(
        sample, columns={**sample.columns, "loss": sample.columns["loss"] * np.arange(len(sample.columns["loss"]))}
    )
    samples = [changed if each is sample else each for each in kept.samples]
    sums = {**kept.sums, sample.row: [each + 1.0 for each in kept.sums[sample.row]]}
    loss = {**kept.loss, sample.row: kept.loss[sample.row] + 1e-4}
    for change, names in (
        ({"samples": samples}, ["token losses"]),
        ({"loss": loss}, ["share"]),
        ({"sums": sums}, ["token losses", "share", "sum of the shares"]),
    ):
        files.write(2, replace(kept, **change))
        assert explain(run, 2, number).failed == names


@pytest.mark.long
def test_a_sequence_has_one_ratio_and_two_epochs_one_share(model: Path, tmp_path: Path) -> None:
    run = read_run(trained_folder(model, tmp_path, "algorithm.name=gspo", "actor.ppo_epochs=2"))
    kept, clipped, others = read_step(run, 1), [0, 0], 0
    for number, sample in enumerate(kept.samples):
        if sample.row not in kept.loss:
            continue
        log_ratio_A = (sample.columns["logprobs"] - sample.columns["old_logprobs"]).astype(np.float64)
        ratio = np.exp(log_ratio_A.mean())
        others += not np.allclose(np.exp(log_ratio_A), ratio, atol=1e-5)
        assert sample.columns["ratio"] == pytest.approx(ratio, abs=1e-6)
        shown = section(explain(run, 1, number), "Tokens")
        found = re.search(r"ratio in the loss: (\S+) on every token", shown)
        assert found is not None and float(found[1]) == pytest.approx(ratio, abs=1e-6)
        advantage = sample.columns["advantages"][0]
        is_clipped = bool(advantage * ratio > advantage * np.clip(ratio, 1 - 3e-4, 1 + 4e-4))
        assert set(sample.columns["clipped"]) == {float(is_clipped)}
        assert f"clipped: {len(log_ratio_A) * is_clipped} of {len(log_ratio_A)} tokens" in shown
        clipped[is_clipped] += 1
        assert "of the first of 2 epochs" in shown
        share = section(explain(run, 1, number), "Share of the loss")
        first, second = (float(each) for each in re.findall(r"weight \* \((\S+) \+ (\S+)\) / 4 updates", share)[0])
        weight = float(re.findall(r" = (\S+);", share)[0])
        assert sample.columns["loss"].sum() == pytest.approx(weight * first, rel=1e-4)
        assert kept.loss[sample.row] == pytest.approx(weight * (first + second) / 4, rel=1e-4, abs=1e-6)
    assert others and all(clipped)


@pytest.mark.long
def test_a_wrong_scale_in_the_trainer_is_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer whose weights are twice what they should be: its own shares still add up to its loss."""

    def doubled(*given: Any) -> TokenBatch:
        weighted = with_loss_weights(*given)
        assert weighted.loss_weights is not None
        return replace(weighted, loss_weights=2 * weighted.loss_weights)

    monkeypatch.setattr(experience, "with_loss_weights", doubled)
    run = read_run(trained_folder(model, tmp_path, "algorithm.name=grpo", KL))
    kept = read_step(run, 2)
    logged = next(row["actor/loss"] for row in run.rows if row["step"] == 2)
    assert sum(kept.loss.values()) == pytest.approx(logged, abs=1e-6)
    number = next(number for number, each in enumerate(kept.samples) if each.row in kept.loss)
    explanation = explain(run, 2, number)
    assert explanation.failed == ["token losses", "share", "sum of the shares"]
    assert "they differ by " in section(explanation, "Share of the loss")
    SampleFiles(run.folder, str).write(2, replace(kept, scale=None, sums={}))
    explanation = explain(run, 2, number)
    assert explanation.failed == [] and "the weight is not known" in section(explanation, "Tokens")
    assert "sum check: not possible: " in section(explanation, "Share of the loss")


@pytest.mark.long
def test_the_recorded_values_of_an_advantage_are_shown(model: Path, tmp_path: Path) -> None:
    """A critic, whitening, a greedy baseline, and KL in the reward, token by token."""
    penalty = ["algorithm.kl_placement=reward", KL]
    run = read_run(trained_folder(model, tmp_path / "ppo", "algorithm.name=ppo", *penalty))
    (sample, *_), shown = read_step(run, 2).samples, section(explain(run, 2, 0), "Group and advantage")
    columns, whitening = sample.columns, read_step(run, 2).whitening
    assert whitening is not None
    assert f"value {columns['values'][0]:.6g}, target {columns['returns'][0]:.6g}" in shown
    assert f"mean {whitening[0]:.6g}, std {whitening[1]:.6g}" in shown
    raw_A = columns["returns"] - columns["values"]
    assert (raw_A - whitening[0]) / whitening[1] == pytest.approx(columns["advantages"], rel=1e-3, abs=1e-5)
    assert "estimator: gae" in shown and "r - beta * sum(KL) = " in shown
    run = read_run(trained_folder(model, tmp_path / "remax", "algorithm.name=remax", "algorithm.kl_placement=none"))
    for number, sample in enumerate(read_step(run, 2).samples):
        shown = section(explain(run, 2, number), "Group and advantage")
        assert sample.baseline is not None and f"reward of the greedy response: {sample.baseline:.6g}" in shown
        assert sample.reward - sample.baseline == pytest.approx(sample.columns["advantages"][0], abs=1e-5)
        assert "sum(KL)" not in shown


def test_a_sample_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Returns 1, 2, 3 and 6: mean 3, std 2.160247. The advantage of the last is 1.388730."""
    run = save_report_run(tmp_path / "run", steps=1)
    (sample, *_) = read_step(read_run(run), 1).samples
    values = np.full(3, 1.388730, dtype=np.float32)
    columns = {
        **sample.columns,
        "advantages": values,
        "loss": -0.01 * values,
        "rewards": np.array([0.0, 0.0, 6.0]),
        "old_logprobs": sample.columns["logprobs"],
    }
    made = replace(
        sample, line=7, row=3, reward=6.0, group_returns=[1.0, 2.0, 3.0, 6.0], columns=columns, num_segments=1
    )
    files = SampleFiles(run, lambda ids: f"w{ids[0]}")
    scale = LossScale(
        aggregation="token-mean",
        length=None,
        minibatches=1,
        num_trained=np.array([20, 20, 37, 3, 20]),
        groups=np.array([0, 0, 0, 0, 1]),
        episodes=np.arange(5),
    )
    loss, sums = {3: -0.0416619, 4: 0.02}, {3: [-4.16619], 4: [2.0]}
    written = StepSamples(samples=[made], loss=loss, sums=sums, scale=scale)
    files.write(1, written)
    append_jsonl(run / "metrics.jsonl", {"step": 1, "actor/loss": -0.02166})
    config = load_config(["algorithm.name=grpo", "algorithm.kl_placement=none", "model.path=a", "rollout.n=4"])
    (run / "config.yaml").write_text(as_yaml(config, TRAIN))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(lines[-1] + "\n")
    explanation = explain(read_run(run), 1, 0)
    assert explanation.failed == []
    advantage = section(explanation, "Group and advantage")
    assert "mean 3, std 2.16025 (n - 1)" in advantage
    assert "estimator: grpo" in advantage and "recorded advantage: 1.38873 on every token" in advantage
    assert "trainer.record=true keeps a record of every step" in advantage
    weight = "token-mean: 1 / 100 trained tokens of mini-batch 1 of 1 = 0.01"
    assert f"weight = {weight}" in section(explanation, "Tokens")
    assert "ratio in the loss: 1 on every token" in section(explanation, "Tokens")
    share = section(explanation, "Share of the loss")
    assert f"share of this sample: -0.0416619 = weight * (-4.16619) / 1 update, with weight = {weight}" in share
    assert "67.57%" in share and "2 samples add up to -0.0216619, actor/loss is -0.02166: they agree" in share
    assert "not known: it needs the weights" in section(explanation, "Share of the gradient norm")
    (run / "records").mkdir()
    (run / "records" / "step-000001.npz").touch()
    again = f"`toolrl replay {run} --step 1` computes the step again from its record"
    assert again in section(explain(read_run(run), 1, 0), "Group and advantage")
    files.write(1, replace(written, loss={3: -0.0416619}, sums={3: [-4.16619]}))
    assert explain(read_run(run), 1, 0).failed == ["sum of the shares"]
    assert main([str(run), "--step", "1", "--sample", "0"]) == 1
    assert "checks that fail: sum of the shares" in capsys.readouterr().out


def test_a_reused_rollout_is_found_where_it_was_generated(tmp_path: Path) -> None:
    run = save_report_run(tmp_path / "run", steps=3)
    config = load_config(["algorithm.name=grpo", "algorithm.kl_placement=none", "model.path=a", "rollout.n=4"])
    (run / "config.yaml").write_text(as_yaml(config, TRAIN))
    kept = read_step(read_run(run), 3)
    first = json.loads((run / "transcripts" / "step-000002.jsonl").read_text().split("\n")[5])
    again = replace(kept.samples[-1], line=None, task_id=first["task_id"], index=1, reward=first["reward"])
    lost = replace(again, reward=9.0)
    SampleFiles(run, str).write(3, replace(kept, samples=[again, lost]))
    shown = section(explain(read_run(run), 3, 0), "Texts")
    assert shown.startswith("user: question 1 ") and '  call 1: weather({"city": "Oslo"})' in shown
    assert "outcome of a call: weather: timeout, 0.5 s" in shown
    assert "step 2 group 1" in shown and "generated for step 2, whose report shows it" in shown
    assert "not in the step's file" in section(explain(read_run(run), 3, 1), "Texts")


def test_a_missing_step_or_sample_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_report_run(tmp_path / "run", steps=2)
    assert main([str(run), "--step", "2"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 5 and "segment 1 of 2" in listed[0] and "share of the loss 0.25" in listed[0]
    with pytest.raises(DataError, match="has no samples of step 3; expected one of 1 to 2"):
        read_step(read_run(run), 3)
    with pytest.raises(ConfigError, match="--sample must be from 0 to 4 in step 2, got 5"):
        explain(read_run(run), 2, 5)
    assert main([str(run), "--step", "3"]) == 2 and "no samples of step 3" in capsys.readouterr().err
    (run / "config.yaml").unlink()
    (run / "transcripts" / "step-000002.jsonl").write_text('{"responses": [], "step": 2}\n')
    capsys.readouterr()
    assert main([str(run), "--step", "2", "--sample", "0"]) == 0
    shown = capsys.readouterr().out
    assert "note: config.yaml cannot be read" in shown
    assert "note: transcripts of step 2: line 1, the rollout of this sample, is missing or damaged" in shown
    assert "not computed: the settings of the run (config.yaml) cannot be read" in shown
    assert "add up to 1.25, actor/loss is 1.25: they agree" in shown


@pytest.mark.parametrize("name", [*COLUMNS, "row", "group_returns"])
def test_a_record_that_lacks_something_is_still_explained(name: str, tmp_path: Path) -> None:
    """A damaged file, or one of another version."""
    run = read_run(save_report_run(tmp_path / "run", steps=1))
    kept, overrides = read_step(run, 1), ["algorithm.name=ppo", "algorithm.kl_placement=reward"]
    columns = {**dict.fromkeys(COLUMNS, kept.samples[0].columns["rollout_logprobs"]), **kept.samples[0].columns}
    columns.pop(name, None)
    changes = {"row": 99} if name == "row" else {"group_returns": []} if name == "group_returns" else {}
    step = replace(kept, samples=[replace(kept.samples[0], columns=columns, **changes), *kept.samples[1:]])
    algorithm = build_algorithm(load_config(overrides).algorithm, 64, 0)
    explainer = replace(Explainer.of(run), algorithm=algorithm, logged={1: {"step": 1, "kl/coefficient": 0.3}})
    sections = dict(explainer.explanation(1, step, computed_loss(step), 0, None).sections)
    assert [*sections][:5] == ["Texts", "Reward", "Group and advantage", "Tokens", "Share of the loss"]
    if name in ("logprobs", "entropy", "rollout_logprobs"):
        assert f"lacks {name}" in sections["Tokens"][0]


CONTROLS = "\x1b[2J\x07\x9b31m\x1b]0;title\x07\x9d\x9c\x00\r\x7f\u202e\u2066\u200f\u2028\ud800"


def controlled(value: Any) -> Any:
    """With control characters at the end of every text, and of every key that is data."""
    if isinstance(value, dict):
        keys = (lambda key: key + CONTROLS) if "correct" in value else (lambda key: key)
        return {keys(key): controlled(each) for key, each in value.items()}
    if isinstance(value, list):
        return [controlled(each) for each in value]
    return value + CONTROLS if isinstance(value, str) and value != "assistant" else value


def test_no_control_character_reaches_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_report_run(tmp_path / "run", steps=1)
    path = run / "transcripts" / "step-000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    for row in rows:
        row["responses"][0]["tool_calls"] = [{"id": "call", "name": "weather", "arguments": {"city": "Oslo"}}]
    path.write_text("".join(json.dumps(controlled(row)) + "\n" for row in rows))
    kept = read_step(read_run(run), 1)
    samples = [replace(each, task_id=each.task_id + CONTROLS) for each in kept.samples]
    SampleFiles(run, lambda ids: CONTROLS).write(1, replace(kept, samples=samples))
    crash = run / CRASH_FILES.replace("*", "1")
    crash.parent.mkdir()
    crash.write_text(f"failed {CONTROLS}\n", errors="replace")
    codes = [main([str(run), "--step", "1", *argv]) for argv in ((), ("--sample", "0"), ("--sample", "4"))]
    shown = capsys.readouterr().out
    assert codes == [0, 0, 0] and shown.count("weather") > 3 and "Oslo" in shown and "\ufffd" in shown
    assert {char for char in shown if not char.isprintable()} == {"\n"}
    assert "\nfine" not in clean("text\nfine")
