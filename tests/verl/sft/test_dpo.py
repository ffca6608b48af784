"""DPO: loss, weights and gradient by hand, rows of pairs, and runs that prefer what was chosen."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid

from tests.support.every import every
from tests.support.metric_names import known
from tests.support.service import free_port
from tests.verl.batch.test_packing import tiny_model
from toolrl.check.preflight.local_group import LocalGroup
from verl.algorithms.dpo import preferences
from verl.batch.packing import assign, make_units, pack
from verl.batch.samples import Sample, batch_of
from verl.build.run import load_chat_template
from verl.chat.template import ChatTemplate
from verl.checkpoint.checkpoint import CheckpointStore
from verl.checkpoint.state import find_saved
from verl.config.commands import SFT
from verl.config.load import load_config
from verl.config.schema import DataConfig, ModelConfig
from verl.data.report import RowReport
from verl.errors import ConfigError, DataError
from verl.sft.objectives import DPO, Pair
from verl.sft.pairs import Preference, pair_samples, read_preferences, to_preference
from verl.sft.run import SFTRun, SFTSettings
from verl.single_controller.group import WorkerContext, WorkerView
from verl.tracking.jsonl import read_jsonl
from verl.tracking.timers import PhaseTimer
from verl.tracking.tracker import RunInfo, build_trackers
from verl.trainer.main_sft import main
from verl.trainer.policy import PackSettings, Policy
from verl.workers.model import PackedPolicy
from verl.workers.optim import OptimizerSettings
from verl.workers.rank import RankSpec, build_rank

USER = {"role": "user", "content": "What is 2 + 3?"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}


def test_loss_weights_and_metrics_by_hand() -> None:
    """beta 0.5: implicit rewards 0.5 * (1, -1) and 0.5 * (0, 2), so margins 1 and -1. Means of two pairs."""
    logprobs_B, ref_B = torch.tensor([-3.0, -5.0, -2.0, -6.0]), torch.tensor([-4.0, -4.0, -2.0, -8.0])
    found = preferences(logprobs_B, ref_B, beta=0.5)
    softplus = math.log1p(math.exp(-1.0)), math.log1p(math.exp(1.0))  # -log sigmoid(1), -log sigmoid(-1)
    assert found.metrics() == pytest.approx(
        {"loss": sum(softplus) / 2, "margin": 0.0, "accuracy": 0.5, "chosen": 0.25, "rejected": 0.25}
    )
    low, high = 0.25 / (1 + math.e), 0.25 / (1 + math.exp(-1.0))  # beta / 2 * sigmoid(-+1)
    assert found.weights().tolist() == pytest.approx([low, -low, high, -high])


def test_trls_loss_on_its_formula() -> None:
    """TRL's DPOTrainer, loss_type=sigmoid: -logsigmoid(beta * (chosen_logratios - rejected_logratios)), and its
    gradient by autograd, which the weights of -log p reproduce."""
    generator = torch.Generator().manual_seed(1)
    logprobs_B = (torch.randn(12, generator=generator, dtype=torch.float64) * 9).requires_grad_()
    ref_B = torch.randn(12, generator=generator, dtype=torch.float64) * 9
    ratios = logprobs_B - ref_B
    loss = -logsigmoid(0.3 * (ratios[::2] - ratios[1::2])).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    found = preferences(logprobs_B.detach(), ref_B, beta=0.3)
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert logprobs_B.grad is not None
    torch.testing.assert_close(-found.weights(), logprobs_B.grad, rtol=1e-12, atol=0)


def row(**changes: Any) -> dict[str, Any]:
    return {"messages": [USER], "chosen": "5", "rejected": "6", **changes}


def test_the_forms_of_a_response_agree() -> None:
    """A text, a message, and a list of one, which may be JSON text, too."""
    answers = {name: {"role": "assistant", "content": row()[name]} for name in ("chosen", "rejected")}
    lists = {name: [each] for name, each in answers.items()}
    texts = {name: json.dumps(each) for name, each in lists.items()}
    plain = to_preference(row())
    assert to_preference(row(**answers)) == to_preference(row(**lists)) == plain
    assert to_preference(row(messages=json.dumps([USER]))) == plain
    assert to_preference(row(**texts)).chosen.messages[-1].content == texts["chosen"]  # a text stays one
    assert plain.chosen.messages[:-1] == plain.rejected.messages[:-1] and plain.chosen.trained == [1]


def test_calls_and_results_are_part_of_pairs() -> None:
    """An earlier turn with a call belongs to the prompt: only the last turn is trained."""
    result = {"role": "tool", "content": "5"}
    made = to_preference(row(messages=[USER, CALL, result], chosen="It is 5.", rejected=CALL, tools=[TOOL]))
    assert (made.chosen.trained, made.rejected.trained) == ([3], [3])
    assert made.rejected.messages[-1].tool_calls[0].name == "add" and made.chosen.tools[0].name == "add"


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"chosen": ""}, "chosen", "is missing or empty"),
        ({"rejected": None}, "rejected", "is missing or empty"),
        ({"messages": [USER, {"role": "assistant", "content": "4"}]}, "messages", "ends with an assistant turn"),
        ({"rejected": "5"}, "rejected", "is the same as chosen"),
        ({"chosen": {"role": "user", "content": "5"}}, "chosen.role", "is 'user'"),
        ({"chosen": [CALL, {"role": "tool", "content": "5"}]}, "chosen", "has 2 messages"),
        ({"chosen": {"role": "assistant", "content": " "}}, "chosen.content", "is empty"),
        ({"rejected": CALL, "tools": []}, "rejected.tool_calls[0].function.name", "'add' is not in tools"),
        ({"chosen": 5}, "chosen", "is of type int"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "is 'robot'"),
        ({"images": ["x"]}, "images", "cannot be used"),
    ],
)
def test_broken_rows_name_their_field(changes: dict[str, Any], field: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row()) + "\n" + json.dumps(row(**changes)) + "\n")
    with pytest.raises(DataError, match="row 1") as caught:
        read_preferences(str(path))
    assert caught.value.field == field and problem in caught.value.problem


def test_a_column_may_be_renamed_to_messages(tmp_path: Path) -> None:
    path, answer = tmp_path / "pairs.jsonl", {"role": "assistant", "content": "5"}
    path.write_text(json.dumps({"asked": [USER], "chosen": [answer], "rejected": [{**answer, "content": "6"}]}))
    assert len(read_preferences(str(path), data=DataConfig(columns={"asked": "messages"}))) == 1
    with pytest.raises(DataError, match="'prompt': is missing, and chosen and rejected begin differently"):
        read_preferences(str(path))


@pytest.fixture(scope="module")
def chat(model: Path) -> ChatTemplate:
    return load_chat_template(ModelConfig(path=str(model)))


def preference(number: int) -> Preference:
    return to_preference(
        {"messages": [{"role": "user", "content": f"{number}?"}], "chosen": "Yes.", "rejected": "No, no, no."}
    )


def test_a_pair_is_two_samples_with_one_prompt(chat: ChatTemplate) -> None:
    """It is dropped if either does not fit."""
    (pair,) = pair_samples([preference(1)], chat, 512, first_group=3)
    assert pair.chosen.group == pair.rejected.group == 3
    prompts = [sample.token_ids[: int(sample.action_mask.argmax())].tolist() for sample in (pair.chosen, pair.rejected)]
    assert prompts[0] == prompts[1]
    texts = [chat.tokenizer.decode(each.token_ids[each.action_mask]) for each in (pair.chosen, pair.rejected)]
    assert texts[0].startswith("Yes.") and texts[1].startswith("No, no, no.")
    lengths = [len(pair.chosen.token_ids), len(pair.rejected.token_ids)]
    assert lengths[0] < lengths[1]
    short = to_preference(row(messages=[{"role": "user", "content": "1?"}], chosen="No.", rejected="Yes."))
    report = RowReport("pairs", 2)
    (kept,) = pair_samples([preference(1), short], chat, lengths[1] - 1, report=report)
    assert kept.chosen.group == 1 and "longer than" in str(report)
    assert len(pair_samples([preference(1)], chat, lengths[1])) == 1


def test_an_update_has_the_gradient_of_the_loss_in_any_packs() -> None:
    """By autograd of the loss itself over the model's own log-probs, in one pack and in one per pair."""
    samples = [
        Sample(
            token_ids=np.arange(1, length + 1),
            action_mask=np.arange(length) >= 2,
            rollout_logprobs=np.zeros(length - 2),
            group=group,
            reward=0.0,
        )
        for group, length in enumerate((4, 6, 9))
        for length in (length, length + 2)
    ]
    batch = batch_of(samples)
    module = PackedPolicy(tiny_model("qwen2", tied=True, dtype=torch.float64))
    ref_B = torch.linspace(-30, -9, 6, dtype=torch.float64)

    def logprobs(max_tokens: int) -> Iterator[tuple[Any, torch.Tensor]]:
        for units in assign(make_units(batch, True, max_tokens), max_tokens):
            packed = pack(units, batch)
            yield packed, module(packed, 1.0, False).logprobs

    sums = torch.zeros(6, dtype=torch.float64)
    for packed, each_A in logprobs(1000):
        sums = sums.index_add(0, packed.sample, each_A)
    ratios = sums - ref_B
    (-logsigmoid(0.1 * (ratios[::2] - ratios[1::2])).mean()).backward()
    expected = [each.grad.clone() for each in module.parameters()]
    weights_B = preferences(sums.detach(), ref_B, 0.1).weights()
    module.zero_grad()
    for packed, each_A in logprobs(20):
        (-(each_A * weights_B[packed.sample]).sum()).backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sft.loss=kto"], "sft.loss must be nll or dpo"),
        (["sft.beta=0.2"], "sft.beta=0.2 has no effect: sft.loss is nll"),
        (["sft.loss=dpo", "sft.beta=0"], "sft.beta must be positive"),
        (["sft.loss=dpo", "data.split_turns=last"], "data.split_turns=last has no effect: a row of sft.loss=dpo"),
    ],
)
def test_settings_of_pairs_are_checked(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["model.path=m", *overrides], SFT)


