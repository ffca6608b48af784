"""A sample from its prompt to its share of the loss: the arithmetic by hand, and the checks on real steps."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.local_run import local_fit, local_trainer
from tests.support.report_run import save_report_run
from tests.support.tiny import run_words, save_tiny_model
from tests.trainer.test_recipes import HalfScripted
from verl.config.commands import TRAIN
from verl.config.load import load_config
from verl.config.show import as_yaml
from verl.envs.base import Observation, StepResult
from verl.errors import ConfigError, DataError
from verl.kit.collapse.collapse import CollapseWatch
from verl.kit.explain.__main__ import main
from verl.kit.explain.explanation import Explanation, explain, read_step
from verl.kit.report.folder import read_run
from verl.tracking.jsonl import append_jsonl
from verl.tracking.samples import SampleFiles, StepSamples
from verl.types import Message, Score, Task


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


class PaidTurns(TwoTurns):
    """Pays the first turn by its length."""

    async def step(self, message: Message) -> StepResult:
        result = await super().step(message)
        paid = None if result.done else len(self.texts[0]) % 7 / 7
        return replace(result, reward=paid)


TWO_TURNS = (f"env.name={__file__}:TwoTurns", "env.tool_call_format=hermes", "data.max_response_length=64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def trained_folder(model: Path, out: Path, *words: str) -> Path:
    """The folder of a run of two steps, each of two updates."""
    own = [*run_words(model, out, "hf", 2), "trainer.num_threads=1", f"reward.name={Path(__file__)}:lively"]
    config = load_config([*own, *words])
    with local_trainer(config) as trained:
        rollout = trained.rollouts.rollout
        if config.reward.name == "env":  # an untrained policy ends no turn
            engine = HalfScripted(rollout.engine, rollout.episode_runner.chat, ["one", "two, three"])
            object.__setattr__(rollout, "engine", engine)
        asyncio.run(local_fit(trained, config, CollapseWatch()).run())
    (out / "run" / "config.yaml").write_text(as_yaml(config, TRAIN))
    return out / "run"


def section(explanation: Explanation, title: str) -> str:
    return "\n".join(dict(explanation.sections)[title])


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.name=grpo"],
        ["algorithm.name=toolrl_grpo"],
        ["algorithm.name=ppo"],
        ["algorithm.name=gspo", "actor.ppo_epochs=2"],
        ["algorithm.name=rloo", "algorithm.kl_placement=none", "algorithm.correction.is_level=token"],
        ["algorithm.name=dr_grpo", "reward.name=env", *TWO_TURNS],
    ],
    ids=["KL in the loss", "KL in the reward", "critic", "sequences", "importance weights", "several turns"],
)
def test_the_record_of_a_step_agrees_with_the_arithmetic(words: list[str], model: Path, tmp_path: Path) -> None:
    run = read_run(trained_folder(model, tmp_path, *words))
    turns: list[int] = []
    for step in (1, 2):
        kept = read_step(run, step)
        assert len(kept.samples) == 8
        for number, sample in enumerate(kept.samples):
            explanation = explain(run, step, number)
            assert explanation.failed == []
            assert "sum check" in section(explanation, "Share of the loss")
            if sample.row in kept.loss:
                assert "computed again" in section(explanation, "Tokens")
            if (np.diff(sample.mask.astype(int)) == 1).sum() == 2:
                assert section(explanation, "Texts").count("assistant:") == 2
                turns.append(number)
    assert bool(turns) is ("reward.name=env" in words)
    # the checks can fail: a share, an advantage and a token's loss are changed
    sample = next(each for each in kept.samples if each.row in kept.loss and each.columns["advantages"].any())
    number, files = kept.samples.index(sample), SampleFiles(run.folder, lambda ids: "w")
    changed = replace(
        sample, columns={**sample.columns, "loss": sample.columns["loss"] * np.arange(len(sample.columns["loss"]))}
    )
    samples = [changed if each is sample else each for each in kept.samples]
    files.write(2, StepSamples(samples=samples, loss={**kept.loss, sample.row: kept.loss[sample.row] + 1e-4}))
    assert {"token losses", "sum of the shares"} <= set(explain(run, 2, number).failed)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.name=ppo"],
        ["algorithm.name=opo"],
        ["algorithm.name=gpg"],
        ["algorithm.name=pass_at_k"],
        ["algorithm.name=rloo", "algorithm.kl_placement=none"],
        ["algorithm.name=remax"],
        ["algorithm.name=reinforce_pp"],
        ["algorithm.name=reinforce_pp", "algorithm.kl_placement=none"],
        ["algorithm.name=reinforce_pp_baseline"],
        # KL in the reward, also with a single update, whose penalty uses the engine's log-probs
        ["algorithm.name=toolrl_grpo", "algorithm.kl_placement=reward", KL],
        ["algorithm.name=rloo", "algorithm.kl_placement=reward", KL, "actor.ppo_mini_batch_size=4"],
        ["algorithm.name=reinforce_pp", "algorithm.kl_placement=reward", KL, "actor.ppo_mini_batch_size=4"],
        ["algorithm.name=ppo", "algorithm.kl_placement=reward", KL, "actor.ppo_mini_batch_size=4"],
        ["algorithm.name=reinforce_pp_baseline", "algorithm.kl_placement=reward", KL],
    ],
    ids=" ".join,
)
def test_every_estimator_has_its_formula_with_numbers(words: list[str], model: Path, tmp_path: Path) -> None:
    run = read_run(trained_folder(model, tmp_path, *words))
    kept, agreed = read_step(run, 2), 0
    for number in range(len(kept.samples)):
        explanation = explain(run, 2, number)
        assert explanation.failed == []
        shown = section(explanation, "Group and advantage")
        assert KL not in words or "r - beta * sum(KL) = " in shown
        agreed += "The record agrees." in shown
    assert agreed == len(kept.samples)
    # the check can fail
    sample = next(each for each in kept.samples if each.columns["advantages"].any())
    values = sample.columns["advantages"] * np.linspace(1.0, 1.5, len(sample.columns["advantages"]))
    changed = replace(sample, columns={**sample.columns, "advantages": values.astype(np.float32)})
    samples = [changed if each is sample else each for each in kept.samples]
    SampleFiles(run.folder, lambda ids: "w").write(2, StepSamples(samples=samples, loss=kept.loss))
    assert "advantage" in explain(run, 2, kept.samples.index(sample)).failed


@pytest.mark.long
def test_gigpo_adds_the_advantages_of_turns(model: Path, tmp_path: Path) -> None:
    """Turns of both responses in equal states: first turns always, and second ones, as every answer is `again`."""
    words = ["algorithm.name=gigpo", "reward.name=env", f"env.name={__file__}:PaidTurns", *TWO_TURNS[1:]]
    run = read_run(trained_folder(model, tmp_path, *words))
    kept, agreed = read_step(run, 1), 0
    for number, sample in enumerate(kept.samples):
        explanation = explain(run, 1, number)
        shown = section(explanation, "Group and advantage")
        assert explanation.failed == []
        agreed += "The record agrees." in shown
        values = dict.fromkeys(sample.columns["advantages"].tolist())
        if len(values) == 2:
            (own, other), mean = sample.group_returns, np.mean(sample.group_returns)
            reward = own if sample.index == 0 else other
            episode = (reward - mean) / (np.std(sample.group_returns, ddof=1) + 1e-6)
            assert f"= {episode:.6g}; discounted return and A_turn of the turns: " in shown
    assert agreed == len(kept.samples)
    assert any(len(set(each.columns["advantages"].tolist())) == 2 for each in kept.samples)
    sample = next(each for each in kept.samples if each.columns["advantages"].any())
    changed = replace(sample, columns={**sample.columns, "advantages": -sample.columns["advantages"]})
    samples = [changed if each is sample else each for each in kept.samples]
    SampleFiles(run.folder, lambda ids: "w").write(1, StepSamples(samples=samples, loss=kept.loss))
    assert "advantage" in explain(run, 1, kept.samples.index(sample)).failed


def test_a_sample_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Returns 1, 2, 3 and 6: mean 3, std 2.160247. The advantage of the last is 1.388730."""
    run = save_report_run(tmp_path / "run", steps=1)
    (sample, *_) = read_step(read_run(run), 1).samples
    values = np.full(3, 1.388730, dtype=np.float32)
    columns = {
        **sample.columns,
        "advantages": values,
        "loss": -0.01 * values,
        "old_logprobs": sample.columns["logprobs"],
    }
    made = replace(
        sample, line=7, row=3, reward=6.0, group_returns=[1.0, 2.0, 3.0, 6.0], columns=columns, num_segments=1
    )
    files = SampleFiles(run, lambda ids: f"w{ids[0]}")
    files.write(1, StepSamples(samples=[made], loss={3: -0.04166, 4: 0.02}))
    append_jsonl(run / "metrics.jsonl", {"step": 1, "actor/loss": -0.02166})
    config = load_config(["algorithm.name=grpo", "algorithm.kl_placement=none", "model.path=a", "rollout.n=4"])
    (run / "config.yaml").write_text(as_yaml(config, TRAIN))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(lines[-1] + "\n")
    explanation = explain(read_run(run), 1, 0)
    assert explanation.failed == []
    advantage = section(explanation, "Group and advantage")
    assert "mean 3, std 2.16025 (n - 1)" in advantage
    assert "A = (r - mean) / (std + 1e-6) = (6 - 3) / (2.16025 + 1e-6) = 1.38873" in advantage
    assert "The record agrees." in advantage
    assert "weight of this sample's tokens is 0.01 " in section(explanation, "Tokens")
    share = section(explanation, "Share of the loss")
    assert "share of this sample: -0.04166" in share and "67.56%" in share
    assert "add up to -0.02166; actor/loss is -0.02166" in share
    assert "not known: it needs the weights" in section(explanation, "Share of the gradient norm")
    files.write(1, StepSamples(samples=[replace(made, reward=5.0)], loss={3: -0.04166}))
    assert explain(read_run(run), 1, 0).failed == ["advantage", "sum of the shares"]
    assert main([str(run), "--step", "1", "--sample", "0"]) == 1
    assert "checks that fail: advantage, sum of the shares" in capsys.readouterr().out


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
    assert "step 2 group 1" in shown and "generated for step 2, whose report shows it" in shown
    assert "not in the step's file" in section(explain(read_run(run), 3, 1), "Texts")


def test_what_there_is_not_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert json.dumps(read_run(run).notes) and main([str(run), "--step", "2", "--sample", "0"]) == 2
