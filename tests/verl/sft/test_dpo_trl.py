"""DPO beside TRL's own trainer: the same loss and the same gradient of the same tokens."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.algorithms.dpo import preferences
from verl.batch.samples import Sample
from verl.build.run import load_chat_template
from verl.config.schema import ModelConfig
from verl.embedded import embedded_path
from verl.sft.pairs import Preference, pair_samples, to_preference

BETA = 0.1


def response_logprob(model: nn.Module, sample: Sample) -> Tensor:
    ids = torch.tensor(list(sample.token_ids))
    logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return torch.stack([logprobs[t - 1, ids[t]] for t, trained in enumerate(sample.action_mask) if trained]).sum()


@pytest.mark.long
def test_loss_and_gradient_are_those_of_trls_trainer(tmp_path: Path) -> None:
    """Its batch but for one token: it trains the template's line end after the end token, which no policy writes."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    path = embedded_path("embedded:model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    policy = deepcopy(reference)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"find the rain in Kala {number}"}],
            "chosen": [{"role": "assistant", "content": f"get_rain Kala {number}"}],
            "rejected": [{"role": "assistant", "content": "Sorry, no tool can do this." + "." * number}],
        }
        for number in range(4)
    ]
    settings = trl.DPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, beta=BETA, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    data = datasets.Dataset.from_list(rows)
    trainer = trl.DPOTrainer(policy, reference, settings, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    for ids, mask in zip(batch["input_ids"], batch["completion_mask"], strict=True):
        last = int(mask.nonzero()[-1])
        assert tokenizer.decode(ids[last]) == "\n" and ids[last - 1] == tokenizer.eos_token_id
        mask[last] = 0
    policy.eval()
    loss = trainer.compute_loss(policy, batch)
    loss.backward()
    theirs = [parameter.grad.clone() for parameter in policy.parameters()]

    chat = load_chat_template(ModelConfig(path=path))
    read = [to_preference({**row, "messages": row["prompt"]}) for row in rows]
    named = [Preference(replace(each.chosen, id="t#0"), replace(each.rejected, id="t#0")) for each in read]
    samples = [side for pair in pair_samples(named, chat, 512) for side in (pair.chosen, pair.rejected)]
    policy.zero_grad()
    own_B = torch.stack([response_logprob(policy, sample) for sample in samples])
    with torch.no_grad():
        reference_B = torch.stack([response_logprob(reference, sample) for sample in samples])
    compared = preferences(own_B.detach().double(), reference_B.double(), BETA)
    assert compared.loss == pytest.approx(loss.item(), rel=1e-6)
    (-(compared.weights().float() * own_B).sum()).backward()
    largest = max(float(each.abs().max()) for each in theirs)
    for parameter, each in zip(policy.parameters(), theirs, strict=True):
        torch.testing.assert_close(parameter.grad, each, rtol=0, atol=1e-5 * largest)