@pytest.fixture
def group_ends() -> Iterator[None]:
    yield
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def run(model: Path, pairs: Sequence[Pair], out: Path, steps: int) -> list[dict[str, Any]]:
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
    port = free_port()
    optimizer = OptimizerSettings(lr=2e-3, weight_decay=0.0)
    rank = build_rank(RankSpec(str(model), torch.float32, 1.0, optimizer), WorkerContext(0, 1, port=port))
    made = SFTRun(
        settings=SFTSettings(total_steps=steps, batch_size=4, test_freq=2, save_freq=2),
        train=pairs[:8],
        val=pairs[8:],
        policy=Policy(WorkerView(LocalGroup(rank), "policy"), PackSettings(256)),
        workers=LocalGroup(rank),
        store=(store := CheckpointStore(out / "checkpoints", keep_last=2, keep_best=0)),
        trackers=build_trackers(["jsonl"], RunInfo(out)),
        timer=PhaseTimer(),
        resume_config={},
        contents={},
        objective=DPO(0.5),
        saved=find_saved(store, "main_sft", {}),
    )
    try:
        made.run()
    finally:
        made.trackers.close()
    return list(read_jsonl(out / "metrics.jsonl"))


@pytest.mark.long
def test_chosen_responses_become_likelier_and_a_run_resumes_bit_for_bit(
    model: Path, chat: ChatTemplate, tmp_path: Path, group_ends: None
) -> None:
    """The margin is 0 before the training, with the loss log 2; the reference stays the start model after a resume."""
    pairs = pair_samples([preference(number) for number in range(10)], chat, 512)
    straight = run(model, pairs, tmp_path / "straight", 4)
    run(model, pairs, tmp_path / "broken", 2)
    broken = run(model, pairs, tmp_path / "broken", 4)
    assert straight[0]["val/pairs/loss"] == pytest.approx(math.log(2)) and straight[0]["val/pairs/margin"] == 0.0
    assert straight[1]["actor/loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert straight[4]["val/pairs/loss"] < 0.6 and straight[4]["val/pairs/accuracy"] == 1.0
    assert straight[4]["dpo/margin"] == pytest.approx(straight[4]["dpo/chosen"] - straight[4]["dpo/rejected"])
    assert [name for name in straight[4] if name not in ("step", "time") and not known(name)] == []
    untimed = [
        [{name: each for name, each in line.items() if not name.startswith(("time", "perf/"))} for line in lines]
        for lines in (straight, broken)
    ]
    assert untimed[0] == untimed[1]
    last = "checkpoints/step-000004/hf/model.safetensors"
    weights = load_file(tmp_path / "broken" / last)
    assert every(torch.equal(each, weights[name]) for name, each in load_file(tmp_path / "straight" / last).items())


@pytest.mark.long
def test_the_command_trains_on_pairs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row(messages=[{"role": "user", "content": f"{n}?"}])) + "\n" for n in range(4)))
    overrides = [
        f"model.path={model}",
        "model.compute_dtype=float32",
        f"data.train_files=[{path}]",
        "trainer.device=cpu",
    ]
    overrides += ["sft.loss=dpo", "sft.beta=0.2", "data.train_batch_size=4", "trainer.total_epochs=2"]
    assert main([*overrides, f"trainer.default_local_dir={tmp_path}", "trainer.logger=[jsonl]"]) == 0
    first, second = read_jsonl(tmp_path / "sft" / "metrics.jsonl")
    assert first["dpo/margin"] == pytest.approx(0.0, abs=1e-5) and second["dpo/margin"] > 0
    assert "a step: 4 pairs" in capsys.readouterr().out
